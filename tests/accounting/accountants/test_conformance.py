"""What every accountant must keep, whatever its formula: one suite for all of them.

An accountant may refuse (UnsupportedMechanism); what it does state must be a number in range, grow with what is
released and shrink with noise, and an upper bound must not be below the exact values.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import BATCHINGS as KINDS
from dpsgd_cli.accounting.adjacency import Adjacency, Batching
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    Mechanism,
    PureDP,
    Release,
    ZeroConcentrated,
)
from dpsgd_cli.errors import UnsupportedMechanism

BATCHINGS: dict[Batching, Adjacency] = {
    "full": "add-remove",
    "poisson": "add-remove",
    "shuffle": "zero-out",
    "fixed": "replace-one",
    "random-allocation": "add-remove",
}
RELAXED = settings(max_examples=10)
everyone = pytest.mark.parametrize("name", accountants.NAMES)


def gaussian(batching: Batching, noise: float, rate: float) -> GaussianSum:
    """Of a sample at about `rate`; an epoch of allocated records has at most 16 steps, to be quick."""
    adjacency, kind = BATCHINGS[batching], KINDS[batching]
    if kind.sampled and kind.by_epoch:
        rate = 1 / min(16, max(2, round(1 / rate)))
    return GaussianSum(noise, adjacency, batching, rate if kind.sampled else 1.0)


def stated(name: str, releases: list[Release], delta: float) -> float | None:
    """Epsilon, checked to be in range; None for a refusal."""
    try:
        epsilon = accountants.get(name).epsilon(releases, delta)
    except UnsupportedMechanism:
        return None
    assert epsilon >= 0
    assert not math.isnan(epsilon)
    return epsilon


def no_more(smaller: float | None, larger: float | None) -> bool:
    """Monotone up to rounding, where both are stated; a refusal is allowed to begin on the dearer side."""
    return smaller is None or larger is None or smaller <= larger * (1 + 1e-6) + 1e-12


mechanisms = st.one_of(
    st.builds(
        gaussian,
        st.sampled_from(sorted(BATCHINGS)),
        st.floats(0.4, 200),
        st.floats(1e-5, 0.5),
    ),
    st.builds(PureDP, st.floats(0, 3), st.just("add-remove"), st.sampled_from(["laplace", "exponential", "pure"])),
)


@everyone
def test_nothing_released_costs_nothing(name: str) -> None:
    accountant = accountants.get(name)
    for batching in BATCHINGS:
        unused = Release(gaussian(batching, 3.0, 0.01), 0)
        if accountant.refusal(unused.mechanism) is None:
            assert accountant.epsilon([unused], 1e-5) == 0
            assert accountant.delta([unused], 1.0) == 0
    assert accountant.epsilon([], 1e-5) == 0
    assert accountant.delta([], 0.0) == 0
    assert accountant.curve([], 1e-5) == []


@everyone
@RELAXED
@given(rho=st.floats(1e-6, 20), count=st.integers(1, 20), log_delta=st.floats(-25, -1))
def test_what_is_zcdp_and_nothing_more_is_priced_by_its_divergences_or_refused(
    name: str, rho: float, count: int, log_delta: float
) -> None:
    """rho-zCDP bounds the divergences of a whole by those of the Gaussian of that rho, and no other test of it."""
    whole, delta = [Release(ZeroConcentrated(rho, "add-remove"), count)], math.exp(log_delta)
    alike = [Release(GaussianSum((2 * rho) ** -0.5, "add-remove"), count)]
    if name not in ("zcdp", "zcdp-tight", "rdp", "rdp-markov"):
        with pytest.raises(UnsupportedMechanism, match="chosen from what was released"):
            accountants.get(name).epsilon(whole, delta)
        return
    accountant = accountants.get(name)
    assert accountant.epsilon(whole, delta) == pytest.approx(accountant.epsilon(alike, delta), rel=1e-9)
    assert accountant.delta(whole, 1.0) == pytest.approx(accountant.delta(alike, 1.0), rel=1e-9)


@everyone
def test_no_noise_is_no_privacy(name: str) -> None:
    accountant = accountants.get(name)
    for batching in BATCHINGS:
        epsilon = stated(name, [Release(gaussian(batching, 0.0, 0.01))], 1e-5)
        assert epsilon in (None, math.inf)
        if epsilon is not None:
            # A sampled release without noise harms nobody while the record is not drawn.
            drawn = 0.01 if batching in ("poisson", "fixed") else 1
            assert accountant.delta([Release(gaussian(batching, 0.0, 0.01))], 5.0) >= drawn


@everyone
@RELAXED
@given(mechanism=mechanisms, count=st.integers(1, 3000), log_delta=st.floats(-25, -1))
def test_more_uses_smaller_deltas_less_noise_and_more_sampling_cost_more(
    name: str, mechanism: Mechanism, count: int, log_delta: float
) -> None:
    delta = math.exp(log_delta)
    here = stated(name, [Release(mechanism, count)], delta)
    assert no_more(here, stated(name, [Release(mechanism, 2 * count)], delta))
    assert no_more(here, stated(name, [Release(mechanism, count)], delta / 3))
    if here is None or not isinstance(mechanism, GaussianSum):
        return
    # The discretisation of pld is relative to a step's own spread, so that monotonicity holds to its precision.
    most = here * (1 + (1e-3 if name == "pld" else 0))
    noise, rate = mechanism.noise_multiplier, mechanism.sampling_rate
    quieter, rarer = gaussian(mechanism.batching, noise * 1.3, rate), gaussian(mechanism.batching, noise, rate * 0.7)
    assert no_more(stated(name, [Release(quieter, count)], delta), most)
    assert no_more(stated(name, [Release(rarer, count)], delta), most)


@everyone
@RELAXED
@given(mechanism=mechanisms, count=st.integers(1, 3000), log_delta=st.floats(-25, -1))
@example(mechanism=PureDP(2.625, "add-remove", "laplace"), count=1, log_delta=-6.0)
def test_epsilon_to_delta_and_back(name: str, mechanism: Mechanism, count: int, log_delta: float) -> None:
    releases = [Release(mechanism, count)]
    epsilon = stated(name, releases, math.exp(log_delta))
    if epsilon is None or epsilon == math.inf:
        return
    delta = accountants.get(name).delta(releases, epsilon)
    assert 0 <= delta <= 1
    assert delta <= math.exp(log_delta) * 1.02 + 1e-250
    if 0.01 < epsilon < 50 and delta > 1e-20:
        back = stated(name, releases, delta)
        assert back is None or back == pytest.approx(epsilon, rel=0.01) or isinstance(mechanism, PureDP)


@everyone
@RELAXED
@given(first=mechanisms, second=mechanisms, counts=st.tuples(st.integers(1, 200), st.integers(1, 200)))
def test_one_release_more_never_costs_less(
    name: str, first: Mechanism, second: Mechanism, counts: tuple[int, int]
) -> None:
    alone = stated(name, [Release(first, counts[0])], 1e-5)
    together = stated(name, [Release(first, counts[0]), Release(second, counts[1])], 1e-5)
    slack = 1 + (1e-3 if name == "pld" else 1e-9)
    assert alone is None or together is None or alone <= together * slack + 1e-9


@everyone
@RELAXED
@given(noise=st.floats(0.7, 300), count=st.integers(1, 500))
def test_an_upper_bound_is_above_the_exact_gaussian(name: str, noise: float, count: int) -> None:
    accountant = accountants.get(name)
    exact = accountants.get("gaussian")
    for batching in ("full", "shuffle"):
        releases = [Release(gaussian(batching, noise, 1.0), count)]
        epsilon = stated(name, releases, 1e-6)
        if epsilon is not None and accountant.bound == "upper":
            assert epsilon >= exact.epsilon(releases, 1e-6) * (1 - 1e-9)


@everyone
@RELAXED
@given(noise=st.floats(0.7, 30), rate=st.floats(1e-3, 0.3), count=st.integers(1, 2000))
def test_an_upper_bound_is_above_the_loss_distribution(name: str, noise: float, rate: float, count: int) -> None:
    releases = [Release(gaussian("poisson", noise, rate), count)]
    epsilon = stated(name, releases, 1e-6)
    if epsilon is not None and accountants.get(name).bound == "upper":
        assert epsilon >= accountants.get("pld").epsilon(releases, 1e-6) * (1 - 1e-3)


@everyone
def test_curve_is_the_epsilon_of_every_prefix(name: str) -> None:
    accountant = accountants.get(name)
    for batching in BATCHINGS:
        loud = 600.0 if "lemma" in name or "advanced" in name else 60.0
        epochs = [[Release(gaussian(batching, loud - i, 0.001), 2)] for i in range(5)]
        if accountant.refusal(epochs[0][0].mechanism) is None:
            slow = [accountant.epsilon([r for epoch in epochs[: i + 1] for r in epoch], 1e-5) for i in range(5)]
            assert accountant.curve(epochs, 1e-5) == pytest.approx(slow, rel=2e-3)


@everyone
def test_what_has_no_theorem_is_refused_by_name(name: str) -> None:
    accountant = accountants.get(name)
    unproved = [
        GaussianSum(1.0, "add-remove", "shuffle"),
        GaussianSum(1.0, "replace-one", "random-allocation", 0.1),
        CorrelatedSums(1.0, "replace-one", "poisson", 0.1),
        GaussianSum(1.0, "add-remove", "fixed", 0.1),
        GaussianSum(1.0, "zero-out", "fixed", 0.1),
        GaussianSum(1e-120, "add-remove", "full"),
        GaussianSum(1.0, "add-remove", "poisson", 1e-200),
    ]
    for mechanism in unproved:
        with pytest.raises(UnsupportedMechanism, match=name):
            accountant.epsilon([Release(mechanism)], 1e-5)
        with pytest.raises(UnsupportedMechanism, match=name):
            accountant.delta([Release(mechanism)], 1.0)


@everyone
def test_mixed_adjacencies_have_no_common_statement(name: str) -> None:
    releases = [Release(GaussianSum(5.0, "add-remove")), Release(GaussianSum(5.0, "zero-out"))]
    with pytest.raises(UnsupportedMechanism, match="add-remove, zero-out"):
        accountants.get(name).epsilon(releases, 1e-5)


@everyone
def test_a_leak_larger_than_delta_leaves_no_statement(name: str) -> None:
    epsilon = stated(name, [Release(ApproximateDP(0.1, 1e-4, "add-remove"))], 1e-5)
    assert epsilon in (None, math.inf)


@pytest.mark.parametrize("name", ["moments", "zcdp-rs"])
def test_poisson_accountants_say_that_shuffling_is_not_poisson_sampling(name: str) -> None:
    with pytest.raises(UnsupportedMechanism, match="not Poisson sampling"):
        accountants.get(name).epsilon([Release(GaussianSum(5.0, "zero-out", "shuffle"))], 1e-5)


def test_zcdp_rs_refuses_what_lies_outside_its_region() -> None:
    accountant = accountants.get("zcdp-rs")
    for noise, rate, words in ((0.9, 0.01, "from 1 on"), (4.0, 0.02, "1 / \\(16")):
        with pytest.raises(UnsupportedMechanism, match=words):
            accountant.epsilon([Release(GaussianSum(noise, "add-remove", "poisson", rate))], 1e-5)
