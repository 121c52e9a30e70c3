"""Noise levels that lectures state for a whole training, inverted into accountants.

Lemmas 15.1 and 15.5 of Lecture 15 and Nikolov's Lecture 9 give a noise variance for a wanted (epsilon, delta). Here
the noise multiplier is given and epsilon follows. They are true but loose, and serve for comparison with the exact
ones. All three rest on lemmas for epsilon below 1, and refuse larger values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

from dpsgd_cli.accounting.accountants.base import EVERY_NEIGHBOUR, WithoutLeaks, smallest_delta
from dpsgd_cli.accounting.accountants.composition import amplified
from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, Release
from dpsgd_cli.errors import UnsupportedMechanism


class LectureNoise(WithoutLeaks, stated=False):
    """Base of the lectures' accountants: T uses of Gaussians.

    All uses are priced with the least noise multiplier z and the largest sampling rate q among them. `batching`: the
    only batching that a lecture's statement covers.
    """

    batching: ClassVar[Batching]

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, GaussianSum) and mechanism.batching != self.batching:
            return f"{mechanism.batching} batches: it is stated for {self.batching} batches"
        return None

    @abstractmethod
    def stated(self, steps: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
        """Return epsilon by the lecture's formula; its region is checked by the caller."""

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        used = [(r.count, m) for r in kept if isinstance(m := r.mechanism, GaussianSum)]
        noise = min((mechanism.noise_multiplier for _, mechanism in used), default=math.inf)
        rate = max((mechanism.sampling_rate for _, mechanism in used), default=0.0)
        if rate == 0:
            return 0.0
        epsilon = self.stated(sum(n for n, _ in used), noise, rate, delta) if noise > 0 else math.inf
        if not epsilon < 1:
            raise UnsupportedMechanism(
                f"{self.name}: it is stated for epsilon below 1 and would give {epsilon:.4g} here; add noise, or take"
                " another accountant"
            )
        return epsilon

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        return smallest_delta(lambda delta: self._epsilon(kept, delta), epsilon, self.largest_delta(kept))

    def largest_delta(self, kept: list[Release]) -> float:
        """Return the delta below which the formula is stated at all."""
        return 1.0


class Lemma151(LectureNoise):
    """Full gradients: variance 64 L^2 T log(2/delta) log(2.5 T/delta) / (n epsilon)^2 at sensitivity 2L/n.

    That is z = 4 sqrt(T log(2/delta) log(2.5 T/delta)) / epsilon. Source: Lecture 15, Lemma 15.1.
    """

    name = "lemma-15.1"
    bound = "upper"
    note = "Lecture 15, for epsilon < 1"
    mechanisms = ("gaussian",)
    adjacencies = EVERY_NEIGHBOUR
    batching = "full"

    def stated(self, steps: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
        return 4 * math.sqrt(steps * math.log(2 / delta) * math.log(2.5 * steps / delta)) / noise_multiplier


class Lemma155(LectureNoise):
    """One record a step: z = 4 q sqrt(T log(2/delta) log(2.5 T q/delta)) / epsilon at q = 1/n (or m/n).

    The lecture takes q epsilon for the amplified epsilon. Its slack covers that while one use before sampling stays
    below epsilon 1. This class repeats the proof with exact amplification and refuses if the slack is not enough.
    Source: Lecture 15, Lemma 15.5.
    """

    name = "lemma-15.5"
    bound = "upper"
    note = "Lecture 15, for epsilon < 1"
    mechanisms = ("gaussian",)
    adjacencies = ("replace-one",)
    batching = "fixed"

    def largest_delta(self, kept: list[Release]) -> float:
        rates = [r.mechanism.sampling_rate for r in kept if isinstance(r.mechanism, GaussianSum)]
        return 2 * sum(r.count for r in kept) * max(rates, default=0.0) or 1.0

    def stated(self, steps: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
        before = delta / (2 * steps * sampling_rate)
        if before >= 1:
            raise UnsupportedMechanism(
                f"{self.name}: {steps} steps at sampling rate {sampling_rate:g} are too few for delta {delta:g}: the"
                " lemma would grant each one a delta above 1; take rdp"
            )
        single = math.sqrt(2 * math.log(1.25 / before)) / noise_multiplier
        epsilon = 2 * sampling_rate * math.sqrt(2 * steps * math.log(2 / delta)) * single
        use = amplified(single, sampling_rate)
        proved = math.sqrt(2 * steps * math.log(2 / delta)) * use + steps * use * math.expm1(use)
        if single >= 1 or proved > epsilon:
            raise UnsupportedMechanism(
                f"{self.name}: noise multiplier {noise_multiplier:g} is outside what the lemma's proof covers: one use"
                f" has epsilon {single:.4g} before sampling, and must stay below 1; take rdp"
            )
        return epsilon


class Nikolov(LectureNoise):
    """T adaptive Gaussians as one of sensitivity sqrt(T): z = sqrt(2 T log(1.25/delta)) / epsilon.

    The lecture leaves the constant open; it is that of the Gaussian mechanism (Dwork and Roth 2014, Theorem A.1).
    Source: Nikolov, Lecture 9, section 5.
    """

    name = "nikolov"
    bound = "upper"
    note = "Lecture 9, for epsilon < 1"
    mechanisms = ("gaussian",)
    adjacencies = EVERY_NEIGHBOUR
    batching = "full"

    def stated(self, steps: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
        return math.sqrt(2 * steps * math.log(1.25 / delta)) / noise_multiplier
