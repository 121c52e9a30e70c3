"""Clipped sums of a linear model over all rows of a table that is kept as codes; their features are not made.

Notation: a row has a code in each of F columns. M_c (G_c, d) holds the features of column c for each of its codes,
after the preconditioner; one constant is part of every row. With weights V an output is a sum of F numbers,
(M_c V_c)[code]. A row's gradient by the outputs, times its clip factor, is its weight w. The sum of all clipped
gradients is, for each column, M_c^T S_c, where S_c is the sum of w over the rows of each code.

Sensitivity: as in `clipping/run.py`. A row adds w x^T, where x are its features as M holds them, and w is such that
|w| |x| is at most the clip norm, with |x| from the same numbers. What a row adds depends on that row and the weights.

Rounding: all sums are float64. A number takes part in at most PIECE additions within a piece, one for each of
N / PIECE pieces, and G_c for the codes of a column. `fits` is True where these are no more than the MOST_ROWS +
N / MOST_ROWS that the bound in `engine/precision.py` counts; other tables are summed up as features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.clipping.run import Clipping, Diagnostics, clipped_slopes
from dpsgd_cli.engine.coded_table import PIECE, CodedTable, LookUp, by_code, features_of, lanes, numbers
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.losses import class_slopes, cross_entropy, slopes_of
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION
from dpsgd_cli.engine.settings import LinearModel
from dpsgd_cli.preconditioning.maps import BlockMap
from dpsgd_cli.preconditioning.run import Made


def fits(context: Context) -> bool:
    """Return True if `CodedSums` may stand in for `add_clipped_sums` of all rows."""
    table, recipe = context.table, context.recipes[0]
    if not isinstance(table, CodedTable) or not isinstance(recipe.model, LinearModel) or recipe.runtime.compile:
        return False
    additions = PIECE + table.rows // PIECE + max(len(one.values) for one in table.coded.columns)
    exact = additions <= MOST_ROWS + table.rows // MOST_ROWS
    return exact and recipe.data.augment is None and not context.pack.session.rounds and len(context.pack.layers) == 1


class CodedSums:
    """Sums over the rows of `context.table`, which is a `CodedTable`, with the preconditioner `made`, or None."""

    def __init__(self, context: Context, made: Made | None) -> None:
        assert isinstance(context.table, CodedTable) and (made is None or isinstance(made, BlockMap))
        self.context, self.table = context, context.table
        coded, trials = context.table.coded, context.trials
        self.features = features_of(coded)
        self.constant = int(coded.constant.nonzero()[0][0])
        every = torch.from_numpy(coded.constant).to(PRECISION).repeat(trials, 1)
        moved = []
        for one, features in zip(coded.columns, self.features, strict=True):
            values = torch.from_numpy(one.values).to(PRECISION)
            moved.append(values.expand(trials, -1, -1) if made is None else made.moved(features, values, every[:1]))
        self.moved = moved
        self.always = every[:, self.constant]
        if made is not None:
            at = torch.tensor([self.constant])
            self.always = made.moved(at, every[:1, at], every[:1] * 0)[:, 0, 0]
        self.beyond = (self.always.square() + float(self.has_bias)).unsqueeze(1)
        self.lengths = LookUp([one.square().sum(dim=2) for one in moved])
        self.codes = self.table.codes(0, self.table.rows) if coded.in_memory else None
        # rows on disk would need 8 bytes each, so theirs are made anew in each step
        pieces = [self._squares(start) for start in range(0, self.table.rows, PIECE)] if coded.in_memory else []
        self.kept = torch.cat(pieces, dim=1) if pieces else None

    @property
    def has_bias(self) -> bool:
        return "bias" in self.context.pack.members[0].names

    def _squares(self, start: int) -> Tensor:
        """Return the squared lengths (R, n) of a piece's rows."""
        return self.lengths.sums(self.table.codes(start, min(start + PIECE, self.table.rows))) + self.beyond

    @torch.no_grad()
    def add(self, first: int, last: int, clipping: Clipping | None, seen: Diagnostics) -> None:
        """Add the clipped gradients of rows first..last-1 to the sums of the pack, as `add_clipped_sums` does."""
        layer = self.context.pack.members[0]
        weight = layer.values["weight"]
        scoring = LookUp(by_code(weight, self.features, self.moved))
        begun = weight[..., self.constant].to(PRECISION) * self.always.unsqueeze(1)
        begun = begun + layer.values["bias"].to(PRECISION) if self.has_bias else begun
        totals, every = [torch.zeros_like(torch.cat(lane)) for lane in scoring.lanes], torch.zeros_like(begun)
        for start in range(first, last, PIECE):
            stop = min(start + PIECE, last)
            codes = self.table.codes(start, stop) if self.codes is None else self.codes[:, start:stop]
            scores = scoring.sums(codes).view(*begun.shape, -1) + begun.unsqueeze(2)
            if self.kept is None:
                squares = self.lengths.sums(codes) + self.beyond
            else:
                squares = self.kept[:, start:stop]
            weights = self._weights(scores, self.table.labels_of(start, stop), squares, clipping, seen)
            every += weights.sum(dim=2)
            for total, own in zip(totals, lanes(weights.flatten(0, 1)), strict=True):
                piece = torch.zeros_like(total)
                for place, at in zip(piece.split(scoring.sizes), codes, strict=True):
                    place.index_add_(0, at, own)
                total += piece
        sums, found = layer.sums["weight"], numbers(totals).view(*begun.shape, -1)
        for own, at, part in zip(self.moved, self.features, found.split(scoring.sizes, dim=2), strict=True):
            sums[..., at] += part @ own
        sums[..., self.constant] += every * self.always.unsqueeze(1)
        if self.has_bias:
            layer.sums["bias"] += every

    def _weights(
        self, scores: Tensor, labels: Tensor, squares: Tensor, clipping: Clipping | None, seen: Diagnostics
    ) -> Tensor:
        """Return each row's gradient by its outputs (R, K, n), clipped; a row whose gradient is not finite has 0."""
        labels = labels.expand(len(scores), -1)
        if self.context.loss is cross_entropy:
            losses, slopes = class_slopes(scores, labels)
            slopes = slopes.mT
        else:
            losses, slopes = slopes_of(self.context.loss, scores.mT, labels)
        return clipped_slopes((losses, slopes, None), squares, clipping, seen).mT
