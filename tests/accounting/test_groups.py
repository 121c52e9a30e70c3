"""Group privacy: what k records together are promised, against dp-accounting, closed forms and sums by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting.pld.privacy_loss_distribution as theirs
import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import binom, norm

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.groups import ForGroup, log_factor, of_group
from dpsgd_cli.accounting.losses import grouped_pair
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    GroupSum,
    PureDP,
    Release,
    ZeroConcentrated,
)
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from dpsgd_cli.main import main
from tests.accounting.releases import dots_of

DELTA = 1e-5
UPPER = [name for name in accountants.NAMES if accountants.get(name).bound == "upper"]


def delta_of_gaussians(epsilon: float, mu: float) -> float:
    """Balle and Wang 2018, of mu-GDP."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("batching", ["full", "shuffle"])
def test_gaussians_are_those_of_a_kth_of_the_noise(size: int, batching: Any) -> None:
    adjacency: Any = "zero-out" if batching == "shuffle" else "add-remove"
    releases = [Release(GaussianSum(8.0, adjacency, batching), 9), Release(GaussianSum(6.0, adjacency, batching), 4)]
    mu = size * math.sqrt(9 / 64 + 4 / 36)
    found = ForGroup(accountants.get("gaussian"), size)
    assert delta_of_gaussians(found.epsilon(releases, DELTA), mu) == pytest.approx(DELTA, rel=1e-6)
    assert found.delta(releases, 2.0) == pytest.approx(delta_of_gaussians(2.0, mu), rel=1e-6)


def mixture(size: int, noise: float, rate: float, steps: int, width: float = 1e-3) -> float:
    """Epsilon of a group of `size` by dp-accounting: a step moves the sum by how many of them are sampled."""
    chances = [float(binom.pmf(j, size, rate)) for j in range(size + 1)]
    made = theirs.from_mixture_gaussian_mechanism(
        noise,
        sensitivities=list(range(size + 1)),
        sampling_probs=chances,
        value_discretization_interval=width,
    )
    return float(made.self_compose(steps).get_epsilon_for_delta(DELTA))


@pytest.mark.parametrize(("size", "noise", "rate", "steps"), [(2, 4.0, 0.01, 1000), (3, 3.0, 0.02, 40)])
def test_sampled_gaussians_are_bounded_by_the_group_s_own_mixture(
    size: int, noise: float, rate: float, steps: int
) -> None:
    """Ganesh 2024 (arXiv 2401.10294): the mixture is what a group can do, so nothing proved is below it."""
    releases = [Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)]
    # rounded up, by less than 1%
    least = 0.99 * mixture(size, noise, rate, steps)
    for name in UPPER:
        try:
            found = ForGroup(accountants.get(name), size).epsilon(releases, DELTA)
        except UnsupportedMechanism:
            continue
        assert found >= least, name
    assert ForGroup(accountants.get("pld"), size).epsilon(releases, DELTA) <= 1.012 * least


@pytest.mark.parametrize("name", ["pld", "rdp"])
def test_a_group_of_three_multiplies_delta_by_1_and_e_and_e_squared(name: str) -> None:
    """A release that is (1, 1e-6)-DP and no more is (3, 1.11e-5)-DP for three records, and at 1e-5 nothing holds."""
    releases = [Release(ApproximateDP(1.0, 1e-6, "add-remove"), 1)]
    whole = ForGroup(accountants.get(name), 3)
    assert whole.epsilon(releases, 1e-5) == math.inf
    assert whole.epsilon(releases, 1.2e-5) == pytest.approx(3, rel=1e-3)


# arXiv 2407.07737's mixture by dp-accounting 0.6, REFERENCES of the issue: z, q, steps, delta, size -> epsilon
TABLE = [
    (1.0, 0.01, 1000, 1e-5, {2: 3.98, 3: 6.34, 4: 8.90, 8: 20.9, 10: 27.90}),
    (2.0, 0.01, 2000, 1e-5, {2: 1.939, 3: 3.06, 4: 4.25, 8: 9.70}),
    (4.0, 0.1, 500, 1e-5, {2: 5.18, 3: 8.39, 4: 11.96, 8: 29.7}),
    (2.0, 0.01, 10_000, 1e-6, {5: 15.86}),
]


