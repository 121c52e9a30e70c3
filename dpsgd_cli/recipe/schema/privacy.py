"""The `privacy:` section: all settings that can change the guarantee."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from dpsgd_cli.recipe.accountants import ACCOUNTANTS
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.base import Delta, Positive, Section
from dpsgd_cli.recipe.schema.clipping import Clipping, FlatClipping
from dpsgd_cli.recipe.schema.noise import CorrelatedNoise, IndependentNoise, Noise
from dpsgd_cli.recipe.schema.schedule import ByRule, Schedule
from dpsgd_cli.recipe.schema.unit import Unit

NoiseSource = Literal["seeded", "secure"]


def noise_source(*seeds: int | None) -> NoiseSource:
    """Return the source of the randomness under these seeds: `secure`, the operating system, only if all are None."""
    return "secure" if all(seed is None for seed in seeds) else "seeded"


def describe_noise(source: NoiseSource) -> str:
    """Return the words for a noise source in statements: noise that a seed can repeat is for experiments."""
    if source == "secure":
        return "secure"
    return "seeded (experiment: who knows the seed can take the noise away, and runs with one seed share their noise)"


_ACCOUNTANTS = ("auto", *(name for name, listed in ACCOUNTANTS.items() if listed.in_recipes))


def _accountant(name: str) -> str:
    if name not in _ACCOUNTANTS:
        raise PydanticCustomError("enum", "is not the name of an accountant")
    return name


class RhoBudget(Section):
    rho: Positive = Field(description="Total zCDP.")


class EpsilonBudget(Section):
    epsilon: Positive = Field(description="Total epsilon.")
    delta: Delta = Field(description="At this delta.")


class Privacy(Section):
    adjacency: Adjacency | None = Field(
        None, description="Which data sets count as neighbours; left out, the batching's own (see README)."
    )
    unit: Unit | None = Field(
        None, description="Protect all rows of a user together; left out, a statement is about one record at a time."
    )
    clipping: Clipping = Field(FlatClipping(), description="How one record's (or user's) gradient is bounded.")
    schedule: Schedule = Field(ByRule(), description="The noise multiplier by epoch.")
    budget: RhoBudget | EpsilonBudget | None = Field(None, description="What a trial may spend.")
    budget_covers: Literal["total", "training"] = Field(
        "total", description="`training` leaves private preprocessing out of the budget (never out of the total)."
    )
    delta: Delta | None = Field(None, description="Delta of the statement; the budget's own when it has one.")
    accountant: Annotated[
        str, AfterValidator(_accountant), WithJsonSchema({"type": "string", "enum": list(_ACCOUNTANTS)})
    ] = Field(
        "auto",
        description="Who polices an epsilon budget, chooses the least noise for it and states epsilon. auto: exact"
        " (gaussian) for full and shuffle, else the least upper bound of all that apply, by whosever it is.",
    )
    noise: Noise | None = Field(
        None, description="How the noise of one step goes with that of others; left out, all is independent."
    )
    noise_source: NoiseSource | None = Field(
        None, description="seeded: reproducible, for experiments; secure: operating-system entropy (no seed)."
    )

    @property
    def correlated(self) -> CorrelatedNoise | None:
        """Return the kind of noise if it is correlated between steps; None for independent noise."""
        if self.noise is None or isinstance(self.noise, IndependentNoise):
            return None
        return self.noise
