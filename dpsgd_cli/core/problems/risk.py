"""What a full-batch method asks of an empirical risk, whatever the model: clipped sums, and losses along a line.

Trials are independent; `active` (int64, distinct trial numbers) limits work to some of them, None means all. Rows of
results that belong to other trials are left out. Not here: noise, prices, regularisation (it reads no data).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Risk(ABC):
    """R trials at weights `values` (R, P), and a direction (R, P) along which they may move.

    Guarantee: one record moves a trial's `gradient_sums` by a vector of norm at most its bound, and its `line_losses`
    by numbers in [0, bound] (all of one sign), whatever the other records are.
    """

    values: Tensor

    @abstractmethod
    def start(self, values: Tensor) -> None:
        """Stand at `values` (R, P), which `advance` then changes in place."""

    @abstractmethod
    def gradient_sums(self, norms: Tensor, active: Tensor | None = None) -> Tensor:
        """Sums (A, P) over a trial's records of loss gradients clipped to `norms` (R,), for active trials."""

    @abstractmethod
    def aim(self, direction: Tensor, active: Tensor | None = None) -> None:
        """Take `direction` (A, P), of any length, for active trials."""

    @abstractmethod
    def line_losses(self, spacing: Tensor, count: int, bounds: Tensor, active: Tensor | None = None) -> Tensor:
        """Sums (A, count), float64, of losses clipped to `bounds` (R,) at values - i spacing direction, i = 0, 1, ...

        `spacing` is (R,).
        """

    @abstractmethod
    def advance(self, lengths: Tensor) -> None:
        """values -= lengths * direction, `lengths` (R,)."""
