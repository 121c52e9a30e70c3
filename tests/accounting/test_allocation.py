"""Losses of an epoch of which each record is in one secret step, against integrals, draws, and what surrounds them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.allocation_pairs import _trimmed, allocated_pair, law_of_ratio
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from tests.accounting.releases import dots_of
from tests.accounting.test_samples import hockey_stick

WIDTH = 1e-3
pld = accountants.get("pld")


def epoch(noise: float, steps: int) -> GaussianSum:
    return GaussianSum(noise, "add-remove", "random-allocation", 1 / steps)


def by_quadrature(noise: float, steps: int, epsilon: float) -> tuple[float, float]:
    """Both directions, on a grid in as many dimensions as there are steps (2 or 3)."""
    line = np.linspace(-8.5 * noise, 1 + 8.5 * noise, 1601 if steps == 2 else 161)
    weights = stats.norm.pdf(line, 0, noise) * (line[1] - line[0])
    ratios = np.exp((line - 0.5) / noise**2)
    mean, weight = ratios, weights
    for _ in range(steps - 1):
        mean, weight = np.add.outer(mean, ratios), np.multiply.outer(weight, weights)
    mean, a = mean / steps, math.exp(epsilon)
    return float((weight * np.maximum(0, mean - a)).sum()), float((weight * np.maximum(0, 1 - a * mean)).sum())


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("noise", [0.7, 1.0, 3.0])
def test_few_steps_agree_with_an_integral(noise: float, steps: int) -> None:
    pair = dots_of(allocated_pair(noise, steps), WIDTH)
    for epsilon in (0.0, 0.2, 0.7):
        for true, loss in zip(by_quadrature(noise, steps, epsilon), (pair.remove, pair.add), strict=True):
            assert true * (1 - 1e-4) <= hockey_stick(loss, WIDTH, epsilon) <= true * 1.01


@pytest.mark.parametrize(("noise", "steps"), [(1.0, 20), (0.6, 100), (2.0, 30)])
def test_many_steps_agree_with_draws(noise: float, steps: int) -> None:
    """200,000 draws of both members, means to six standard errors; a wrong number of steps is farther off."""
    random, draws = np.random.default_rng(7), 200_000
    ratio = np.zeros(draws)
    for _ in range(steps - 1):
        ratio += np.exp(random.standard_normal(draws) / noise - 1 / (2 * noise**2))
    own = random.standard_normal(draws) / noise
    without = (ratio + np.exp(own - 1 / (2 * noise**2))) / steps
    within = (ratio + np.exp(own + 1 / (2 * noise**2))) / steps
    for count, right in ((steps, True), (2 * steps, False)):
        pair = dots_of(allocated_pair(noise, count), WIDTH)
        for epsilon in (0.0, 0.1):
            for seen, loss in (
                (np.maximum(0, 1 - math.exp(epsilon) / within), pair.remove),
                (np.maximum(0, 1 - math.exp(epsilon) * without), pair.add),
            ):
                found, error = hockey_stick(loss, WIDTH, epsilon), float(seen.std()) / draws**0.5
                near = abs(found - float(seen.mean())) < 6 * error + 0.01 * found
                assert near is right


def test_one_step_is_a_gaussian_and_so_is_what_is_hardly_private() -> None:
    one = [Release(epoch(1.0, 1), 5)]
    assert pld.epsilon(one, 1e-5) == accountants.get("gaussian").epsilon(
        [Release(GaussianSum(1.0, "zero-out"), 5)], 1e-5
    )
    loud = [Release(GaussianSum(0.05, "zero-out"), 2)]
    assert pld.epsilon([Release(epoch(0.05, 10), 2)], 1e-5) == pld.epsilon(loud, 1e-5)


@pytest.mark.parametrize(("noise", "steps", "epochs"), [(1.0, 10, 10), (1.0, 100, 10), (0.6, 100, 5), (0.8, 98, 30)])
def test_an_epoch_costs_less_than_shuffled_and_poisson_batches(noise: float, steps: int, epochs: int) -> None:
    """As Feldman and Shenfeld 2026 find; and no less than Poisson batches of four fifths of the rate."""
    own = pld.epsilon([Release(epoch(noise, steps), epochs)], 1e-5)
    poisson, fewer = (
        pld.epsilon([Release(GaussianSum(noise, "add-remove", "poisson", rate / steps), steps * epochs)], 1e-5)
        for rate in (1.0, 0.8)
    )
    assert fewer < own < poisson
    assert own < pld.epsilon([Release(GaussianSum(noise, "zero-out", "shuffle"), epochs)], 1e-5)


@pytest.mark.parametrize(("noise", "steps"), [(0.3, 7), (1.0, 1000), (50.0, 12)])
def test_means_are_kept_and_tails_charged(noise: float, steps: int) -> None:
    values, masses = law_of_ratio(noise, steps)
    assert (masses >= 0).all()
    assert float(masses.sum()) == pytest.approx(1, abs=1e-12)
    assert float(values @ masses) == pytest.approx(1, abs=1e-12)
    pair = dots_of(allocated_pair(noise, steps), WIDTH)
    beyond = float(stats.norm.sf(10)) + (steps - 1) * float(stats.norm.sf(10 + 1 / noise))
    assert pair.remove.infinite == pytest.approx(beyond, rel=1e-9, abs=0)
    assert pair.add.infinite >= steps * float(stats.norm.sf(10 + 1 / noise))


@pytest.mark.parametrize(
    ("noise", "steps", "delta", "known", "within"),
    [(1.0, 100, 1e-13, 3.0, 0.03), (0.4, 100, 1e-9, 13.01, 0.001), (0.3, 1000, 1e-5, 12.22, 0.001)],
)
def test_an_epoch_costs_what_is_known_of_it_at_small_deltas(
    noise: float, steps: int, delta: float, known: float, within: float
) -> None:
    """Known by Monte Carlo and exact densities, and less than the epoch costs without its secret step."""
    own = pld.epsilon([Release(epoch(noise, steps))], delta)
    assert own == pytest.approx(known, rel=within)
    assert own < pld.epsilon([Release(GaussianSum(noise, "add-remove"))], delta)


@pytest.mark.parametrize(("noise", "steps", "delta"), [(1.0, 100, 1e-25), (0.2, 10, 1e-22), (1.0, 10**6, 1e-28)])
def test_an_epoch_never_costs_more_than_without_its_secret(noise: float, steps: int, delta: float) -> None:
    """Where the tails that are cut off weigh more than delta."""
    without = [Release(GaussianSum(noise, "add-remove"), 3), Release(PureDP(0.1, "add-remove"))]
    within = [Release(epoch(noise, steps), 3), without[1]]
    limit = pld.epsilon(without, delta)
    assert pld.epsilon(within, delta) <= limit < math.inf
    assert pld.delta(within, limit) <= pld.delta(without, limit) * (1 + 1e-6)
    assert pld.curve([within[:1], within[1:]], delta)[-1] <= limit * (1 + 1e-6)


def test_the_least_masses_keep_their_mean() -> None:
    """Less than 1e-30 at the lower end goes to 0 and to the point above it."""
    law = _trimmed(0.0, 7, np.array([1e-31, 1e-30]), 1.0)
    assert law.first == 8 and law.none == pytest.approx(1e-31 * (1 - math.exp(-1)), rel=1e-12, abs=0)
    assert law.masses.tolist() == pytest.approx([1e-30 + 1e-31 * math.exp(-1)], rel=1e-12, abs=0)


def test_what_cannot_be_without_the_record_is_charged() -> None:
    """Ratio 0 is on the grid: there Q has mass and P none, so the way back has that much infinite loss besides."""
    noise, steps = 0.5, 2
    values, masses = law_of_ratio(noise, steps)
    beyond = steps * float(stats.norm.sf(10 + 1 / noise))
    never = float(masses[values == 0].sum())
    assert 0 < never < 1e-20
    assert dots_of(allocated_pair(noise, steps), WIDTH).add.infinite == pytest.approx(never + beyond, rel=1e-9, abs=0)


def test_more_noise_and_more_steps_cost_less() -> None:
    costs = [pld.epsilon([Release(epoch(z, t), 4)], 1e-6) for z, t in ((0.8, 16), (1.0, 16), (1.0, 17), (1.0, 40))]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("name", ["rdp", "moments", "zcdp-rs", "gaussian", "zcdp", "strong-composition"])
def test_who_has_no_formula_says_so(name: str) -> None:
    with pytest.raises(UnsupportedMechanism, match="random-allocation batches"):
        accountants.get(name).epsilon([Release(epoch(1.0, 10))], 1e-5)


def test_what_has_no_proof_is_refused() -> None:
    with pytest.raises(UnsupportedMechanism, match="choose add-remove or zero-out"):
        pld.epsilon([Release(GaussianSum(1.0, "replace-one", "random-allocation", 0.1))], 1e-5)
    with pytest.raises(PrivacyError, match="1 over the number of steps"):
        GaussianSum(1.0, "add-remove", "random-allocation", 0.3)
