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

from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.engine.coded_table import CodedTable
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION
from dpsgd_cli.engine.settings import LinearModel
from dpsgd_cli.preconditioning.maps import BlockMap
from dpsgd_cli.preconditioning.run import Made

PIECE = 8192
"""Rows whose sums are made together."""


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
        self.codes = torch.from_numpy(coded.codes)
        self.features = [torch.from_numpy(one.features) for one in coded.columns]
        self.sizes = [len(one.values) for one in coded.columns]
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
        squares = torch.cat([one.square().sum(dim=2) for one in moved], dim=1)
        beyond = self.always.square() + float(self.has_bias)
        self.squares = torch.empty(trials, self.table.rows, dtype=PRECISION)
        for trial in range(trials):
            for start in range(0, self.table.rows, PIECE):
                own = self._sum_of(squares[trial], start, start + PIECE)
                self.squares[trial, start : start + PIECE] = own + beyond[trial]

    @property
    def has_bias(self) -> bool:
        return "bias" in self.context.pack.members[0].names

    def _sum_of(self, numbers: Tensor, start: int, stop: int) -> Tensor:
        """Return the sum of a lane of `numbers` (all G_c in a row,) at the codes of each row start..stop-1, (B,)."""
        pairs = zip(numbers.split(self.sizes), self.codes[:, start:stop], strict=True)
        first, *rest = (own.index_select(0, codes) for own, codes in pairs)
        for own in rest:
            first += own
        return first

    @torch.no_grad()
    def add(self, first: int, last: int, clipping: Clipping | None, seen: Diagnostics) -> None:
        """Add the clipped gradients of rows first..last-1 to the sums of the pack, as `add_clipped_sums` does."""
        layer = self.context.pack.members[0]
        weight = layer.values["weight"].to(PRECISION)
        parts = [weight[..., at] @ own.mT for own, at in zip(self.moved, self.features, strict=True)]
        lanes = _lanes(torch.cat(parts, dim=2).flatten(0, 1))
        begun = weight[..., self.constant] * self.always.unsqueeze(1)
        begun = begun + layer.values["bias"].to(PRECISION) if self.has_bias else begun
        totals, every = [torch.zeros_like(lane) for lane in lanes], torch.zeros_like(begun)
        for start in range(first, last, PIECE):
            stop = min(start + PIECE, last)
            scores = _numbers([self._sum_of(lane, start, stop) for lane in lanes]).view(*begun.shape, -1)
            weights = self._weights(scores + begun.unsqueeze(2), start, stop, clipping, seen)
            every += weights.sum(dim=2)
            for total, own in zip(totals, _lanes(weights.flatten(0, 1)), strict=True):
                piece = torch.zeros_like(total)
                for place, codes in zip(piece.split(self.sizes), self.codes[:, start:stop], strict=True):
                    place.index_add_(0, codes, own)
                total += piece
        sums, found = layer.sums["weight"], _numbers(totals).view(*begun.shape, -1)
        for own, at, part in zip(self.moved, self.features, found.split(self.sizes, dim=2), strict=True):
            sums[..., at] += part @ own
        sums[..., self.constant] += every * self.always.unsqueeze(1)
        if self.has_bias:
            layer.sums["bias"] += every

    def _weights(self, scores: Tensor, start: int, stop: int, clipping: Clipping | None, seen: Diagnostics) -> Tensor:
        """Return each row's gradient by its outputs (R, K, B), clipped; a row whose gradient is not finite has 0."""
        labels = self.table.y[None, start:stop].expand(len(scores), -1)
        with torch.enable_grad():
            scores.requires_grad_()
            losses = self.context.loss(scores.permute(0, 2, 1), labels)
            (slopes,) = torch.autograd.grad(losses.sum(), scores)
        squares = (slopes.square().sum(dim=1) * self.squares[:, start:stop]).unsqueeze(0)
        seen.add(losses.detach(), None if clipping is None else squares, None, clipping)
        if clipping is None:
            return slopes
        factors = clipping.factors(clipping.norms.to(PRECISION).unsqueeze(-1), squares.sqrt())[0]
        if clipping.on_norms is not None:
            clipping.on_norms(squares, None)
        return torch.where(torch.isfinite(squares[0]).unsqueeze(1), slopes * factors.unsqueeze(1), 0.0)


def _lanes(numbers: Tensor) -> list[Tensor]:
    """Return the rows of `numbers` (A, n), two at a time as one complex row, so that one look-up serves both."""
    pairs = [torch.complex(one, other) for one, other in zip(numbers[0::2], numbers[1::2], strict=False)]
    return pairs + [numbers[-1].clone()] * (len(numbers) % 2)


def _numbers(lanes: list[Tensor]) -> Tensor:
    """Return the rows (A, n) of `_lanes`."""
    rows = [part for lane in lanes for part in ((lane.real, lane.imag) if lane.is_complex() else (lane,))]
    return torch.stack(rows)
