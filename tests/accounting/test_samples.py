"""Losses of samples, against integrals that know nothing of cells, every triple of a ball, and dp-accounting."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import (
    GaussianDpEvent,
    NeighboringRelation,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
)
from dp_accounting.pld import PLDAccountant
from scipy import stats

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import Adjacency, Batching
from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, PureDP, Release
from dpsgd_cli.errors import UnsupportedMechanism
from tests.accounting.releases import Dots, discretise

SETTINGS = [(0.01, 1.0, 1e-3), (0.3, 0.5, 1e-3), (0.1, 3.0, 5e-4), (1e-4, 0.8, 1e-5)]
EPSILONS = (-2.0, -0.5, -0.05, 0.0, 0.001, 0.01, 0.2, 1.0, 3.0)


def hockey_stick(loss: Dots, width: float, epsilon: float) -> float:
    return loss.infinite + float((loss.masses * np.maximum(0, -np.expm1(epsilon - loss.cells * width))).sum())


def mixture(x: np.ndarray, rate: float, noise: float, place: float) -> np.ndarray:
    own: np.ndarray = (1 - rate) * stats.norm.pdf(x, 0, noise) + rate * stats.norm.pdf(x, place, noise)
    return own


def by_integral(p: np.ndarray, q: np.ndarray, epsilon: float, step: float) -> float:
    return float(np.maximum(0, p - math.exp(epsilon) * q).sum() * step)


def grid(noise: float) -> tuple[np.ndarray, float]:
    x = np.linspace(-12 * noise - 1, 12 * noise + 1, 400_001)
    return x, float(x[1] - x[0])


@pytest.mark.parametrize(("rate", "noise", "width"), SETTINGS)
def test_a_replaced_record_of_a_poisson_batch(rate: float, noise: float, width: float) -> None:
    pair = discretise(GaussianSum(noise, "replace-one", "poisson", rate), width)
    x, step = grid(noise)
    p, q = mixture(x, rate, noise, 0.5), mixture(x, rate, noise, -0.5)
    assert pair.remove is pair.add
    for epsilon in EPSILONS:
        true = by_integral(p, q, epsilon, step)
        assert true * (1 - 1e-7) <= hockey_stick(pair.remove, width, epsilon) <= true * (1 + 1e-3) + 1e-15


@pytest.mark.parametrize(("rate", "noise", "width"), SETTINGS)
def test_a_replaced_record_of_a_fixed_batch_has_the_larger_direction_on_each_side(
    rate: float, noise: float, width: float
) -> None:
    """Zhu, Dong and Wang 2022: removing at and above ratio 1, adding below."""
    pair = discretise(GaussianSum(noise, "replace-one", "fixed", rate), width)
    x, step = grid(noise)
    mixed, alone = mixture(x, rate, noise, 1.0), stats.norm.pdf(x, 0, noise)
    assert pair.remove is pair.add
    for epsilon in EPSILONS:
        ways = by_integral(mixed, alone, epsilon, step), by_integral(alone, mixed, epsilon, step)
        true = ways[0] if epsilon >= 0 else ways[1]
        assert true == pytest.approx(max(ways), rel=1e-6)
        assert true * (1 - 1e-7) <= hockey_stick(pair.remove, width, epsilon) <= true * (1 + 1e-3) + 1e-15


@pytest.mark.parametrize("batching", ["poisson", "fixed"])
def test_no_records_of_two_dimensions_are_told_apart_better(batching: Batching) -> None:
    """Twelve triples of a disc of diameter 1, for a Poisson batch the first in its middle; the worst is attained."""
    rate, noise, width = 0.2, 0.6, 1e-3
    own = discretise(GaussianSum(noise, "replace-one", batching, rate), width).remove
    line = np.linspace(-5, 5, 1001)
    x, y, area = line[:, None], line[None, :], (line[1] - line[0]) ** 2

    def normal(at: complex) -> np.ndarray:
        squares = (x - at.real) ** 2 + (y - at.imag) ** 2
        found: np.ndarray = np.exp(-squares / (2 * noise**2)) / (2 * math.pi * noise**2)
        return found

    random = np.random.default_rng(4)
    triples = [tuple(0.5 * np.exp(2j * math.pi * random.random(3))) for _ in range(10)]
    triples += [(-0.5, 0.5, -0.5), (0.5, 0.5, -0.5)]
    nearest = dict.fromkeys((-0.5, 0.3, 1.0), 0.0)
    for third, one, other in triples:
        shared = normal(0 if batching == "poisson" else complex(third))
        p, q = (1 - rate) * shared + rate * normal(complex(one)), (1 - rate) * shared + rate * normal(complex(other))
        for epsilon in nearest:
            seen, most = by_integral(p, q, epsilon, area), hockey_stick(own, width, epsilon)
            assert seen <= most * (1 + 1e-4)  # what the grid leaves out
            nearest[epsilon] = max(nearest[epsilon], seen / most)
    assert min(nearest.values()) > 0.999


@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.01, 1.0, 1000), (0.1, 2.0, 100), (0.004, 0.7, 2000)])
def test_replaced_records_of_poisson_batches_agree_with_dp_accounting(rate: float, noise: float, steps: int) -> None:
    """Its noise is over C, ours over 2 C."""
    oracle = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    oracle.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(2 * noise)), steps))
    used = [Release(GaussianSum(noise, "replace-one", "poisson", rate), steps)]
    assert accountants.get("pld").epsilon(used, 1e-5) == pytest.approx(oracle.get_epsilon(1e-5), rel=3e-4)


def test_composed_without_replacement_costs_more_than_either_direction_alone() -> None:
    """Lebeda et al. 2024: neither direction of subset sampling dominates; and the fallback by divergences is above."""
    rate, noise, steps = 0.02, 0.8, 500
    pld, rdp = accountants.get("pld"), accountants.get("rdp")
    fixed = [Release(GaussianSum(noise, "replace-one", "fixed", rate), steps)]
    directions = pld.epsilon([Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)], 1e-5)
    replaced = pld.epsilon([Release(GaussianSum(noise, "replace-one", "poisson", rate), steps)], 1e-5)
    own = pld.epsilon(fixed, 1e-5)
    assert replaced < directions < own < rdp.epsilon(fixed, 1e-5)


@pytest.mark.parametrize("order", [2.0, 8.0, 12.0])
def test_divergences_bound_what_they_are_said_to(order: float) -> None:
    """Of the worst pair, by an integral: (1 - q) N(0) + q N(1/2) against its mirror image."""
    rate, noise = 0.02, 1.0
    x, step = grid(noise)

    def power(p: np.ndarray, q: np.ndarray) -> float:
        held = q > 0  # what lies farther out does not show
        return float(np.exp(order * np.log(p[held]) + (1 - order) * np.log(q[held])).sum() * step)

    def proved(mechanism: GaussianSum) -> float:
        found = mechanism.divergence(order)
        assert found is not None
        return math.exp((order - 1) * found)

    replaced = power(mixture(x, rate, noise, 0.5), mixture(x, rate, noise, -0.5))
    assert replaced <= proved(GaussianSum(noise, "replace-one", "poisson", rate)) <= replaced * (1 + 1e-6)


def test_correlated_noise_has_no_proof_for_replaced_records_of_samples() -> None:
    with pytest.raises(UnsupportedMechanism, match="comes or goes"):
        accountants.get("pld").epsilon([Release(CorrelatedSums(1.0, "replace-one", "poisson", 0.1))], 1e-5)


@pytest.mark.parametrize("batching", ["poisson", "fixed", "random-allocation"])
def test_samples_add_up_with_whatever_else_there_is(batching: Batching) -> None:
    """Epsilon and delta are each other's inverse, curves end in the whole, and parts cost less than it."""
    adjacency: Adjacency = "zero-out" if batching == "random-allocation" else "replace-one"
    sample = GaussianSum(1.0, adjacency, batching, 0.05)
    used = [Release(sample, 30), Release(GaussianSum(8.0, adjacency), 3), Release(PureDP(0.05, adjacency))]
    pld = accountants.get("pld")
    epsilon = pld.epsilon(used, 1e-5)
    assert pld.delta(used, epsilon) == pytest.approx(1e-5, rel=1e-3)
    assert pld.curve([used[:1], used[1:]], 1e-5)[-1] == pytest.approx(epsilon, rel=1e-3)
    assert pld.profile(used, 1e-3)(epsilon / 2) == pytest.approx(pld.delta(used, epsilon / 2), rel=1e-3)
    assert max(pld.epsilon([one], 1e-5) for one in used) < epsilon < sum(pld.epsilon([one], 1e-5) for one in used)
