"""Cases that `dpsgd account` prices: command-line flags, recipes or ledgers.

A case knows its releases, by epoch where epochs are known, and the parameters that a solver may set. Recipes and
ledgers are in `recipes.py` and `ledgers.py`, so that plain numbers are priced without their imports.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.adjacency import BATCHINGS, Adjacency, Batching, BatchingKind
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, TruncatedSum
from dpsgd_cli.accounting.search import NOISE, Interval, gap_of, solve_at_limit
from dpsgd_cli.accounting.statement import epsilon_at_least
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import InfeasibleBudget, UnsupportedMechanism, UsageError
from dpsgd_cli.results.guarantee import ASSUMED, FIXED

BATCH_SIZE = "batch-size"
_MOST_USES = float(1 << 26)


@dataclass(frozen=True)
class Target:
    """Budget: epsilon at the case's delta, or rho."""

    epsilon: float | None = None
    rho: float | None = None

    @property
    def limit(self) -> float:
        """Value of the budget; UsageError if none is given, or if it is not positive and finite."""
        limit = self.rho if self.rho is not None else self.epsilon
        if limit is None:
            raise UsageError("give a budget: --target-epsilon or another target, or one in the recipe")
        if not 0 < limit < math.inf:
            raise UsageError(f"the budget is {limit!r}, but must be positive and finite")
        return limit


def afforded(
    build: Callable[[float], Sequence[Release]],
    parameter: str,
    target: Target,
    accountant: Accountant,
    delta: float,
    records: int | None = None,
) -> float:
    """Return the value of `parameter` whose releases spend as much of the budget at `delta` as possible, and no more.

    A batch size, for which `records` is given, may be as large as `records`. With fixed epochs, a partial step counts
    as whole: the next larger batch size is then too expensive, but an even larger one may not be.

    Guarantee: the price of `build(answer)`, by `accountant` (zCDP for rho), is at most
    the budget. If the
    price is monotone, no value that is more expensive by more than the precision fits.
    Raises InfeasibleBudget if no value fits, or if nothing limits a whole number, UnsupportedMechanism as the
    accountant does.
    """
    if parameter == "noise-multiplier":
        span = NOISE
    else:
        most = _MOST_USES if records is None else float(records)
        span = Interval(parameter, cheap=1.0, expensive=most, start=1.0, whole=True)
    if target.rho is not None:
        span = dataclasses.replace(span, precision=0.0)

    def gap(value: float) -> float:
        spent = accountant.epsilon(build(value), delta) if target.rho is None else total_rho(build(value))
        return gap_of(spent, target.limit)

    found = solve_at_limit(gap, span)
    if found is None and span.whole:
        what = f"not one of the {parameter}" if records is None else f"not even {parameter} 1"
        raise InfeasibleBudget(f"{what} fits the budget {target.limit:g}; add noise or raise it")
    if found is None:
        raise InfeasibleBudget(
            f"{accountant.name}: not even {parameter} {span.cheap:g} fits the budget {target.limit:g}; raise it, or"
            " take fewer steps"
        )
    if found == span.expensive and span.whole and records is None:
        raise InfeasibleBudget(
            f"more than {found:.0f} {parameter} fit the budget {target.limit:g}; nothing limits them"
        )
    return found


