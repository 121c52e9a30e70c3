"""Methods that choose what to release from what they released: their budget is stated, and not what they spent."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.ledger import entries_from_lines
from dpsgd_cli.accounting.mechanism import merge
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import GRADIENT, WAYS, Train, WriteRecipe, table

# One gradient and one selection take four fifths of this budget, so that a fifth is left.
AGD = ["data.name=breast-cancer", "data.preprocess=[{scale: {by: bounds}}]", "runtime.threads=1", "repeats=2",
       "folds=null", "data.split={test: 0.2}", "privacy.budget={epsilon: 2, delta: 1e-5}", "privacy.accountant=zcdp",
       "method.splits=1.25", "method.gradient_share=0.5"]  # fmt: skip


def account(*args: object) -> Result:
    return CliRunner().invoke(main, ["account", *map(str, args)])


def rows(*args: object) -> dict[str, dict[str, Any]]:
    result = account(*args, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return {row["accountant"]: row for row in json.loads(result.stdout)}


def spent(directory: Path, accountant: str) -> float:
    """What the most expensive trial's releases would cost, had they been fixed beforehand."""
    lines = (directory / "ledger.jsonl").read_text().splitlines()
    trials = [merge([e.release for e in own]) for own in entries_from_lines(lines, "ledger").values()]
    return max(accountants.get(accountant).epsilon(own, 1e-5) for own in trials)


