"""Conversion of regression targets between their own unit and that of training.

Clipped gradients bound the length of a step, so a model needs many steps to reach large outputs: thousands for targets
of some hundreds. Training therefore scales the recipe's public target bounds to [-1, 1], whatever the data are. Metrics
and predictions are in the targets' own unit.

`engine/losses.py` clamps targets out of bounds in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsgd_cli.data.settings import Data


@dataclass(frozen=True)
class TargetScale:
    """An affine scale on which `middle` becomes 0 and a distance of `unit` becomes 1.

    >>> scale = TargetScale(middle=150.0, unit=50.0)
    >>> scale.inward(np.array([100.0, 175.0])).tolist(), scale.outward(np.array([-1.0, 0.5])).tolist()
    ([-1.0, 0.5], [100.0, 175.0])
    """

    middle: float = 0.0
    unit: float = 1.0

    def inward(self, targets: np.ndarray) -> np.ndarray:
        """Return targets (N,) in the unit of training."""
        return (targets - self.middle) / self.unit

    def outward(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs of a model, or targets of training, in the targets' own unit."""
        return outputs * self.unit + self.middle


def target_scale(data: Data) -> TargetScale:
    """Return the scale of the recipe's public target bounds; without bounds, one that changes nothing."""
    if data.target_bounds is None:
        return TargetScale()
    low, high = data.target_bounds
    return TargetScale((low + high) / 2, (high - low) / 2)
