"""Correlated noise as numbers: weights and errors against matrices and published values, charges against blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.noise.price import NoiseStrategy, by_cycle, strategy
from dpsgd_cli.noise.settings import CorrelatedNoise
from dpsgd_cli.recipe.schema import Recipe


def matrix(own: NoiseStrategy) -> np.ndarray:
    """C, as a matrix, from its definition, in other words than `NoiseStrategy.column`."""
    below = np.eye(own.steps, k=-1)
    powers = [np.linalg.matrix_power(below, j) for j in range(1, own.steps + 1)]
    found = np.eye(own.steps) + sum((t * power for t, power in zip(own.taken, powers, strict=False)), 0 * below)
    return np.asarray(found / np.linalg.norm(found[:, 0]))


def made(bands: int, steps: int, epochs: int = 1) -> NoiseStrategy:
    return strategy(CorrelatedNoise(bands=bands), epochs * steps)


def whole_error(inverse: np.ndarray, multipliers: np.ndarray) -> float:
    """Root mean square over steps of the deviation of what C^-1 y adds to the weights, from whole matrices."""
    sums = np.tril(np.ones(inverse.shape)) @ inverse @ np.diag(multipliers)
    return float(np.sqrt((sums**2).sum(axis=1).mean()))


def test_weights_are_the_published_ones() -> None:
    assert round(NoiseStrategy(1000).error([1.0]), 5) == 22.37186
    assert made(5, 5).column.tolist() == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16, 35 / 128])


@given(
    bands=st.integers(1, 9),
    steps=st.integers(1, 9),
    multipliers=st.lists(st.floats(0.5, 3), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_the_error_is_that_of_whole_matrices(bands: int, steps: int, multipliers: list[float]) -> None:
    own = made(bands, steps, len(multipliers))
    assert np.linalg.norm(matrix(own), axis=0).max() == pytest.approx(1, abs=1e-12)
    expected = whole_error(np.linalg.inv(matrix(own)), np.repeat(multipliers, steps))
    assert own.error(multipliers) == pytest.approx(expected, rel=1e-8)


ALLOCATED: dict[str, Any] = {"batching": "random-allocation"}


def recipe(noise: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    base: dict[str, Any] = {
        "name": "planned",
        "data": {"path": "d.csv", "target": "y"},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 100} | changes.pop("method", {}),
        "privacy": {"schedule": {"kind": "uniform", "initial": 2.0}, "delta": 1e-5} | changes.pop("privacy", {}),
        "epochs": 4,
        "seed": 0,
    }
    if noise is not None:
        base["privacy"] = base["privacy"] | {"noise": noise}
    return Recipe.model_validate(base | changes)


def banded(bands: int | str, **changes: Any) -> Plan:
    return plan_for(recipe({"kind": "banded", "bands": bands}, **changes), Facts(1050))


def cycles(bands: int, multipliers: list[float], steps: int) -> list[list[tuple[float, int]]]:
    charges = by_cycle(multipliers, steps, bands)
    assert {(use.squared, use.batching) for epoch in charges for use in epoch} <= {(1.0, "poisson")}
    return [[(use.multiplier, use.uses) for use in epoch] for epoch in charges]


@given(
    steps=st.integers(1, 12),
    bands=st.integers(1, 30),
    multipliers=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=6),
)
def test_what_is_charged_covers_every_group(steps: int, bands: int, multipliers: list[float]) -> None:
    """Every block of steps that a record of any group moves, listed one by one, by the noise of those steps.

    At the end, and after every epoch: what was charged by then covers what was released by then.
    """
    charged = cycles(bands, multipliers, steps)
    noise = np.repeat(multipliers, steps)
    assert len(charged) == len(multipliers)
    for done in range(1, len(multipliers) + 1):
        uses = [z for epoch in charged[:done] for z, count in epoch for _ in range(count)]
        released = done * steps
        assert len(uses) == math.ceil(released / bands)
        for group in range(bands):
            blocks = [noise[s : min(s + bands, released)] for s in range(group, released, bands)]
            # whatever the weights of a block, its noise is no less than the least of it
            least = sorted(block.min() for block in blocks)
            assert all(z <= own for z, own in zip(sorted(uses), least, strict=False))
            assert len(least) <= len(uses)


def test_a_falling_schedule_is_charged_the_epoch_it_is_in() -> None:
    """But for the cycles that reach into the next one: of 10 steps and 2 bands, cycles of steps 8 (to 10)."""
    assert cycles(2, [3.0, 2.0, 1.0], 10) == [[(3.0, 4), (2.0, 1)], [(2.0, 4), (1.0, 1)], [(1.0, 5)]]
    assert cycles(12, [3.0, 2.0, 1.0], 4) == [[(3.0, 0), (1.0, 1)], [(2.0, 0)], [(1.0, 0)]]


def strange(steps: int) -> NoiseStrategy:
    """A strategy of weights that nobody would choose, of both signs."""
    return NoiseStrategy(steps, (0.2, -0.1, 0.8))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_record_in_one_order_moves_no_more_than_is_charged(steps: int) -> None:
    """By the worst vectors of a record that random search finds, at every place of the order, after every epoch.

    The noise falls from epoch to epoch. Vectors of one direction attain it where C has no negative entries and noise is
    constant; charges that leave out the products of two epochs would be passed.
    """
    multipliers, random = [2.0, 1.5, 1.0, 1.0], np.random.default_rng(0)
    total = len(multipliers) * steps
    own = strange(total)
    charges = own.charges("shuffle", multipliers, steps, 1)
    noise = np.repeat(multipliers, steps)
    for done in range(1, len(multipliers) + 1):
        price = sum(use.uses * use.squared / use.multiplier**2 for epoch in charges[:done] for use in epoch)
        rows = matrix(own)[: done * steps] / noise[: done * steps, None]
        worst = 0.0
        for place in range(steps):
            columns = rows[:, place : done * steps : steps]
            for signs in itertools.product((1, -1), repeat=done):
                worst = max(worst, float(((columns * signs).sum(axis=1) ** 2).sum()))
            for _ in range(20):
                vectors = random.standard_normal((done, 3))
                vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                worst = max(worst, float(((columns @ vectors) ** 2).sum()))
        assert worst <= price * (1 + 1e-9)
    flat = own.charges("shuffle", [1.0] * 4, steps, 1)
    price = sum(use.uses * use.squared for epoch in flat for use in epoch)
    attained = float((np.abs(matrix(own))[:, ::steps].sum(axis=1) ** 2).sum())
    assert price == pytest.approx(attained, rel=1e-12)


def ratio_divergences(
    squares: np.ndarray, products: np.ndarray, weights: np.ndarray, thresholds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return E (R - a)_+ and E (1 - a R)_+ of R = sum_p w_p exp(G_p - G_p.G_p / 2), G normal of covariance `products`.

    By 400,000 points, the same for each call.
    """
    values, vectors = np.linalg.eigh(products)
    normals = np.random.default_rng(1).standard_normal((400_000, len(products)))
    shown = normals @ (vectors * np.sqrt(np.maximum(values, 0))).T
    ratio = np.exp(shown - squares / 2) @ weights
    one = np.maximum(ratio[:, None] - thresholds, 0).mean(axis=0)
    other = np.maximum(1 - thresholds * ratio[:, None], 0).mean(axis=0)
    return one, other


