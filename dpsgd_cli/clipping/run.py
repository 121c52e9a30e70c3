"""Clipped sums of per-example gradients, for every trial of a pack, without per-example gradients.

Always sums, never means: the method divides by a public constant. `Diagnostics` collects what a pass shows without
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpsgd_cli.engine.losses import Loss, of_arrays
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.precision import MOST_ROWS, rounded_products
from dpsgd_cli.errors import RunError
from dpsgd_cli.users.run import losses_of_users


class Diagnostics:
    """NON-PRIVATE sums over examples, each float64 (R,): for `nonprivate_` columns only.

    Steps pass numbers that they have anyway. These are copied into a buffer, which is summed up when it is full. This
    avoids a dozen small operations per step, and small tensors that outlive their step and fragment memory.
    """

    _ROOM = 1 << 20

    def __init__(self, trials: int, device: torch.device) -> None:
        self._totals = {
            name: torch.zeros(trials, device=device, dtype=torch.float64)
            for name in ("loss", "examples", "norm", "clipped", "nonfinite")
        }
        self._room: Tensor | None = None  # (2 + M, R, rows): losses, presence, squared norms
        self._clipping: Clipping | None = None
        self._filled = 0

    @classmethod
    def of(cls, totals: dict[str, Tensor]) -> Diagnostics:
        """Return Diagnostics that hold the sums `totals`, (R,) each."""
        made = cls(len(totals["loss"]), totals["loss"].device)
        made._totals = totals
        return made

    def add(self, losses: Tensor, squares: Tensor | None, mask: Tensor | None, clipping: Clipping | None) -> None:
        """Add losses (R, B), squared norms (M, R, B) or None if nothing is clipped, and a mask (R, B) or None."""
        lines, (trials, rows) = 2 + (0 if squares is None else len(squares)), losses.shape
        if losses.numel() * lines > self._ROOM:
            present = torch.ones_like(losses, dtype=torch.bool) if mask is None else mask
            self._sum(losses, present, squares, clipping)
            return
        fits = self._room is not None and len(self._room) == lines and self._room.dtype == losses.dtype
        if not fits or self._clipping is not clipping or self._filled + rows > self._ROOM // (lines * trials):
            self._sum_up()
            self._clipping = clipping
        if self._room is None or not fits:
            self._room = losses.new_empty(lines, trials, self._ROOM // (lines * trials))
        place = self._room[:, :, self._filled : self._filled + rows]
        place[0].copy_(losses)
        if mask is None:
            place[1].fill_(1.0)
        else:
            place[1].copy_(mask)
        if squares is not None:
            place[2:].copy_(squares)
        self._filled += rows

    def sums(self) -> dict[str, list[float]]:
        """Return sums of `loss`, `examples`, `norm` (of whole gradients), `clipped` and `nonfinite`, one per trial."""
        self._sum_up()
        return dict(zip(self._totals, torch.stack(list(self._totals.values())).tolist(), strict=True))

    def _sum_up(self) -> None:
        if self._room is not None and self._filled:
            held = self._room[:, :, : self._filled]
            self._sum(held[0], held[1] > 0, held[2:] if len(held) > 2 else None, self._clipping)
        self._filled = 0

    def _sum(self, losses: Tensor, present: Tensor, squares: Tensor | None, clipping: Clipping | None) -> None:
        self._count("loss", losses, present)
        self._count("examples", present, present)
        if squares is None or clipping is None:
            return
        total = squares.sum(dim=0)
        finite = torch.isfinite(total)
        groups = total.unsqueeze(0) if clipping.flat else squares
        over = (groups.sqrt() > clipping.norms.unsqueeze(-1)).any(dim=0)
        self._count("norm", total.sqrt(), present & finite)
        self._count("clipped", over, present & finite)
        self._count("nonfinite", ~finite, present)

    def _count(self, name: str, values: Tensor, where: Tensor) -> None:
        self._totals[name] += torch.where(where, values.double(), 0.0).sum(dim=1)


def at_most(bounds: Tensor, norms: Tensor) -> Tensor:
    """Return the clip factor min(1, C / |g|): a gradient within its bound C is unchanged (Abadi et al. 2016)."""
    return (bounds / norms).clamp_(max=1.0)


def automatic(bounds: Tensor, norms: Tensor, stability: float) -> Tensor:
    """Return the factor C / (|g| + gamma), for a norm C |g| / (|g| + gamma) below C (Bu et al. 2022, AUTO-S)."""
    return bounds / (norms + stability)


@dataclass(frozen=True)
class Clipping:
    """L2 bounds on one example's gradient for each trial: one over all parameters if `flat`, else one per layer.

    `norms` is (1, R) if flat, (M, R) for a pack of M layers; every bound is positive and finite. `factors` computes the
    clip factors from bounds and gradient norms; no factor leaves a norm above its bound. `on_norms`, if given, is
    called with the squared norms (M, R, B) of all clipped gradients by layer (M may be 1 if `flat`), and with the mask
    (R, B) or None of the rows that count.
    """

    norms: Tensor
    flat: bool = True
    factors: Callable[[Tensor, Tensor], Tensor] = at_most
    on_norms: Callable[[Tensor, Tensor | None], None] | None = None

    def scales(self, norms: Tensor) -> Tensor:
        """Return the clip factors of gradients with L2 norms `norms`, (1, R, B) if flat, else (M, R, B).

        Raises RunError if a function of a user's own leaves a finite gradient longer than its bound.
        """
        bounds = self.norms.to(norms.dtype).unsqueeze(-1)
        found = self.factors(bounds, norms)
        function = getattr(self.factors, "func", self.factors)
        if not function.__module__.startswith(__name__.partition(".")[0] + "."):
            longest = torch.where(norms.isfinite(), found.abs() * norms / bounds, 0.0)
            if not bool((longest <= 1 + 1e-4).all()):
                raise RunError(
                    f"{function.__name__} leaves a gradient {float(longest.max()):.4g} times as long as its clip bound,"
                    " for which the noise is too small; return at most bounds / norms"
                )
        return found

    @property
    def sensitivities(self) -> list[float]:
        """Largest L2 norm of one example's clipped gradient, per trial: C, or sqrt(sum C_l^2) over layers."""
        return [float(s) for s in self.norms.double().square().sum(dim=0).sqrt()]


