"""Cases that `dpsgd account` prices: one record each, filled from numbers here and elsewhere from recipes and ledgers.

Recipes and ledgers are in `recipes.py` and `ledgers.py`, so that plain numbers are priced without their imports.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.adjacency import BATCHINGS, Adjacency, Batching, BatchingKind, replace_factor
from dpsgd_cli.accounting.groups import Parts
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.repeated_selection import Choice
from dpsgd_cli.accounting.search import NOISE, Interval, gap_of, solve_at_limit
from dpsgd_cli.accounting.statement import Composition, epsilon_at_least
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import InfeasibleBudget, UnsupportedMechanism, UsageError
from dpsgd_cli.results.guarantee import ASSUMED, FIXED, SUM

BATCH_SIZE = "batch-size"
DEFAULT_DELTA = 1e-5
_MOST_USES = float(1 << 26)
_MOST_EPOCHS = 1_000_000
Epochs = list[list[Release]]


@dataclass(frozen=True)
class Target:
    """Budget: epsilon at the case's delta, or rho."""

    epsilon: float | None = None
    rho: float | None = None

    @property
    def limit(self) -> float:
        """Value of the budget; UsageError if none is given."""
        limit = self.rho if self.rho is not None else self.epsilon
        if limit is None:
            raise UsageError("give a budget: --target-epsilon or another target, or one in the recipe")
        return limit


