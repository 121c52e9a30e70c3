"""`privacy.schedule`: the noise multiplier by epoch (Yu et al. 2019, IV-A2), and all that depends on its kind.

To add a kind: a class here, and its name in the union `Schedule` (in `Decay`, if it can be a part of another one). The
class defines its noise at epoch t (epochs count from 0) and how it scales. The type of each number that may be `auto`
states the range of the search and the direction in which it costs more.

`accounting/budget.py` computes how much of a budget a schedule spends, `accounting/accountants/` the cost of an epoch.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from dpsgd_cli.accounting.search import NOISE, Interval
from dpsgd_cli.common.sections import Auto, Count, Fraction, NonNegative, Positive, Section
from dpsgd_cli.errors import PrivacyError

LEAST = 1e-6
"""Least noise multiplier. Less noise protects nothing (rho is 5e11), and its square soon leaves the range of floats."""


@dataclass(frozen=True)
class Number(Interval):
    """A number of a schedule that may be `auto`, searched from `cheap` (most noise) to `expensive` (least noise).

    `value` maps a value of the search to the number. `refused`: the reason if it cannot be solved for.
    """

    value: Callable[[float], float] = float
    refused: str = ""

    @property
    def increasing(self) -> bool:
        """Return True if a larger number makes more noise."""
        return self.cheap > self.expensive


_NOISE = Number(NOISE.name, NOISE.cheap, NOISE.expensive, NOISE.start)
OnlyNoise = Annotated[Positive | Auto, _NOISE]
Noise = Annotated[Positive | Auto, replace(_NOISE, start=64.0)]
Rate = Annotated[Positive | Auto, Number("decay", cheap=1e-9, expensive=1e9, start=1e-4)]
Factor = Annotated[
    Fraction | Auto,
    Number("decay / (1 - decay)", cheap=1e9, expensive=1e-9, start=1e4, value=lambda odds: odds / (1 + odds)),
]
Period = Annotated[
    Count | Auto, Number("period", cheap=float(1 << 40), expensive=1.0, start=64.0, whole=True, value=int)
]


class NoiseSchedule(Section):
    """Base of the schedules. Each kind states the next two in its own body: they have no default.

    `adaptive`: the noise is chosen during training, and `noise` is the most that an epoch may have. Otherwise all noise
    is known before training and priced as planned.
    `follows_initial`: multiplying `initial` by a factor multiplies all noise by it.
    """

    must_state = ("adaptive", "follows_initial")
    adaptive: ClassVar[bool]
    follows_initial: ClassVar[bool]
    kind: str

    @property
    def length(self) -> int | None:
        """Return the number of epochs that the schedule has noise for; None for any number."""
        return None

    @abstractmethod
    def noise(self, epoch: int) -> float:
        """Return the noise multiplier of `epoch`. Raise PrivacyError if a number that it needs is `auto`."""

    def noise_multiplier(self, epoch: int) -> float:
        """Return the noise multiplier of `epoch` (0, 1, ...), at least `LEAST`.

        Raises PrivacyError if the schedule has less noise than that, or needs a number that is still `auto`.
        """
        value = self.noise(epoch)
        if value < LEAST:
            raise PrivacyError(
                f"schedule {self.kind} has noise multiplier {value:g} at epoch {epoch}, less than {LEAST:g}:"
                " train fewer epochs, or let it decay slower (for no privacy at all there is method sgd)"
            )
        return value

    def scaled(self, factor: float) -> Self:
        """Return the schedule with every noise multiplier times `factor`. No number may be `auto`."""
        names = [name for name in ("initial", "final") if name in type(self).model_fields]
        return self.changed(**{name: getattr(self, name) * factor for name in names})

    def numbers(self) -> dict[str, Number]:
        """Return the numbers that may be `auto`, by their paths inside the section.

        >>> list(ExponentialDecay(initial=10, decay=0.1).numbers())
        ['initial', 'decay']
        """
        found = ((name, field.metadata) for name, field in type(self).model_fields.items())
        return {name: one for name, metadata in found for one in metadata if isinstance(one, Number)}

    def free_numbers(self) -> list[str]:
        """Return the paths of the numbers that are `auto`, such as `decay` or `parts.1.initial`.

        >>> ExponentialDecay(initial=10, decay="auto").free_numbers()
        ['decay']
        """
        return [path for path in self.numbers() if self.number_at(path) == "auto"]

    def number_at(self, path: str) -> Any:
        """Return the number at one of the paths of `numbers`, or `auto`."""
        return getattr(self, path)

    def with_number(self, path: str, value: float | str) -> Self:
        """Return the schedule with `value` at one of the paths of `numbers`."""
        return self.changed(**{path: value})


class Uniform(NoiseSchedule):
    adaptive = False
    follows_initial = True
    kind: Literal["uniform"] = "uniform"
    initial: OnlyNoise = Field("auto", description="Noise multiplier of every epoch; auto: the least allowed.")

    def noise(self, epoch: int) -> float:
        """Return `initial` for every epoch."""
        del epoch
        return _known(self.initial)


class ByRule(Uniform):
    """`influence` where automatic settings choose it (`dpsgd train --dry-run` shows this); else uniform."""

    adaptive = False
    follows_initial = True
    kind: Literal["auto"] = "auto"  # type: ignore[assignment]


DEFAULT_SCHEDULES = (ByRule(), Uniform())
"""Schedules of a recipe that states none, before and after automatic settings are resolved."""


class TimeDecay(NoiseSchedule):
    adaptive = False
    follows_initial = True
    kind: Literal["time"] = "time"
    initial: Noise = Field(description="Noise multiplier of epoch 0.")
    decay: Rate = Field(description="k in initial / (1 + k floor(t / period)).")
    period: Count = Field(1, description="Epochs between two changes.")

    def noise(self, epoch: int) -> float:
        """Return sigma_t = sigma_0 / (1 + k floor(t / period))."""
        return _known(self.initial) / (1 + _known(self.decay) * (epoch // self.period))


class ExponentialDecay(NoiseSchedule):
    adaptive = False
    follows_initial = True
    kind: Literal["exponential"] = "exponential"
    initial: Noise = Field(description="Noise multiplier of epoch 0.")
    decay: Rate = Field(description="k in initial * exp(-k floor(t / period)).")
    period: Count = Field(1, description="Epochs between two changes.")

    def noise(self, epoch: int) -> float:
        """Return sigma_t = sigma_0 exp(-k floor(t / period))."""
        return _known(self.initial) * math.exp(-_known(self.decay) * (epoch // self.period))


class StepDecay(NoiseSchedule):
    adaptive = False
    follows_initial = True
    kind: Literal["step"] = "step"
    initial: Noise = Field(description="Noise multiplier of epoch 0.")
    decay: Factor = Field(description="k in initial * k^floor(t / period).")
    period: Period = Field(10, description="Epochs between two steps.")

    def noise(self, epoch: int) -> float:
        """Return sigma_t = sigma_0 k^floor(t / period)."""
        times = epoch // int(_known(self.period))
        return float(_known(self.initial) * _known(self.decay) ** times)


class PolynomialDecay(NoiseSchedule):
    adaptive = False
    follows_initial = False
    kind: Literal["polynomial"] = "polynomial"
    initial: Noise = Field(description="Noise multiplier of epoch 0.")
    final: Noise = Field(description="Noise multiplier from epoch `period` on.")
    decay: Rate = Field(description="Power k in (initial - final) (1 - t/period)^k + final.")
    period: Period = Field(100, description="Epochs until the final value.")
    every: Count = Field(1, description="Epochs between two changes.")

    def noise(self, epoch: int) -> float:
        """Return sigma_t = (sigma_0 - sigma_end) (1 - t / period)^k + sigma_end, and sigma_end from `period` on.

        With `every` above 1, t is the last multiple of it up to `epoch`.
        """
        left = max(0.0, 1 - (epoch - epoch % self.every) / _known(self.period))
        final = _known(self.final)
        return float((_known(self.initial) - final) * left ** _known(self.decay) + final)

    def numbers(self) -> dict[str, Number]:
        """Return the numbers that may be `auto`. Increasing noise reverses the search of power and period."""
        found = super().numbers()
        if isinstance(self.initial, str) or isinstance(self.final, str) or self.final <= self.initial:
            return found
        reason = "auto is for noise that decays; final is above initial here"
        return found | {
            "decay": replace(found["decay"], cheap=1e9, expensive=1e-9, start=64.0),
            "period": replace(found["period"], cheap=1.0, expensive=found["period"].cheap, refused=reason),
        }


_Decay = Uniform | TimeDecay | ExponentialDecay | StepDecay | PolynomialDecay
Decay = Annotated[_Decay, Field(discriminator="kind")]


class Stretch(Section):
    """One part of a piecewise schedule."""

    epochs: Count | None = Field(None, description="How long this part lasts; left out in the last one, to the end.")
    schedule: Decay = Field(description="Its noise; its clock starts at 0 where the part begins.")


class Piecewise(NoiseSchedule):
    """Schedules one after the other, such as constant for 10 epochs, then exponential."""

    adaptive = False
    follows_initial = False
    kind: Literal["piecewise"] = "piecewise"
    parts: Annotated[list[Stretch], Field(min_length=1)] = Field(
        description="In order.",
        examples=[
            [
                {"epochs": 20, "schedule": {"kind": "time", "initial": 8, "decay": 0.1}},
                {"schedule": {"kind": "uniform", "initial": 4}},
            ]
        ],
    )

    @model_validator(mode="after")
    def _only_the_last_is_open(self) -> Piecewise:
        open_parts = [index for index, part in enumerate(self.parts[:-1]) if part.epochs is None]
        if open_parts or self.parts[-1].epochs is not None:
            at = open_parts[0] if open_parts else len(self.parts) - 1
            said = "missing: only the last part lasts to the end" if open_parts else "leave it out of the last part"
            raise ValueError(f"parts.{at}: epochs: {said}")
        return self

    def noise(self, epoch: int) -> float:
        """Return the noise of the part that `epoch` falls into; each part counts its epochs from 0."""
        for part in self.parts:
            if part.epochs is None or epoch < part.epochs:
                return part.schedule.noise(epoch)
            epoch -= part.epochs
        raise PrivacyError("schedule piecewise ended before the training")

    def scaled(self, factor: float) -> Self:
        return self._with([part.schedule.scaled(factor) for part in self.parts])

    def numbers(self) -> dict[str, Number]:
        return {
            f"parts.{index}.{name}": number
            for index, part in enumerate(self.parts)
            for name, number in part.schedule.numbers().items()
        }

    def number_at(self, path: str) -> Any:
        _, index, name = path.split(".")
        return self.parts[int(index)].schedule.number_at(name)

    def with_number(self, path: str, value: float | str) -> Self:
        _, index, name = path.split(".")
        schedules = [part.schedule for part in self.parts]
        schedules[int(index)] = schedules[int(index)].with_number(name, value)
        return self._with(schedules)

    def _with(self, schedules: list[_Decay]) -> Self:
        pairs = zip(self.parts, schedules, strict=True)
        return self.changed(parts=[part.changed(schedule=one) for part, one in pairs])


class Validation(NoiseSchedule):
    """Less noise whenever validation accuracy stops improving (Yu et al. 2019, IV-A1). Needs `data.validation`."""

    adaptive = True
    follows_initial = True
    kind: Literal["validation"] = "validation"
    initial: Positive = Field(description="Noise multiplier of epoch 0.")
    decay: Fraction = Field(description="k: the noise multiplier becomes k times itself.")
    threshold: NonNegative = Field(0.01, description="It does when accuracy improved by at most this since last time.")
    period: Count = Field(10, description="Validations between two looks.")
    average: Count = Field(1, description="m: the accuracy that is looked at is the mean of the last m validations.")
    every: Count = Field(1, description="Epochs between two validations.")

    @model_validator(mode="after")
    def _period_covers_the_average(self) -> Validation:
        if self.period < self.average:
            raise ValueError(f"period: is {self.period}, but must be at least average ({self.average})")
        return self

    def noise(self, epoch: int) -> float:
        """Return the noise of epoch 0, the most of any epoch: later noise follows the validation accuracy."""
        del epoch
        return self.initial


class Listed(NoiseSchedule):
    """A list of noise multipliers, one for each epoch."""

    adaptive = False
    follows_initial = False
    kind: Literal["list"] = "list"
    multipliers: Annotated[list[Positive], Field(min_length=1)] = Field(
        description="Noise multiplier of epochs 0, 1, ...; until-budget, training ends with the last."
    )
    factor: Noise = Field(1.0, description="Times all of them; auto: the least that the budget allows.")

    @property
    def length(self) -> int:
        return len(self.multipliers)

    def noise(self, epoch: int) -> float:
        """Return the epoch's multiplier times the factor; 0 beyond the last, which no budget affords."""
        return self.multipliers[epoch] * _known(self.factor) if epoch < self.length else 0.0

    def scaled(self, factor: float) -> Self:
        return self.changed(factor=_known(self.factor) * factor)