def require_bound(pack: Pack, clipping: Clipping | None) -> None:
    """Raise RunError unless `clipping` keeps gradients within `pack.charged_norms`, where these are set."""
    if pack.charged_norms is None:
        return
    given = [math.inf] * pack.trials if clipping is None else clipping.sensitivities
    for bound, charged in zip(given, pack.charged_norms, strict=True):
        if not bound <= charged * (1 + 1e-6) or math.isinf(bound):
            raise RunError(
                f"the method adds gradients of norm up to {bound:.4g}, and noise is charged for {charged:.4g}; keep the"
                " clipping that it inherits, or state the norm in privacy.clipping"
            )


Found = tuple[Tensor, Tensor | None]
SumClipped = Callable[[Pack, tuple[Tensor, Tensor, Tensor | None], Loss, Clipping | None], Found]
"""Type of `sum_clipped` and of functions that replace it (`compiling.py`)."""


@torch.no_grad()
def add_clipped_sums(
    pack: Pack,
    batch: tuple[Tensor, Tensor, Tensor | None],
    loss: Loss,
    clipping: Clipping | None,
    seen: Diagnostics,
    function: SumClipped | None = None,
) -> None:
    """Add the clipped gradients of at most `MOST_ROWS` examples to `pack.sums`.

    Guarantee: one example adds a vector of L2 norm at most the trial's entry of `clipping.sensitivities`, for any other
    examples (to rounding; `precision.py` gives the effect on the sum). An example whose gradient is not finite adds
    zero, a masked row adds zero, and an empty batch adds nothing. `clipping=None` adds unclipped gradients (no
    guarantee).

    `batch` is inputs (R or 1, K B, ...), labels (R or 1, B), and a mask bool (R, B) or None. A leading 1 is for rows
    that all trials share. With K > 1 copies of every example (`augmentation.py`), all first copies come first, and an
    example's loss is the mean over its copies. So the mean of their gradients is clipped. An example may be a user with
    several rows (`users/run.py`): labels are then (R or 1, B, m), and the mean over the user's rows is clipped.
    Diagnostics go to `seen`. `function` replaces `sum_clipped`. Raises ValueError for more than `MOST_ROWS` examples,
    and RunError for clipping of a user's own that does not clip.
    """
    if batch[1].shape[1] > MOST_ROWS:
        raise ValueError(f"{batch[1].shape[1]} rows in one piece of a sum; at most {MOST_ROWS} are added up at once")
    require_bound(pack, clipping)
    if batch[1].shape[1]:
        losses, squares = (function or sum_clipped)(pack, batch, loss, clipping)
        seen.add(losses, squares, batch[2], clipping)
        if clipping is not None and clipping.on_norms is not None and squares is not None:
            clipping.on_norms(squares, batch[2])


