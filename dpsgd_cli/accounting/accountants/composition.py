"""Compositions of (epsilon, delta) pairs, one pair a use: basic, advanced as Lecture 15 teaches it, and strong.

They hold for any mechanisms: each Gaussian gets a share of delta, a lemma its epsilon at that share, and sampling
amplifies it. None is the tightest form of anything; they serve for comparison.

`strong-composition` is a bound: exact amplification, and the split of delta between the uses and the composition is
optimised. `strong-composition-published` repeats the number of Abadi et al. 2016: amplification to q epsilon and delta
split in half. q epsilon is less than log(1 + q (e^epsilon - 1)), so it bounds nothing.

The noise levels that lectures state for a whole training are here, too, inverted: Lemmas 15.1 and 15.5 of Lecture 15
and Nikolov's Lecture 9 give a noise variance for a wanted (epsilon, delta); `LectureNoise` gives epsilon for a noise
multiplier. They rest on lemmas for epsilon below 1, and refuse larger values.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from dpsgd_cli.accounting.accountants import ONLY_ZCDP, Bound, WithoutLeaks, smallest_delta
from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.accounting.conversions import gaussian_delta, gaussian_epsilon, minimise
from dpsgd_cli.accounting.mechanism import GaussianSum, GroupSum, Mechanism, Release, ZeroConcentrated
from dpsgd_cli.errors import UnsupportedMechanism

GaussianLemma = Callable[[float, float], float]


def exact_gaussian(noise_multiplier: float, delta: float) -> float:
    """Return the smallest epsilon of one Gaussian at `delta`. Source: Balle and Wang 2018, Theorem 8."""
    return gaussian_epsilon(1 / noise_multiplier, delta) if noise_multiplier > 0 else math.inf


def classical_gaussian(noise_multiplier: float, delta: float) -> float:
    """Return sqrt(2 log(1.25/delta)) / z, proved for results below 1 only.

    Source: Dwork and Roth 2014, Theorem A.1; Lecture 15, Lemma 15.3.
    """
    if noise_multiplier == 0:
        return math.inf
    return math.sqrt(2 * max(math.log(1.25 / delta), 0.0)) / noise_multiplier


def checked_classical_gaussian(noise_multiplier: float, delta: float) -> float:
    """Return `classical_gaussian` where the exact formula confirms it, also above 1; else the exact value."""
    stated = classical_gaussian(noise_multiplier, delta)
    if stated == math.inf or gaussian_delta(1 / noise_multiplier, stated) <= delta:
        return stated
    return exact_gaussian(noise_multiplier, delta)


def amplified(epsilon: float, sampling_rate: float) -> float:
    """Return log(1 + q (e^epsilon - 1)): the epsilon after sampling, while delta becomes q delta.

    For Poisson batches under any adjacency, and batches of fixed size under replace-one. (A replaced record of a
    Poisson batch is compared with its absence, which is no farther from it than another record.) Source: Balle, Barthe
    and Gaboardi 2018, Theorems 2, 8 and 9; Lecture 15, Lemma 15.4.
    """
    if epsilon < 30:
        return math.log1p(sampling_rate * math.expm1(epsilon))
    return epsilon + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-epsilon)) if sampling_rate else 0.0


def use_epsilon(mechanism: Mechanism, delta: float, lemma: GaussianLemma, linear: bool = False) -> float:
    """Return epsilon of one use when `delta` is granted to it (to Gaussians only: the others have their own).

    `linear` takes q epsilon for the amplified epsilon, as published, which is less than sampling achieves.
    """
    if not isinstance(mechanism, GaussianSum):
        assert not isinstance(mechanism, ZeroConcentrated), "refused by Accountant.check"
        return mechanism.epsilon
    rate = mechanism.sampling_rate
    if rate == 0:
        return 0.0
    before = min(delta / rate, 1.0)
    if before == 0:
        return math.inf
    epsilon = lemma(mechanism.noise_multiplier, before) if before < 1 else 0.0
    return rate * epsilon if linear else amplified(epsilon, rate)


class CompositionTheorem(WithoutLeaks, stated=False):
    """Base of all compositions: they take every mechanism whose batching has a theorem for pairs."""

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, ZeroConcentrated):
            return ONLY_ZCDP
        if isinstance(mechanism, GroupSum) or (
            isinstance(mechanism, GaussianSum) and not mechanism.batches.amplifies_pairs
        ):
            return f"{mechanism.batching} batches: no lemma gives (epsilon, delta) of one use; use pld"
        return None

    @staticmethod
    def noisy_uses(kept: Sequence[Release]) -> int:
        """Return how many uses need a delta of their own."""
        return sum(r.count for r in kept if isinstance(r.mechanism, GaussianSum))


class BasicComposition(CompositionTheorem):
    """Basic composition: epsilons add up, deltas add up (Dwork and Roth 2014, Theorem 3.16).

    Every other accountant is compared with it. Each Gaussian gets an equal share of delta and its exact epsilon there.
    """

    name = "basic-composition"
    bound = "upper"
    note = "exact Gaussian per use"

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        share = delta / max(self.noisy_uses(kept), 1)
        return math.fsum(r.count * use_epsilon(r.mechanism, share, exact_gaussian) for r in kept)

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        if not self.noisy_uses(kept):
            return 0.0 if self._epsilon(kept, 0.0) <= epsilon else 1.0
        return super()._delta(kept, epsilon)


class AdvancedComposition(CompositionTheorem):
    """Advanced composition: k uses of at most (eps', delta / 2k) cost (2 sqrt(2 k log(2/delta)) eps', delta).

    It holds when that epsilon is below 1.
    Guarantee: with k delta' = delta / 2, Dwork, Rothblum and Vadhan 2010 at delta / 2 gives sqrt(2k log(2/delta))
    eps' + k eps' (e^eps' - 1) <= epsilon/2 + epsilon^2 / (4 log(2/delta)) (1 + eps') <= epsilon. Sampled uses are
    amplified exactly (Lemma 15.4). Source: Lecture 15, Lemmas 15.2 to 15.4.
    """

    name = "advanced-composition"
    bound = "upper"
    note = "Lemmas 15.2 and 15.3, for epsilon < 1"

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        if not kept:
            return 0.0
        uses = sum(r.count for r in kept)
        single = max(use_epsilon(r.mechanism, delta / (2 * uses), _lemma_15_3) for r in kept)
        epsilon = 2 * math.sqrt(2 * uses * math.log(2 / delta)) * single
        if not epsilon < 1:
            raise UnsupportedMechanism(
                f"{self.name}: Lemma 15.2 is stated for epsilon below 1 and would give {epsilon:.4g} here;"
                " add noise, or take another accountant"
            )
        return epsilon


def _lemma_15_3(noise_multiplier: float, delta: float) -> float:
    """Return the Gaussian mechanism's epsilon, which Lemma 15.3 states below 1 only.

    Raises UnsupportedMechanism from 1 on.
    """
    epsilon = classical_gaussian(noise_multiplier, delta)
    if not epsilon < 1:
        raise UnsupportedMechanism(
            f"advanced-composition: Lemma 15.3 is stated for epsilon below 1; noise multiplier {noise_multiplier:g} has"
            f" {epsilon:.4g} at delta {delta:.3g}; add noise, or take another accountant"
        )
    return epsilon


class StrongComposition(CompositionTheorem):
    """Strong composition: sqrt(2 log(1/delta') sum eps_i^2) + sum eps_i (e^eps_i - 1), at delta' + sum delta_i.

    Source: Dwork, Rothblum and Vadhan 2010, Theorem III.3, for unequal uses Kairouz, Oh and Viswanath 2017, Theorem 3.5
    (whose second term is smaller). Noise multipliers must not depend on earlier outputs (Rogers et al. 2016).
    """

    name = "strong-composition"
    bound: ClassVar[Bound] = "upper"
    note = "Gaussian lemma per use, split of delta optimised"

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        if not self.noisy_uses(kept):
            return self._composed(kept, delta, 0.0)

        def at(logit: float) -> float:
            return self._composed(kept, delta, 1 / (1 + math.exp(-logit)))

        return at(minimise(at, -12.0, 12.0, 1e-4))

    def _composed(self, kept: list[Release], delta: float, share: float) -> float:
        """Return epsilon when `share` of delta goes to the uses, in equal parts, and the rest to the composition."""
        per_use = delta * share / max(self.noisy_uses(kept), 1)
        uses = [(r.count, use_epsilon(r.mechanism, per_use, checked_classical_gaussian)) for r in kept]
        if any(epsilon > 700 for _, epsilon in uses):
            return math.inf
        squares = math.fsum(n * epsilon**2 for n, epsilon in uses)
        drift = math.fsum(n * epsilon * math.expm1(epsilon) for n, epsilon in uses)
        return math.sqrt(2 * math.log(1 / (delta * (1 - share))) * squares) + drift


class PublishedStrongComposition(StrongComposition):
    """Published form: sqrt(2 log(2/delta) sum (q eps)^2) + sum (q eps)^2, with half of delta for the uses."""

    name = "strong-composition-published"
    bound = "estimate"
    note = "linear amplification q*eps is below what sampling achieves: no bound"

    def _epsilon(self, kept: list[Release], delta: float) -> float:
        half = delta / 2
        per_use = half / max(self.noisy_uses(kept), 1)
        squares = math.fsum(
            r.count * use_epsilon(r.mechanism, per_use, classical_gaussian, linear=True) ** 2 for r in kept
        )
        return math.sqrt(2 * math.log(1 / half) * squares) + squares


class LectureNoise(WithoutLeaks, stated=False):
    """Base of the lectures' accountants: T uses of Gaussians.

    All uses are priced with the least noise multiplier z and the largest sampling rate q among them. `batching`: the
    only batching that a lecture's statement covers.
    """

    batching: ClassVar[Batching]

    def uncovered(self, mechanism: Mechanism) -> str | None:
        if isinstance(mechanism, GaussianSum) and mechanism.batching != self.batching:
            return f"{mechanism.batching} batches: it is stated for {self.batching} batches"
        if isinstance(mechanism, ZeroConcentrated):
            return ONLY_ZCDP
        return None if type(mechanism) is GaussianSum else f"{mechanism.kind} releases: it is stated for Gaussian sums"

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


class Lemma151(LectureNoise):
    """Full gradients: variance 64 L^2 T log(2/delta) log(2.5 T/delta) / (n epsilon)^2 at sensitivity 2L/n.

    That is z = 4 sqrt(T log(2/delta) log(2.5 T/delta)) / epsilon. Source: Lecture 15, Lemma 15.1.
    """

    name = "lemma-15.1"
    bound = "upper"
    note = "Lecture 15, for epsilon < 1"
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
    batching = "fixed"

    def _delta(self, kept: list[Release], epsilon: float) -> float:
        rates = [r.mechanism.sampling_rate for r in kept if isinstance(r.mechanism, GaussianSum)]
        most = 2 * sum(r.count for r in kept) * max(rates, default=0.0) or 1.0  # the lemma is stated below it
        return smallest_delta(lambda delta: self._epsilon(kept, delta), epsilon, most)

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
    batching = "full"

    def stated(self, steps: int, noise_multiplier: float, sampling_rate: float, delta: float) -> float:
        return math.sqrt(2 * steps * math.log(1.25 / delta)) / noise_multiplier