def afforded(spent: Callable[[float], float], parameter: str, target: Target, records: int | None = None) -> float:
    """Return the value of `parameter` that spends as much of the budget as possible, and no more.

    `spent` prices a value in the unit of the budget. A batch size, for which `records` is given, may be as large as
    `records`. With fixed epochs, a partial step counts as whole: the next larger batch size is then too expensive, but
    an even larger one may not be.

    Guarantee: the price of the answer is at most the budget. If the price is monotone, no value that is more expensive
    by more than the precision fits.
    Raises InfeasibleBudget if no value fits, or if nothing limits a whole number, and the errors of `spent`.
    """
    if parameter == "noise-multiplier":
        span = NOISE
    else:
        most = _MOST_USES if records is None else float(records)
        span = Interval(parameter, cheap=1.0, expensive=most, start=1.0, whole=True)
    if target.rho is not None:
        span = dataclasses.replace(span, precision=0.0)
    found = solve_at_limit(lambda value: gap_of(spent(value), target.limit), span)
    if found is None and span.whole:
        what = f"not one of the {parameter}" if records is None else f"not even {parameter} 1"
        raise InfeasibleBudget(f"{what} fits the budget {target.limit:g}; add noise or raise it")
    if found is None:
        raise InfeasibleBudget(
            f"not even {parameter} {span.cheap:g} fits the budget {target.limit:g}; raise it, or take fewer steps"
        )
    if found == span.expensive and span.whole and records is None:
        raise InfeasibleBudget(
            f"more than {found:.0f} {parameter} fit the budget {target.limit:g}; nothing limits them"
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question: releases, and everything that a statement about them has to say.

    - `label` distinguishes the cases of a query; `about` describes the case to a reader.
    - `made` returns releases that bound each trial, by part of the data (`ledger.by_part`): those that were made, or
      the trial's budget. `epochs` returns those of each trial by epoch; the first includes releases before training.
      Both raise what keeps them from an answer.
    - `apart` returns why so many trials have no joint guarantee (`joint_composition.py`); None if their costs add up.
    - `own_trials`: how many the case has, None if it has none. `recorded`: they ran.
    - `refused`: why no accountant can state a guarantee at all.
    - `uncovered`: uses of the data that no price covers; `missing`: files that belong to the price. With any of them
      `--max-epsilon` fails.
    - `is_budget`: releases are chosen during a trial, so that the price is the budget of its filter.
    - `parameters` may be solved for; True if a larger value costs more. `free` is the one that was left out. `changed`
      returns the case with another value; `plans` solves where the planner of a recipe does.
    - `start`: the earlier result that the training starts from (`results/earlier.py`). Only the sum of both epsilons is
      stated, by `answers.price`; everything else is refused.
    - `together`: number of published trials that are priced jointly; None prices one, the most expensive. `group` and
      `choice`: as in `Composition`.
    """

    label: str
    about: str
    batching: str
    delta: float
    made: Callable[[], Sequence[Parts]]
    epochs: Callable[[], Sequence[Epochs]]
    apart: Callable[[int], str | None] = lambda trials: None
    unit: str | None = None
    records: int | None = None
    own_trials: int | None = None
    recorded: bool = False
    refused: str | None = None
    told: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    is_budget: bool = False
    budget: Target = Target()
    parameters: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    free: str | None = None
    changed: Callable[[str, float], Case] | None = None
    plans: Callable[[str, Target, Accountant, int], float] | None = None
    assumed: str = FIXED
    start: Mapping[str, Any] | None = None
    together: int | None = None
    group: int = 1
    choice: Choice | None = None

    @property
    def composition(self) -> Composition:
        """The composition that is priced. Trials that are priced jointly are added up part by part.

        Raises UnsupportedMechanism if the case has no statement.
        """
        self._check()
        made = self.made()
        if self.together is not None:
            made = [
                [[*itertools.chain(*parts)] for parts in itertools.zip_longest(*made, fillvalue=[])]
                if len(made) > 1
                else [_times(part, self.together) for part in made[0]]
            ]
        return Composition.of(made, self.group, self.choice)

    def by_epoch(self) -> Epochs:
        """Return the releases to price by epoch; for several trials that are not priced jointly, the longest trial's.

        Raises UnsupportedMechanism if the case has no statement.
        """
        self._check()
        curves = self.epochs()
        if self.together is None:
            return max(curves, key=lambda epochs: sum(map(len, epochs)))
        if len(curves) == 1:
            return [_times(epoch, self.together) for epoch in curves[0]]
        return [[*itertools.chain(*epochs)] for epochs in itertools.zip_longest(*curves, fillvalue=[])]

    def no_statement(self) -> str | None:
        """Return why no accountant can state a guarantee for the case; None if one may."""
        if self.refused is not None:
            return self.refused
        if self.start is not None:
            return "of a training and the earlier result that it starts from, only epsilon at a delta is stated"
        if self.together is None and self.choice is None:
            return None
        reason = self.apart(self.together or 2)
        what = f"{count(self.together, 'trial')} together" if self.together else "the best of several trials"
        return None if reason is None else f"{what}: {reason}"

    def _check(self) -> None:
        if (reason := self.no_statement()) is not None:
            raise UnsupportedMechanism(reason)

    @property
    def subject(self) -> str:
        """Description of what is priced, with everybody who is protected together."""
        text = self.about if self.together is None else f"{self.about}; {count(self.together, 'trial')} together"
        if self.recorded and self.together is None and (self.own_trials or 1) > 1 and self.choice is None:
            text += "; the most expensive trial is stated"
        text += "" if self.group == 1 else f"; groups of {self.group}"
        if self.choice is None:
            return text
        return f"{text}; the best of a random number of trials ({self.choice.law}, mean {self.choice.mean:g})"

    def conditions(self) -> list[str]:
        """Return all conditions of the statement, and remarks on it."""
        several = (self.together or 1) > 1 and self.no_statement() is None
        joint = [f"{count(self.together or 1, 'trial')} together: {self.assumed}"] if several else []
        both = [] if self.start is None else [f"with the earlier result that the training starts from. {SUM}"]
        return [*self.told, *both, *joint, *self.missing, *self.uncovered]

    def with_value(self, parameter: str, value: float) -> Case:
        """Return the case with `parameter` set to `value`; UsageError if the case has no such parameter."""
        if self.changed is None:
            name = self.label or "this"
            raise UsageError(f"{name} has no free {parameter}; it can be solved for flags and recipes only")
        found = self.changed(parameter, value)
        return dataclasses.replace(found, together=self.together, group=self.group, choice=self.choice)

    def solved(self, parameter: str, target: Target, accountant: Accountant) -> tuple[float, Case]:
        """Return the value of `parameter` that spends as much of the budget as possible, and the case with that value.

        Guarantee: the cost of the returned case, by `accountant` (zCDP for a budget in rho), is at most the budget. For
        a recipe it is the value that its plan gives to `auto`.
        Raises InfeasibleBudget if no value fits, UsageError for a parameter that the case does not have.
        """
        if parameter not in self.parameters:
            raise UsageError(f"cannot solve for {parameter} here; one of: {', '.join(self.parameters) or 'nothing'}")
        assert target.limit > 0
        self._check()

        def spent(value: float) -> float:
            made = self.with_value(parameter, value).composition
            if target.rho is None:
                return made.epsilon(accountant, self.delta)
            if (rho := made.rho()) is None:
                total_rho(made.releases)  # raises the reason, if there is one
                raise UnsupportedMechanism("no rho is proved for this, so no budget in rho can be solved for")
            return rho

        if self.plans is not None and parameter != BATCH_SIZE:
            value = self.plans(parameter, target, accountant, self.together or 1)
        else:
            value = afforded(spent, parameter, target, self.records if parameter == BATCH_SIZE else None)
        return value, self.with_value(parameter, value)


def _times(releases: Sequence[Release], trials: int) -> list[Release]:
    return [Release(release.mechanism, release.count * trials) for release in releases]


def noise_facts(trials: Iterable[Sequence[Release]], label: str = "gradient") -> dict[str, Any]:
    """Return what a reader needs to judge the noise of sums: multipliers, sampling rate, sensitivity, number of uses.

    `noise_over_clip` is the noise over the clip norm, which is what most other libraries call the noise multiplier: the
    sensitivity of a sum is twice the clip norm where one record replaces another. Several values are [least, largest].
    """
    made = [
        [(r.mechanism, r.count) for r in own if isinstance(r.mechanism, GaussianSum) and r.mechanism.label == label]
        for own in trials
    ]
    sums = [mechanism for own in made for mechanism, _ in own]
    if not sums:
        return {}
    return {
        "noise_multiplier": _span([one.noise_multiplier for one in sums]),
        "noise_over_clip": _span([one.noise_multiplier * replace_factor(one.adjacency) for one in sums]),
        "sampling_rate": _span([one.sampling_rate for one in sums]),
        "sensitivity": _span([one.sensitivity for one in sums]),
        "uses": _span([sum(uses for _, uses in own) for own in made]),
    }


def _span(values: Sequence[float]) -> Any:
    return values[0] if min(values) == max(values) else [min(values), max(values)]


def span_words(value: Any) -> str:
    """Return a number or [least, largest] of `noise_facts` as text."""
    return f"{value[0]:.8g} to {value[1]:.8g}" if isinstance(value, list) else f"{value:.8g}"


def noise_words(facts: Mapping[str, Any]) -> str:
    """Return the noise of `noise_facts` in words: the multiplier, and the noise in units of the clip norm C."""
    if not facts:
        return ""
    return f", z {span_words(facts['noise_multiplier'])} (noise {span_words(facts['noise_over_clip'])} C)"


@dataclass(frozen=True)
class Numbers:
    """Constant noise, given by numbers. At most one of `steps` and `epochs` is set; neither to solve for it.

    `records` is the number of training records, which the batch size refers to; None if not given.
    """

    batching: Batching
    adjacency: Adjacency
    delta: float
    noise_multiplier: float | None = None
    sampling_rate: float | None = None
    steps: int | None = None
    epochs: int | None = None
    records: int | None = None

    @property
    def kind(self) -> BatchingKind:
        """Properties of the batching."""
        return BATCHINGS[self.batching]

    @property
    def about(self) -> str:
        """Description of the setting."""
        noise = "noise multiplier to be found"
        if self.noise_multiplier is not None:
            over_clip = self.noise_multiplier * replace_factor(self.adjacency)
            noise = f"z {self.noise_multiplier:.8g} (noise {over_clip:.8g} C)"
        rate = "" if self.free != BATCH_SIZE else f", batch size of {count(self.records or 0, 'record')} to be found"
        rate = rate if self.sampling_rate is None else f", sampling rate {self.sampling_rate:.6g}"
        length = "length to be found"
        if self.steps is not None or self.epochs is not None:
            length = count(self.epochs or 0, "epoch") if self.steps is None else count(self.steps, "step")
        if self.kind.by_epoch and self.kind.sampled and self.sampling_rate is not None:
            length += f" ({count(self.steps_per_epoch, 'step')} an epoch)"
        return f"{self.batching} batches, {noise}{rate}, {length}, {self.adjacency}, delta {self.delta:g}"

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; 1 for full batches."""
        if self.batching == "full" or self.sampling_rate is None:
            return 1
        return max(1, math.ceil(1 / self.sampling_rate - 1e-9))

    @property
    def uses(self) -> int:
        """Number of uses of the mechanism: steps, or where a use is an epoch, all begun epochs."""
        if self.epochs is not None:
            return self.epochs if self.kind.by_epoch else self.epochs * self.steps_per_epoch
        if self.kind.by_epoch and self.sampling_rate is None:
            raise UsageError(
                f"{self.batching} batches are counted by epochs: give --epochs, or --sampling-rate to --steps"
            )
        if self.steps is None:
            raise UsageError("give --steps or --epochs")
        return math.ceil(self.steps / self.steps_per_epoch) if self.kind.by_epoch else self.steps

    def release(self, uses: int) -> Release:
        """Return `uses` releases of the mechanism; UsageError if a number is missing."""
        noise = self.noise_multiplier
        if noise is None:
            raise UsageError("give --noise-multiplier or --noise-over-clip, or a budget (--target-epsilon) to solve")
        rate = self.sampling_rate if self.kind.sampled else 1.0
        if rate is None:
            raise UsageError(f"{self.batching} batches need --sampling-rate, or --batch-size and --records")
        if self.kind.by_epoch and self.kind.sampled:
            steps = self.steps_per_epoch
            if abs(rate * steps - 1) > 1e-9:
                raise UsageError(
                    f"--sampling-rate is {rate:g}, but must be 1 over a whole number of steps for {self.batching}"
                    f" batches: 1/{steps} = {1 / steps:.6g}, say; or give --batch-size and --records"
                )
            rate = 1 / steps
        return Release(GaussianSum(noise, self.adjacency, self.batching, rate), uses)

    def by_epoch(self) -> list[Epochs]:
        """Return the releases of each epoch."""
        left = self.uses
        size = 1 if self.kind.by_epoch else self.steps_per_epoch
        if left / size > _MOST_EPOCHS:
            raise UsageError(f"a curve of {left / size:.0f} epochs is too long; take fewer steps")
        whole = self.release(size)
        return [[[whole] for _ in range(left // size)] + ([[self.release(left % size)]] if left % size else [])]

    @property
    def parameters(self) -> dict[str, bool]:
        """The parameters that may be solved for; True if a larger value costs more."""
        by_steps = self.kind.sampled and not self.kind.by_epoch
        length = "steps" if by_steps and self.epochs is None else "epochs"
        size = {BATCH_SIZE: True} if self.kind.sampled and self.records is not None else {}
        return {"noise-multiplier": False, length: True} | size

    @property
    def free(self) -> str | None:
        """The parameter that was left out; None if there is none."""
        if self.noise_multiplier is None:
            return "noise-multiplier"
        if self.steps is None and self.epochs is None:
            return "steps" if "steps" in self.parameters else "epochs"
        return BATCH_SIZE if self.sampling_rate is None and BATCH_SIZE in self.parameters else None

    def remarks(self) -> tuple[str, ...]:
        """Return remarks on the batching."""
        if self.batching != "shuffle" or self.noise_multiplier is None or self.sampling_rate is None:
            return ()
        least = epsilon_at_least(self.noise_multiplier, self.steps_per_epoch, self.delta)
        return (
            f"one epoch of these shuffled batches costs at least epsilon {least:.4f} (Chua et al. 2024): a lower bound",
        )

    def with_value(self, parameter: str, value: float) -> Numbers:
        """Return the numbers with `parameter` set to `value`; UsageError if there is no such parameter."""
        name = parameter.replace("-", "_")
        changes: dict[str, Any] = {}
        if name in ("steps", "epochs"):
            changes = {"steps": None, "epochs": None, name: int(value)}
        elif parameter == BATCH_SIZE and self.records is not None:
            changes = {"sampling_rate": self.kind.rate(int(value), self.records)}
        elif name == "noise_over_clip":
            changes = {"noise_multiplier": value / replace_factor(self.adjacency)}
        elif name in ("noise_multiplier", "sampling_rate", "delta"):
            changes = {name: float(value)}
        if changes:
            return dataclasses.replace(self, **changes)
        raise UsageError(f"{parameter} is no parameter of constant noise; give a recipe with a schedule")

    def case(self) -> Case:
        """Return the case of these numbers."""
        return Case(
            label="",
            about=self.about,
            batching=self.batching,
            delta=self.delta,
            made=lambda: [[[self.release(self.uses)]]],
            epochs=self.by_epoch,
            records=self.records,
            told=self.remarks(),
            parameters=self.parameters,
            free=self.free,
            changed=lambda parameter, value: self.with_value(parameter, value).case(),
            assumed=ASSUMED,
        )


def of_history(label: str, releases: Sequence[Release], delta: float, remark: str) -> Case:
    """Return the case of one training that another library recorded; `remark` says what the record cannot vouch for."""
    uses = sum(release.count for release in releases)
    sums = {release.mechanism.batching for release in releases if isinstance(release.mechanism, GaussianSum)}

    def epochs() -> list[Epochs]:
        raise UnsupportedMechanism(f"{label} has no epochs, so no curve by epoch")

    return Case(
        label=label,
        about=f"{label}: {count(uses, 'release')} of {count(len(releases), 'kind')}, delta {delta:g}",
        batching="+".join(sorted(sums)) or "full",
        delta=delta,
        made=lambda: [[releases]],
        epochs=epochs,
        told=(f"{label}: {remark}",),
        assumed=ASSUMED,
    )
