"""User-level privacy (`privacy.unit`): each user, with all their rows, adds one bounded vector to a sum.

Notation: a user u has rows i = 1..n_u of the at most m that are used (`data/users.py`). g_i is the gradient of row i,
and g_u = (1 / n_u) sum_i g_i is the gradient of the user's mean loss.

Guarantee: the sum over users of clip(g_u) moves by at most the clip bound C when a user with all their rows is added or
removed (add-remove) or emptied (zero-out). It moves by at most 2 C when all of a user's rows, and their number, are
replaced. Proof: each term has norm at most C and is a function of that user's own rows and of the weights. A user takes
the role of a record, so every theorem about sums over records holds, with N the number of users. Sampling draws users
(a batch has all rows of a user, or none), and rates, batch sizes and prices count users. (Clipping each g_i, and adding
them up, would move the sum by m C.)

Method: the rows of a user go through the model like the copies of one example (`layers/base.py`). A user's loss is the
mean over their rows, so layers pass g_u to the clipping. A user with fewer than m rows has unused places, which hold
zeros and a label that marks them as empty (`absent`). The loss of an empty place is not counted, and its gradient is
exactly 0 for all weights. In particular it holds nothing of another user's rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.tensors import Examples, Table

_NOBODY = -1


@dataclass(frozen=True)
class UnitTable(Table):
    """A table whose examples are users: `members` (U, m) lists each user's row numbers in `x` and `y`, -1 for none.

    A piece of a batch of B users has inputs (R or 1, m B, ...): the first row of each user, then the second of each,
    and so on. Labels are (R or 1, B, m), `absent` where a user has no row; the mask (R, B) is of users.

    >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1])
    >>> table = UnitTable(x, y, False, members=torch.tensor([[0, 2], [1, -1]]))
    >>> [part.tolist() for part in table.every(0, 2)[:2]]
    [[[[1.0], [2.0], [3.0], [0.0]]], [[[0, 1], [1, -1]]]]
    """

    members: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, table: Table, members: Tensor) -> UnitTable:
        """Return the table of users for a `table` of rows. Raises ValueError for a table with folds."""
        if table.held_out is not None:
            raise ValueError("users are of a table before folds are cut")
        return cls(table.x, table.y, table.per_trial, members=members.to(table.y.device))

    @property
    def rows(self) -> int:
        """Number of users, including held-out ones."""
        return self.members.shape[0]

    def every(self, start: int, stop: int) -> Examples:
        mask = None if self.held_out is None else ~self.held_out[start:stop].T
        return *self._of(self.members[None, start:stop]), mask

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        rows, mask = self._own(rows, mask)
        return *self._of(self.members[rows]), mask

    def row_by_row(self) -> Table:
        """Return the table of the users' rows as single records; metrics are computed on rows."""
        there = self.members >= 0
        rows, users = self.members[there], there.nonzero()[:, 0]
        held_out = None if self.held_out is None else self.held_out[users]
        x = self.x[:, rows] if self.per_trial else self.x[rows]
        return Table(x, self.y[rows], self.per_trial, held_out=held_out)

    def _of(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (R, m B, ...) and labels (R, B, m) of the rows `members` (R, B, m)."""
        y = self.y[members.clamp_min(0)]
        y = torch.where(members >= 0, y, torch.nan if y.is_floating_point() else _NOBODY)
        in_turn = members.transpose(1, 2).flatten(1)
        if self.per_trial:
            x = self.x[torch.arange(len(self.x), device=self.x.device).unsqueeze(1), in_turn.clamp_min(0)]
        else:
            x = self.x[in_turn.clamp_min(0)]
        there = (in_turn >= 0).view(*in_turn.shape, *[1] * (x.dim() - 2))
        return x.masked_fill(~there, 0), y


def absent(labels: Tensor) -> Tensor:
    """Return a mask of the places that hold no row, in the shape of `labels`."""
    return labels.isnan() if labels.is_floating_point() else labels == _NOBODY


def losses_of_users(outputs: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Return the mean loss of each user, (R, B), from outputs (R, m B, K) and labels (R, B, m).

    Outputs are ordered by row number: the first row of each user, then the second of each, and so on.
    """
    trials, users, most = labels.shape
    in_turn = labels.transpose(1, 2).flatten(1)
    nobody = absent(in_turn)
    each = loss(outputs, in_turn.masked_fill(nobody, 0))
    # an empty place adds neither loss nor gradient, for all weights
    each = each.masked_fill(nobody, 0.0).view(trials, most, users)
    return each.sum(dim=1) / (most - nobody.view(trials, most, users).sum(dim=1)).clamp_min(1)
