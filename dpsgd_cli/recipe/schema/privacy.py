"""The `privacy:` section: everything that can change the guarantee."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.accountants import ACCOUNTANTS
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.base import Auto, Delta, Positive, Section
from dpsgd_cli.recipe.schema.noise import CorrelatedNoise, Noise
from dpsgd_cli.recipe.schema.schedule import Schedule, Uniform
from dpsgd_cli.recipe.schema.unit import Unit
from dpsgd_cli.wording import count

NoiseSource = Literal["seeded", "secure"]


def noise_source(*seeds: int | None) -> NoiseSource:
    """Where randomness comes from that these seeds decide: the operating system only where none is given."""
    return "secure" if all(seed is None for seed in seeds) else "seeded"


def describe_noise(source: NoiseSource) -> str:
    """The same as every statement says it: what a seed can repeat is an experiment."""
    if source == "secure":
        return "secure"
    return "seeded (experiment: who knows the seed can take the noise away, and runs with one seed share their noise)"


class ClippingKind(Section):
    """What every kind of clipping offers; a kind is one class here, and its name in the union `Clipping`.

    `by_layer`: whether each layer's gradient is bounded by itself, or one record's whole gradient.
    `factors`: `module:name` of the function that says what a gradient is multiplied by, from the L2 bounds and the L2
    norms of the gradients (tensors that broadcast): no factor may leave a norm above its bound.
    """

    by_layer: ClassVar[bool] = False
    factors: ClassVar[str] = "dpsgd_cli.core.clipping:at_most"
    kind: str

    @abstractmethod
    def bounds(self, layers: int | None) -> list[float]:
        """L2 bounds on one record's gradient: one, or one for each of `layers` (None: unknown) where `by_layer`."""

    def norm_bound(self, layers: int | None) -> float:
        """L2 bound on all that one record adds to a sum."""
        return math.sqrt(math.fsum(bound**2 for bound in self.bounds(layers)))

    @property
    def noise_by_layer(self) -> bool:
        """Whether each layer has noise z times its own bound, instead of z times `norm_bound` everywhere."""
        return False

    def charged(self, noise_multiplier: float, layers: int | None) -> float:
        """Noise multiplier of the one Gaussian that noise at `noise_multiplier` is.

        Noise z C_l on layer l: M Gaussians of multiplier z on the parts of one vector, which together are one Gaussian
        of multiplier z / sqrt(M).
        """
        return noise_multiplier / math.sqrt(len(self.bounds(layers))) if self.noise_by_layer else noise_multiplier


class FlatClipping(ClippingKind):
    kind: Literal["flat"] = "flat"
    norm: Positive | Auto = Field(
        "auto", description="L2 bound C of one record's whole gradient; auto: by the rule of method.learning_rate."
    )

    def bounds(self, layers: int | None) -> list[float]:
        return [self.norm_bound(layers)]

    def norm_bound(self, layers: int | None) -> float:
        """C itself, without the rounding of a root; 1 where nobody chose it."""
        del layers
        return 1.0 if self.norm == "auto" else self.norm


class PerLayerClipping(ClippingKind):
    by_layer = True
    kind: Literal["per-layer"] = "per-layer"
    norm: Positive | list[Positive] = Field(1.0, description="L2 bound C_l of each layer, or one per layer.")
    noise: Literal["joint", "as-published"] = Field(
        "joint",
        description="`joint`: noise z * sqrt(sum C_l^2) everywhere. `as-published`: noise z * C_l on layer l of M,"
        " which is charged what it costs, noise multiplier z / sqrt(M).",
    )

    def bounds(self, layers: int | None) -> list[float]:
        if isinstance(self.norm, list):
            if layers is not None and len(self.norm) != layers:
                raise PrivacyError(
                    f"privacy.clipping.norm lists {count(len(self.norm), 'bound')}, but the model has"
                    f" {count(layers, 'layer')}"
                )
            return list(self.norm)
        if layers is None:
            raise PrivacyError("per-layer clipping with one norm needs the number of layers; list one norm per layer")
        return [self.norm] * layers

    @property
    def noise_by_layer(self) -> bool:
        return self.noise == "as-published"


Clipping = Annotated[FlatClipping | PerLayerClipping, Field(discriminator="kind")]


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
    schedule: Schedule = Field(Uniform(), description="The noise multiplier by epoch.")
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
        """The kind of noise, where that of one step is not independent of that of others."""
        return self.noise if isinstance(self.noise, CorrelatedNoise) else None
