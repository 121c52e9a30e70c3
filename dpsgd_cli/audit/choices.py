"""Private choices, attacked by their law: the methods' own code, on worst-case scores, many times.

With one record more all scores rise by at most D. Worst for one choice among n is that all but one do, so that the one
is chosen more often; worst for many choices is that half of them do, so that each choice tells as much whichever way it
falls. What is counted is one event on both neighbours.
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
    """How a method chooses: by `kind`, among so many `candidates`; `draws` are made on each neighbour."""

    kind: NoisyChoice
    candidates: int
    draws: int


def one_choice(mechanism: PureDP, choosing: Choosing, confidence: float) -> Finding:
    """Tier A of one choice that is charged as `mechanism`.

    Under replace-one scores may move both ways, and methods double D; the worst pair is the same one in units of it.
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
    """What is claimed of `times` choices together."""

    times: int
    epsilon: float
    delta: float


def all_choices(mechanism: PureDP, choosing: Choosing, whole: Whole, confidence: float) -> Finding:
    """Tier B of all choices of the exponential mechanism: the family is that of one epsilon for each of them."""
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
    """Lower bound on the log of the odds ratio of an event between two neighbours: by how much one epsilon ranges."""
    positive, negative = errors.upper(confidence)
    if not (0 < positive < 1 and 0 < negative < 1):
        return 0.0
    return max(0.0, math.log((1 - negative) / negative) - math.log(positive / (1 - positive)))


def composed(epsilon: float, share: float, times: int, delta: float) -> float:
    """Epsilon at `delta` > 0 of so many events with odds e^epsilon times those of `share`: of two binomials, exactly.

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
    """How often one of the first `still` scores is chosen, where none rises, and where all others do."""
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
    """How often one of the first of `scores`, in units of the sensitivity, is chosen."""
    shape = (draws, len(scores), NORMALS_PER_SCORE[choosing.kind])
    normals = torch.randn(shape, dtype=torch.float64, generator=generator)
    both = torch.full((2, draws), 1.0, dtype=torch.float64)
    both[0] = epsilon
    chosen = selection.select_least(scores.repeat(draws, 1), both[0], both[1], choosing.kind, normals)
    return int((chosen < still).sum())