class Case(ABC):
    """Releases to price at `delta`.

    `label` distinguishes the cases of a query; `described` describes the case to a reader. `together` is the number of
    published trials that are priced jointly; None prices one trial, the most expensive.
    """

    delta: float
    label: str
    described: str
    batching: str
    together: int | None

    @abstractmethod
    def each_trial(self) -> list[list[list[Release]]]:
        """Return releases that bound the cost of each trial, by part of the data (`ledger.by_part`).

        They are those that were made, or the trial's budget. Most trials have one part.
        """

    @abstractmethod
    def each_curve(self) -> list[list[list[Release]]]:
        """Return the releases of each trial by epoch; the first epoch includes releases before training."""

    @property
    def subject(self) -> str:
        """Description of the releases that are priced."""
        if self.together is None:
            return self.described
        return f"{self.described.split('; ')[0]}; {count(self.together, 'trial')} together"

    def joined(self, others: Sequence[Case]) -> Case:
        """Return one case with the trials of several; UsageError unless all of them record their trials."""
        raise UsageError("--trials adds up results and ledgers, or the trials of one recipe: name one recipe at a time")

    def own_trials(self) -> int:
        """Return the number of trials that the case itself has; UsageError if it has none."""
        raise UsageError("--trials all: numbers have no trials of their own; give how many")

    def repeated(self, trials: int) -> Case:
        """Return the case of `trials` trials priced jointly.

        Its releases raise UnsupportedMechanism if no joint guarantee holds.
        """
        case = copy.copy(self)
        object.__setattr__(case, "together", trials)
        return case

    def trials(self) -> list[list[Release]]:
        """Return the releases to price, per trial and part of the data; the statement is for the most expensive.

        Trials that are priced jointly are added up part by part. Raises UnsupportedMechanism if the case has no
        statement.
        """
        self._check()
        made = self.each_trial()
        if self.together is None:
            return [part for parts in made for part in parts]
        if len(made) > 1:
            return [[*itertools.chain(*parts)] for parts in itertools.zip_longest(*made, fillvalue=[])]
        return [[Release(r.mechanism, r.count * self.together) for r in part] for part in made[0]]

    def by_epoch(self) -> list[list[Release]]:
        """Return the releases to price by epoch; for several trials that are not priced jointly, the longest trial's.

        Raises UnsupportedMechanism if the case has no statement.
        """
        self._check()
        curves = self.each_curve()
        if self.together is None:
            return max(curves, key=lambda epochs: sum(map(len, epochs)))
        if len(curves) == 1:
            return [[Release(r.mechanism, r.count * self.together) for r in epoch] for epoch in curves[0]]
        return [[*itertools.chain(*epochs)] for epochs in itertools.zip_longest(*curves, fillvalue=[])]

    def _check(self) -> None:
        reason = self.no_statement()
        if reason is not None:
            raise UnsupportedMechanism(reason)

    def noise_multipliers(self) -> list[float | None]:
        """Return the noise multiplier of each epoch of `by_epoch`: its last Gaussian's; None without one."""
        values: list[float | None] = []
        for releases in self.by_epoch():
            noises = [r.mechanism.noise_multiplier for r in releases if isinstance(r.mechanism, GaussianSum)]
            values.append(noises[-1] if noises else None)
        return values

    def parameters(self) -> dict[str, bool]:
        """Return the parameters that may be solved for; True if a larger value costs more."""
        return {}

    def with_value(self, parameter: str, value: float) -> Case:
        """Return a copy of the case with `parameter` set to `value`; UsageError if the case has no such parameter."""
        raise UsageError(f"{self.label or 'this'} has no free {parameter}; it can be solved for flags and recipes only")

    def afforded(self, parameter: str, target: Target, accountant: Accountant) -> float:
        """Return the value of one of `parameters` that spends as much of the budget as possible, and no more."""

        def build(value: float) -> list[Release]:
            return self.with_value(parameter, value).trials()[0]

        most = self.most_in_a_batch() if parameter == BATCH_SIZE else None
        return afforded(build, parameter, target, accountant, self.delta, most)

    def most_in_a_batch(self) -> int | None:
        """Return the number of records, an upper bound on the batch size; None if unknown."""
        return None

    def solved(self, parameter: str, target: Target, accountant: Accountant) -> tuple[float, Case]:
        """Return the value of `parameter` that spends as much of the budget as possible, and the case with that value.

        Guarantee: the cost of the returned case, by `accountant` (zCDP for a budget in rho), is at most the budget. For
        a recipe it is the value that its plan gives to `auto`.
        Raises InfeasibleBudget if no value fits, UsageError for a parameter that the case does not have.
        """
        known = self.parameters()
        if parameter not in known:
            raise UsageError(f"cannot solve for {parameter} here; one of: {', '.join(known) or 'nothing'}")
        assert target.limit > 0
        self._check()
        value = self.afforded(parameter, target, accountant)
        return value, self.with_value(parameter, value)

    def free(self) -> str | None:
        """Return the parameter that was left out and is solved for; None if there is none."""
        return None

    def budget(self) -> Target:
        """Return the case's own budget; by default an empty one."""
        return Target()

    def spends_a_budget(self) -> bool:
        """Return True if releases are chosen during a trial, so that the price is the budget of its privacy filter."""
        return False

    def has_held_out(self) -> bool:
        """Return True if a trial also released something of private held-out records (`ledger.by_part`)."""
        return False

    def own_remarks(self) -> list[str]:
        """Return remarks on each trial, printed below the rows."""
        return []

    def remarks(self) -> list[str]:
        """Return all remarks that are printed below the rows, including the assumptions of a joint price."""
        several = (self.together or 1) > 1 and self.no_statement() is None
        return [*self.own_remarks(), *([f"{count(self.together or 1, 'trial')} together: {self.assumed}"] * several)]

    def uncovered(self) -> list[str]:
        """Return the uses of the data that no price covers; with any, `--max-epsilon` fails."""
        return []

    def why_apart(self, trials: int) -> str | None:
        """Return why `trials` trials have no joint guarantee (`joint_composition.py`); None if their costs add up."""
        del trials
        return None

    def no_statement(self) -> str | None:
        """Return why no accountant can state a guarantee for the case; None if one may."""
        reason = None if self.together is None else self.why_apart(self.together)
        return None if reason is None else f"{count(self.together or 1, 'trial')} together: {reason}"

    def missing(self) -> list[str]:
        """Return the missing files that belong to the price; with any, `--max-epsilon` fails."""
        return []

    recorded: bool = False
    """True if the case consists of trials that ran."""
    assumed: str = FIXED
    """Assumption under which the costs of trials add up."""


