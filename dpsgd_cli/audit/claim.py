"""The attacked claim: the releases of gradients that ledgers charge for, and the family of distributions around it.

The family of a claim is its own releases with all noise multiplied by one factor. A member with more noise claims more
privacy. The error rates of an attack refute all members above some noise. If the audited run is a member of the family,
the epsilon of the last member that is not refuted is a lower bound on the run's epsilon (tier B).

The threshold and the number of guesses of a membership test are chosen from scores drawn from the claimed distribution,
never from those of the audited run. A choice by the observed scores would need a correction.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, Release, ZeroConcentrated, merge
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.accounting.tradeoff import TradeoffCurve, curve_of
from dpsgd_cli.audit.statistics import Errors, Guesses, epsilon_of_guesses, mu_of_errors
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from dpsgd_cli.preconditioning.price import LABELS as PRECONDITIONERS

GRADIENT = "gradient"
_MOST_NOISE = 1000.0
_STEP, _PRECISION = 1.25, 1.002
_SAMPLES = 20_000
_SHARES = (0.001, 0.003, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)
_LINES = 61
_FEWEST = 4


def gradients(ledger: Ledger) -> tuple[Release, ...]:
    """Return the releases of which canaries are part: that of a preconditioner, and that of each epoch's gradients."""
    before, found = [], {}
    for entry in ledger.entries:
        label = entry.release.mechanism.label if isinstance(entry.release.mechanism, GaussianSum) else None
        if label in PRECONDITIONERS:
            before.append(entry.release)
        elif label == GRADIENT and entry.epoch is not None:
            found[entry.epoch] = entry.release
    return (*before, *found.values())


def last_gradient(ledger: Ledger, epoch: int) -> GaussianSum | None:
    """Return the last gradient that the ledger charges for in `epoch`; None if the training ended before.

    With correlated noise, return the epoch's first charge: later ones are of cycles that reach into other epochs.
    """
    found: GaussianSum | None = None
    for entry in reversed(ledger.entries):
        mechanism = entry.release.mechanism
        if entry.epoch != epoch:
            break
        if isinstance(mechanism, GaussianSum) and mechanism.label == GRADIENT:
            found = mechanism
            if not isinstance(mechanism, CorrelatedSums):
                break
    return found


@dataclass(frozen=True)
class PrivacyClaim:
    """Releases of gradients by epoch, in order, and the epsilon and delta of the whole run."""

    epochs: tuple[Release, ...]
    epsilon: float
    delta: float

    @property
    def releases(self) -> list[Release]:
        return merge(list(self.epochs))

    def member(self, noise: float) -> PrivacyClaim:
        """Return the claim with its noise multiplied by `noise`."""
        epochs = [
            Release(r.mechanism.scaled(noise), r.count) for r in self.epochs if isinstance(r.mechanism, GaussianSum)
        ]
        return replace(self, epochs=tuple(epochs))

    @cached_property
    def curve(self) -> TradeoffCurve:
        """Return the trade-off curve of the gradients alone."""
        return curve_of(self.releases)

    @cached_property
    def own_epsilon(self) -> float:
        """Return the epsilon of the gradients alone: exact, or the least known upper bound."""
        if self.curve.mu is not None:
            return gaussian_epsilon(self.curve.mu, self.delta)
        return BestAccountant().epsilon(self.releases, self.delta)

    def refuted_by(self, errors: Errors, confidence: float) -> bool:
        """Return whether the claim rules out every attack with error rates as small as those that `errors` prove."""
        positive, negative = errors.upper(confidence)
        return positive < 1 and 1 - negative > self.curve.power(positive) + 1e-12

    def standing(self, errors: Errors, confidence: float) -> PrivacyClaim | None:
        """Return the member with the most noise that is not refuted; its epsilon is the least that stands.

        None if unlimited noise is not refuted. A member enters only by its trade-off curve, which bounds every attack.
        Without a Gaussian curve, members are searched by bisection: the result's noise is the most up to a factor of
        1.002, and None is also returned if 1,000 times the claimed noise is not refuted.
        """
        if self.curve.mu is not None:
            mu = mu_of_errors(errors, confidence)
            return self.member(self.curve.mu / mu) if mu > 0 else None
        if 1 - sum(errors.upper(confidence)) <= 0:
            return None
        low = high = 1.0  # low ends as noise that stands, high as noise that is refuted
        while self.member(low).refuted_by(errors, confidence):
            low, high = low / _STEP, low
        while not self.member(high).refuted_by(errors, confidence):
            if high > _MOST_NOISE:
                return None
            low, high = high, high * _STEP
        while high / low > _PRECISION:
            middle = math.sqrt(low * high)
            if self.member(middle).refuted_by(errors, confidence):
                high = middle
            else:
                low = middle
        return self.member(low)

    def sample(self, random: np.random.Generator, count: int = _SAMPLES) -> tuple[np.ndarray, np.ndarray]:
        """Draw scores of `count` canaries that are out, and of `count` that are in, from the claimed distribution."""
        if self.curve.mu is not None:
            return _of_gaussian(self.curve.mu, random, count)
        out, inside = np.zeros(count), np.zeros(count)
        for release in self.epochs:
            mechanism = release.mechanism
            assert isinstance(mechanism, GaussianSum)
            shift = shift_of(mechanism)
            rate = mechanism.sampling_rate
            steps = mechanism.steps if mechanism.by_allocation else 1
            for step in range(release.count * steps):
                if step % steps == 0:
                    own = random.integers(steps, size=(2, count))
                for which, (scores, moved) in enumerate(((out, shift[0]), (inside, shift[1]))):
                    if steps > 1:
                        drawn = own[which] == step % steps
                    else:
                        drawn = random.binomial(1, rate, count)
                    seen = moved * drawn + mechanism.noise_multiplier * random.standard_normal(count)
                    scores += score(seen, mechanism.noise_multiplier, rate, shift)
        return out, inside