@pytest.mark.parametrize(("noise", "rate", "steps", "delta", "by_size"), TABLE)
def test_groups_of_sampled_batches_cost_what_their_mixture_costs(
    noise: float, rate: float, steps: int, delta: float, by_size: dict[int, float]
) -> None:
    releases = [Release(GaussianSum(noise, "add-remove", "poisson", rate), steps)]
    for size, known in by_size.items():
        assert ForGroup(accountants.get("pld"), size).epsilon(releases, delta) == pytest.approx(known, rel=3e-3)


@pytest.mark.parametrize(("size", "noise", "rate"), [(2, 1.0, 0.1), (7, 0.8, 0.02), (40, 6.0, 0.3)])
@pytest.mark.parametrize("epsilon", [0.05, 0.5, 3.0])
def test_a_step_of_a_group_is_its_integral_in_both_directions(
    size: int, noise: float, rate: float, epsilon: float
) -> None:
    x = np.linspace(-12 * noise, size + 12 * noise, 400_001)
    alone = norm.pdf(x, 0, noise)
    mixed = sum(binom.pmf(j, size, rate) * norm.pdf(x, j, noise) for j in range(size + 1))
    width = 1e-3
    pair = dots_of(grouped_pair(size, rate, noise), width)
    for p, q, losses in ((mixed, alone, pair.remove), (alone, mixed, pair.add)):
        true = float(np.maximum(0, p - math.exp(epsilon) * q).sum()) * (x[1] - x[0])
        own = losses.cells * width
        stated = losses.infinite + float((losses.masses * np.maximum(0, -np.expm1(epsilon - own))).sum())
        assert true * (1 - 1e-6) - 1e-15 <= stated <= true * 1.001 + 1e-12


@pytest.mark.parametrize(("size", "order"), [(1, 3.0), (3, 2.5), (3, 8.0), (5, 1.2)])
def test_divergences_of_a_group_are_the_larger_integral(size: int, order: float) -> None:
    noise, rate = 1.5, 0.1
    x = np.linspace(-15 * noise, order * size + 15 * noise, 400_001)
    alone = norm.logpdf(x, 0, noise)
    parts = [binom.logpmf(j, size, rate) + norm.logpdf(x, j, noise) for j in range(size + 1)]
    mixed = np.logaddexp.reduce(parts, axis=0)
    both = [
        math.log(float(np.exp(order * p + (1 - order) * q).sum()) * (x[1] - x[0])) / (order - 1)
        for p, q in ((mixed, alone), (alone, mixed))
    ]
    found = GroupSum(noise, "zero-out", "poisson", rate, size=size).divergence(order)
    assert found == pytest.approx(max(both), rel=1e-8)


def test_a_group_of_one_is_one_record_and_a_rate_of_one_the_whole_group() -> None:
    def priced(mechanism: GaussianSum, name: str) -> float:
        return accountants.get(name).epsilon([Release(mechanism, 50)], DELTA)

    for name in ("pld", "rdp"):
        one = GroupSum(1.5, "add-remove", "poisson", 0.05, size=1)
        assert priced(one, name) == pytest.approx(priced(GaussianSum(1.5, "add-remove", "poisson", 0.05), name), 1e-6)
        all_of_them = GroupSum(30.0, "add-remove", "poisson", 1.0, size=3)
        assert priced(all_of_them, name) == pytest.approx(priced(GaussianSum(10.0, "add-remove"), name), 1e-6)
    step = GaussianSum(1.5, "add-remove", "poisson", 0.05)
    assert of_group(step, 4) == GroupSum(1.5, "add-remove", "poisson", 0.05, size=4)
    with pytest.raises(PrivacyError, match="add-remove or zero-out"):
        GroupSum(1.0, "replace-one", "poisson", 0.1, size=2)
    with pytest.raises(PrivacyError, match="size"):
        GroupSum(1.0, "add-remove", "poisson", 0.1, size=0)


