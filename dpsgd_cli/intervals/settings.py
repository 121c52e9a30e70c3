"""Intervals as recipes ask for them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

Inference = Literal["intervals"]
INFERENCE = Field(
    None, description="intervals: release what 95% intervals of coefficients and shapes need, from the same budget."
)
