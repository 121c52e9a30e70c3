"""Plans: the published epoch counts, budgets that are met and never passed, and refusals that say why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.plan import Facts, Plan, Sampling
from dpsgd_cli.errors import BudgetExceeded, InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.dp_sgd.settings import DpSgdMethod
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.schema import Recipe

PCA = Release(GaussianSum(16.0, "zero-out", label="pca"))
TABLE_II: dict[str, tuple[dict[str, Any], int]] = {
    "uniform": ({"initial": 8}, 100),
    "time": ({"initial": 10, "decay": 0.05}, 38),
    "step": ({"initial": 10, "decay": 0.6, "period": 10}, 31),
    "exponential": ({"initial": 10, "decay": 0.01}, 71),
    "polynomial": ({"initial": 10, "final": 2, "decay": 3, "period": 100}, 44),
}


def recipe(batching: str = "shuffle", epochs: Any = "until-budget", **privacy: Any) -> Recipe:
    """A recipe whose data and model play no part; `privacy` replaces whole keys of that section."""
    method: dict[str, Any] = {"kind": "dp-sgd", "batching": batching}
    if batching != "full":
        method["batch_size"] = 600
    return Recipe.model_validate(
        {
            "name": "planned",
            "data": {"name": "digits"},
            "model": {"kind": "linear"},
            "method": method,
            "privacy": {"budget": {"rho": 0.78125}, "delta": 1e-5, **privacy},
            "epochs": epochs,
            "seed": 0,
        }
    )


def plan(*args: Any, records: int = 60_000, before: tuple[Release, ...] = (), **privacy: Any) -> Plan:
    return plan_for(recipe(*args, **privacy), Facts(records, before))


def spend(plan: Plan, epochs: int | None = None) -> None:
    ledger = plan.ledger()
    for release in plan.preprocessing_releases:
        ledger.spend(release, phase="before")
    for epoch, releases in enumerate(plan.epochs[:epochs]):
        for release in releases:
            ledger.spend(release, epoch)


@pytest.mark.parametrize("kind", TABLE_II)
def test_table_2_epochs_of_yu_et_al(kind: str) -> None:
    parameters, epochs = TABLE_II[kind]
    found = plan(schedule={"kind": kind, **parameters})
    assert len(found.epochs) == epochs
    assert found.rho() == pytest.approx(sum(0.5 / z**2 for z in found.noise_multipliers), rel=1e-12)
    spend(found)


def test_an_epoch_of_shuffled_batches_is_one_release_and_a_poisson_epoch_one_a_step() -> None:
    uniform = {"kind": "uniform", "initial": 8}
    assert [r.count for r in plan("shuffle", 1, schedule=uniform).epochs[0]] == [1]
    (sampled,) = plan("poisson", 1, schedule=uniform, budget=None, accountant="rdp").epochs[0]
    assert (sampled.count, sampled.mechanism) == (100, GaussianSum(8.0, "add-remove", "poisson", 0.01))
    (full,) = plan("full", 1, schedule=uniform).epochs[0]
    assert (full.count, full.mechanism) == (1, GaussianSum(8.0, "add-remove", "full"))


def test_a_last_batch_that_is_not_full_is_a_step_too() -> None:
    uniform = {"kind": "uniform", "initial": 8}
    found = plan("poisson", 1, schedule=uniform, budget=None, accountant="rdp", records=60_001)
    assert (found.sampling.steps_per_epoch, found.sampling.rate) == (101, 600 / 60_001)


SCHEDULES = st.one_of(
    st.builds(lambda z: {"kind": "uniform", "initial": z}, st.floats(0.5, 20)),
    st.builds(lambda z, k: {"kind": "time", "initial": z, "decay": k}, st.floats(1, 30), st.floats(1e-3, 0.2)),
    st.builds(lambda z, k: {"kind": "exponential", "initial": z, "decay": k}, st.floats(1, 30), st.floats(1e-3, 0.2)),
    st.builds(lambda z, k: {"kind": "step", "initial": z, "decay": k}, st.floats(1, 9), st.floats(0.3, 0.9)),
    st.builds(
        lambda z, end, k: {"kind": "polynomial", "initial": z, "final": end, "decay": k, "period": 20},
        st.floats(1, 30), st.floats(0.5, 5), st.floats(0.2, 4),
    ),
)  # fmt: skip
BUDGETS = st.one_of(
    st.builds(lambda rho: {"rho": rho}, st.floats(0.05, 3)),
    st.builds(lambda epsilon: {"epsilon": epsilon, "delta": 1e-5}, st.floats(0.3, 8)),
)


@settings(max_examples=60)
@given(SCHEDULES, BUDGETS, st.sampled_from(["shuffle", "full"]), st.booleans())
def test_until_budget_trains_as_long_as_the_budget_lasts_and_no_longer(
    schedule: dict[str, Any], budget: dict[str, Any], batching: str, with_pca: bool
) -> None:
    """The next epoch of the same schedule would have been refused, both by the plan and by the ledger."""
    before = (PCA,) if with_pca else ()
    given_privacy: dict[str, Any] = {"schedule": schedule, "budget": budget, "adjacency": "zero-out"}
    try:
        found = plan(batching, before=before, **given_privacy)
    except InfeasibleBudget:
        with pytest.raises(InfeasibleBudget, match="1 epoch of this schedule would pass the budget"):
            plan(batching, 1, before=before, **given_privacy)
        return
    assume(len(found.epochs) < 2000)
    spend(found)
    if "rho" in budget:
        rho = found.rho()
        assert rho is not None
        assert rho <= budget["rho"]
    else:
        assert accountants.get("gaussian").epsilon(found.releases, 1e-5) <= budget["epsilon"]
    with pytest.raises(InfeasibleBudget, match=f" {len(found.epochs)} fit"):
        plan(batching, len(found.epochs) + 1, before=before, **given_privacy)
    longer = plan(batching, len(found.epochs) + 1, before=before, **{**given_privacy, "budget": None})
    ledger = found.ledger()
    for release in found.preprocessing_releases:
        ledger.spend(release, phase="before")
    for (release,) in longer.epochs[:-1]:
        ledger.spend(release)
    with pytest.raises(BudgetExceeded):
        ledger.spend(longer.epochs[-1][0])


@settings(max_examples=40)
@given(st.integers(1, 400), BUDGETS, st.booleans(), st.sampled_from(["shuffle", "full"]))
def test_auto_noise_spends_the_budget_to_a_millionth_and_never_more(
    epochs: int, budget: dict[str, Any], with_pca: bool, batching: str
) -> None:
    found = plan(batching, epochs, before=(PCA,) if with_pca else (), budget=budget, adjacency="zero-out")
    spend(found)
    spent, most = (found.rho(), budget["rho"]) if "rho" in budget else (found.guarantee().epsilon, budget["epsilon"])
    assert spent is not None
    assert most * (1 - 1e-6) <= spent <= most


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("with_pca", [False, True])
def test_auto_noise_for_poisson_batches(accountant: str, with_pca: bool) -> None:
    before = (Release(GaussianSum(16.0, "add-remove", label="pca")),) if with_pca else ()
    budget = {"epsilon": 3, "delta": 1e-5}
    found = plan("poisson", 20, before=before, budget=budget, accountant=accountant)
    assert 3 * (1 - 1e-6) <= found.guarantee().epsilon <= 3
    spend(found)


def test_the_least_noise_beside_a_preprocessing_that_almost_spends_the_budget() -> None:
    """What is left is a rounding error of what was spent; the noise is still found, and still fits."""
    rho = 0.5 / 16.0**2
    found = plan("shuffle", 1, before=(PCA,), budget={"rho": math.nextafter(rho, 1)})
    assert found.noise_multipliers[0] > 1e6
    spend(found)
    for spent in (rho, rho / 2):
        with pytest.raises(InfeasibleBudget, match="private preprocessing alone spends the budget"):
            plan("shuffle", 1, before=(PCA,), budget={"rho": spent})


def test_preprocessing_can_be_left_out_of_the_budget_but_not_out_of_the_total() -> None:
    schedule = {"kind": "uniform", "initial": 8}
    covered = plan(schedule=schedule, before=(PCA,))
    not_covered = plan(schedule=schedule, before=(PCA,), budget_covers="training")
    assert (len(covered.epochs), len(not_covered.epochs)) == (99, 100)
    assert not_covered.rho() == pytest.approx(0.78125 + 0.5 / 16**2, rel=1e-12)
    assert not_covered.releases[0] == PCA
    spend(covered)
    spend(not_covered)


def test_sensitivities() -> None:
    schedule = {"kind": "uniform", "initial": 8}

    def sensitivity(adjacency: str, clipping: dict[str, Any], groups: int | None = None) -> float:
        one = recipe(schedule=schedule, adjacency=adjacency, clipping=clipping)
        return plan_for(one, Facts(6000, groups=groups)).sensitivity

    flat, each, listed = (
        {"kind": "flat", "norm": 4},
        {"kind": "per-layer", "norm": 4},
        {"kind": "per-layer", "norm": [3, 4]},
    )
    assert sensitivity("zero-out", flat) == 4
    assert sensitivity("zero-out", each, 3) == pytest.approx(math.sqrt(48))
    assert sensitivity("zero-out", listed, 2) == 5
    assert sensitivity("replace-one", flat) == 8
    assert sensitivity("replace-one", listed) == 10
    with pytest.raises(PrivacyError, match="lists 2 bounds, but the model has 3 layers"):
        sensitivity("zero-out", listed, 3)
    with pytest.raises(PrivacyError, match="needs the number of layers"):
        sensitivity("zero-out", each)


def test_noise_as_published_is_charged_what_it_costs() -> None:
    """M layers with noise z C_l each are M Gaussians of multiplier z: mu^2 = M / z^2."""
    clipping = {"kind": "per-layer", "norm": [4, 4], "noise": "as-published"}
    found = plan_for(recipe("shuffle", 10, schedule={"kind": "uniform", "initial": 10}, clipping=clipping), Facts(6000))
    assert found.noise_multipliers == (10.0,) * 10
    assert {r.mechanism.noise_multiplier for e in found.epochs for r in e if isinstance(r.mechanism, GaussianSum)} == {
        10 / math.sqrt(2)
    }
    assert found.rho() == pytest.approx(10 * 2 * 0.5 / 10**2, rel=1e-12)
    auto = plan_for(recipe("shuffle", 10, clipping=clipping), Facts(6000))
    assert auto.rho() == pytest.approx(0.78125, rel=1e-6)


@pytest.mark.parametrize("adjacency", ["add-remove", "zero-out"])
def test_single_records_are_planned_for_replaced_ones_only(adjacency: str) -> None:
    """Wang, Balle and Kasiviswanathan 2019 bound draws without replacement where a record is swapped for another."""
    single = {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1}
    one = recipe(budget={"epsilon": 3, "delta": 1e-5}, adjacency=adjacency)
    one = one.model_copy(update={"method": DpSgdMethod.model_validate(single), "epochs": 1})
    with pytest.raises(PrivacyError, match=rf"batches of fixed size under {adjacency} adjacency"):
        plan_for(one, Facts(60))
    assert one.privacy is not None
    own = one.model_copy(update={"privacy": one.privacy.model_copy(update={"adjacency": None})})
    assert plan_for(own, Facts(60)).sampling == Sampling("fixed", 60, 1, "replace-one")


def test_the_rate_of_an_allocation_is_one_over_the_steps_of_its_epoch() -> None:
    made = plan("random-allocation", 3, budget={"epsilon": 3, "delta": 1e-5})
    mechanism = made.releases[0].mechanism
    assert isinstance(mechanism, GaussianSum)
    assert [release.count for release in made.releases] == [1, 1, 1]
    assert mechanism.sampling_rate * made.sampling.steps_per_epoch == pytest.approx(1, abs=1e-15)
    assert mechanism.steps == made.sampling.steps_per_epoch == -(-made.sampling.records // made.sampling.batch_size)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(PrivacyError, match="batch_size is 600, more than the 599 training records"):
        plan("shuffle", 10, records=599)
    assert plan("shuffle", 10, records=600).sampling.steps_per_epoch == 1


def test_a_schedule_that_decays_to_nothing_stops_before() -> None:
    decaying = {"kind": "exponential", "initial": 1, "decay": 1}
    with pytest.raises(PrivacyError, match="less than 1e-06"):
        plan("shuffle", 20, schedule=decaying, budget=None)
    assert len(plan("shuffle", schedule=decaying, budget={"rho": 1e13}).epochs) == 14


@pytest.mark.parametrize(
    ("batching", "adjacency"), [("poisson", "add-remove"), ("shuffle", "zero-out"), ("full", "add-remove")]
)
def test_every_batching_has_an_adjacency_of_its_own(batching: str, adjacency: str) -> None:
    assert recipe(batching, 1).adjacency == adjacency
    budget = {"epsilon": 3, "delta": 1e-5}
    assert plan(batching, 1, budget=budget, accountant="rdp").sampling.adjacency == adjacency
    assert recipe("full", 1, adjacency="replace-one").adjacency == "replace-one"


def test_a_plan_of_many_epochs_is_made_and_spent_in_one_go() -> None:
    found = plan(schedule={"kind": "exponential", "initial": 500, "decay": 1e-5}, budget={"rho": 0.005})
    assert len(found.epochs) > 2000
    spend(found)
    epsilon = {"epsilon": 0.25, "delta": 1e-5}
    longer = plan(schedule={"kind": "exponential", "initial": 500, "decay": 1e-5}, budget=epsilon)
    assert len(longer.epochs) > 800
    spend(longer)


def test_a_poisson_plan_states_the_least_bound_and_names_whose_it_is() -> None:
    """At tiny rates and deltas `pld` states the bound by Renyi orders, which is less there."""
    fixed: dict[str, Any] = {"schedule": {"kind": "uniform", "initial": 0.5}, "budget": None}
    tiny = plan_for(recipe("poisson", 1, delta=1e-20, **fixed), Facts(600 * 1000))
    usual = plan_for(recipe("poisson", 1, **fixed), Facts(60_000))
    assert tiny.accountant == usual.accountant == "pld"
    for one in (tiny, usual):
        for name in ("rdp", "pld"):
            assert one.guarantee().epsilon <= accountants.get(name).epsilon(one.releases, one.delta)


def test_noise_is_calibrated_by_the_least_bound() -> None:
    """`pld` alone would have asked for as much noise, or more."""
    least = plan_for(recipe("poisson", 1, budget={"epsilon": 5.0, "delta": 1e-20}, delta=None), Facts(600 * 1000))
    assert least.guarantee().epsilon <= 5.0
    assert accountants.get("pld").epsilon(least.releases, 1e-20) >= 5.0 * (1 - 1e-5)