@torch.no_grad()
def sum_clipped(
    pack: Pack, batch: tuple[Tensor, Tensor, Tensor | None], loss: Loss, clipping: Clipping | None
) -> Found:
    """Add clipped gradients to `pack.sums` like `add_clipped_sums`, without diagnostics, for a batch that is not empty.

    Returns losses (R, B), and squared norms (M, R, B) of each layer's gradients, or None without clipping.
    """
    x, y, mask = batch
    y = y.expand(pack.trials, *y.shape[1:])
    losses = record_pass(pack, x, y, loss)
    if clipping is None:
        squares = None
        weights = torch.ones_like(losses) if mask is None else mask.to(losses.dtype)
        if mask is not None and not _surely_finite(pack, losses):
            for layer in pack.layers:
                layer.zero_nonfinite(~mask)
        factors = [weights] * len(pack.layers)
    else:
        none = torch.zeros_like(losses)
        squares = torch.stack([layer.square_norms() if layer.used else none for layer in pack.layers])
        factors = _factors(pack, squares, clipping, mask)
    with pack.in_products() as precision:
        for layer, own in zip(pack.layers, factors, strict=True):
            if layer.used:
                layer.add_clipped_sums(own.to(precision))
            layer.forget()
    return losses, squares


def record_pass(pack: Pack, x: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Run a recorded forward pass and a backward pass to the layers' outputs; return the losses (R, B)."""
    pack.session.begin()
    pack.session.copies = x.shape[1] // y.shape[1]
    try:
        with torch.enable_grad(), rounded_products(pack.rounded_products):
            losses = _losses(pack(x), y, loss)
            losses.sum().backward()
    finally:
        pack.session.recording, pack.session.copies = False, 1
    pack.session.rows = y.shape[1]
    return losses.detach()


def _losses(outputs: Tensor, y: Tensor, loss: Loss) -> Tensor:
    """Return one loss per example, (R, B): the mean over its copies, or over a user's rows."""
    if y.dim() == 3 and not of_arrays(loss):
        return losses_of_users(outputs, y, loss)
    copies = outputs.shape[1] // y.shape[1]
    losses = loss(outputs, y if copies == 1 else y.repeat(1, copies, *[1] * (y.dim() - 2)))
    return losses if copies == 1 else losses.view(len(y), copies, -1).mean(dim=1)


def _factors(pack: Pack, squares: Tensor, clipping: Clipping, mask: Tensor | None) -> list[Tensor]:
    """Return clip factors (R, B) for each layer from squared norms (M, R, B); erase gradients that are not finite."""
    groups = squares.sum(dim=0, keepdim=True) if clipping.flat else squares
    factors = clipping.scales(groups.sqrt())
    if not _surely_finite(pack, squares):
        bad = ~torch.isfinite(squares.sum(dim=0))
        factors.masked_fill_(bad, 0.0)
        for layer in pack.layers:
            layer.zero_nonfinite(bad)
    if mask is not None:
        factors = factors * mask
    return list(pack.session.stored(factors).expand(len(pack.layers), -1, -1))


def _surely_finite(pack: Pack, x: Tensor) -> bool:
    """Return True if all numbers are known to be finite; False while tracing and on a GPU, where the host never asks.

    There, numbers of rows that are not finite are always set to 0, for which no program and no kernel waits.
    """
    return not (pack.session.tracing or x.is_cuda) and math.isfinite(x.sum())
