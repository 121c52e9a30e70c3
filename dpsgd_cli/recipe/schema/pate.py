"""Sections of PATE: teachers that nobody sees, how their votes are released, and the student that learns from those.

Not here: what an aggregation costs (`privacy/voting.py`), training (`methods/pate.py`).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Count, Delta, NonNegative, Positive, Section


class AggregationKind(Section):
    """What every rule offers. `rule`: `module:name` of the class that says what it releases and what that costs."""

    rule: ClassVar[str]
    kind: str


Noise = Positive | Literal["auto"]


class LnMax(AggregationKind):
    """Papernot et al. 2017: the largest of counts with Laplace noise."""

    rule = "dpsgd_cli.privacy.voting:LaplaceMax"
    kind: Literal["lnmax"] = "lnmax"
    noise: Noise = Field(20.0, description="Scale of the Laplace noise on each count; auto: the least for the budget.")


class GnMax(AggregationKind):
    """Papernot et al. 2018: the largest of counts with Gaussian noise."""

    rule = "dpsgd_cli.privacy.voting:GaussianMax"
    kind: Literal["gnmax"] = "gnmax"
    noise: Noise = Field(
        40.0, description="Standard deviation of the noise on each count; auto: the least for the budget."
    )


class ConfidentGnMax(AggregationKind):
    """Papernot et al. 2018: the same, for queries whose largest noisy count reaches a threshold."""

    rule = "dpsgd_cli.privacy.voting:ConfidentMax"
    kind: Literal["confident-gnmax"] = "confident-gnmax"
    threshold: NonNegative = Field(200.0, description="T: votes that the leading class must have, noise included.")
    threshold_noise: Positive = Field(150.0, description="sigma_1: standard deviation of that noise.")
    noise: Noise = Field(
        40.0,
        description="sigma_2: standard deviation of the noise on each count of an answer; auto: the least with which"
        " the budget allows `answers`.",
    )
    answers: Count | None = Field(None, description="Most queries that are answered; left out, as many as pass.")


class ProposeTestRelease(AggregationKind):
    """The mode as it is where a noisy test says that one vote could not change it."""

    rule = "dpsgd_cli.privacy.voting:StableMode"
    kind: Literal["propose-test-release"] = "propose-test-release"
    epsilon: Positive = Field(description="Of each query's test.")
    delta: Delta = Field(description="Of each query: that a mode is released which one vote could change.")


Aggregation = Annotated[LnMax | GnMax | ConfidentGnMax | ProposeTestRelease, Field(discriminator="kind")]
