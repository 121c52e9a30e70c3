"""Parallel composition in ledgers: the price of a trial is the greatest of its parts' prices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpsgd_cli.accounting.book_filter import Spending
from dpsgd_cli.accounting.joint_composition import Records, Run
from dpsgd_cli.accounting.ledger import Ledger, LedgerEntry, entries_from_lines, priced_parts, priced_releases, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.main import main
from dpsgd_cli.sweep.pricing import Spent, statement
from dpsgd_cli.sweep.settings import Sweep

LITTLE, MUCH = Release(GaussianSum(10.0, "add-remove")), Release(GaussianSum(0.5, "add-remove", label="held-out"))
# epsilon at delta 1e-5 of mu 2 and of mu sqrt(8): Balle and Wang 2018, Theorem 8, by scipy
OF_2, OF_ROOT_8 = 9.99726, 15.45616


def test_parts_are_priced_each_for_itself_and_a_flat_list_composes_all() -> None:
    entries = [LedgerEntry(LITTLE), LedgerEntry(MUCH, "held-out")]
    assert priced_parts(entries) == [[LITTLE], [MUCH]]
    assert set(priced_releases(entries)) == {LITTLE, MUCH}
    assert priced_parts([LedgerEntry(LITTLE)]) == [[LITTLE]]


def test_a_ledger_on_disk_is_priced_by_its_most_expensive_part(tmp_path: Path) -> None:
    entries = [LedgerEntry(LITTLE, "train", 0), LedgerEntry(MUCH, "held-out")]
    lines = to_lines(entries, 0, None) + to_lines(entries, 1, None)
    assert entries_from_lines(lines, "x")[0] == entries
    (tmp_path / "ledger.jsonl").write_text("\n".join(lines) + "\n")

    def epsilon(*more: str) -> float:
        asked = ["account", str(tmp_path / "ledger.jsonl"), "--accountant", "gaussian", "--format", "json", *more]
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == 0, done.output
        return float(json.loads(done.stdout)[0]["epsilon"])

    assert epsilon() == pytest.approx(OF_2, abs=1e-3)


def test_an_unplanned_or_repeated_measurement_is_refused() -> None:
    ledger = Ledger(held_out=[MUCH])
    ledger.spend(MUCH, phase="held-out")
    with pytest.raises(PrivacyError, match="not planned"):
        ledger.spend(MUCH, phase="held-out")
    with pytest.raises(PrivacyError, match="not planned"):
        Ledger(held_out=[MUCH]).spend(LITTLE, phase="held-out")
    assert [entry.phase for entry in ledger.entries] == ["held-out"] and ledger.training == []


def test_a_sweep_adds_trials_up_part_by_part() -> None:
    run = Run("x", (None, None), "add-remove", Records("x", "measured with noise on 20%"))
    spent = [Spent((LITTLE,), run, 1e-5, OF_2, "upper", (MUCH,))]
    told = statement(spent, Sweep(name="x", recipes=["quickstart"]), spent)["all_trials"]
    assert told["epsilon"] == pytest.approx(OF_ROOT_8, abs=1e-3)


def test_a_book_is_charged_the_larger_part_and_several_runs_all_of_both() -> None:
    """mu 2 dominates mu .1; of two runs, which may hold out different records: 2 (4 + .01)."""
    one = Spending((LITTLE,), held_out=(MUCH,))
    assert one.price(1e-6).mu_squared == pytest.approx(4.0)
    assert (Spending() + one).price(1e-6).mu_squared == pytest.approx(4.0)
    assert (one + one).price(1e-6).mu_squared == pytest.approx(8.02)
    assert one.epsilon(1e-5) == pytest.approx(OF_2, abs=1e-3)