@dataclass(frozen=True)
class FlagCase(Case):
    """Case with constant noise, given by numbers. At most one of `steps` and `epochs` is set; neither to solve for it.

    `records` is the number of training records that the sampling rate refers to; None if not given.
    """

    batching: Batching
    adjacency: Adjacency
    delta: float
    noise_multiplier: float | None = None
    sampling_rate: float | None = None
    steps: int | None = None
    epochs: int | None = None
    records: int | None = None
    largest_batch: int | None = None
    participations: int | None = None
    label: str = ""
    together: int | None = None

    assumed = ASSUMED

    @property
    def kind(self) -> BatchingKind:
        """Properties of the batching."""
        return BATCHINGS[self.batching]

    @property
    def described(self) -> str:  # type: ignore[override]
        """Description of the setting."""
        noise = "noise multiplier to be found" if self.noise_multiplier is None else f"z {self.noise_multiplier:.8g}"
        rate = "" if self.free() != BATCH_SIZE else f", batch size of {count(self.records or 0, 'record')} to be found"
        rate = rate if self.sampling_rate is None else f", sampling rate {self.sampling_rate:.6g}"
        length = "length to be found"
        if self.steps is not None or self.epochs is not None:
            length = count(self.epochs or 0, "epoch") if self.steps is None else count(self.steps, "step")
        return f"{self.batching} batches, {noise}{rate}, {length}, delta {self.delta:g}"

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches of an epoch; 1 for full batches."""
        return self.uses_per_epoch * self._batches

    @property
    def _batches(self) -> int:
        if self.batching == "full" or self.sampling_rate is None:
            return 1
        return max(1, math.ceil(1 / self.sampling_rate - 1e-9))

    @property
    def uses_per_epoch(self) -> int:
        """Number of uses of the mechanism in an epoch of shuffled or allocated records."""
        return self.participations or 1

    @property
    def uses(self) -> int:
        """Number of uses of the mechanism: steps, or where an epoch is one or several, those of all begun epochs."""
        if self.kind.by_epoch:
            if self.epochs is not None:
                return self.epochs * self.uses_per_epoch
            if self.sampling_rate is None:
                raise UsageError(
                    f"{self.batching} batches are counted by epochs: give --epochs, or --sampling-rate to --steps"
                )
            epochs = math.ceil(_given(self.steps, "--steps or --epochs") / self.steps_per_epoch)
            return epochs * self.uses_per_epoch
        if self.steps is not None:
            return self.steps
        return _given(self.epochs, "--steps or --epochs") * self.steps_per_epoch

    def release(self, uses: int) -> Release:
        """Return `uses` releases of the case's mechanism; UsageError if a number is missing."""
        noise = self.noise_multiplier
        if noise is None:
            raise UsageError("give --noise-multiplier, or a budget (--target-epsilon, --target-tpr, ...) to solve")
        rate = self.sampling_rate if self.kind.sampled else 1.0
        if rate is None:
            raise UsageError(f"{self.batching} batches need --sampling-rate, or --batch-size and --records")
        if self.kind.by_epoch and self.kind.sampled:
            rate = 1 / self._batches
        if self.kind.recorded != "truncated":
            return Release(GaussianSum(noise, self.adjacency, self.batching, rate), uses)
        records, largest = _given(self.records, "--records"), _given(self.largest_batch, "--largest-batch")
        if largest < rate * records * (1 - 1e-9):
            raise UsageError(
                f"--largest-batch is {largest}, below the expected size {rate * records:g} of a batch, so that most"
                " batches would be cut; give more"
            )
        return Release(
            TruncatedSum(noise, self.adjacency, self.batching, rate, records=records, largest_batch=largest), uses
        )

    def each_trial(self) -> list[list[list[Release]]]:
        return [[[self.release(self.uses)]]]

    def each_curve(self) -> list[list[list[Release]]]:
        left = self.uses
        size = self.uses_per_epoch if self.kind.by_epoch else self.steps_per_epoch
        if left / size > 1_000_000:
            raise UsageError(f"a curve of {left / size:.0f} epochs is too long; take fewer steps")
        whole = self.release(size)
        epochs = [[whole] for _ in range(left // size)]
        return [epochs + ([[self.release(left % size)]] if left % size else [])]

    def parameters(self) -> dict[str, bool]:
        by_steps = self.kind.sampled and not self.kind.by_epoch
        length = "steps" if by_steps and self.epochs is None else "epochs"
        size = {BATCH_SIZE: True} if self.kind.sampled and self.records is not None and not self.largest_batch else {}
        return {"noise-multiplier": False, length: True} | size

    def free(self) -> str | None:
        if self.noise_multiplier is None:
            return "noise-multiplier"
        if self.steps is None and self.epochs is None:
            return "steps" if "steps" in self.parameters() else "epochs"
        return BATCH_SIZE if self.sampling_rate is None and BATCH_SIZE in self.parameters() else None

    def most_in_a_batch(self) -> int | None:
        return self.records

    def own_remarks(self) -> list[str]:
        if self.batching != "shuffle" or self.noise_multiplier is None or self.sampling_rate is None:
            return []
        least = epsilon_at_least(self.noise_multiplier, self.steps_per_epoch, self.delta)
        return [
            f"one epoch of these shuffled batches costs at least epsilon {least:.4f} (Chua et al. 2024): a lower bound"
        ]

    def with_value(self, parameter: str, value: float) -> Case:
        name = parameter.replace("-", "_")
        changes: dict[str, Any] = {}
        if name in ("steps", "epochs"):
            changes = {"steps": None, "epochs": None, name: int(value)}
        elif parameter == BATCH_SIZE and self.records is not None:
            changes = {"sampling_rate": int(value) / self.records}
        elif name in ("noise_multiplier", "sampling_rate", "delta"):
            changes = {name: float(value)}
        if changes:
            return dataclasses.replace(self, **changes)
        raise UsageError(f"{parameter} is no parameter of constant noise; give a recipe with a schedule")


def _given(value: int | None, option: str) -> int:
    if value is None:
        raise UsageError(f"give {option}")
    return value