@pytest.fixture(scope="module")
def agd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished DP-AGD of a budget of epsilon 2."""
    folder = tmp_path_factory.mktemp("agd")
    return loop.run(resolve_auto(load_recipe("lee2018/dp-agd-better", AGD)), loop.Options(folder))


def test_account_states_the_budget_of_a_result_and_nobody_the_sum(agd: Path) -> None:
    assert spent(agd, "zcdp") < 1.9
    for source in (agd, agd / "ledger.jsonl"):
        found = rows(source, "--delta", "1e-5")
        priced = {name for name, row in found.items() if row["epsilon"] is not None}
        assert priced == {"zcdp", "zcdp-tight", "rdp"}
        assert found["zcdp"]["epsilon"] == pytest.approx(2, rel=1e-9) and found["zcdp"]["epsilon"] <= 2
        assert found["zcdp"]["bound"] == "upper"
        assert found["pld"]["note"].startswith("refused: what is released is chosen from what was released")
    assert rows(agd) == {name: row | {"source": agd.name} for name, row in rows(agd, "--delta", "1e-5").items()}


def test_the_gate_judges_the_budget(agd: Path) -> None:
    zcdp = ("--accountant", "zcdp", "--max-epsilon")
    assert account(agd, *zcdp, "2").exit_code == 0
    assert account(agd, *zcdp, "1.99").exit_code == 1
    least = rows(agd)["zcdp-tight"]["epsilon"]
    assert account(agd, "--max-epsilon", spent(agd, "pld")).exit_code == 1
    assert account(agd, "--max-epsilon", least).exit_code == 0


def test_a_budget_by_the_best_renyi_order_passes_its_own_gate(tmp_path: Path) -> None:
    recipe = load_recipe("lee2018/dp-agd-better", [*AGD, "privacy.accountant=zcdp-tight"])
    directory = loop.run(resolve_auto(recipe), loop.Options(tmp_path))
    assert account(directory, "--max-epsilon", "2").exit_code == 0
    assert account(directory, "--max-epsilon", "1.9999").exit_code == 1
    assert account("lee2018/dp-agd-better", *AGD, "privacy.accountant=zcdp-tight", "--max-epsilon", "2").exit_code == 0


def test_several_trials_are_that_many_budgets_and_there_is_no_curve(agd: Path) -> None:
    one, both = (rows(agd, "--accountant", "zcdp", "--trials", n)["zcdp"]["rho"] for n in ("1", "all"))
    assert both == pytest.approx(2 * one, rel=1e-12)
    assert rows(agd, "--best-of", "5")["rdp"]["epsilon"] > rows(agd)["rdp"]["epsilon"]
    recipe = ("lee2018/dp-agd-better", *AGD)
    assert rows(*recipe)["zcdp"]["epsilon"] == rows(agd)["zcdp"]["epsilon"]
    assert rows(*recipe, "--trials", "3")["zcdp"]["rho"] == pytest.approx(3 * one, rel=1e-12)
    for source in ([agd], recipe):
        refused = account(*source, "--curve")
        assert refused.exit_code == 2
        assert "no curve by epoch: releases may be chosen by earlier releases" in refused.stderr


def test_a_result_states_the_budget_and_names_what_was_spent(agd: Path) -> None:
    privacy, trials = store.read_document(agd)["privacy"], table(agd, "trials.csv")
    assert privacy["epsilon"] == pytest.approx(2, rel=1e-9)
    assert privacy["spent"]["epsilon"] == pytest.approx(spent(agd, "zcdp"), rel=1e-9)
    assert set(privacy["spent"]["parts"]) == {"gradient", "step"}
    assert "parts" not in privacy
    assert {float(row["epsilon"]) for row in trials} == {privacy["epsilon"]}
    assert max(float(row["spent_rho"]) for row in trials) == pytest.approx(privacy["spent"]["rho"])
    assert privacy["spent"]["rho"] < privacy["rho"]


def test_compare_states_the_budget_of_what_chose_its_releases(agd: Path, tmp_path: Path) -> None:
    report = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["compare", str(agd), "--out", str(tmp_path / "c"), "--report", str(report)])
    assert done.exit_code == 0, done.output
    assert re.search(r"<li>epsilon: at most 2(\.0+)? at delta 1e-05", report.read_text())
    assert "<li>adaptive: releases may be chosen by earlier releases, so the budget is the bound" in report.read_text()
    assert f"at most {spent(agd, 'zcdp'):.3g}" not in report.read_text()


def test_a_schedule_that_follows_validation_is_one_gaussian_of_its_budget(
    train: Train, write_recipe: WriteRecipe
) -> None:
    directory = train(write_recipe(**WAYS["shuffle-validation"]))
    new = store.read_document(directory)
    expected = accountants.get("gaussian").epsilon([*_of_rho(0.5)], 1e-3)
    found = rows(directory)
    for name in ("gaussian", "pld"):
        assert found[name]["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert new["privacy"]["epsilon"] == found["gaussian"]["epsilon"]
    assert new["privacy"]["spent"]["rho"] <= new["privacy"]["rho"] == pytest.approx(0.5, rel=1e-14)


def _of_rho(rho: float) -> list[Any]:
    from dpsgd_cli.accounting.mechanism import GaussianSum, Release

    return [Release(GaussianSum((2 * rho) ** -0.5, "zero-out"))]


OWN = """
from dpsgd_cli.methods.dp_sgd.run import DpSgd

class Short(DpSgd):
    @property
    def finished(self):
        return self._done >= 1
"""


@pytest.mark.parametrize("batching", ["poisson", "shuffle"])
def test_a_users_own_method_that_stops_when_it_likes_costs_its_whole_plan_or_budget(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, batching: str
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = GRADIENT | {"kind": "python", "file": "own.py", "factory": "Short", "batching": batching}
    privacy = {"budget": {"epsilon": 4, "delta": 1e-3}, "schedule": {"kind": "uniform", "initial": 3}}
    directory = train(write_recipe(method=own, privacy=privacy))
    document = store.read_document(directory)
    assert {row["epochs"] for row in document["trials"]} == {1}
    plain = GRADIENT | {"batching": batching}
    whole = load_recipe(str(write_recipe(method=plain, privacy=privacy)))
    plan, _ = loop.plan_recipe(resolve_auto(whole))
    assert plan is not None
    planned = plan.guarantee().epsilon
    stated = document["privacy"]["epsilon"]
    assert stated == rows(directory)["pld" if batching == "poisson" else "gaussian"]["epsilon"]
    if batching == "poisson":
        assert stated == pytest.approx(planned, rel=1e-6)
    else:
        assert planned < 3.9 < stated <= 4
