"""The three statements about a sweep, against compositions written out."""

from __future__ import annotations

import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.joint_composition import Records, Run
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Release, ZeroConcentrated
from dpsgd_cli.accounting.repeated_selection import BestOfTrials, Choice
from dpsgd_cli.errors import UnsupportedMechanism
from dpsgd_cli.results.guarantee import sweep_lines
from dpsgd_cli.sweep.pricing import Spent, statement
from dpsgd_cli.sweep.settings import RandomStopping, Sweep

SWEEP = Sweep(name="x", recipes=["quickstart"])


def release(multiplier: float, count: int = 1, adjacency: str = "add-remove", sensitivity: float = 1.0) -> Release:
    return Release(GaussianSum(multiplier, adjacency, sensitivity=sensitivity), count)  # type: ignore[arg-type]


HELD = Records("mine", "tested on its own test records")


def run(*seeds: int | None, adjacency: str = "add-remove", held: Records = HELD) -> Run:
    return Run("a", seeds, adjacency, held)


def spent(*releases: Release, trials: int = 1, seed: int | None = None, held: Records = HELD) -> Spent:
    seeds = [None if seed is None else seed + trial for trial in range(trials)]
    made = run(*seeds, adjacency=releases[0].mechanism.adjacency, held=held)
    return Spent(releases, made, 1e-5, accountants.get("gaussian").epsilon(releases, 1e-5))


def test_all_together_is_the_composition_of_every_trial() -> None:
    told = statement([spent(release(8, 3, sensitivity=0.1), trials=2), spent(release(5, sensitivity=7.0))], SWEEP)
    everything = [release(8)] * 6 + [release(5)]
    assert told["all_trials"]["epsilon"] == pytest.approx(
        accountants.get("gaussian").epsilon(everything, 1e-5), rel=1e-9
    )
    assert told["all_trials"]["trials"] == 3
    assert told["each_trial"][0]["epsilon"] == max(spent(release(8, 3)).epsilon or 0, spent(release(5)).epsilon or 0)


def test_no_choice_is_told_as_such() -> None:
    assert (
        "choosing among these trials is not covered" in statement([spent(release(8), trials=2)], SWEEP)["warnings"][0]
    )
    assert statement([spent(release(8))], SWEEP)["warnings"] == []


def test_a_cell_that_spends_a_budget_is_priced_by_the_budget_in_every_statement() -> None:
    """A filter in rho has the Renyi divergences of one Gaussian of the same rho, and so its Renyi prices."""
    capped = Spent((Release(ZeroConcentrated(1 / 128, "add-remove")),), run(None, None, None), 1e-5, 0.7)
    sweep = SWEEP.model_copy(update={"select": RandomStopping(mean=10)})
    told = statement([capped], sweep, [capped, spent(release(9))])
    assert told["all_trials"]["accountant"] == "rdp"
    assert told["all_trials"]["epsilon"] == accountants.get("rdp").epsilon([release(8, 3)], 1e-5)
    assert told["choice"]["epsilon"] == pytest.approx(BestOfTrials(Choice(10)).epsilon([release(8)], 1e-5), rel=1e-12)


def test_shared_noise_has_no_statement_together() -> None:
    """Whatever `seeds:` says: overlapping ranges share noise too, and without any seed nobody does."""
    shared = SWEEP.model_copy(update={"seeds": "shared"})
    for sweep in (SWEEP, shared):
        told = statement([spent(release(8), trials=3, seed=0), spent(release(5), seed=2)], sweep)["all_trials"]
        assert told["epsilon"] is None and "share seed 2, and thus noise" in told["note"]
        assert statement([spent(release(8), trials=2), spent(release(5))], sweep)["all_trials"]["epsilon"] > 0


