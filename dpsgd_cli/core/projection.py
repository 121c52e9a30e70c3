"""Projection of weights to a Euclidean ball. Post-processing: reads no data."""

from __future__ import annotations

import torch
from torch import Tensor


def project_to_ball(values: Tensor, radii: Tensor) -> Tensor:
    """Scale each row of `values` (R, P) in place to norm at most `radii` (R, 1) > 0, inf for no constraint.

    Guarantee: the result is the nearest point of the ball, to rounding. Source: Lecture 9, section 4.
    """
    norms = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return values.mul_((radii / norms).clamp_(max=1.0).nan_to_num_(nan=1.0))
