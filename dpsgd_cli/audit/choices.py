"""Private choices, attacked by their distribution: the methods' own code on worst-case scores, over many draws.

One more record raises each score by at most D. Worst for one choice among n: all scores but one rise, so that the one
is chosen more often. Worst for many choices: half of the scores rise, so that each choice is as informative for either
outcome. The attack counts one event on both neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from scipy import stats
from scipy.optimize import brentq

from dpsgd_cli.accounting.mechanism import PureDP
from dpsgd_cli.audit.findings import Finding
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors
from dpsgd_cli.common.rounding import epsilon_text
from dpsgd_cli.noise import selection
from dpsgd_cli.noise.selection import NORMALS_PER_SCORE, NoisyChoice

_AT_ONCE = 1 << 23
_DELTA = 1e-9
_MOST_EPSILON = 50.0


@dataclass(frozen=True)
class Choosing:
    """Setting of an attack: the `kind` of choice, the number of `candidates`, and the `draws` on each neighbour."""

    kind: NoisyChoice
    candidates: int
    draws: int


def one_choice(mechanism: PureDP, choosing: Choosing, confidence: float) -> Finding:
    """Return the finding of tier A for one choice that is charged as `mechanism`.

    Under replace-one, scores may move both ways, and methods double D. In units of D the worst pair is unchanged.
    """
    errors = _errors(mechanism, choosing, 1)
    found = epsilon_of_errors(errors, _DELTA, confidence)
    counts = f"{errors.false_positives} and {errors.positives - errors.false_negatives} of {errors.positives} draws"
    return Finding(
        "A", "a choice", f"epsilon of one at least {found:.4f}: {counts} (of {choosing.candidates}, {choosing.kind})",
        f"at most {epsilon_text(mechanism.epsilon)}",
        lambda level: epsilon_of_errors(errors, _DELTA, level) > mechanism.epsilon,
    )  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """The claim on `times` choices together."""

    times: int
    epsilon: float
    delta: float


def all_choices(mechanism: PureDP, choosing: Choosing, whole: Whole, confidence: float) -> Finding:
    """Return the finding of tier B for all choices of the exponential mechanism.

    The family of the claim has one epsilon for each choice, the same for all.
    """
    errors = _errors(mechanism, choosing, choosing.candidates // 2)
    share = choosing.candidates // 2 / choosing.candidates

    def bound(level: float) -> float:
        return composed(odds_ratio(errors, level), share, whole.times, whole.delta)

    return Finding(
        "B", "all choices", f"epsilon of {whole.times} at least {bound(confidence):.4f} ({2 * choosing.draws:,} draws)",
        f"at most {epsilon_text(whole.epsilon)}", lambda level: bound(level) > whole.epsilon,
        epsilon=bound(confidence),
    )  # fmt: skip


def odds_ratio(errors: Errors, confidence: float) -> float:
    """Return a lower bound on the log odds ratio of an event between two neighbours (its bounded range)."""
    positive, negative = errors.upper(confidence)
    if not (0 < positive < 1 and 0 < negative < 1):
        return 0.0
    return max(0.0, math.log((1 - negative) / negative) - math.log(positive / (1 - positive)))


def composed(epsilon: float, share: float, times: int, delta: float) -> float:
    """Return epsilon at `delta` > 0 of `times` events, whose odds are those of `share` or e^epsilon times those.

    The divergence is that of two binomials, computed exactly. The result is at most 50.

    >>> round(composed(1.0, 0.5, 1, 1e-3), 4), round(math.log((math.e / (1 + math.e) - 1e-3) / 0.5), 4)
    (0.3785, 0.3785)
    """
    odds = share / (1 - share) * math.exp(epsilon)
    number = range(times + 1)
    own, other = stats.binom.pmf(number, times, odds / (1 + odds)), stats.binom.pmf(number, times, share)

    def over(level: float) -> float:
        return float((own - math.exp(level) * other).clip(min=0.0).sum()) - delta

    if over(0.0) <= 0:
        return 0.0
    return _MOST_EPSILON if over(_MOST_EPSILON) > 0 else float(brentq(over, 0.0, _MOST_EPSILON, xtol=1e-6))


def _errors(mechanism: PureDP, choosing: Choosing, still: int) -> Errors:
    """Count how often one of the first `still` scores is chosen, if no score rises and if all others rise."""
    generator = torch.Generator().manual_seed(29)
    moved = torch.ones(choosing.candidates, dtype=torch.float64)
    moved[:still] = 0.0
    draw = partial(_first, mechanism.epsilon, choosing, generator)
    counts = [_in_pieces(draw, scores, still, choosing) for scores in (torch.zeros_like(moved), moved)]
    return Errors(counts[0], choosing.draws, choosing.draws - counts[1], choosing.draws)


def _in_pieces(draw: Callable[..., int], scores: torch.Tensor, still: int, choosing: Choosing) -> int:
    size = max(1, _AT_ONCE // (choosing.candidates * NORMALS_PER_SCORE[choosing.kind]))
    return sum(draw(scores, still, min(size, choosing.draws - done)) for done in range(0, choosing.draws, size))


def _first(
    epsilon: float, choosing: Choosing, generator: torch.Generator, scores: torch.Tensor, still: int, draws: int
) -> int:
    """Count how often one of the first `still` of `scores` is chosen; scores are in units of the sensitivity."""
    shape = (draws, len(scores), NORMALS_PER_SCORE[choosing.kind])
    normals = torch.randn(shape, dtype=torch.float64, generator=generator)
    both = torch.full((2, draws), 1.0, dtype=torch.float64)
    both[0] = epsilon
    chosen = selection.select_least(scores.repeat(draws, 1), both[0], both[1], choosing.kind, normals)
    return int((chosen < still).sum())
