"""A regression's targets between their own unit and that of training.

A gradient is bounded and a step has a length, so a model whose output has to travel far never arrives: targets of some
hundreds take a clipped model thousands of steps. Training therefore sees targets in units in which the public bounds
of the recipe are [-1, 1], whatever the data are, and whoever reads a metric or a prediction sees the targets' own.

Not here: clamping what is out of bounds in training (`engine/losses.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsgd_cli.data.settings import Data


@dataclass(frozen=True)
class TargetScale:
    """`middle` becomes 0 and a distance of `unit` becomes 1.

    >>> scale = TargetScale(middle=150.0, unit=50.0)
    >>> scale.inward(np.array([100.0, 175.0])).tolist(), scale.outward(np.array([-1.0, 0.5])).tolist()
    ([-1.0, 0.5], [100.0, 175.0])
    """

    middle: float = 0.0
    unit: float = 1.0

    def inward(self, targets: np.ndarray) -> np.ndarray:
        """Targets (N,) as training sees them."""
        return (targets - self.middle) / self.unit

    def outward(self, outputs: np.ndarray) -> np.ndarray:
        """What a model gives, or what training sees, in the targets' own unit."""
        return outputs * self.unit + self.middle


def target_scale(data: Data) -> TargetScale:
    """By the recipe's public bounds; without them targets stay as they are."""
    if data.target_bounds is None:
        return TargetScale()
    low, high = data.target_bounds
    return TargetScale((low + high) / 2, (high - low) / 2)