class Contraction(Section):
    """A constant factor by which every epoch shrinks the effect of earlier noise on the result."""

    contraction: Fraction = Field(description="gamma: w_t is gamma^-t times that of epoch 0.")


class Tail(Section):
    """Weight of an epoch's noise in the mean of the last weights of descent with momentum, at one step per epoch.

    w_t is the fraction of step t's total displacement that is in this mean. For m weights, those after steps F to
    T - 1, it is the sum over k >= t of (1 - momentum^(k - t + 1)) / m. If the loss had no curvature, w_t^2 would give
    the least noise; with curvature later steps undo the effect of early noise, which w_t allows for.

    >>> [Tail(epochs=4, momentum=0.5).weight(t) for t in range(4)]
    [0.90625, 0.8125, 0.625, 0.25]
    """

    epochs: Count = Field(description="T, all epochs of the training.")
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(description="Heavy-ball momentum.")
    fraction: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="Share of the steps that is averaged.")

    def weight(self, epoch: int) -> float:
        """Return w_t, in (0, 1], for an `epoch` below T."""
        averaged = max(1, math.ceil(self.fraction * self.epochs))
        start = max(self.epochs - averaged, epoch)
        seen = self.epochs - start
        short = self.momentum ** (start - epoch + 1) * (1 - self.momentum**seen) / (1 - self.momentum)
        return (seen - short) / averaged


