"""`privacy.clipping`: the bound on one record's gradient, and all that depends on its kind.

To add a kind: a class here, and its name in the union `Clipping`. The class states its bounds, and with them the
sensitivity that is charged. It names the function of `clipping/run.py` that computes the factors of gradients.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dpsgd_cli.common.sections import Auto, Positive, Section
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import PrivacyError


class ClippingKind(Section):
    """Base of the kinds of clipping. Each kind states the next five in its own body: they have no default.

    `factors`: `module:name` of the function that computes the factor of each gradient, from L2 bounds and L2 norms of
    gradients (tensors that broadcast) and `factor_settings`. No factor may leave a norm above its bound.
    `plain`: the recipe states the bounds, and gradients within them are unchanged. Theorems' learning rates, automatic
    settings (`training/auto_rule.py`) and advice about norms apply to these kinds only.
    `held`: `module:name` of the class that holds the bounds of trials during training.
    `in_units`: the bound is unknown before training. Sums are charged in units of it, so `bounds` are 1.
    `moves`: the bound changes from step to step.
    """

    must_state = ("factors", "plain", "held", "in_units", "moves")
    factors: ClassVar[str]
    plain: ClassVar[bool]
    held: ClassVar[str]
    in_units: ClassVar[bool]
    moves: ClassVar[bool]
    kind: str

    @property
    def by_layer(self) -> bool:
        """Return True if each layer's gradient has a bound of its own, False if a record's whole gradient has one."""
        return False

    @property
    def factor_settings(self) -> Mapping[str, float]:
        """Return the keyword arguments of `factors` besides bounds and norms."""
        return {}

    @abstractmethod
    def bounds(self, layers: int | None) -> list[float]:
        """Return L2 bounds on a record's gradient: one, or one per layer if `by_layer`. `layers` None: unknown."""

    def norm_bound(self, layers: int | None) -> float:
        """Return the L2 bound on one record's contribution to a sum."""
        return math.sqrt(math.fsum(bound**2 for bound in self.bounds(layers)))

    @property
    def noise_by_layer(self) -> bool:
        """Return True if each layer's noise is z times its own bound, False if it is z times `norm_bound`."""
        return False

    def charged(self, noise_multiplier: float, layers: int | None) -> float:
        """Return the noise multiplier of the single Gaussian that is equivalent to noise at `noise_multiplier`.

        With noise z C_l on layer l, the M parts of one vector have Gaussian noise of multiplier z each. Together they
        are one Gaussian of multiplier z / sqrt(M).
        """
        return noise_multiplier / math.sqrt(len(self.bounds(layers))) if self.noise_by_layer else noise_multiplier

    def applied(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of the gradient sums for a schedule's noise multiplier.

        The two are equal unless a step releases another statistic, too. Raises PrivacyError if that statistic leaves
        nothing for the sums.
        """
        return noise_multiplier


class FlatClipping(ClippingKind):
    factors = "dpsgd_cli.clipping.run:at_most"
    plain = True
    held = "dpsgd_cli.clipping.bounds:Bounds"
    in_units = False
    moves = False
    kind: Literal["flat"] = "flat"
    norm: Positive | Auto = Field(
        "auto", description="L2 bound C of one record's whole gradient; auto: by the rule of method.learning_rate."
    )

    def bounds(self, layers: int | None) -> list[float]:
        return [self.norm_bound(layers)]

    def norm_bound(self, layers: int | None) -> float:
        """Return C itself, without the rounding error of a root; 1 while it is `auto`."""
        del layers
        return 1.0 if self.norm == "auto" else self.norm


class PerLayerClipping(ClippingKind):
    factors = "dpsgd_cli.clipping.run:at_most"
    plain = True
    held = "dpsgd_cli.clipping.bounds:Bounds"
    in_units = False
    moves = False
    kind: Literal["per-layer"] = "per-layer"
    norm: Positive | list[Positive] = Field(1.0, description="L2 bound C_l of each layer, or one per layer.")
    noise: Literal["joint", "as-published"] = Field(
        "joint",
        description="`joint`: noise z * sqrt(sum C_l^2) everywhere. `as-published`: noise z * C_l on layer l of M,"
        " which is charged what it costs, noise multiplier z / sqrt(M).",
    )

    @property
    def by_layer(self) -> bool:
        return True

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


class AutomaticClipping(ClippingKind):
    """Gradients C g / (|g| + gamma), of norm C |g| / (|g| + gamma) < C (Bu et al. 2022, arXiv 2206.07136, AUTO-S).

    Gradients have about one length C, short ones are lengthened, so that no bound has to be found. The update is
    learning rate x (sum of such gradients + noise z C) / batch, so C and the learning rate are one setting: their
    product is the distance by which a record in a batch of one would move the weights. Leave C at 1 and choose the
    learning rate. It is then about C |g| times that of plain clipping, for typical gradients of norm |g| < C.

    Sensitivity: C under add-remove and zero-out, 2 C under replace-one, as with plain clipping; never attained.
    """

    factors = "dpsgd_cli.clipping.run:automatic"
    plain = False
    held = "dpsgd_cli.clipping.bounds:Bounds"
    in_units = False
    moves = False
    kind: Literal["automatic"] = "automatic"
    norm: Positive = Field(1.0, description="L2 bound C of one record's gradient; tune it with the learning rate.")
    layers: Literal["together", "apart"] = Field(
        "together", description="The whole gradient has one length, or each layer's its own, C / sqrt(layers)."
    )
    stability: float = Field(
        0.01,
        ge=1e-6,
        le=1e6,
        description="gamma, added to every norm: gradients far below it stay as short as they are.",
    )

    @property
    def by_layer(self) -> bool:
        return self.layers == "apart"

    def bounds(self, layers: int | None) -> list[float]:
        if not self.by_layer:
            return [self.norm]
        if layers is None:
            raise PrivacyError("privacy.clipping.layers: apart needs the number of layers; use together")
        return [self.norm / math.sqrt(layers)] * layers

    def norm_bound(self, layers: int | None) -> float:
        """Return C itself: M layers of norm at most C / sqrt(M) each have norm at most C together."""
        del layers
        return self.norm

    @property
    def factor_settings(self) -> Mapping[str, float]:
        return {"stability": self.stability}


class QuantileClipping(ClippingKind):
    """A bound that follows a quantile of the gradients' norms, by a noisy count in each step of those within it.

    Andrew et al. 2019 (arXiv 1905.03871). Sum and count are charged as one Gaussian at the schedule's noise multiplier
    z; the sum has noise z_d = (z^-2 - (2 s_b)^-2)^(-1/2) times its sensitivity. The proof is at `QuantileBounds` in
    `clipping/bounds.py`. One bound for the whole gradient.
    """

    factors = "dpsgd_cli.clipping.run:at_most"
    plain = False
    held = "dpsgd_cli.clipping.bounds:QuantileBounds"
    in_units = True
    moves = True
    kind: Literal["quantile"] = "quantile"
    quantile: float = Field(
        0.5, gt=0, lt=1, description="gamma: the share of gradients that shall be within the bound."
    )
    learning_rate: Positive = Field(0.2, description="eta: a step multiplies the bound by e^(-eta (share - gamma)).")
    count_noise: Positive = Field(
        description="s_b: standard deviation of the noise on the count (twice that under replace-one); more than half"
        " the noise multiplier. Andrew et al. take a twentieth of the batch."
    )
    initial: Positive = Field(0.1, description="The bound C_0 of the first step.")

    def bounds(self, layers: int | None) -> list[float]:
        """Return the bound in units of itself: 1."""
        del layers
        return [1.0]

    def applied(self, noise_multiplier: float) -> float:
        """Return z_d: in units of noise, the sum's sensitivity 1 / z_d and the count's 1 / (2 s_b) give 1 / z together.

        Raises PrivacyError if the count alone spends as much or more.
        """
        left = noise_multiplier**-2 - (2 * self.count_noise) ** -2 if noise_multiplier > 0 else math.inf
        if left <= 0:
            raise PrivacyError(
                f"privacy.clipping.count_noise is {self.count_noise:g}, but must be more than half the noise multiplier"
                f" {noise_multiplier:.6g}, or the count alone spends it; give at least {2 * noise_multiplier:.3g}"
            )
        return left**-0.5


Clipping = Annotated[
    FlatClipping | PerLayerClipping | AutomaticClipping | QuantileClipping,
    Field(discriminator="kind"),
]
