"""Gradients of canaries of a dense layer, with or without a preconditioner, as an attacker can compute them.

A canary's row has a feature that is 0 in all other rows; with a preconditioner, the other rows are 0 altogether. The
canary moves one diagonal entry of the second moments by 1. In each step it moves the weights of its feature by its
clipped gradient. That gradient depends on released values (the preconditioner, the weights), on public bounds and on
the canary's own row. In a dense layer it is the slope of the loss times the row. This module computes it independently
of the code that the audit tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.training.start import Trials


@dataclass(frozen=True)
class Aim:
    """Canaries at `rows` (k,) of the table. `instead` (k,): the rows that replace canaries that are out, or None.

    `columns`: for each output of the model, an array (k,) with the positions of the canaries' features among the
    weights.
    """

    trials: Trials
    rows: np.ndarray
    instead: np.ndarray | None
    columns: list[np.ndarray]

    def gradients(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the clipped gradients (R, k, outputs) on canary coordinates, of canaries and of what replaces them.

        The second is None if nothing replaces a canary that is out.
        """
        return self._of(self.rows), None if self.instead is None else self._of(self.instead)

    def _of(self, rows: np.ndarray) -> np.ndarray:
        context, method = self.trials.context, self.trials.method
        assert isinstance(method, DpSgd)
        table, values = context.table, context.pack.values
        units = table.x[torch.from_numpy(rows)][None]
        if method.preconditioning is not None:
            units = method.preconditioning.ready.units(units)
        units = units.double().expand(len(values), -1, -1)
        outputs, width = len(self.columns), units.shape[-1]
        weights = values[:, : outputs * width].view(len(values), outputs, width).double()
        shown = torch.einsum("rkd,rod->rko", units, weights)
        biases = values[:, outputs * width :].double()
        slopes = self._slopes(shown if not biases.numel() else shown + biases[:, None], table.y[rows])
        lengths = (units.square().sum(dim=-1) + float(biases.numel() > 0)).sqrt()
        norms = torch.linalg.vector_norm(slopes, dim=-1) * lengths
        clipping = method.bounds.clipping
        kept = clipping.factors(clipping.norms[0].double()[:, None], norms.clamp_min(1e-300))
        lane = torch.as_tensor(self.columns[0] % width)
        own = units.gather(2, lane.expand(len(values), -1)[..., None]).squeeze(-1)
        found: np.ndarray = (slopes * (kept * own)[..., None]).cpu().numpy()
        return found

    def _slopes(self, shown: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            asked = shown.detach().requires_grad_()
            losses = self.trials.context.loss(asked, labels[None].expand(len(shown), -1))
            (slopes,) = torch.autograd.grad(losses.sum(), asked)
        return slopes