class Influence(NoiseSchedule):
    """The least noise on the result for its price, if the noise of epoch t has public weight w_t in the result.

    Let the result have error sum w_t sigma_t^2, and let the spending be sum sigma_t^-2 (for Gaussians exactly mu^2, and
    twice rho). A Lagrange multiplier lambda gives w_t = lambda sigma_t^-4 at the optimum, so sigma_t^2 is proportional
    to w_t^(-1/2) (Hong, Wang and Zhou 2021, arXiv 2101.07413). Under sampling, spending is another function of sigma_t,
    and this schedule is good but not optimal. A contraction by gamma per epoch (in that paper, for a loss under the
    Polyak-Lojasiewicz condition) gives exponential decay by k = -log(gamma) / 4.

    >>> steady = Influence(initial=8, weights={"contraction": 0.5})
    >>> [round(steady.noise(t), 3) for t in (0, 2, 4)], round(Influence(initial=8, weights=[1, 16]).noise(1), 3)
    ([8.0, 5.657, 4.0], 4.0)
    """

    adaptive = False
    follows_initial = True
    kind: Literal["influence"] = "influence"
    initial: Noise = Field(description="Noise multiplier of epoch 0.")
    weights: Annotated[list[Positive], Field(min_length=1)] | Contraction | Tail = Field(
        description="w_t of epochs 0, 1, ... (only their ratios matter; until-budget, training ends with the last), or"
        " {contraction: gamma}, or {epochs: T, momentum: m} of an average. Public: from theory or other data, never"
        " from these records."
    )

    @property
    def length(self) -> int | None:
        if isinstance(self.weights, Contraction):
            return None
        return self.weights.epochs if isinstance(self.weights, Tail) else len(self.weights)

    def noise(self, epoch: int) -> float:
        """Return sigma_t = sigma_0 (w_t / w_0)^(-1/4); 0 beyond the last weight, which no budget affords."""
        if isinstance(self.weights, Contraction):
            return float(_known(self.initial) * self.weights.contraction ** (epoch / 4))
        if self.length is not None and epoch >= self.length:
            return 0.0
        weight = self.weights.weight if isinstance(self.weights, Tail) else self.weights.__getitem__
        return float(_known(self.initial) * (weight(0) / weight(epoch)) ** 0.25)


Schedule = Annotated[
    ByRule | _Decay | Piecewise | Listed | Influence | Validation,
    Field(discriminator="kind"),
]


def _known(value: float | str) -> float:
    if isinstance(value, str):
        raise PrivacyError("a number of the schedule is auto: it has no value until the plan has solved for it")
    return value
