"""Clipped sums of a model with one dense layer, over all rows, for R trials at once: two matrix products per step.

The outputs are t = f W x + b, where f is the trial's factor of the row (`Table.factors`; else 1). With the gradient g
of a record's loss with respect to its outputs, the record's gradient is g (f x, 1). Its norm is |g| times the norm of
(f x, 1), so no per-example gradient is stored. Trials share one matrix of rows; folds are a mask. `LinearRisk` is for
models with one output, and merges equal rows.

`CodedSums` are over all rows of a table that is kept as codes; their features are not made.

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
from dpsgd_cli.engine.coded_table import PIECE, CodedTable, LookUp, by_code, features_of, lanes, numbers
from dpsgd_cli.engine.losses import Loss, cross_entropy
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION
from dpsgd_cli.engine.settings import LinearModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.context import Context
from dpsgd_cli.preconditioning.maps import BlockMap
from dpsgd_cli.preconditioning.run import Made

# chunks in float64 should fit a CPU's cache, while a GPU is faster with few large ones
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 28}
_LEAST = 64


def slopes_of(loss: Loss, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses (R, B), and their gradients by the outputs (R, B, K)."""
    with torch.enable_grad():
        asked = outputs.detach().requires_grad_()
        losses = loss(asked, labels)
        (slopes,) = torch.autograd.grad(losses.sum(), asked)
    return losses.detach(), slopes


def class_slopes(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy` (R, n) and its gradient (R, K, n) for logits that are stored by class, (R, K, n)."""
    below, own = scores - scores.amax(dim=1, keepdim=True), labels.unsqueeze(1)
    losses = -below.gather(1, own)
    shares = below.exp_()
    total = shares.sum(dim=1, keepdim=True)
    losses += total.log()
    shares /= total
    shares.scatter_add_(1, own, shares.new_full((), -1.0).expand_as(own))
    return losses.squeeze(1), shares


class AffineRisk:
    """Risk of one loss over a table that all trials share; flat weights (R, P) hold W (K, D), then b (K,)."""

    def __init__(self, table: Table, loss: Loss, bias: bool, lengths: Tensor | None = None) -> None:
        """Prepare rows and norms.

        `lengths` (R or 1, N) bound the norms of the rows for which the caller takes gradients, in place of |f x|; None
        for |x|, without factors.
        """
        self.table, self.loss, self.bias = table, loss, bias
        rows = table.x.flatten(1)
        self.finite = torch.isfinite(rows).all(dim=1)
        self.rows = rows if bool(self.finite.all()) else torch.where(self.finite.unsqueeze(1), rows, 0.0)
        if lengths is None:
            lengths = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64).unsqueeze(0)
        self.squares = torch.where(self.finite, lengths.square() + float(bias), torch.nan)

    @torch.no_grad()
    def add_sums(self, values: Tensor, sums: Tensor, clipping: Clipping | None, seen: Diagnostics) -> None:
        """Add all clipped gradients at `values` (R, P) to `sums` (R, P), float64.

        Guarantee: that of `clipping.add_clipped_sums`; products and sums are float64.
        """
        trials, width = len(values), self.rows.shape[1]
        outputs = values.shape[1] // (width + self.bias)
        weights = values[:, : outputs * width].reshape(-1, width)
        biases = values[:, outputs * width :].unsqueeze(1) if self.bias else None
        kind = "cuda" if values.is_cuda else "cpu"
        most = min(MOST_ROWS, max(_LEAST, _ELEMENTS[kind] // max(width, trials * outputs)))
        total = sums.new_zeros(trials * outputs, width)
        for start in range(0, len(self.rows), most):
            chunk = slice(start, start + most)
            rows, factors = self.rows[chunk], None if self.table.factors is None else self.table.factors[:, chunk]
            t = (rows @ weights.T).view(-1, trials, outputs).transpose(0, 1)
            t = t if factors is None else t * factors.unsqueeze(-1)
            slopes = self._slopes(t if biases is None else t + biases, chunk, clipping, seen)
            if self.bias:
                sums[:, outputs * width :] += slopes.sum(dim=1)
            slopes = slopes if factors is None else slopes * factors.unsqueeze(-1)
            total.addmm_(slopes.transpose(1, 2).reshape(trials * outputs, -1), rows.to(PRECISION))
        sums[:, : outputs * width] += total.view(trials, -1)

    def _slopes(self, t: Tensor, chunk: slice, clipping: Clipping | None, seen: Diagnostics) -> Tensor:
        """Return gradients of losses with respect to outputs t (R, n, K), scaled by clip factors; float64."""
        labels = self.table.y[None, chunk]
        losses, slopes = slopes_of(self.loss, t, labels.expand(len(t), *labels.shape[1:]))
        slopes, mask = slopes.to(PRECISION), None
        if self.table.held_out is not None:
            mask = ~self.table.held_out[chunk].T
            slopes = torch.where(mask.unsqueeze(-1), slopes, 0.0)
        return clipped_slopes((losses, slopes, mask), self.squares[:, chunk], clipping, seen)


def clipped_slopes(
    found: tuple[Tensor, Tensor, Tensor | None], rows: Tensor, clipping: Clipping | None, seen: Diagnostics
) -> Tensor:
    """Return what one dense layer's clipped gradients hold of its outputs: each times its row is a clipped gradient.

    Guarantee: that of `add_clipped_sums`. A gradient is a record's slope (K,) times its row, so its squared norm is
    |slope|^2 times the row's. A gradient that is not finite becomes zero. Diagnostics go to `seen`.

    `found`: losses (R, n), their gradients by the outputs (R, n, K), float64, and a mask (R, n) or None. `rows` (R or
    1, n): the squared norms of rows, with the 1 of a bias.
    """
    losses, slopes, mask = found
    if clipping is None:
        seen.add(losses, None, mask, None)
        return slopes
    squares = slopes.square().sum(dim=-1) * rows
    seen.add(losses, squares.unsqueeze(0).to(losses.dtype), mask, clipping)
    if clipping.on_norms is not None:
        clipping.on_norms(squares.unsqueeze(0), mask)
    return shortened(slopes, squares, clipping)


def shortened(slopes: Tensor, squares: Tensor, clipping: Clipping) -> Tensor:
    """Return slopes (R, n, K) times the clip factors of gradients of squared norms (R, n); 0 for one not finite."""
    clipped = slopes * clipping.scales(squares.sqrt().unsqueeze(0))[0].unsqueeze(-1)
    if not squares.is_cuda and torch.isfinite(squares.amax()):  # so are all, for none is below 0; usually
        return clipped
    return torch.where(torch.isfinite(squares).unsqueeze(-1), clipped, 0.0)


def fits(context: Context) -> bool:
    """Return True if `CodedSums` may stand in for `add_clipped_sums` of all rows."""
    table, recipe = context.table, context.recipes[0]
    if not isinstance(table, CodedTable) or not isinstance(recipe.model, LinearModel) or recipe.runtime.compile is True:
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
