"""The ledger refuses before a budget is passed, never after, and its file loses nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import total_mu_squared
from dpsgd_cli.accounting.budget import EpsilonBudget, Filter, GaussianFilter, PlannedFilter, RhoFilter, enforce
from dpsgd_cli.accounting.ledger import Ledger, LedgerEntry, entries_from_lines, priced_releases, read_ledgers, to_lines
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP, Release, ZeroConcentrated
from dpsgd_cli.errors import BudgetExceeded, DataError, PrivacyError, UnsupportedMechanism

Z = st.floats(min_value=0.3, max_value=50)
MANY = st.lists(st.tuples(Z, st.integers(1, 5)), min_size=1, max_size=40)


def gaussian(multiplier: float, count: int = 1, batching: str = "full") -> Release:
    return Release(GaussianSum(multiplier, "zero-out", batching), count)  # type: ignore[arg-type]


def spend_until_refused(filter: Filter, wanted: list[Release]) -> Ledger:
    """Spend what fits, skipping what is refused (an adaptive method may go on with something cheaper)."""
    ledger = Ledger(filter)
    for release in wanted:
        try:
            ledger.spend(release)
        except BudgetExceeded:
            continue
    return ledger


def exactly(release: Release) -> Fraction:
    assert isinstance(release.mechanism, GaussianSum)
    return release.count / Fraction(release.mechanism.noise_multiplier) ** 2


@settings(max_examples=40)
@given(MANY, st.floats(min_value=1e-3, max_value=20))
def test_a_rho_filter_never_passes_its_budget_and_stops_only_there(
    wanted: list[tuple[float, int]], budget: float
) -> None:
    ledger = Ledger(RhoFilter(budget))
    for z, count in wanted:
        kept = list(ledger.entries)
        spent = sum((exactly(entry.release) for entry in ledger.entries), Fraction(0)) / 2
        cost = exactly(gaussian(z, count)) / 2
        assert spent <= Fraction(budget) * (1 + Fraction(1, 10**15))
        try:
            ledger.spend(gaussian(z, count))
        except BudgetExceeded:
            assert spent + cost > Fraction(budget) * (1 - Fraction(1, 10**15))
            assert ledger.entries == kept
        else:
            assert spent + cost <= Fraction(budget) * (1 + Fraction(1, 10**15))


@given(MANY, st.floats(min_value=0.05, max_value=20), st.floats(min_value=1e-9, max_value=1e-2))
def test_a_gaussian_filter_never_states_more_than_its_epsilon(
    wanted: list[tuple[float, int]], epsilon: float, delta: float
) -> None:
    """The statement is the accountant's own, on the merged releases as a reader would price them."""
    accountant = accountants.get("gaussian")
    budget = EpsilonBudget(epsilon=epsilon, delta=delta)
    releases = [gaussian(z, count) for z, count in wanted]
    ledger = spend_until_refused(enforce(budget, accountant, ()), releases)
    assert accountant.epsilon(ledger.releases, delta) <= epsilon
    # an epsilon larger by one part in 10^6 would have let the first refused release in, or there was none
    kept = [entry.release for entry in ledger.entries]
    refused = next((i for i, r in enumerate(releases) if releases[: i + 1] != kept[: i + 1]), None)
    if refused is not None:
        assert accountant.epsilon(releases[: refused + 1], delta) > epsilon * (1 - 1e-6)


@given(st.lists(st.tuples(Z, st.integers(1, 3)), min_size=1, max_size=10), st.data())
def test_a_planned_filter_allows_the_plan_in_order_and_nothing_else(
    planned: list[tuple[float, int]], data: st.DataObject
) -> None:
    releases = [gaussian(z, count, "poisson") for z, count in planned]
    ledger = Ledger(PlannedFilter(releases))
    stop = data.draw(st.integers(0, len(releases) - 1))
    for release in releases[:stop]:
        ledger.spend(release)
    with pytest.raises(BudgetExceeded, match="not what the plan priced"):
        ledger.spend(gaussian(60.0, 1, "poisson"))
    for release in releases[stop:]:
        ledger.spend(release)
    with pytest.raises(BudgetExceeded, match=f"all {len(releases)} releases"):
        ledger.spend(releases[0])
    assert [entry.release for entry in ledger.entries] == releases


