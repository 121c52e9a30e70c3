"""Calibration as recipes ask for it."""

from __future__ import annotations

from pydantic import Field

from dpsgd_cli.common.sections import Fraction, Section


class Calibration(Section):
    """Correction of a squared loss's predictions by a mean and a slope, for what clipping took from residuals."""

    share: Fraction = Field(
        0.05, description="Share of the mu^2 (or rho) left after the preconditioner that the correction gets."
    )
