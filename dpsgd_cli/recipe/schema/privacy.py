"""The `privacy:` section: everything that can change the guarantee."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpsgd_cli.recipe.schema.base import Delta, Positive, Section
from dpsgd_cli.recipe.schema.schedule import Schedule, Uniform

NoiseSource = Literal["seeded", "secure"]


def noise_source(*seeds: int | None) -> NoiseSource:
    """Where randomness comes from that these seeds decide: the operating system only where none is given."""
    return "secure" if all(seed is None for seed in seeds) else "seeded"


def describe_noise(source: NoiseSource) -> str:
    """The same as every statement says it: what a seed can repeat is an experiment."""
    if source == "secure":
        return "secure"
    return "seeded (experiment: who knows the seed can take the noise away, and runs with one seed share their noise)"


class FlatClipping(Section):
    kind: Literal["flat"] = "flat"
    norm: Positive = Field(1.0, description="L2 bound C of one record's whole gradient.")


class PerLayerClipping(Section):
    kind: Literal["per-layer"] = "per-layer"
    norm: Positive | list[Positive] = Field(1.0, description="L2 bound C_l of each layer, or one per layer.")
    noise: Literal["joint", "as-published"] = Field(
        "joint",
        description="`joint`: noise z * sqrt(sum C_l^2) everywhere. `as-published`: noise z * C_l on layer l of M,"
        " which is charged what it costs, noise multiplier z / sqrt(M).",
    )


Clipping = Annotated[FlatClipping | PerLayerClipping, Field(discriminator="kind")]


class RhoBudget(Section):
    rho: Positive = Field(description="Total zCDP.")


class EpsilonBudget(Section):
    epsilon: Positive = Field(description="Total epsilon.")
    delta: Delta = Field(description="At this delta.")


class Privacy(Section):
    adjacency: Literal["add-remove", "replace-one", "zero-out"] | None = Field(
        None, description="Which data sets count as neighbours; left out, the batching's own (see README)."
    )
    clipping: Clipping = Field(FlatClipping(), description="How one record's gradient is bounded.")
    schedule: Schedule = Field(Uniform(), description="The noise multiplier by epoch.")
    budget: RhoBudget | EpsilonBudget | None = Field(None, description="What a trial may spend.")
    budget_covers: Literal["total", "training"] = Field(
        "total", description="`training` leaves private preprocessing out of the budget (never out of the total)."
    )
    delta: Delta | None = Field(None, description="Delta of the statement; the budget's own when it has one.")
    accountant: Literal[
        "auto", "zcdp", "zcdp-tight", "gaussian", "rdp", "pld", "moments",
        "lemma-15.1", "lemma-15.5", "nikolov", "basic-composition", "advanced-composition", "strong-composition",
    ] = Field(
        "auto",
        description="Who polices an epsilon budget, chooses the least noise for it and states epsilon. auto: exact"
        " (gaussian) for full and shuffle, else the least upper bound of all that apply, by whosever it is.",
    )  # fmt: skip
    noise_source: NoiseSource | None = Field(
        None, description="seeded: reproducible, for experiments; secure: operating-system entropy (no seed)."
    )
