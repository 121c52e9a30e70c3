"""The schedule that looks at the model: less noise when validation accuracy stops improving (Yu et al. 2019, IV-A1).

What it looks at is either public, and then the noise multiplier of an epoch is a function of earlier releases and
public records, or a noisy count of right predictions on private validation records, which is a release of its own.

Guarantee: noise multipliers are chosen while training runs, so only a filter may end it: `GaussianRhoFilter` (a budget
in rho) or `GaussianFilter` (epsilon by the exact accountant), both sound for releases chosen after seeing earlier ones
(`ledger.py`). What is stated is that budget, not what a run spent of it. Sampled batches are refused.
A look releases the number of right predictions on the validation records plus Gaussian noise of standard deviation
z: one record changes that number by at most 1 under every adjacency (added, removed, replaced or set to null), so
it is a Gaussian mechanism of noise multiplier z. Training and validation records are disjoint, and yet both are
charged to one ledger: an upper bound.

Not here: predicting (`methods/adaptive_schedule.py`), schedules known beforehand (`recipe/schema/schedule.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dpsgd_cli.privacy.mechanism import Release
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.schema.schedule import Validation


@dataclass
class AdaptiveNoise:
    """The noise multiplier of one trial, and the accuracies that it followed."""

    schedule: Validation
    multiplier: float
    seen: list[float] = field(default_factory=list)
    last: float = 0.0

    def looks_after(self, epoch: int) -> bool:
        """Whether `epoch` (0, 1, ...) is a validation epoch."""
        return (epoch + 1) % self.schedule.every == 0

    def observe(self, accuracy: float) -> None:
        """Take in the accuracy of a validation epoch, and set the multiplier of the epochs to come.

        Every `period` validations the mean of the last `average` of them is compared with the mean of last time (0 at
        first): where it grew by at most `threshold`, the multiplier becomes `decay` times itself (equations 8 to 10).
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
    """A plan whose noise is chosen while it runs. `most` epochs are what the first noise multiplier would allow.

    `release` gives what an epoch releases at a noise multiplier; `look` what a validation releases, None where the
    validation records are public.
    """

    schedule: Validation | None = None
    release: Callable[[float], Release] | None = None
    look: Release | None = None
    most: int = 0
    chooses: bool = True

    @property
    def most_epochs(self) -> int:
        return self.most

    def noise(self) -> AdaptiveNoise:
        """The noise of a trial that begins."""
        assert self.schedule is not None
        return AdaptiveNoise(self.schedule, self.schedule.initial)

    def releases_of(self, noise: AdaptiveNoise, epoch: int) -> tuple[Release, ...]:
        """Everything that `epoch` will release: its gradients, and the look after it."""
        assert self.release is not None
        looks = (self.look,) if self.look is not None and noise.looks_after(epoch) else ()
        return (self.release(noise.multiplier), *looks)
