"""The `privacy:` section: everything that can change the guarantee."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from dpsgd_cli.accounting.accountants import ACCOUNTANTS
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.budget import EpsilonBudget, RhoBudget
from dpsgd_cli.clipping.settings import Clipping, FlatClipping
from dpsgd_cli.common.sections import Delta, Section
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.settings import CorrelatedNoise, IndependentNoise, Noise, NoiseSource
from dpsgd_cli.schedules.settings import ByRule, Schedule
from dpsgd_cli.users.settings import Unit

_ACCOUNTANTS = ("auto", *(name for name, listed in ACCOUNTANTS.items() if listed.in_recipes))


def _accountant(name: str) -> str:
    if name not in _ACCOUNTANTS:
        raise PydanticCustomError("enum", "is not the name of an accountant")
    return name


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
    book: str | None = Field(
        None,
        description="The budget book of the table, relative to the recipe: `dpsgd budget create` makes one. What a"
        " run may release is charged to it before the run starts.",
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

    @property
    def stated_delta(self) -> float:
        """The delta of the statement, in (0, 1); PrivacyError if none is given, or two that differ."""
        stated = self.budget.delta if isinstance(self.budget, EpsilonBudget) else None
        if stated is not None and self.delta not in (None, stated):
            raise PrivacyError(f"privacy.delta is {self.delta}, but privacy.budget.delta is {stated}; give one")
        delta = stated or self.delta
        if delta is None:
            raise PrivacyError("no delta: give privacy.delta (smaller than 1 / number of records, say 1.0e-5)")
        return delta
