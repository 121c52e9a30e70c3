"""Clipped sums of per-example gradients, for every trial of a pack, without per-example gradients.

Always sums, never means: the method divides by a public constant. Not here: noise and its price.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpsgd_cli.core.losses import Loss
from dpsgd_cli.core.packing import Pack


@dataclass(frozen=True)
class Clipping:
    """L2 bounds on one example's gradient, by trial: `flat` has one, over all parameters; otherwise one a layer.

    `norms` is (1, R) when flat, (M, R) for a pack of M layers; every bound is positive and finite.
    """

    norms: Tensor
    flat: bool = True

    @property
    def sensitivities(self) -> list[float]:
        """Per trial, the L2 norm that one example's clipped gradient cannot exceed: C, or sqrt(sum C_l^2)."""
        return [float(s) for s in self.norms.double().square().sum(dim=0).sqrt()]


@dataclass
class Diagnostics:
    """NON-PRIVATE sums over the examples seen, each (R,): for `nonprivate_` columns only."""

    loss: Tensor
    examples: Tensor
    clipped: Tensor
    norm: Tensor
    nonfinite: Tensor

    @classmethod
    def zeros(cls, trials: int, device: torch.device) -> Diagnostics:
        return cls(*(torch.zeros(trials, device=device, dtype=torch.float64) for _ in range(5)))


@torch.no_grad()
def add_clipped_sums(
    pack: Pack, batch: tuple[Tensor, Tensor, Tensor | None], loss: Loss, clipping: Clipping | None, seen: Diagnostics
) -> None:
    """Add every example's clipped gradient to `pack.sums`.

    Guarantee: what one example adds has L2 norm at most the trial's entry of `clipping.sensitivities` (to rounding),
    whatever the other examples are; an example whose gradient is not finite adds zero; a masked row adds
    zero; an empty batch adds nothing. `clipping=None` adds unclipped gradients (no guarantee).

    `batch` is inputs (R or 1, B, ...), labels (R or 1, B), and a mask bool (R, B) or None; a leading 1 stands
    for rows that all trials share. Diagnostics go to `seen`.
    """
    x, y, mask = batch
    y = y.expand(pack.trials, -1)
    if y.shape[1] == 0:
        return
    _record(pack, x, y, loss, seen, mask)
    if clipping is None:
        factors = torch.ones_like(y, dtype=pack.values.dtype) if mask is None else mask.to(pack.values.dtype)
        for layer in pack.layers:
            layer.add_clipped_sums(factors)
    else:
        squares = torch.stack([layer.square_norms() for layer in pack.layers])
        for layer, factors in zip(pack.layers, _factors(pack, squares, clipping, mask, seen), strict=True):
            layer.add_clipped_sums(factors)
    for layer in pack.layers:
        layer.forget()


def _record(pack: Pack, x: Tensor, y: Tensor, loss: Loss, seen: Diagnostics, mask: Tensor | None) -> None:
    """One recorded forward pass and one backward pass to the layers' outputs."""
    pack.session.recording = True
    try:
        with torch.enable_grad():
            losses = loss(pack(x), y)
            losses.sum().backward()
    finally:
        pack.session.recording = False
    values = losses.detach()
    values = values if mask is None else torch.where(mask, values, 0.0)
    seen.loss += values.sum(dim=1, dtype=torch.float64)
    seen.examples += y.shape[1] if mask is None else mask.sum(dim=1)


def _factors(pack: Pack, squares: Tensor, clipping: Clipping, mask: Tensor | None, seen: Diagnostics) -> list[Tensor]:
    """Clip factors (R, B) of each layer from squared norms (M, R, B); erases what is not finite."""
    total = squares.sum(dim=0)
    bad = ~torch.isfinite(total)
    if mask is not None:
        bad = bad & mask
    if bad.is_cuda or bool(bad.any()):
        for layer in pack.layers:
            layer.erase(~torch.isfinite(total))
    keep = torch.isfinite(total) if mask is None else torch.isfinite(total) & mask
    groups = total.unsqueeze(0) if clipping.flat else squares
    norms = groups.sqrt()
    factors = torch.where(keep, (clipping.norms.unsqueeze(-1) / norms).clamp_(max=1.0), 0.0)
    _diagnose(seen, total, factors, keep, bad)
    return list(factors.expand(len(pack.layers), -1, -1))


def _diagnose(seen: Diagnostics, total: Tensor, factors: Tensor, keep: Tensor, bad: Tensor) -> None:
    seen.norm += torch.where(keep, total.sqrt(), 0.0).sum(dim=1, dtype=torch.float64)
    seen.clipped += ((factors < 1).any(dim=0) & keep).sum(dim=1)
    seen.nonfinite += bad.sum(dim=1)
