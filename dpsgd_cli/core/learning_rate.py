"""The step length by epoch. Public, and decided before training.

Not here: what a step is (`updates.py`), step lengths from theorems (`methods/`).
"""

from __future__ import annotations

import math

from dpsgd_cli.recipe.schema.schedule import ConstantRate, CosineRate, LinearRate, Rate, StepRate


def rate_at(rate: Rate | float, epoch: int, length: int) -> float:
    """Step length of `epoch` (0, 1, ...) in a training of `length` epochs.

    linear: straight from initial to final over `epochs`, then final (Yu et al. 2019, V-B2). cosine: half a
    wave from initial to final over `epochs` (Loshchilov and Hutter 2017, equation 5, without restarts).

    >>> rate_at(LinearRate(initial=0.1, final=0.05, epochs=10), 5, 60)
    0.07500000000000001
    """
    if isinstance(rate, LinearRate):
        return rate.initial + (rate.final - rate.initial) * min(1.0, epoch / rate.epochs)
    if isinstance(rate, StepRate):
        return float(rate.initial * rate.decay ** (epoch // rate.period))
    if isinstance(rate, CosineRate):
        done = min(1.0, epoch / (rate.epochs or length))
        return rate.final + (rate.initial - rate.final) * (1 + math.cos(math.pi * done)) / 2
    return rate.initial if isinstance(rate, ConstantRate) else float(rate)