def test_more_records_than_are_kept_count_as_infinite_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut where it shows: of 60 records at rate .01, more than 4 are drawn at once with a chance below 1e-3."""
    monkeypatch.setattr("dpsgd_cli.accounting.losses._LOST", 1e-3)
    pair = dots_of(grouped_pair(60, 0.01, 8.0), 1e-3)
    beyond = float(binom.sf(4, 60, 0.01))
    assert float(binom.sf(3, 60, 0.01)) > 1e-3 > beyond > 1e-4
    assert beyond <= pair.remove.infinite <= beyond + 1.1e-3
    assert float(pair.remove.masses.sum()) + pair.remove.infinite == pytest.approx(1, abs=1e-9)


def test_a_schedule_of_groups_is_between_its_ends() -> None:
    """And a hundred of a group take no more than seconds (`benchmarks/accounting.py`)."""
    pld = ForGroup(accountants.get("pld"), 5)
    loud, mixed, quiet = (
        pld.epsilon([Release(GaussianSum(z, "add-remove", "poisson", 0.02), n) for z, n in uses], DELTA)
        for uses in ([(1.0, 60)], [(1.0, 20), (1.5, 20), (2.0, 20)], [(2.0, 60)])
    )
    assert quiet < mixed < loud


def test_a_large_rate_is_bounded_by_mechanism() -> None:
    """Where nearly everybody is sampled, the statement of one record loses much, and the pair of a group little."""
    release = Release(GaussianSum(10.0, "add-remove", "poisson", 0.95), 1)
    found = ForGroup(accountants.get("pld"), 3).epsilon([release], DELTA)
    least = 0.99 * mixture(3, 10.0, 0.95, 1, 1e-2)
    assert least <= found <= 1.1 * least
    pair = of_group(release.mechanism, 3, mixtures=False)
    assert type(pair) is GaussianSum
    assert (pair.noise_multiplier, pair.sampling_rate) == pytest.approx((10 / 3, 1 - 0.05**3))


@pytest.mark.parametrize("source", ["pure", "laplace", "exponential"])
def test_pure_releases_cost_k_times(source: Any) -> None:
    releases = [Release(PureDP(0.01, "add-remove", source), 3)]
    assert ForGroup(accountants.get("basic-composition"), 7).epsilon(releases, DELTA) == pytest.approx(0.21)
    assert of_group(releases[0].mechanism, 7) == PureDP(0.07, "add-remove", source)


def test_zcdp_grows_with_the_square() -> None:
    """Bun and Steinke 2016, Proposition 1.9, and their conversion rho + 2 sqrt(rho log(1 / delta))."""
    releases = [Release(ZeroConcentrated(0.01, "add-remove"))]
    found = ForGroup(accountants.get("zcdp"), 3).epsilon(releases, DELTA)
    assert found <= 0.09 + 2 * math.sqrt(0.09 * math.log(1 / DELTA)) + 1e-9
    grown = of_group(releases[0].mechanism, 3)
    assert isinstance(grown, ZeroConcentrated) and grown.rho == pytest.approx(0.09)


def test_approximate_releases_by_hand() -> None:
    """From neighbour to neighbour: delta + e^eps delta + e^(2 eps) delta at 3 eps."""
    found = of_group(ApproximateDP(0.5, 1e-6, "add-remove"), 3)
    assert isinstance(found, ApproximateDP)
    assert found.epsilon == 1.5 and found.delta == pytest.approx(1e-6 * (1 + math.exp(0.5) + math.exp(1.0)))
    assert math.exp(log_factor(0.0, 4)) == pytest.approx(4) and log_factor(800.0, 3) == pytest.approx(1600)
    with pytest.raises(UnsupportedMechanism, match="delta passes 1"):
        of_group(ApproximateDP(20.0, 1e-6, "add-remove"), 3)


def test_what_is_kept_of_a_release() -> None:
    """Everything but the noise and the rate: a group's is of the same kind."""
    epoch = CorrelatedSums(2.0, "zero-out", "shuffle", correlation="buffered", bands=3)
    pair = of_group(epoch, 2)
    assert isinstance(pair, CorrelatedSums) and (pair.bands, pair.batching) == (3, "shuffle")
    assert (pair.noise_multiplier, pair.sampling_rate) == (1.0, 1.0)
    step = of_group(GaussianSum(2.0, "add-remove", "poisson", 0.1), 2, mixtures=False)
    assert type(step) is GaussianSum
    assert (step.noise_multiplier, step.sampling_rate) == pytest.approx((1.0, 0.19))


