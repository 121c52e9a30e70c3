"""`privacy.clipping`: how one record's gradient is bounded, and all that depends on it.

A kind of clipping is one class here, and its name in the union `Clipping`. The class owns its bounds, and with them the
sensitivity that is charged; what a gradient is multiplied by is a function of `clipping/run.py` that it names.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dpsgd_cli.common.sections import Auto, Fraction, Positive, Section
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import PrivacyError


class ClippingKind(Section):
    """What every kind of clipping offers. Each states the next five in its own body: none has a default.

    `factors`: `module:name` of the function that says what a gradient is multiplied by, from the L2 bounds and the L2
    norms of the gradients (tensors that broadcast) and `factor_settings`: no factor may leave a norm above its bound.
    `plain`: gradients within bounds that the recipe states stay as they are. Theorems' learning rates, the rule of
    `training/auto_rule.py` and advice about norms are of those.
    `held`: `module:name` of the class that holds the bounds of trials while they train.
    `in_units`: nobody knows the bound before training; sums are charged in units of it, so that `bounds` are 1.
    `moves`: it changes from step to step.
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
        """Whether each layer's gradient is bounded by itself, or one record's whole gradient."""
        return False

    @property
    def factor_settings(self) -> Mapping[str, float]:
        """What `factors` takes besides bounds and norms, by name."""
        return {}

    @property
    def share_before(self) -> float | None:
        """The share of the budget's mu^2 that a histogram of norms gets before training; None for no histogram."""
        return None

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

    def applied(self, noise_multiplier: float) -> float:
        """What of a schedule's noise multiplier is added to the sums: all, unless something else is released with it.

        Raises PrivacyError where that leaves nothing.
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
        """C itself, without the rounding of a root; 1 where nobody chose it."""
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


class OneLength(ClippingKind):
    """Gradients of about one length C each, short ones lengthened: no bound has to be found.

    The update is learning rate x (sum of such gradients + noise z C) / batch, so C and the learning rate are one
    setting: their product is how far a record of a batch of one would move the weights. Leave C at 1 and choose the
    learning rate, which then is about C |g| times that of plain clipping for typical gradients of norm |g| < C.
    """

    norm: Positive = Field(1.0, description="L2 bound C of one record's gradient: goes with the learning rate.")
    layers: Literal["together", "apart"] = Field(
        "together", description="The whole gradient has one length, or each layer's its own, C / sqrt(layers)."
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
        """C itself: layers of norm at most C / sqrt(M) each are of norm at most C together."""
        del layers
        return self.norm


class AutomaticClipping(OneLength):
    """C g / (|g| + gamma), of norm C |g| / (|g| + gamma) < C (Bu et al. 2022, arXiv 2206.07136, AUTO-S).

    Sensitivity: C under add-remove and zero-out, 2 C under replace-one, as of plain clipping; never reached.
    """

    factors = "dpsgd_cli.clipping.run:automatic"
    plain = False
    held = "dpsgd_cli.clipping.bounds:Bounds"
    in_units = False
    moves = False
    kind: Literal["automatic"] = "automatic"
    stability: float = Field(
        0.01,
        ge=1e-6,
        le=1e6,
        description="gamma, added to every norm: gradients far below it stay as short as they are.",
    )

    @property
    def factor_settings(self) -> Mapping[str, float]:
        return {"stability": self.stability}


class NormalisedClipping(OneLength):
    """C g / |g|, of norm C, and 0 where g is 0.

    Sensitivity: C under add-remove and zero-out, 2 C under replace-one; reached. A gradient whose norm is below
    10^-10, where float32 no longer tells what it is, is C g / 10^-10: shorter.
    """

    factors = "dpsgd_cli.clipping.run:normalised"
    plain = False
    held = "dpsgd_cli.clipping.bounds:Bounds"
    in_units = False
    moves = False
    kind: Literal["normalised"] = "normalised"


class QuantileClipping(ClippingKind):
    """A bound that follows a quantile of the gradients' norms, by a noised count of those within it in each step.

    Andrew et al. 2019 (arXiv 1905.03871). The count is charged in the Gaussian of the sum: at the noise multiplier z of
    the schedule, which is charged, the sum has noise z_d = (z^-2 - (2 s_b)^-2)^(-1/2) times its sensitivity. Proof:
    `clipping/bounds.py`, `QuantileBounds`. One bound for the whole gradient.
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
        """In units of the bound."""
        del layers
        return [1.0]

    def applied(self, noise_multiplier: float) -> float:
        """z_d, so that the sum's sensitivity 1 / z_d and the count's 1 / (2 s_b), in noise, are 1 / z together."""
        left = noise_multiplier**-2 - (2 * self.count_noise) ** -2 if noise_multiplier > 0 else math.inf
        if left <= 0:
            raise PrivacyError(
                f"privacy.clipping.count_noise is {self.count_noise:g}, but must be more than half the noise multiplier"
                f" {noise_multiplier:.6g}, or the count alone spends it; give at least {_ample(noise_multiplier)}"
            )
        return left**-0.5


def _ample(noise_multiplier: float) -> str:
    """A count noise that leaves nearly all of a noise multiplier to the sum: z_d is 1.033 z."""
    return f"{2 * noise_multiplier:.3g}"


class HistogramClipping(ClippingKind):
    """A quantile of the gradients' norms before the first step, read off a noised histogram that is charged first.

    After DC-SGD (Wei et al. 2025, arXiv 2503.22988), which makes such a histogram again and again; this one is made
    once, at the initial weights, of all training records. Proof: `clipping/bounds.py`, `HistogramBounds`. One bound
    for the whole gradient.
    """

    factors = "dpsgd_cli.clipping.run:at_most"
    plain = False
    held = "dpsgd_cli.clipping.bounds:HistogramBounds"
    in_units = True
    moves = False
    kind: Literal["histogram"] = "histogram"
    quantile: float = Field(0.5, gt=0, lt=1, description="The share of gradients to be within the bound at the start.")
    share: Fraction = Field(0.02, description="Share of the budget's mu^2 (or rho) that the histogram gets.")
    bins: int = Field(60, ge=2, le=10_000, description="Bins of equal ratio between the bounds of `range`.")
    range: tuple[Positive, Positive] = Field(
        (1e-3, 1e3), description="The least and the largest bound: shorter and longer gradients are in the outer bins."
    )

    @model_validator(mode="after")
    def _range_goes_up(self) -> HistogramClipping:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: goes from {self.range[0]:g} to {self.range[1]:g}; give the smaller bound first")
        return self

    @property
    def share_before(self) -> float:
        return self.share

    def bounds(self, layers: int | None) -> list[float]:
        """In units of the bound."""
        del layers
        return [1.0]


Clipping = Annotated[
    FlatClipping | PerLayerClipping | AutomaticClipping | NormalisedClipping | QuantileClipping | HistogramClipping,
    Field(discriminator="kind"),
]