def test_a_refused_release_is_not_recorded_and_a_smaller_one_may_follow() -> None:
    ledger = Ledger(RhoFilter(1.0))
    ledger.spend(gaussian(1.0), epoch=0)
    with pytest.raises(BudgetExceeded, match=r"rho to 1\.125, over the budget 1"):
        ledger.spend(gaussian(math.sqrt(0.8)), epoch=1)
    ledger.spend(gaussian(1.0), epoch=1)
    assert ledger.entries == [LedgerEntry(gaussian(1.0), "train", 0), LedgerEntry(gaussian(1.0), "train", 1)]
    with pytest.raises(BudgetExceeded, match="over the budget"):
        ledger.spend(gaussian(1e8))


@pytest.mark.parametrize("filter_of", [lambda: RhoFilter(25.0), lambda: GaussianFilter(50.0)])
def test_the_last_release_of_a_long_ledger_is_refused_to_the_last_digit(filter_of: Callable[[], Filter]) -> None:
    """3,200 releases of 1 / z^2 = 1/64 are exactly mu^2 50 and rho 25; in floats one by one they might not be."""
    ledger = Ledger(filter_of())
    for epoch in range(3_200):
        ledger.spend(gaussian(8.0), epoch)
    with pytest.raises(BudgetExceeded):
        ledger.spend(gaussian(1e7))
    assert ledger.releases == [gaussian(8.0, 3_200)]


def test_preprocessing_counts_where_the_budget_covers_it_and_is_listed_in_any_case() -> None:
    for covers in (True, False):
        ledger = Ledger(RhoFilter(0.5), covers_before=covers)
        ledger.spend(gaussian(1.0), phase="before")
        if covers:
            with pytest.raises(BudgetExceeded):
                ledger.spend(gaussian(10.0))
        else:
            ledger.spend(gaussian(1.0))
        assert ledger.entries[0] == LedgerEntry(gaussian(1.0), "before", None)
        assert len(ledger.entries) == (1 if covers else 2)


def test_releases_for_different_adjacencies_have_no_common_statement() -> None:
    ledger = Ledger()
    ledger.spend(gaussian(1.0))
    with pytest.raises(PrivacyError, match="add-remove cannot follow one for zero-out"):
        ledger.spend(Release(GaussianSum(1.0, "add-remove")))
    assert len(ledger.entries) == 1


def test_sampled_batches_have_no_rho_and_no_mu() -> None:
    for filter in (RhoFilter(10.0), GaussianFilter(10.0)):
        with pytest.raises(UnsupportedMechanism, match="poisson"):
            Ledger(filter).spend(gaussian(1.0, 1, "poisson"))


def test_other_mechanisms_cost_what_is_proved() -> None:
    mu = 2 * norm.ppf(math.exp(0.5) / (1 + math.exp(0.5)))  # Dong, Roth and Su 2022, Proposition 2.10
    assert total_mu_squared([Release(PureDP(0.5, "zero-out"), 0)]) == 0
    assert total_mu_squared([Release(PureDP(0.5, "zero-out"), 3)]) == pytest.approx(3 * mu**2, rel=1e-12)
    with pytest.raises(BudgetExceeded, match="inf"):
        Ledger(GaussianFilter(1e6)).spend(Release(ApproximateDP(0.1, 1e-6, "zero-out")))
    with pytest.raises(BudgetExceeded, match="inf"):
        Ledger(GaussianFilter(1e6)).spend(gaussian(0.0))


def test_releases_that_were_chosen_are_bounded_by_the_budget_and_the_others_by_themselves() -> None:
    cap = ZeroConcentrated(0.5, "zero-out")
    for covers in (True, False):
        ledger = Ledger(RhoFilter(0.5), covers, budget_cap=cap)
        ledger.spend(gaussian(4.0), phase="before")
        ledger.spend(gaussian(5.0), 0)
        ledger.spend(gaussian(3.0, 2), 1)
        assert len(ledger.releases) == 3
        assert priced_releases(ledger.entries) == ([Release(cap)] if covers else [gaussian(4.0), Release(cap)])
        read = entries_from_lines(to_lines(ledger.entries, 0, None), "here")[0]
        assert priced_releases(read) == priced_releases(ledger.entries)
    known = Ledger(RhoFilter(0.5))
    known.spend(gaussian(5.0))
    assert priced_releases(known.entries) == known.releases == [gaussian(5.0)]


