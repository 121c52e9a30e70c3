"""One use as an (epsilon, delta) pair: the lemmas against the exact hockey-stick divergence."""

from __future__ import annotations

import math

import pytest

from dpsgd_cli.accounting.accountants.composition import (
    amplified,
    checked_classical_gaussian,
    classical_gaussian,
    use_epsilon,
)
from dpsgd_cli.accounting.conversions import gaussian_delta
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP


def test_the_classical_lemma_fails_for_little_noise_and_the_check_sees_it() -> None:
    stated = classical_gaussian(0.05, 0.1)
    assert gaussian_delta(1 / 0.05, stated) > 0.1
    assert checked_classical_gaussian(0.05, 0.1) > stated


@pytest.mark.parametrize("epsilon", [1e-9, 0.1, 1.0, 29.9, 30.1, 900.0])
@pytest.mark.parametrize("rate", [1e-6, 0.3, 1.0])
def test_amplification(epsilon: float, rate: float) -> None:
    if epsilon < 600:
        assert amplified(epsilon, rate) == pytest.approx(math.log1p(rate * math.expm1(epsilon)), rel=1e-12)
    assert amplified(epsilon, rate) <= epsilon * (1 + 1e-12)
    assert amplified(epsilon, rate) >= rate * epsilon * (1 - 1e-12)


def test_sampling_passes_q_delta_on() -> None:
    sampled = GaussianSum(4.0, "add-remove", "poisson", 0.01)
    expected = amplified(classical_gaussian(4.0, 1e-6), 0.01)
    assert use_epsilon(sampled, 1e-8, classical_gaussian) == pytest.approx(expected)
    assert use_epsilon(sampled, 1e-8, classical_gaussian, linear=True) < expected
    assert use_epsilon(sampled, 0.02, classical_gaussian) == 0
    assert use_epsilon(sampled, 0.0, classical_gaussian) == math.inf
    assert use_epsilon(PureDP(0.3, "add-remove"), 0.0, classical_gaussian) == 0.3
