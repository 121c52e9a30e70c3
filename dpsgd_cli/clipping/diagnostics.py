"""Non-private diagnostics of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dpsgd_cli.clipping.run import Clipping


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