def test_what_is_planned_and_not_made_is_charged_at_the_end() -> None:
    """Whether a method stops may be chosen from what it saw, so a plan costs what all of it costs."""
    planned = [gaussian(3.0, 1, "poisson"), gaussian(2.0, 1, "poisson")]
    ledger = Ledger(PlannedFilter(planned))
    ledger.spend(planned[0], 7)
    ledger.close()
    assert ledger.entries == [LedgerEntry(planned[0], "train", 7), LedgerEntry(planned[1], "train", 7)]
    for unplanned in (Ledger(), Ledger(RhoFilter(1.0))):
        unplanned.spend(gaussian(3.0))
        unplanned.close()
        assert len(unplanned.entries) == 1


ENTRIES = st.lists(
    st.builds(
        LedgerEntry,
        st.builds(gaussian, st.floats(1e-6, 1e6), st.integers(0, 10**6), st.sampled_from(["full", "shuffle"])),
        st.sampled_from(["before", "train"]),
        st.none() | st.integers(0, 10**6),
        st.none() | st.builds(ZeroConcentrated, st.floats(0, 1e6), st.just("zero-out")),
    ),
    max_size=20,
)


@given(ENTRIES, ENTRIES)
def test_a_file_gives_back_every_entry_of_every_trial(first: list[LedgerEntry], second: list[LedgerEntry]) -> None:
    lines = [*to_lines(first, 0, 7), *to_lines(second, 4, None)]
    expected = {trial: entries for trial, entries in ((0, first), (4, second)) if entries}
    assert entries_from_lines(lines, "here") == expected
    assert all(json.loads(line)["seed"] == (7 if json.loads(line)["trial"] == 0 else None) for line in lines)


def test_a_file_that_is_missing_empty_or_no_text_is_a_data_error(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n")
    binary.write_bytes(b"\xff\xfe\x00")
    for path, why in ((tmp_path / "none", "cannot read"), (empty, "is empty"), (binary, "cannot read")):
        with pytest.raises(DataError, match=why):
            read_ledgers(path)


BUDGET = ZeroConcentrated(0.5, "add-remove")


def _chosen(noise: float, epoch: int) -> LedgerEntry:
    return LedgerEntry(Release(GaussianSum(noise, "add-remove")), "train", epoch, BUDGET)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([_chosen(1.2, 0), _chosen(1.2, 1)], "0.694444 in all say to be within 0.5"),
        ([_chosen(1 / 1.001, 0)], "0.501 in all say to be within 0.5"),
        ([_chosen(4, 0), _chosen(4, 1), _chosen(4, 0)], "epochs go back"),
        ([LedgerEntry(Release(PureDP(0.1, "add-remove")), "train", 0, PureDP(1, "add-remove"))], "no filter admits"),
    ],
)
def test_lines_of_two_runs_are_not_stated_as_one_budget(
    entries: list[LedgerEntry], message: str, tmp_path: Path
) -> None:
    """Two ledgers of one trial each in one file would else be stated as one budget."""
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(to_lines(entries, 0, 0)))
    with pytest.raises(DataError, match=message):
        read_ledgers(path)


def test_a_whole_budget_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(to_lines([_chosen(math.sqrt(10), epoch) for epoch in range(10)], 0, 0)))
    assert read_ledgers(path) == {0: [Release(BUDGET)]}


def test_to_release_nothing_after_private_preprocessing_is_a_choice_too(tmp_path: Path) -> None:
    """The preprocessing is not of the budget, and by what it released a method may go on or not."""
    before = Release(GaussianSum(4.0, "add-remove", label="pca"))
    ledger = Ledger(RhoFilter(0.5), covers_before=False, budget_cap=BUDGET)
    ledger.spend(before, phase="before")
    ledger.close()
    assert priced_releases(ledger.entries) == [before, Release(BUDGET)]
    assert ledger.releases == [before]
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(to_lines(ledger.entries, 0, 0)))
    assert read_ledgers(path) == {0: [before, Release(BUDGET)]}
    empty = Ledger(RhoFilter(0.5), budget_cap=BUDGET)
    empty.close()
    assert priced_releases(empty.entries) == []