@pytest.mark.parametrize(
    "mechanism",
    [
        GaussianSum(2.0, "replace-one", "fixed", 0.01),
        GaussianSum(2.0, "replace-one", "poisson", 0.01),
        GaussianSum(2.0, "add-remove", "random-allocation", 0.01),
    ],
    ids=lambda one: f"{one.batching} {one.adjacency}",
)
def test_samples_without_a_pair_of_groups_are_bounded_by_the_statement_of_one_record(mechanism: GaussianSum) -> None:
    with pytest.raises(UnsupportedMechanism, match=mechanism.batching):
        of_group(mechanism, 2)
    pld, uses = accountants.get("pld"), [Release(mechanism, 10)]
    found = ForGroup(pld, 2).epsilon(uses, 1e-6)
    one = pld.delta(uses, found / 2)
    assert one * (1 + math.exp(found / 2)) == pytest.approx(1e-6, rel=0.2)
    assert one * (1 + math.exp(found / 2)) <= 1e-6 * (1 + 1e-6)


def test_cycles_of_correlated_noise_are_bounded_by_the_statement_of_one_record() -> None:
    """Records of a group may be in different groups of the cycle, whose blocks of steps overlap: no pair is proved."""
    cycle = CorrelatedSums(4.0, "add-remove", "poisson", 0.02, bands=2)
    with pytest.raises(UnsupportedMechanism, match="cycles overlap"):
        of_group(cycle, 2)
    pld = accountants.get("pld")
    found = ForGroup(pld, 2).epsilon([Release(cycle, 100)], DELTA)
    # the sum of both directions' deltas: delta' + e^epsilon' delta' at 2 epsilon'
    one = found / 2
    assert pld.delta([Release(cycle, 100)], one) * (1 + math.exp(one)) <= DELTA * (1 + 1e-6)


def test_the_command_states_groups_of_any_source() -> None:
    def rows(*arguments: str) -> list[dict[str, Any]]:
        done = CliRunner().invoke(main, ["account", *arguments, "--format", "json"])
        assert done.exit_code == 0, done.output
        return [row for row in json.loads(done.stdout) if row["epsilon"] is not None]

    flags = ["--batching", "full", "--noise-multiplier", "10", "--steps", "25", "--accountant", "gaussian"]
    ((one,), (three,)) = rows(*flags), rows(*flags, "--group", "3")
    assert delta_of_gaussians(three["epsilon"], 1.5) == pytest.approx(DELTA, rel=1e-6)
    assert three["rho"] == pytest.approx(9 * one["rho"]) and three["note"].endswith("groups of 3")
    gate = CliRunner().invoke(main, ["account", *flags, "--group", "3", "--max-epsilon", str(one["epsilon"])])
    assert gate.exit_code == 1
    for extra in (["--target-epsilon", "3"], ["--curve"], ["--best-of", "3"]):
        assert CliRunner().invoke(main, ["account", *flags, "--group", "3", *extra]).exit_code == 2
    assert "--group is 0" in CliRunner().invoke(main, ["account", *flags, "--group", "0"]).output