def claim_of(plan: Plan, ledgers: Sequence[Ledger]) -> PrivacyClaim:
    """Return the claim: the first trial's charges if releases are planned, the budget if they are chosen.

    Raises PrivacyError if trials were charged differently.
    """
    stated = plan.guarantee()
    cap = plan.budget_cap
    if isinstance(cap, GaussianSum):
        return PrivacyClaim((Release(cap),), stated.epsilon, plan.delta)
    if isinstance(cap, ZeroConcentrated):
        # the Gaussian whose zCDP is exactly rho
        one = GaussianSum(1 / math.sqrt(2 * cap.rho), cap.adjacency)
        return PrivacyClaim((Release(one),), stated.epsilon, plan.delta)
    found = [gradients(ledger) for ledger in ledgers]
    if any(one != found[0] for one in found):
        raise PrivacyError("trials of one recipe were charged differently; nothing can be said of all of them together")
    return PrivacyClaim(found[0], stated.epsilon, plan.delta)


def law_of(plan: Plan, ledgers: Sequence[Ledger]) -> PrivacyClaim:
    """Return the distribution from which thresholds are chosen, as the first trial's ledger states it.

    If releases are chosen, these are its charges for gradients, less than the claimed budget; else the claim. A ledger
    is public and does not depend on scores.
    """
    claim = claim_of(plan, ledgers)
    made = [entry.release for entry in ledgers[0].entries]
    own = [one for one in made if isinstance(one.mechanism, GaussianSum) and one.mechanism.label == GRADIENT]
    return PrivacyClaim(tuple(merge(own)), claim.epsilon, claim.delta) if plan.is_adaptive else claim


def bound_of(stands: PrivacyClaim | None) -> float:
    """Return the lower bound on epsilon that the last unrefuted member of the family proves; 0 for None."""
    return 0.0 if stands is None else stands.own_epsilon


def shift_of(mechanism: GaussianSum) -> tuple[float, float]:
    """Return the mean of a canary's coordinate, in sensitivities, if the canary is out and if it is in.

    Under replace-one, a record with the opposite gradient replaces a canary that is out.
    """
    return (-0.5, 0.5) if mechanism.adjacency == "replace-one" else (0.0, 1.0)


def score(seen: np.ndarray, noise: np.ndarray | float, rate: float, shift: tuple[float, float]) -> np.ndarray:
    """Return the log-likelihood ratio, in against out, of one release's value on a canary coordinate.

    The test is Neyman and Pearson's. A sample of rate q shows N(shift, s^2) with probability q, else N(0, s^2); s is
    the noise multiplier.

    >>> round(float(score(np.array(1.0), 2.0, 1.0, (0.0, 1.0))), 4)
    0.125
    """

    def against_nothing(place: float) -> np.ndarray:
        if place == 0:
            return np.zeros_like(seen)
        return log_ratio(place * seen, place**2, noise, rate)

    return against_nothing(shift[1]) - against_nothing(shift[0])