@pytest.mark.parametrize("groups", [1, 2])
def test_random_allocation_of_correlated_noise_costs_no_less_than_its_law(groups: int) -> None:
    """2 epochs of 4 steps, of a record of each group, with the noise of the last epoch lower.

    All sets of steps are listed with the products of their rows; the law of the ratio is drawn. Neither H_a may pass
    the price by more than the drawing does. A price without what all sets share would be passed.
    """
    multipliers, steps = [1.5, 1.2], 4
    own = strange(8)
    price = accountants.get("pld").profile(released(own, multipliers, steps, groups), 1e-4)
    alone = [r for r in released(own, multipliers, steps, groups) if r.mechanism.batching != "full"]  # type: ignore[union-attr]
    cheaper, passed = accountants.get("pld").profile(alone, 1e-4), False
    rows = np.abs(matrix(own)) / np.repeat(multipliers, steps)[:, None]
    thresholds = np.array([1.0, 1.5, 2.5, 4.0])
    for group in range(groups):
        places = range(group, steps, groups)
        means = np.array([rows[:, i] + rows[:, steps + j] for i in places for j in places])
        products = means @ means.T
        weights = np.full(len(means), 1 / len(means))
        found = ratio_divergences(np.diag(products), products, weights, thresholds)
        for place, threshold in enumerate(thresholds):
            worst = max(float(one[place]) for one in found)
            assert worst <= price(math.log(threshold)) + 4e-3 * math.sqrt(worst)
            passed |= worst > cheaper(math.log(threshold)) + 4e-3 * math.sqrt(worst)
    assert passed == (groups < 4), "what all sets share costs something"


def released(own: NoiseStrategy, multipliers: list[float], steps: int, groups: int) -> list[Release]:
    """What a plan charges for an allocation, as Gaussians."""
    charges = own.charges("random-allocation", multipliers, steps, groups)
    rates = {"random-allocation": groups / steps, "full": 1.0}
    return [
        Release(
            CorrelatedSums(
                use.multiplier / math.sqrt(use.squared), "add-remove", use.batching, rates[use.batching], bands=steps
            ),
            use.uses,
        )
        for epoch in charges
        for use in epoch
    ]


