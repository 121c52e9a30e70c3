"""What a user adds to a sum, where all rows of a user are protected together (`privacy.unit`): one bounded vector.

Notation: a user u has rows i = 1..n_u of the at most m that are taken (`data/users.py`); g_i is the gradient of row i,
and g_u = (1 / n_u) sum_i g_i the gradient of the user's mean loss.

Guarantee: the sum over users of clip(g_u) moves by at most the clip bound C when a user with all their rows comes or
goes (add-remove) or is emptied (zero-out), and by 2 C when all of a user's rows, and their number, are replaced: each
term has norm at most C and is a function of that user's own rows and of the weights. It is what a record is elsewhere,
so everything that is proved of sums over records, with N the number of users, holds as it stands: sampling draws
users (a user is in a batch with all their rows, or with none), and rates, batch sizes and prices count users.
(Clipping each g_i instead, and adding them up, would move the sum by m C.)

How: a user's rows go through the model beside each other, as the copies of one example do (`layers/base.py`): the loss
of a user is the mean over their rows, so what a layer hands to the clipping is g_u. Users with fewer than m rows have
places left over, which hold zeros, and a label that says that nobody is there (`absent`): their loss is not counted and
their gradient is exactly 0, whatever the weights; in particular nothing of another user's row is in them.

Not here: clipping (`clipping/run.py`), which rows a user has (`data/users.py`).
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
    """A table whose examples are users: `members` (U, m) number the rows of each in `x` and `y`, -1 for none.

    A piece of a batch of B users is inputs (R or 1, m B, ...), first the first row of each, then the second of each;
    labels (R or 1, B, m), `absent` where a user has no row; and a mask (R, B) of users.

    >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 1])
    >>> table = UnitTable(x, y, False, members=torch.tensor([[0, 2], [1, -1]]))
    >>> [part.tolist() for part in table.every(0, 2)[:2]]
    [[[[1.0], [2.0], [3.0], [0.0]]], [[[0, 1], [1, -1]]]]
    """

    members: Tensor = field(kw_only=True)

    @classmethod
    def of(cls, table: Table, members: Tensor) -> UnitTable:
        """The users of a `table` of rows that all trials share."""
        if table.per_trial or table.held_out is not None:
            raise ValueError("users are of a table that all trials share, before folds are cut")
        return cls(table.x, table.y, False, members=members.to(table.y.device))

    @property
    def rows(self) -> int:
        """Users, held-out ones included."""
        return self.members.shape[0]

    def every(self, start: int, stop: int) -> Examples:
        mask = None if self.held_out is None else ~self.held_out[start:stop].T
        return *self._of(self.members[None, start:stop]), mask

    def _gather(self, rows: Tensor, mask: Tensor | None) -> Examples:
        rows, mask = self._own(rows, mask)
        return *self._of(self.members[rows]), mask

    def row_by_row(self) -> Table:
        """The rows that are taken, as single records; for metrics, which are of rows."""
        there = self.members >= 0
        rows, users = self.members[there], there.nonzero()[:, 0]
        held_out = None if self.held_out is None else self.held_out[users]
        return Table(self.x[rows], self.y[rows], False, held_out=held_out)

    def _of(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (R, m B, ...) and labels (R, B, m) of the rows `members` (R, B, m)."""
        y = self.y[members.clamp_min(0)]
        y = torch.where(members >= 0, y, torch.nan if y.is_floating_point() else _NOBODY)
        in_turn = members.transpose(1, 2).flatten(1)
        x = self.x[in_turn.clamp_min(0)]
        there = (in_turn >= 0).view(*in_turn.shape, *[1] * (x.dim() - 2))
        return torch.where(there, x, 0.0), y


def absent(labels: Tensor) -> Tensor:
    """Which places hold no row."""
    return labels.isnan() if labels.is_floating_point() else labels == _NOBODY


def losses_of_users(outputs: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """Mean losses (R, B) of users: outputs (R, m B, K), first the first row of each, and labels (R, B, m)."""
    trials, users, most = labels.shape
    in_turn = labels.transpose(1, 2).flatten(1)
    nobody = absent(in_turn)
    each = loss(outputs, in_turn.masked_fill(nobody, 0))
    # where nobody is, neither the loss nor its gradient counts, whatever the weights give
    each = each.masked_fill(nobody, 0.0).view(trials, most, users)
    return each.sum(dim=1) / (most - nobody.view(trials, most, users).sum(dim=1)).clamp_min(1)


def shares_of_rows(members: Tensor) -> Tensor:
    """What each row (U, m) weighs in its user's mean: 1 / n_u, and 0 where there is none."""
    there = (members >= 0).double()
    return there / there.sum(dim=1, keepdim=True).clamp_min(1)
