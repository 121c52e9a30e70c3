"""Claims as curves: what the best attacker finds, as `account`, results and comparisons say it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from scipy import stats

from dpsgd_cli.accounting.ledger import read_ledgers
from dpsgd_cli.accounting.tradeoff import RATES, best_attacker
from dpsgd_cli.main import main
from dpsgd_cli.results import store
from dpsgd_cli.results.summary import result_text
from tests.cli.accounting import rows, run, table
from tests.conftest import GRADIENT, Train, WriteRecipe

FULL = ["--batching", "full", "--noise-multiplier", "5", "--steps", "25", "--accountant", "gaussian"]
SAMPLED = ["--sampling-rate", "0.01", "--noise-multiplier", "1", "--steps", "1000", "--accountant", "pld"]


def neyman_pearson(mu: float, rate: float) -> float:
    """Of the test of N(0, 1) against N(mu, 1)."""
    return float(stats.norm.sf(stats.norm.isf(rate) - mu))


def test_account_states_mu_and_what_the_best_attacker_finds() -> None:
    """25 Gaussians of multiplier 5 are one of mu 1."""
    found = rows(*FULL, "--attacker")["gaussian"]
    assert found["mu"] == pytest.approx(1.0, rel=1e-14) and found["regret"] == 0 and found["attacker_by"] == "gaussian"
    for rate in RATES:
        assert found[f"true_positives_at_{rate:g}"] == pytest.approx(neyman_pearson(1.0, rate), rel=1e-9)
    said = run(*FULL, "--attacker").stdout
    assert "strongest attack: TPR 9.24% at FPR 1%, 1.83% at FPR 0.1%; exactly mu-Gaussian-DP with mu 1.0" in said
    assert "attack" not in run(*FULL).stdout and "mu" not in rows(*FULL)["gaussian"]


def test_the_tradeoff_curve_is_one_over_false_positives() -> None:
    over = "--over=false-positives=0.1:0.9:0.2"
    exact = table(*FULL[:-2], over)
    assert [float(row["false-positives"]) for row in exact] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for row in exact:
        rate = float(row["false-positives"])
        assert float(row["true positives (exact)"]) == pytest.approx(neyman_pearson(1.0, rate), rel=1e-9)
        assert float(row["blind guess"]) == rate
    bound = [float(row["true positives (at most)"]) for row in table(*SAMPLED[:-2], over)]
    assert bound == sorted(bound) and all(
        own > rate for own, rate in zip(bound, (0.1, 0.3, 0.5, 0.7, 0.9), strict=True)
    )
    refused = run(*FULL[:-2], "--over=false-positives=0:0.9:0.2")
    assert refused.exit_code == 2 and "above 0 and below 1" in refused.stderr


def test_results_and_comparisons_state_what_their_ledgers_allow(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial that tells most, of a ledger with correlated noise and of one without."""
    budget = {"budget": {"epsilon": 4, "delta": 1e-3}, "delta": 1e-3}
    plain = write_recipe(method=GRADIENT | {"batching": "shuffle"}, privacy=budget, epochs=3)
    poisson = ["method.batching=poisson", "privacy.noise={kind: banded, bands: 3}", "name=banded"]
    falling = ["privacy.schedule={kind: list, multipliers: [4, 3, 2], factor: auto}", "privacy.budget={rho: 0.5}"]
    exact, sampled = train(plain, *falling), train(plain, *poisson)
    for directory in (exact, sampled):
        stated = store.read_document(directory)["privacy"]["attacker"]
        own = [best_attacker(releases) for releases in read_ledgers(directory / "ledger.jsonl").values()]
        for rate in RATES:
            assert stated["true_positives"][f"{rate:g}"] == pytest.approx(max(one.true_positives[rate] for one in own))
        assert "strongest attack" in result_text(store.read_document(directory), directory)
    # rho is mu^2 / 2
    assert store.read_document(exact)["privacy"]["attacker"]["mu"] == pytest.approx(1.0, rel=1e-9)
    assert store.read_document(sampled)["privacy"]["attacker"]["regret"] > 0
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(main, ["compare", str(exact), str(sampled), "--out", "side"])
    assert shown.exit_code == 0, shown.stderr
    assert "| TPR at FPR 1% | TPR at FPR 0.1% | mu (regret) |" in shown.stdout and "| at most " in shown.stdout
    with (tmp_path / "side" / "comparison.csv").open(encoding="utf-8") as file:
        both = list(csv.DictReader(file))
    assert float(both[0]["mu"]) == pytest.approx(store.read_document(exact)["privacy"]["attacker"]["mu"])
    told = store.read_document(sampled)["privacy"]["attacker"]
    assert float(both[1]["mu"]) == pytest.approx(told["mu"]) and float(both[1]["regret"]) == pytest.approx(
        told["regret"]
    )
    assert 0.01 < float(both[1]["true_positives_at_0.01"]) < 1
    assert json.loads((tmp_path / "side" / "comparison.json").read_text())["rows"][0]["mu"] == float(both[0]["mu"])