def test_products_bound_those_of_all_columns() -> None:
    own = strange(12)
    size = np.abs(matrix(own))
    all_of = size.T @ size
    for distance in range(12):
        largest = max(all_of[i, j] for i in range(12) for j in range(12) if abs(i - j) >= distance)
        assert own.product(distance) >= largest * (1 - 1e-12)
        assert own.product(distance) <= largest + 1e-9
    assert own.product(12) == 0


def test_weights_of_both_signs_count_by_their_size() -> None:
    """Weights 1, -1/2, 1/2 have 3/2 as the square of their norm; 1/2 + 1/4 of it one step apart, and 1/2 two steps."""
    own = NoiseStrategy(5, (-0.5, 0.5))
    assert [own.product(distance) for distance in range(4)] == pytest.approx([1, 1 / 2, 1 / 3, 0])


def test_bands_as_many_as_groups_share_nothing() -> None:
    own = strange(24)
    assert [[tuple(use) for use in epoch] for epoch in own.charges("random-allocation", [2.0, 1.0], 12, 4)] == [
        [(2.0, 1.0, "random-allocation", 0), (1.0, 1.0, "random-allocation", 1)],
        [(1.0, 1.0, "random-allocation", 1)],
    ]
    assert any(use.batching == "full" for use in own.charges("random-allocation", [1.0], 12, 3)[0])


@pytest.mark.parametrize("bands", [1, 2, 3, 7, 10])
def test_the_price_is_that_of_so_many_sampled_gaussians(bands: int) -> None:
    """44 steps, 1,050 records in batches of 100: ceil(44 / b) of rate b 100 / 1050, priced by dp-accounting."""
    plan = banded(bands)
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(bands * 100 / 1050, dp_accounting.GaussianDpEvent(2.0)), -(-44 // bands)
    )
    orders = [1 + x / 10 for x in range(1, 400)]
    expected = RdpAccountant(orders).compose(event).get_epsilon(1e-5)
    assert accountants.get("rdp").epsilon(plan.releases, 1e-5) == pytest.approx(expected, rel=2e-3)
    mechanisms = {release.mechanism for release in plan.releases}
    (own,) = mechanisms
    assert isinstance(own, CorrelatedSums) and (own.bands, own.sampling_rate) == (bands, bands * 100 / 1050)
    assert sum(release.count for release in plan.releases) == -(-44 // bands)


def test_every_accountant_prices_it_as_the_gaussian_that_it_is_or_refuses_both() -> None:
    pairs: list[tuple[GaussianSum, GaussianSum]] = [
        (
            CorrelatedSums(30.0, "add-remove", "poisson", 0.01, bands=4),
            GaussianSum(30.0, "add-remove", "poisson", 0.01),
        ),
        (
            CorrelatedSums(30.0, "zero-out", "shuffle", bands=9),
            GaussianSum(30.0, "zero-out", "shuffle"),
        ),
    ]
    for name in accountants.NAMES:
        for one, other in pairs:
            assert said_of(name, one) == said_of(name, other)


def said_of(name: str, mechanism: GaussianSum) -> float | str:
    """What an accountant states of 20 uses, or why it does not."""
    try:
        return accountants.get(name).epsilon([Release(mechanism, 20)], 1e-5)
    except UnsupportedMechanism as refusal:
        return str(refusal)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"batching": "fixed", "adjacency": "replace-one", "sampling_rate": 0.1}, "batching"),
        ({"bands": 0}, "bands"),
    ],
)
def test_what_no_theorem_is_about_is_no_record(given: dict[str, Any], named: str) -> None:
    with pytest.raises(PrivacyError, match=f"^{named} is"):
        CorrelatedSums(1.0, **{"adjacency": "add-remove", "batching": "poisson", **given})


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_one_order_costs_one_gaussian_of_all_epochs(adjacency: str) -> None:
    """2 a step: mu of 4 epochs of 11 steps is the largest |C g| over 2, of whole matrices."""
    method = {"batching": "shuffle"}
    plan = plan_for(
        recipe({"kind": "banded", "bands": 30}, method=method, privacy={"adjacency": adjacency}), Facts(1050)
    )
    assert [[(r.mechanism.kind, r.count) for r in epoch] for epoch in plan.epochs] == [[("correlated", 1)]] * 4
    assert plan.correlated is not None and plan.correlated.steps == 44
    moved = float(np.linalg.norm(np.abs(matrix(NoiseStrategy.of(plan.correlated)))[:, ::11].sum(axis=1)))
    expected = accountants.get("gaussian").epsilon([Release(GaussianSum(2.0 / moved, "zero-out"))], 1e-5)
    assert plan.guarantee().epsilon == pytest.approx(expected, rel=1e-6)
    assert plan.sensitivity == (2.0 if adjacency == "replace-one" else 1.0)
    mechanisms = [release.mechanism for release in plan.releases]
    noise = {m.noise_multiplier * m.sensitivity for m in mechanisms if isinstance(m, CorrelatedSums)}
    assert max(noise) == pytest.approx(min(noise)) == pytest.approx(2.0 * plan.sensitivity)


