"""Convex empirical risk on linear models: losses of a margin, public constants, and fast sums for many trials.

Not here: privacy (what is clipped, noised and charged is the method's business), general models (`core/packing.py`).
"""

from dpsgd_cli.core.problems.linear import LinearRisk
from dpsgd_cli.core.problems.losses import MARGIN_LOSSES, MarginLoss, margin_loss
from dpsgd_cli.core.problems.risk import Risk
from dpsgd_cli.core.problems.rows import SignedRows

__all__ = [
    "MARGIN_LOSSES",
    "LinearRisk",
    "MarginLoss",
    "Risk",
    "SignedRows",
    "margin_loss",
]
