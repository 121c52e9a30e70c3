"""Correlated noise as numbers: weights and errors against matrices and published values, charges against blocks."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz as toeplitz_matrix
from scipy.optimize import minimize

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, Release
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism
from dpsgd_cli.methods.descriptor import plan_for
from dpsgd_cli.noise.price import INDEPENDENT, Toeplitz, Tree, optimised, square_root
from dpsgd_cli.noise.settings import BandedNoise
from dpsgd_cli.recipe.schema import Recipe

# |c| x prefix RMSE, from an implementation of arXiv 2306.08153 that is not ours (shared REFERENCES)
PUBLISHED = {(1000, 4): (12.52145, 11.43100), (1000, 16): (7.13737, 6.27816), (100, 4): (4.10221, 3.91614)}


def strategy(correlation: Toeplitz, steps: int) -> np.ndarray:
    """C, as a matrix."""
    column = np.zeros(steps)
    own = correlation.weights[:steps]
    column[: len(own)] = own
    return np.asarray(toeplitz_matrix(column, np.zeros(steps)))


def prefix_error(inverse: np.ndarray, multipliers: np.ndarray) -> float:
    """Root mean square over steps of the deviation of sums of C^-1 y, from whole matrices."""
    sums = np.tril(np.ones_like(inverse)) @ inverse @ np.diag(multipliers)
    return float(np.sqrt((sums**2).sum(axis=1).mean()))


@pytest.mark.parametrize(("steps", "bands"), PUBLISHED)
def test_errors_are_the_published_ones(steps: int, bands: int) -> None:
    plain, best = PUBLISHED[steps, bands]
    assert round(Toeplitz(None, square_root(bands)).error([1.0], steps), 5) == plain
    assert round(Toeplitz(None, optimised(bands, steps)).error([1.0], steps), 5) == best


def test_weights_are_the_published_ones() -> None:
    assert round(INDEPENDENT.error([1.0], 1000), 5) == 22.37186
    assert np.round(optimised(4, 1000), 5).tolist() == [0.58702, 0.50351, 0.46819, 0.42742]
    whole = np.asarray(square_root(5))
    assert (whole / whole[0]).tolist() == pytest.approx([1, 1 / 2, 3 / 8, 5 / 16, 35 / 128], rel=1e-15)
    inverse = np.linalg.inv(strategy(Toeplitz(None, square_root(5)), 5)) * whole[0]
    assert inverse[:, 0] == pytest.approx([1, -1 / 2, -1 / 8, -1 / 16, -5 / 128], rel=1e-12)


@pytest.mark.parametrize("bands", [2, 5])
def test_no_other_search_finds_better_weights(bands: int) -> None:
    """Nelder-Mead on whole matrices, which knows no gradient."""
    steps = 60

    def error(weights: np.ndarray) -> float:
        c = strategy(Toeplitz(None, tuple(weights / np.linalg.norm(weights))), steps)
        return prefix_error(np.linalg.inv(c), np.ones(steps))

    found: Any = minimize(error, np.asarray(square_root(bands)), method="Nelder-Mead", options={"xatol": 1e-9})
    assert Toeplitz(None, optimised(bands, steps)).error([1.0], steps) == pytest.approx(found.fun, rel=1e-6)


@given(bands=st.integers(1, 40), more=st.integers(0, 300), best=st.booleans())
@settings(max_examples=30)
def test_columns_have_a_norm_of_1_and_weights_keep_noise_bounded(bands: int, more: int, best: bool) -> None:
    weights = optimised(bands, bands + more) if best else square_root(bands)
    assert len(weights) == bands and math.fsum(w**2 for w in weights) == pytest.approx(1.0, abs=1e-15)
    plain = Toeplitz(None, square_root(bands)).error([1.0], bands + more)
    assert Toeplitz(None, weights).error([1.0], bands + more) <= plain * (1 + 1e-12)


@given(
    bands=st.integers(1, 12),
    steps=st.integers(1, 9),
    period=st.booleans(),
    multipliers=st.lists(st.floats(0.5, 3), min_size=1, max_size=4),
)
@settings(max_examples=40)
def test_the_error_is_that_of_whole_matrices(bands: int, steps: int, period: bool, multipliers: list[float]) -> None:
    """One memory over all epochs, or a new one for each."""
    correlation = Toeplitz(steps if period else None, square_root(bands))
    total = len(multipliers) * steps
    size = steps if period else total
    block = np.linalg.inv(strategy(correlation, size))
    inverse = np.kron(np.eye(total // size), block)
    expected = prefix_error(inverse, np.repeat(multipliers, steps))
    assert correlation.error(multipliers, steps) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 100])
def test_a_tree_sums_nodes(steps: int) -> None:
    """Nodes listed one by one: which leaves each has, how many are above a leaf, which ones a prefix is made of."""
    nodes = [
        range(start, start + size)
        for size in (1 << k for k in range(steps.bit_length()))
        for start in range(0, steps, 2 * size)
        if start + size <= steps
    ]
    above = max(sum(leaf in node for node in nodes) for leaf in range(steps))
    tree = Tree(steps)
    assert tree.levels == above
    for end in range(1, steps + 1):
        used, at = 0, 0
        while at < end:
            at = max(node.stop for node in nodes if node.start == at and node.stop <= end)
            used += 1
        assert tree.variances(steps)[end - 1] == above * used


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


@given(
    steps=st.integers(1, 12),
    bands=st.integers(1, 30),
    multipliers=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=1, max_size=6),
)
def test_what_is_charged_covers_every_group(steps: int, bands: int, multipliers: list[float]) -> None:
    """Every block of steps that a record of any group moves, listed one by one, by the noise of those steps.

    At the end, and after every epoch: what was charged by then covers what was released by then.
    """
    charged = BandedNoise(bands=bands).charges_by_epoch(multipliers, steps)
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
    assert BandedNoise(bands=2).charges_by_epoch([3.0, 2.0, 1.0], 10) == [
        [(3.0, 4), (2.0, 1)],
        [(2.0, 4), (1.0, 1)],
        [(1.0, 5)],
    ]
    assert BandedNoise(bands=12).charges_by_epoch([3.0, 2.0, 1.0], 4) == [
        [(3.0, 0), (1.0, 1)],
        [(2.0, 0)],
        [(1.0, 0)],
    ]


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
            CorrelatedSums(30.0, "zero-out", "shuffle", correlation="tree", bands=9),
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
        ({"batching": "full"}, "batching"),
        ({"batching": "fixed", "adjacency": "replace-one", "sampling_rate": 0.1}, "batching"),
        ({"bands": 0}, "bands"),
    ],
)
def test_what_no_theorem_is_about_is_no_record(given: dict[str, Any], named: str) -> None:
    with pytest.raises(PrivacyError, match=f"^{named} is"):
        CorrelatedSums(1.0, **{"adjacency": "add-remove", "batching": "poisson", **given})


@pytest.mark.parametrize("kind", ["tree", "toeplitz"])
@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_one_pass_costs_one_gaussian_an_epoch(kind: str, adjacency: str) -> None:
    """2 a step, and neither its steps nor its levels: mu of 4 epochs is sqrt(4) / 2."""
    method = {"batching": "shuffle"}
    plan = plan_for(recipe({"kind": kind}, method=method, privacy={"adjacency": adjacency}), Facts(1050))
    assert [[(r.mechanism.kind, r.count) for r in epoch] for epoch in plan.epochs] == [[("correlated", 1)]] * 4
    assert plan.guarantee().epsilon == pytest.approx(
        accountants.get("gaussian").epsilon([Release(GaussianSum(1.0, "zero-out"))], 1e-5), rel=1e-9
    )
    assert plan.sensitivity == (2.0 if adjacency == "replace-one" else 1.0)
    assert plan.correlated is not None and plan.correlated.correlation.period == 11


@pytest.mark.parametrize(
    ("noise", "changes", "said"),
    [
        ({"kind": "banded", "bands": 11}, {}, "bands is 11: groups of 1050 / 11 records .* give at most 10 bands"),
        ({"kind": "banded", "bands": 2000}, {}, "give at most 10 bands"),
        ({"kind": "banded", "bands": 2}, {"method": {"batching": "shuffle"}}, "banded on shuffle batches"),
        ({"kind": "banded"}, {"method": {"batching": "full", "batch_size": None}}, "banded on full batches"),
        ({"kind": "tree"}, {}, "tree on poisson batches.*use method.batching: shuffle"),
        (
            {"kind": "banded", "bands": 2},
            {"privacy": {"adjacency": "replace-one"}},
            "poisson batches under replace-one",
        ),
        ({"kind": "tree"}, {"method": {"batching": "shuffle"}, "privacy": {"adjacency": "add-remove"}}, "shuffled"),
        ({"kind": "banded"}, {}, "bands: auto compares .* give privacy.budget, epochs as a number"),
    ],
)
def test_what_has_no_proof_is_refused(noise: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PrivacyError, match=said):
        plan_for(recipe(noise, **changes), Facts(1050))


@pytest.mark.parametrize("kind", ["private-selection", "python"])
def test_methods_with_steps_of_their_own_are_refused(kind: str) -> None:
    more: dict[str, Any] = {
        "private-selection": {"candidates": [{"kind": "uniform", "initial": z} for z in (1, 2)]},
        "python": {"file": "x.py"},
    }
    with pytest.raises(ValueError, match=f"privacy.noise: method {kind} draws its noise"):
        recipe({"kind": "banded", "bands": 2}, method={"kind": kind} | more.get(kind, {}))


def test_independent_noise_is_what_is_drawn_where_nothing_is_said() -> None:
    assert plan_for(recipe({"kind": "independent"}), Facts(1050)) == plan_for(recipe(), Facts(1050))


# bands as small as these are best at small budgets, whose noise an amplified step needs most
@pytest.mark.parametrize(("epsilon", "least"), [(0.5, 1), (8.0, 4)])
def test_auto_takes_the_bands_with_the_least_error_at_the_budget(epsilon: float, least: int) -> None:
    privacy: dict[str, Any] = {
        "schedule": {"kind": "uniform", "initial": "auto"},
        "budget": {"epsilon": epsilon, "delta": 1e-5},
        "accountant": "rdp",
    }
    chosen = banded("auto", privacy=privacy)
    assert chosen.correlated is not None and chosen.correlated.error is not None
    errors = {}
    for bands in (1, 2, 3, 4, 6, 8):
        own = banded(bands, privacy=privacy).correlated
        assert own is not None and own.error is not None
        errors[bands] = own.error
    assert chosen.correlated.error == min(errors.values()) and chosen.correlated.independent == errors[1]
    assert chosen.correlated.correlation.bands >= least
    assert chosen.sampling.groups == chosen.correlated.correlation.bands == min(errors, key=lambda b: errors[b])


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


def test_validation_may_choose_the_noise_of_an_epoch_but_not_of_a_band() -> None:
    """Each epoch of one-pass noise is a mechanism of its own; a band reaches into noise that is not chosen yet."""
    changes: dict[str, Any] = {
        "privacy": {"schedule": {"kind": "validation", "initial": 2.0, "decay": 0.7}, "budget": {"rho": 1.0}},
        "data": {"path": "d.csv", "target": "y", "validation": {"records": 5, "public": True}},
        "epochs": "until-budget",
    }
    plan = plan_for(recipe({"kind": "tree"}, method={"batching": "shuffle"}, **changes), Facts(1050))
    assert plan.is_adaptive and plan.correlated is not None and plan.correlated.error is None
    assert plan.budget_cap == GaussianSum(0.5**0.5, "zero-out", label="budget")
    with pytest.raises(PrivacyError, match="can be enforced"):
        plan_for(recipe({"kind": "banded", "bands": 2}, **changes), Facts(1050))


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
        noise = {"kind": "banded", "bands": own, "weights": "sqrt"}
        one = recipe(noise, method={"batch_size": 512}, privacy=privacy, epochs=20)
        planned = plan_for(one, Facts(50_000)).correlated
        assert planned is not None and planned.error is not None
        errors.append(planned.error)
    assert errors[0] / errors[1] == pytest.approx(published, abs=0.01)