@pytest.mark.parametrize("kind", ["private-selection", "python"])
def test_methods_with_steps_of_their_own_are_refused(kind: str) -> None:
    more: dict[str, Any] = {
        "private-selection": {"candidates": [{"kind": "uniform", "initial": z} for z in (1, 2)]},
        "python": {"file": "x.py"},
    }
    with pytest.raises(ValueError, match=f"privacy.noise: method {kind} draws its noise"):
        recipe({"kind": "banded", "bands": 2}, method={"kind": kind} | more.get(kind, {}))


# bands as small as these are best at small budgets, whose noise an amplified step needs most
@pytest.mark.parametrize(("epsilon", "least"), [(0.5, 1), (8.0, 4)])
def test_auto_takes_the_bands_with_the_least_error_at_the_budget(epsilon: float, least: int) -> None:
    privacy: dict[str, Any] = {
        "schedule": {"kind": "uniform", "initial": "auto"},
        "budget": {"epsilon": epsilon, "delta": 1e-5},
        "accountant": "rdp",
    }
    chosen = banded("auto", privacy=privacy)
    assert chosen.correlated is not None
    errors = {}
    for bands in (1, 2, 3, 4, 6, 8):
        own = banded(bands, privacy=privacy).correlated
        assert own is not None
        errors[bands] = own.error
    assert chosen.correlated.error == min(errors.values()) and chosen.correlated.independent == errors[1]
    assert chosen.correlated.reach >= least
    assert chosen.sampling.groups == chosen.correlated.reach == min(errors, key=lambda b: errors[b])


@pytest.mark.parametrize(
    "schedule", [{"kind": "exponential", "initial": 4, "decay": 0.1}, {"kind": "uniform", "initial": 2}]
)
def test_until_budget_trains_as_long_as_cycles_fit(schedule: dict[str, Any]) -> None:
    """And the ledger admits what was planned, epoch by epoch, to the end."""
    privacy = {"schedule": schedule, "budget": {"epsilon": 4, "delta": 1e-5}, "accountant": "rdp"}
    plan = banded(4, privacy=privacy, epochs="until-budget")
    rdp = accountants.get("rdp")
    assert rdp.epsilon(plan.releases, 1e-5) <= 4
    longer = {"schedule": schedule, "accountant": "rdp"}
    assert rdp.epsilon(banded(4, privacy=longer, epochs=len(plan.epochs) + 1).releases, 1e-5) > 4
    ledger = plan.ledger()
    for epoch, releases in enumerate(plan.epochs):
        for release in releases:
            ledger.spend(release, epoch)
    assert sum(release.count for release in ledger.releases) == math.ceil(len(plan.epochs) * 11 / 4)


@pytest.mark.parametrize("batching", ["poisson", "shuffle"])
def test_noise_that_is_chosen_while_training_runs_is_not_correlated(batching: str) -> None:
    changes: dict[str, Any] = {
        "privacy": {"schedule": {"kind": "validation", "initial": 2.0, "decay": 0.7}, "budget": {"rho": 1.0}},
        "data": {"path": "d.csv", "target": "y", "validation": {"records": 5, "public": True}},
        "epochs": "until-budget",
    }
    with pytest.raises(PrivacyError, match="correlates it with that of earlier ones"):
        plan_for(recipe({"kind": "banded", "bands": 2}, method={"batching": batching}, **changes), Facts(1050))


@pytest.mark.parametrize(("epsilon", "bands", "published"), [(3.0, 4, 0.89), (8.0, 32, 0.65)])
def test_predicted_errors_beside_independent_noise_are_the_published_ones(
    epsilon: float, bands: int, published: float
) -> None:
    """50,000 records, batches of 512, 20 epochs of 98 steps (published: 2,000), coefficients of (1 - x)^(-1/2)."""
    privacy = {
        "schedule": {"kind": "uniform", "initial": "auto"},
        "budget": {"epsilon": epsilon, "delta": 1e-5},
        "accountant": "pld",
    }
    errors = []
    for own in (bands, 1):
        noise = {"kind": "banded", "bands": own}
        one = recipe(noise, method={"batch_size": 512}, privacy=privacy, epochs=20)
        planned = plan_for(one, Facts(50_000)).correlated
        assert planned is not None and planned.error is not None
        errors.append(planned.error)
    assert errors[0] / errors[1] == pytest.approx(published, abs=0.01)
