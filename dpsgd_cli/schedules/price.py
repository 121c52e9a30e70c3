"""Noise schedules and budgets: the free number of a schedule, and the schedule that follows validation accuracy.

The validation schedule lowers the noise when validation accuracy stops improving (Yu et al. 2019, IV-A1). It looks at
public records, or at a noisy count of right predictions on private validation records. In the first case the noise
multiplier of an epoch is a function of earlier releases and public records. In the second the count is a release.

Guarantee: noise multipliers are chosen while training runs, so only a filter may end it: `GaussianRhoFilter` (a budget
in rho) or `GaussianFilter` (epsilon by the exact accountant). Both are sound for releases chosen after seeing earlier
ones (`accounting/budget.py`). The statement gives that budget, not the amount that a run spent. Sampled batches are
refused. A look releases the number of right predictions on the validation records plus Gaussian noise of standard
deviation z. One record changes that number by at most 1 under every adjacency (added, removed, replaced or set to
null), so a look is a Gaussian mechanism of noise multiplier z. Training and validation records are disjoint, and yet
both are charged to one ledger: an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.accounting.search import Interval, solve_at_limit
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.schedules.settings import LEAST, Schedule, Validation


@dataclass
class AdaptiveNoise:
    """The noise multiplier of one trial, and the accuracies that it followed."""

    schedule: Validation
    multiplier: float
    seen: list[float] = field(default_factory=list)
    last: float = 0.0

    def looks_after(self, epoch: int) -> bool:
        """Return True if `epoch` (0, 1, ...) is a validation epoch."""
        return (epoch + 1) % self.schedule.every == 0

    def observe(self, accuracy: float) -> None:
        """Record the accuracy of a validation epoch, and set the multiplier of the following epochs.

        Every `period` validations the mean of the last `average` accuracies is compared with the previous mean (0 at
        first). If it grew by at most `threshold`, the multiplier is multiplied by `decay` (equations 8 to 10).
        """
        settings = self.schedule
        self.seen.append(accuracy)
        if len(self.seen) % settings.period:
            return
        mean = sum(self.seen[-settings.average :]) / settings.average
        if mean - self.last <= settings.threshold:
            self.multiplier *= settings.decay
        self.last = mean


@dataclass(frozen=True)
class AdaptiveSchedulePlan(Plan):
    """Plan whose noise is chosen during the run. `most` is the number of epochs that the first noise multiplier allows.

    `release` gives the release of an epoch at a noise multiplier; `look` is the release of a validation, None if the
    validation records are public.
    """

    schedule: Validation | None = None
    release: Callable[[float], Release] | None = None
    look: Release | None = None
    most: int = 0
    is_adaptive: bool = True

    @property
    def most_epochs(self) -> int:
        return self.most

    def noise(self) -> AdaptiveNoise:
        """Return the noise of a new trial."""
        assert self.schedule is not None
        return AdaptiveNoise(self.schedule, self.schedule.initial)

    def releases_of(self, noise: AdaptiveNoise, epoch: int) -> tuple[Release, ...]:
        """Return everything that `epoch` will release: its gradients, and the validation after it."""
        assert self.release is not None
        looks = (self.look,) if self.look is not None and noise.looks_after(epoch) else ()
        return (self.release(noise.multiplier), *looks)


Excess = Callable[[list[float]], float]
"""Function of noise multipliers, by epoch: how far they exceed the budget (<= 0: within)."""


def solve_schedule(schedule: Schedule, epochs: int, excess: Excess, precision: float = 0.0) -> Schedule:
    """Return `schedule` with its one free number set so that `epochs` epochs fit, with as little noise as that allows.

    Guarantee: `excess` was asked about the answer and found it within the budget. The number is found to the last bit,
    or to the relative `precision`. If even its most expensive value fits (a polynomial's power), that value is the
    answer. Raises PrivacyError for several free numbers, InfeasibleBudget if no value fits, UnsupportedMechanism as
    `excess` does.
    """
    free = schedule.free_numbers()
    if len(free) != 1:
        raise PrivacyError(f"privacy.schedule: {' and '.join(free)} are auto, but only one number can be solved for")
    path, number = free[0], schedule.numbers()[free[0]]
    if number.refused:
        raise PrivacyError(f"privacy.schedule.{path}: {number.refused}")

    found = solve_at_limit(
        lambda value: _gap(schedule.with_number(path, number.value(value)), epochs, excess),
        number if number.whole else replace(number, precision=precision),
    )
    if found is None:
        raise InfeasibleBudget(
            f"no value of privacy.schedule.{path} lets {count(epochs, 'epoch')} fit the budget: raise the budget,"
            " train fewer epochs, or start with more noise"
        )
    return schedule.with_number(path, number.value(found))


def epochs_that_fit(schedule: Schedule, most: int, excess: Excess) -> int:
    """Return how many first epochs of the schedule fit the budget, at most `most`; spending only grows."""
    span = Interval("epochs", cheap=1.0, expensive=float(most), start=1.0, whole=True)
    return int(solve_at_limit(lambda epochs: _gap(schedule, int(epochs), excess), span) or 0)


def _gap(schedule: Schedule, epochs: int, excess: Excess) -> float:
    """Return the excess of the first `epochs` epochs; inf if the schedule runs out of noise."""
    noise = [schedule.noise(epoch) for epoch in range(epochs)]
    return excess(noise) if min(noise) >= LEAST else math.inf
