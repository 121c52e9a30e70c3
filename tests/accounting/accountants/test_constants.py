"""Constants of theorems, from the theorems' own texts: formulas written out again, from the side of the paper."""

from __future__ import annotations

import math

import pytest

from dpsgd_cli.accounting import accountants, conversions
from dpsgd_cli.accounting.accountants.additive import largest_order, sampled_rho
from dpsgd_cli.accounting.accountants.composition import amplified, classical_gaussian
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release

STEPS, N, EPSILON, DELTA, LIPSCHITZ = 400, 200, 0.5, 1e-6, 3.0


def test_lemma_15_5_is_the_variance_that_the_lecture_states() -> None:
    """sigma^2 = 64 L^2 T log(2/delta) log(2.5 T/(delta n)) / (n epsilon)^2, on gradients of sensitivity 2 L."""
    logs = math.log(2 / DELTA) * math.log(2.5 * STEPS / (DELTA * N))
    sigma = math.sqrt(64 * LIPSCHITZ**2 * STEPS * logs) / (N * EPSILON)
    release = Release(GaussianSum(sigma / (2 * LIPSCHITZ), "replace-one", "fixed", 1 / N), STEPS)
    assert accountants.get("lemma-15.5").epsilon([release], DELTA) == pytest.approx(EPSILON, rel=1e-9)


def test_lemma_15_1_is_the_variance_that_the_lecture_states() -> None:
    """sigma^2 = 64 L^2 T log(2/delta) log(2.5 T/delta) / (n epsilon)^2, on mean gradients of sensitivity 2 L / n."""
    logs = math.log(2 / DELTA) * math.log(2.5 * STEPS / DELTA)
    sigma = math.sqrt(64 * LIPSCHITZ**2 * STEPS * logs) / (N * EPSILON)
    release = Release(GaussianSum(sigma / (2 * LIPSCHITZ / N), "replace-one"), STEPS)
    assert accountants.get("lemma-15.1").epsilon([release], DELTA) == pytest.approx(EPSILON, rel=1e-9)


def test_nikolov_is_one_gaussian_of_root_t_times_the_sensitivity() -> None:
    z = math.sqrt(STEPS) * math.sqrt(2 * math.log(1.25 / DELTA)) / EPSILON
    stated = accountants.get("nikolov").epsilon([Release(GaussianSum(z, "replace-one"), STEPS)], DELTA)
    assert stated == pytest.approx(EPSILON, rel=1e-9)


def test_lemma_15_2_divides_epsilon_and_delta_among_k_uses() -> None:
    """epsilon' = epsilon / (2 sqrt(2 k log(2/delta))) and delta' = delta / (2 k), by Lemma 15.3 at each use."""
    single = EPSILON / (2 * math.sqrt(2 * STEPS * math.log(2 / DELTA)))
    z = math.sqrt(2 * math.log(1.25 / (DELTA / (2 * STEPS)))) / single
    stated = accountants.get("advanced-composition").epsilon([Release(GaussianSum(z, "add-remove"), STEPS)], DELTA)
    assert stated == pytest.approx(EPSILON, rel=1e-9)


def test_strong_composition_of_pure_releases_is_that_of_dwork_rothblum_and_vadhan() -> None:
    """sqrt(2 k log(1/delta)) eps + k eps (e^eps - 1)."""
    stated = accountants.get("strong-composition").epsilon([Release(PureDP(0.1, "add-remove"), 50)], DELTA)
    assert stated == pytest.approx(0.1 * math.sqrt(100 * math.log(1e6)) + 5 * (math.exp(0.1) - 1), rel=1e-9)


def test_rho_and_mu_of_single_releases() -> None:
    """Bun and Steinke 2016, Propositions 1.4 and 1.6; Cesar and Rogers 2021, Lemma 3.2; Dong, Roth and Su 2022."""
    assert GaussianSum(4.0, "add-remove").rho == pytest.approx(1 / 32)
    assert GaussianSum(4.0, "zero-out", "shuffle").rho == pytest.approx(1 / 32)
    assert PureDP(0.6, "add-remove").rho == pytest.approx(0.18)
    assert PureDP(0.6, "add-remove", "laplace").rho == pytest.approx(0.18)
    assert PureDP(0.6, "add-remove", "exponential").rho == pytest.approx(0.045)
    assert GaussianSum(4.0, "add-remove").mu == 0.25
    # one standard deviation each way holds 0.6826895 of the normal mass: its corner is at e^eps = (1 - t) / t
    corner = math.log((1 - 0.158655254) / 0.158655254)
    assert PureDP(corner, "add-remove").mu == pytest.approx(2.0, rel=1e-8)


def test_published_conversions() -> None:
    """Bun and Steinke 2016, Proposition 1.3; Mironov 2017, Proposition 3; the Gaussian lemma of Dwork and Roth 2014."""
    assert conversions.bun_steinke_epsilon(0.5, math.exp(-8)) == pytest.approx(0.5 + 2 * 2)
    assert conversions.bun_steinke_delta(0.5, 4.5) == pytest.approx(math.exp(-8))
    gaussian = [Release(GaussianSum(2.0, "add-remove"))]
    orders = accountants.get("rdp-markov").orders  # type: ignore[attr-defined]
    best = min(a / 8 + math.log(1e5) / (a - 1) for a in orders)
    assert accountants.get("rdp-markov").epsilon(gaussian, 1e-5) == pytest.approx(best, rel=1e-9)
    moments = min((m + 1) / 8 + math.log(1e5) / m for m in range(1, 33))
    assert accountants.get("moments").epsilon(gaussian, 1e-5) == pytest.approx(moments, rel=1e-9)
    assert classical_gaussian(2.0, 1e-5) == pytest.approx(math.sqrt(2 * math.log(125_000)) / 2)


@pytest.mark.parametrize("epsilon", [0.3, 2.0, 40.0])
def test_amplification_by_sampling_is_exact_for_randomised_response(epsilon: float) -> None:
    """Sampled at rate q, the likely answer has probability (1-q) r + q p against r: log(1 + q (e^eps - 1))."""
    unlikely = 1 / (1 + math.exp(epsilon))
    mixed = 0.9 * unlikely + 0.1 * (1 - unlikely)
    assert amplified(epsilon, 0.1) == pytest.approx(math.log(mixed / unlikely), rel=1e-9)


def test_zcdp_rs_is_yu_et_als_p_and_u() -> None:
    sampled = GaussianSum(4.0, "add-remove", "poisson", 0.01)
    assert sampled_rho(sampled) == pytest.approx(0.01**2 / 4**2)
    assert largest_order(sampled) == pytest.approx(16 * math.log(25) + 1)