def test_cells_that_leave_out_different_records_have_no_statement_together_and_no_choice() -> None:
    """A score that costs nothing is measured on records that no cell trains on."""
    cells = [spent(release(8)), spent(release(8), held=Records("mine", "tested on 20% of its records (split seed 1)"))]
    told = statement(cells, SWEEP.model_copy(update={"select": RandomStopping(mean=3)}), cells)
    for way in ("all_trials", "choice"):
        assert told[way]["epsilon"] is None and "leave out different records" in told[way]["note"]


def test_sweeps_of_seeded_recipes_are_marked_as_experiments() -> None:
    """A statement is as good as its weakest noise: one seed among the cells, or of the choice, is enough."""
    secure, seeded = spent(release(8)), spent(release(8), seed=7)
    select = RandomStopping(mean=3)
    sweep = SWEEP.model_copy(update={"select": select})
    drawn = SWEEP.model_copy(update={"select": select.model_copy(update={"seed": 1})})
    without = statement([secure], sweep, [secure])
    assert without["noise_source"] == without["choice"]["randomness"] == "secure"
    assert "an experiment" not in "".join(sweep_lines(without))
    for told in (statement([secure, seeded], sweep, [secure, seeded]), statement([secure], drawn, [secure])):
        assert told["choice"]["randomness"].startswith("seeded (experiment")
    lines = sweep_lines(statement([secure, seeded], sweep, [secure, seeded]))
    assert len(lines) == 3 and all(
        "an experiment: anybody who knows the seed can subtract the noise" in line for line in lines
    )


def test_different_adjacencies_have_no_statement_together() -> None:
    told = statement([spent(release(8)), spent(release(5, adjacency="zero-out"))], SWEEP)
    assert told["all_trials"]["epsilon"] is None
    assert [one["adjacency"] for one in told["each_trial"]] == ["add-remove", "zero-out"]


def test_a_trial_without_privacy_leaves_nothing_to_state() -> None:
    told = statement([spent(release(8)), None], SWEEP)
    assert told["all_trials"] is None
    assert "no privacy at all" in told["warnings"][0]


@pytest.mark.parametrize("law", ["geometric", "logarithmic", "poisson"])
def test_the_best_of_unequal_cells_costs_what_the_dearest_order_by_order_says(law: str) -> None:
    """Equal cells cost what one trial does; others, more than the cheaper and at least what the dearer costs."""
    best = BestOfTrials(Choice(10, law))
    assert best.of_any([[release(8)]] * 3)[0](1e-5) == best.epsilon([release(8)], 1e-5)
    mixed = best.of_any([[release(8)], [release(4)], [release(100)]])[0](1e-5)
    assert mixed == pytest.approx(best.epsilon([release(4)], 1e-5))
    assert mixed > best.epsilon([release(8)], 1e-5)


def test_what_the_theorem_does_not_cover_has_no_price() -> None:
    with pytest.raises(UnsupportedMechanism, match="no Renyi divergence"):
        BestOfTrials(Choice(10)).of_any([[release(8)], [Release(ApproximateDP(0.1, 1e-9, "add-remove"))]])


def test_random_stopping_is_stated_for_all_cells_not_for_those_drawn() -> None:
    sweep = SWEEP.model_copy(update={"select": RandomStopping(mean=10)})
    drawn, dear = [spent(release(8))], spent(release(4))
    narrow, wide = (statement(drawn, sweep, cells)["choice"]["epsilon"] for cells in (drawn, [*drawn, dear]))
    assert wide > narrow > (drawn[0].epsilon or 0)
    assert statement([], sweep, [*drawn, dear])["choice"]["epsilon"] == wide
    assert statement(drawn, sweep, None)["choice"]["epsilon"] is None


def test_random_stopping_has_no_price_where_a_cell_has_none_or_another_guarantee() -> None:
    sweep = SWEEP.model_copy(update={"select": RandomStopping(mean=10)})
    assert statement([], sweep, [spent(release(8)), None])["choice"]["epsilon"] is None
    mixed = statement([], sweep, [spent(release(8)), spent(release(8, adjacency="zero-out"))])["choice"]
    assert mixed["epsilon"] is None and "different adjacencies" in mixed["note"]
