"""Threshold and number of guesses of a membership test, chosen from the claimed distribution alone.

Scores are drawn from the claimed distribution, never taken from the audited run. Of several thresholds, the one with
the best bound on such scores is used. A choice based on the observed scores would need a correction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpsgd_cli.audit.claim import Claim
from dpsgd_cli.audit.statistics import Errors, Guesses, epsilon_of_guesses, mu_of_errors

_SHARES = (0.001, 0.003, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.25)
_LINES = 61
_FEWEST = 4
_DRAWS = 20_000


@dataclass(frozen=True)
class Line:
    """The `threshold` of tier B's test, and the share of all canaries that tier A guesses at each end of the scores."""

    threshold: float
    share_in: float
    share_out: float


def line_for(claim: Claim, positives: int, negatives: int, confidence: float) -> Line:
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
    return Line(threshold, top, bottom)


def threshold_of_gaussian(mu: float, positives: int, negatives: int, confidence: float) -> float:
    """Return the best threshold for log-likelihood ratios of two Gaussians, `mu` standard deviations apart."""
    drawn = np.random.default_rng(23).standard_normal((2, _DRAWS))
    out, inside = (mu * own + sign * mu**2 / 2 for own, sign in zip(drawn, (-1, 1), strict=True))
    return _threshold(out, inside, positives, negatives, confidence)


def _threshold(out: np.ndarray, inside: np.ndarray, positives: int, negatives: int, confidence: float) -> float:
    candidates = np.quantile(np.concatenate([out, inside]), np.linspace(0.005, 0.995, _LINES))
    values = [mu_of_errors(_expected(out, inside, t, positives, negatives), confidence) for t in candidates]
    return float(candidates[int(np.argmax(values))]) if max(values) > 0 else 0.0


def _expected(out: np.ndarray, inside: np.ndarray, threshold: float, positives: int, negatives: int) -> Errors:
    false_positive, false_negative = float((out > threshold).mean()), float((inside <= threshold).mean())
    return Errors(round(false_positive * negatives), negatives, round(false_negative * positives), positives)


def errors_at(scores: np.ndarray, inside: np.ndarray, threshold: float) -> Errors:
    """Return the counted errors of the test that guesses `in` above `threshold`."""
    over, out = scores > threshold, ~inside
    return Errors(int((over & out).sum()), int(out.sum()), int((~over & inside).sum()), int(inside.sum()))


def guesses_of(scores: np.ndarray, inside: np.ndarray, line: Line) -> Guesses:
    """Guess that canaries with the highest scores are in and those with the lowest are out, in the shares of `line`."""
    member = inside.ravel()[np.argsort(scores.ravel(), kind="stable")]
    top, bottom = (int(share * member.size) for share in (line.share_in, line.share_out))
    right = int(member[member.size - top :].sum()) + int((~member[:bottom]).sum())
    return Guesses(member.size, top + bottom, right)
