"""NoisyChoice probabilities against their exact values, and privacy losses measured on neighbouring scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd_cli.noise.selection import NORMALS_PER_SCORE, NoisyChoice, exponentials, select_least

DRAWS = 50_000


def frequencies(scores: list[float], epsilon: float, kind: NoisyChoice, seed: int) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    shape = (DRAWS, len(scores), NORMALS_PER_SCORE[kind])
    normals = torch.randn(shape, dtype=torch.float64, generator=generator)
    repeated = torch.tensor(scores, dtype=torch.float64).expand(DRAWS, -1)
    every = torch.full((DRAWS,), epsilon, dtype=torch.float64)
    chosen = select_least(repeated, every, torch.ones(DRAWS, dtype=torch.float64), kind, normals)
    return np.bincount(chosen.numpy(), minlength=len(scores)) / DRAWS


def exact(scores: list[float], epsilon: float, kind: NoisyChoice) -> np.ndarray:
    """The law of the choice: in closed form, or as the integral over the value of the least score."""
    if kind == "exponential":
        weights = np.exp(-epsilon * np.array(scores))
        return np.asarray(weights / weights.sum())
    values = np.linspace(min(scores) - 40 / epsilon, max(scores) + 40 / epsilon, 400_001)
    noisy = stats.laplace(np.array(scores)[:, None], 1 / epsilon)
    density, above = noisy.pdf(values), noisy.sf(values)
    others = [np.prod(np.delete(above, i, 0), 0) for i in range(len(scores))]
    return np.asarray(np.trapezoid(density * others, values))


@pytest.mark.parametrize("kind", ["laplace", "exponential"])
def test_choices_have_their_exact_probabilities(kind: NoisyChoice) -> None:
    """Chi-square at 1e-6 of a fixed seed; the probabilities of half and twice the scale are rejected."""
    scores, epsilon = [0.0, 0.5, 0.7, 3.0], 1.3
    seen = frequencies(scores, epsilon, kind, 7) * DRAWS
    assert exact(scores, epsilon, kind).sum() == pytest.approx(1, abs=1e-6)

    def pvalue(tested: float) -> float:
        law = exact(scores, tested, kind)
        return float(stats.chisquare(seen, law / law.sum() * DRAWS).pvalue)

    assert pvalue(epsilon) > 1e-6
    assert max(pvalue(epsilon / 2), pvalue(2 * epsilon)) < 1e-12


def largest_loss(probabilities: np.ndarray, neighbour: np.ndarray) -> float:
    return float(np.abs(np.log(probabilities / neighbour)).max())


@pytest.mark.parametrize("kind", ["laplace", "exponential"])
def test_no_neighbour_loses_more_than_epsilon(kind: NoisyChoice) -> None:
    """One record raises every score by something in [0, 1]: all corners of that cube."""
    epsilon, scores = 1.0, [0.0, 0.3, 0.9]
    before = exact(scores, epsilon, kind)
    for corner in range(2 ** len(scores)):
        raised = [s + ((corner >> i) & 1) for i, s in enumerate(scores)]
        assert largest_loss(before, exact(raised, epsilon, kind)) <= epsilon + 1e-6


def wrong_sided(scores: np.ndarray, epsilon: float, generator: np.random.Generator) -> np.ndarray:
    """The published bug: one-sided exponential noise ADDED to scores of which the least is chosen."""
    return (scores + generator.exponential(1 / epsilon, (DRAWS, len(scores)))).argmin(axis=1)


def measured_loss(choose: object, raised: list[float], plain: list[float]) -> float:
    """Log ratio of the frequencies of choosing candidate 0, less four standard errors."""
    assert callable(choose)
    p, q = (float((choose(np.array(s)) == 0).mean()) for s in (plain, raised))
    error = math.sqrt((1 - p) / (p * DRAWS) + (1 - q) / (max(q, 1 / DRAWS) * DRAWS))
    return abs(math.log(p / max(q, 1 / DRAWS))) - 4 * error


def test_an_empirical_privacy_test_passes_ours_and_fails_noise_on_the_wrong_side() -> None:
    """21 candidates; one record raises one score by its whole bound. False failures: below 1e-4 (four deviations)."""
    epsilon, plain = 1.0, [0.0] * 21
    raised = [1.0] + [0.0] * 20
    rng = np.random.default_rng(3)
    assert measured_loss(lambda s: wrong_sided(s, epsilon, rng), raised, plain) > epsilon
    seeds = iter(range(100))

    def ours(scores: np.ndarray) -> np.ndarray:
        generator = torch.Generator().manual_seed(next(seeds))
        normals = torch.randn((DRAWS, 21, 4), dtype=torch.float64, generator=generator)
        every = torch.ones(DRAWS, dtype=torch.float64)
        return select_least(torch.from_numpy(scores).expand(DRAWS, -1), every, every, "laplace", normals).numpy()

    assert measured_loss(ours, raised, plain) <= epsilon


def test_exponentials_are_exponential() -> None:
    normals = torch.randn((100_000, 2), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    drawn = exponentials(normals).numpy()
    assert stats.kstest(drawn, "expon").pvalue > 1e-6
    assert stats.kstest(drawn * 1.5, "expon").pvalue < 1e-12


def test_a_score_that_is_not_a_number_is_never_preferred() -> None:
    scores = torch.tensor([[math.nan, 5.0, math.nan]], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert select_least(scores, one, one, "laplace", torch.zeros(1, 3, 4, dtype=torch.float64)).tolist() == [1]


def test_a_choice_of_an_unknown_kind_is_an_error() -> None:
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match="no noise is proved"):
        select_least(torch.zeros(1, 3).double(), one, one, "gumbel", torch.ones(1, 3, 2).double())  # type: ignore[arg-type]
