"""Clipped sums of a model with one dense layer, over all rows, for R trials at once: two matrix products per step.

The outputs are t = f W x + b, where f is the trial's factor of the row (`Table.factors`; else 1). With the gradient g
of a record's loss with respect to its outputs, the record's gradient is g (f x, 1). Its norm is |g| times the norm of
(f x, 1), so no per-example gradient is stored. Trials share one matrix of rows; folds are a mask. `LinearRisk` is for
models with one output, and merges equal rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.clipping.run import Clipping, Diagnostics, clipped_slopes
from dpsgd_cli.engine.losses import Loss, slopes_of
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION
from dpsgd_cli.engine.tensors import Table

# chunks in float64 should fit a CPU's cache, while a GPU is faster with few large ones
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 28}
_LEAST = 64


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