def log_ratio(product: np.ndarray, square: np.ndarray | float, noise: np.ndarray | float, rate: float) -> np.ndarray:
    """Return the log-likelihood ratio of a vector that moves a sum with probability `rate`, against no vector.

    `product` is the inner product of the vector with the release, `square` the vector's squared norm, and `noise` the
    standard deviation of each coordinate.
    """
    ratio = (2 * product - square) / (2 * np.square(noise))
    if rate == 1:
        return np.asarray(ratio)
    return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + ratio))


def unsupported(claim: PrivacyClaim) -> str | None:
    """Return the reason why no trade-off curve of the claim's gradients is known; None if one is."""
    try:
        claim.curve  # noqa: B018
    except UnsupportedMechanism as refusal:
        return str(refusal)
    return None


@dataclass(frozen=True)
class Cutoffs:
    """The `threshold` of tier B's test, and the share of all canaries that tier A guesses at each end of the scores."""

    threshold: float
    share_in: float
    share_out: float


def best_cutoffs(claim: PrivacyClaim, positives: int, negatives: int, confidence: float) -> Cutoffs:
    """Return the best threshold and shares for `positives` canaries in and `negatives` out, if the claim is true."""
    out, inside = claim.sample(np.random.default_rng(23))
    threshold = _threshold(out, inside, positives, negatives, confidence)
    both = np.concatenate([out, inside])
    member = np.concatenate([np.zeros(len(out), bool), np.ones(len(inside), bool)])[np.argsort(both)]
    total = positives + negatives
    found = []
    for top in _SHARES:
        for bottom in (0.0, top):
            guessed = [int(share * total) for share in (top, bottom)]
            if guessed[0] < _FEWEST:
                continue
            high, low = (max(1, int(share * len(member))) for share in (top, bottom))
            right = guessed[0] * member[-high:].mean() + guessed[1] * (~member[:low]).mean()
            guesses = Guesses(total, sum(guessed), int(right))
            found.append((epsilon_of_guesses(guesses, claim.delta, confidence), top, bottom))
    _, top, bottom = max(found, default=(0.0, 0.25, 0.25))
    return Cutoffs(threshold, top, bottom)


def threshold_of_gaussian(mu: float, positives: int, negatives: int, confidence: float) -> float:
    """Return the best threshold for log-likelihood ratios of two Gaussians, `mu` standard deviations apart."""
    return _threshold(*_of_gaussian(mu, np.random.default_rng(23), _SAMPLES), positives, negatives, confidence)


def _of_gaussian(mu: float, random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw log-likelihood ratios of two Gaussians, `mu` standard deviations apart: under the one, under the other."""
    out, inside = mu * random.standard_normal((2, count))
    return out - mu**2 / 2, inside + mu**2 / 2


def _threshold(out: np.ndarray, inside: np.ndarray, positives: int, negatives: int, confidence: float) -> float:
    candidates = np.quantile(np.concatenate([out, inside]), np.linspace(0.005, 0.995, _LINES))

    def expected(threshold: float) -> float:
        wrong_in, wrong_out = float((out > threshold).mean()), float((inside <= threshold).mean())
        errors = Errors(round(wrong_in * negatives), negatives, round(wrong_out * positives), positives)
        return mu_of_errors(errors, confidence)

    values = [expected(threshold) for threshold in candidates]
    return float(candidates[int(np.argmax(values))]) if max(values) > 0 else 0.0


def errors_at(scores: np.ndarray, inside: np.ndarray, threshold: float) -> Errors:
    """Return the counted errors of the test that guesses `in` above `threshold`."""
    over, out = scores > threshold, ~inside
    return Errors(int((over & out).sum()), int(out.sum()), int((~over & inside).sum()), int(inside.sum()))


def guesses_of(scores: np.ndarray, inside: np.ndarray, cutoffs: Cutoffs) -> Guesses:
    """Guess that canaries with the highest scores are in, those with the lowest out, in the shares of `cutoffs`."""
    member = inside.ravel()[np.argsort(scores.ravel(), kind="stable")]
    top, bottom = (int(share * member.size) for share in (cutoffs.share_in, cutoffs.share_out))
    right = int(member[member.size - top :].sum()) + int((~member[:bottom]).sum())
    return Guesses(member.size, top + bottom, right)
