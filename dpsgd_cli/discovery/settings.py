"""Settings of the release of bounds and categories that a recipe calls `private`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Auto, Count, Fraction, Section

Private = Literal["private"]
"""What a recipe writes in place of bounds, or of a list of categories, that are to be released with noise."""
LARGEST_DELTA = 0.01
SHARE = 0.05
"""Share of the budget's mu^2 for `noise_multiplier: auto`."""
DELTA_SHARE = 0.1
"""Share of the statement's delta for `delta: auto`."""


class Discovery(Section):
    """The one noisy histogram from which all private bounds and categories are read. `discovery/price.py` prices it."""

    noise_multiplier: Auto | Annotated[float, Field(gt=0, le=1e6)] = Field(
        "auto", description="Of the histogram of all private columns together; auto: `share` of the budget."
    )
    share: Fraction = Field(SHARE, description="Share of the budget's mu^2 (or rho) that `auto` noise gets.")
    delta: Auto | Annotated[float, Field(gt=0, le=LARGEST_DELTA)] = Field(
        "auto",
        description="Probability that a category which only one record has is named, charged to the ledger; auto: a"
        " tenth of the statement's delta.",
    )
    outside: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.01, description="Share of the records that may lie below the bounds, and above them; they are clamped."
    )
    most_categories: Count = Field(
        32, description="Most categories of a column that are kept apart, the most frequent ones; public."
    )

    @property
    def settled(self) -> bool:
        """Return True if nothing is `auto`."""
        return "auto" not in (self.noise_multiplier, self.delta)
