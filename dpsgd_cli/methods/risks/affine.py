"""Clipped sums of a model that is one dense layer, over all rows, for R trials at once: two matrix products a step.

The outputs are t = f W x + b, f being the trial's factor of the row (`Table.factors`; 1 without), and one record's
gradient is g (f x, 1) for the gradient g of its loss by its outputs: its norm is |g| times the length of (f x, 1), so
no example's own gradient is made. Trials share one matrix of rows; folds are a mask.

Not here: models of one output, whose equal rows are merged (`linear.py`), what is released (`methods/`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.clipping.run import Clipping
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.precision import MOST_ROWS, PRECISION
from dpsgd_cli.engine.tensors import Table

# a CPU's chunks stay in its cache while they are made float64, a GPU wants few large ones
_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 28}
_LEAST = 64


class AffineRisk:
    """One loss of the outputs over the rows of a table that all trials share; flat weights (R, P): W (K, D), then b."""

    def __init__(self, table: Table, loss: Loss, bias: bool, longest: float | None = None) -> None:
        """`longest` is a bound on |f x| that holds for every row; left out, there are no factors, and |x| is taken."""
        self.table, self.loss, self.bias = table, loss, bias
        rows = table.x.flatten(1)
        self.finite = torch.isfinite(rows).all(dim=1)
        self.rows = rows if bool(self.finite.all()) else torch.where(self.finite.unsqueeze(1), rows, 0.0)
        exact = torch.linalg.vector_norm(self.rows, dim=1, dtype=torch.float64)
        self.squares = (exact.square() if longest is None else torch.full_like(exact, longest**2)) + float(bias)

    @torch.no_grad()
    def add_sums(self, values: Tensor, sums: Tensor, clipping: Clipping | None, seen: Diagnostics) -> None:
        """Add all clipped gradients at `values` (R, P) to `sums` (R, P), float64.

        Guarantee: as of `clipping.add_clipped_sums`; what is added up, and multiplied for it, is float64.
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
        """Gradients of losses by the outputs t (R, n, K), so much shorter that no record's own is too long; float64."""
        labels = self.table.y[None, chunk].expand(len(t), -1)
        with torch.enable_grad():
            asked = t.detach().requires_grad_()
            losses = self.loss(asked, labels)
            (slopes,) = torch.autograd.grad(losses.sum(), asked)
        slopes, mask = slopes.to(PRECISION), None
        if self.table.held_out is not None:
            mask = ~self.table.held_out[chunk].T
            slopes = torch.where(mask.unsqueeze(-1), slopes, 0.0)
        if clipping is None:
            seen.add(losses.detach(), None, mask, None)
            return slopes
        squares = slopes.square().sum(dim=-1) * self.squares[chunk]
        squares = torch.where(self.finite[chunk], squares, torch.nan)
        seen.add(losses.detach(), squares.unsqueeze(0).to(losses.dtype), mask, clipping)
        if clipping.told is not None:
            clipping.told(squares.unsqueeze(0), mask)
        factors = clipping.factors(clipping.norms[0].unsqueeze(-1).to(PRECISION), squares.sqrt())
        good = torch.isfinite(squares)
        return torch.where(good.unsqueeze(-1), slopes * torch.where(good, factors, 0.0).unsqueeze(-1), 0.0)
