"""Old results: which of them chose what to release, and the budget that polices them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpsgd_cli.errors import DataError, UnsupportedMechanism
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.zcdp import total_rho
from dpsgd_cli.privacy.ledger import Entry, read_entries, read_ledgers, to_lines
from dpsgd_cli.privacy.mechanism import GaussianSum, PureDP, Release, ZeroConcentrated
from dpsgd_cli.privacy.unmarked import cap_beside

DELTA = 1e-5


def old_result(folder: Path, method: str, schedule: str, accountant: str, budget: dict[str, Any] | None) -> Path:
    """A ledger of two small releases, one of them before training, beside a recipe and a result."""
    recipe = {"method": {"kind": method}, "privacy": {"schedule": {"kind": schedule}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    stated = {"budget": budget, "accountant": accountant, "adjacency": "zero-out", "budget_covers": "total"}
    (folder / "result.json").write_text(json.dumps({"privacy": stated}))
    entries = [Entry(Release(GaussianSum(50.0, "zero-out")), phase) for phase in ("before", "train")]
    (folder / "ledger.jsonl").write_text("\n".join(to_lines(entries, 0, 0)))
    return folder / "ledger.jsonl"


RHO, EPSILON = {"rho": 0.25}, {"epsilon": 2.0, "delta": DELTA}


@pytest.mark.parametrize(
    ("method", "schedule", "accountant", "budget"),
    [
        ("dp-agd", "uniform", "zcdp", EPSILON),
        ("dp-agd", "uniform", "zcdp-tight", EPSILON),
        ("dp-agd", "uniform", "zcdp", RHO),
        ("dp-sgd", "validation", "gaussian", EPSILON),
        ("dp-sgd", "validation", "gaussian", RHO),
        ("python", "uniform", "gaussian", RHO),
    ],
)
def test_what_an_old_method_chose_is_bounded_by_its_budget(
    tmp_path: Path, method: str, schedule: str, accountant: str, budget: dict[str, Any]
) -> None:
    bounds = read_ledgers(old_result(tmp_path, method, schedule, accountant, budget))[0]
    if "rho" in budget:
        assert total_rho(bounds) == pytest.approx(0.25, rel=1e-14)
    else:
        stated = accountants.get(accountant).epsilon(bounds, DELTA)
        assert 2.0 * (1 - 1e-9) < stated <= 2.0


@pytest.mark.parametrize(
    ("method", "schedule", "accountant", "budget"),
    [
        ("dp-sgd", "uniform", "gaussian", RHO),
        ("privgene", "uniform", "zcdp", EPSILON),
        ("python", "uniform", "pld", EPSILON),
        ("python", "uniform", "gaussian", None),
    ],
)
def test_what_was_planned_is_bounded_by_itself(
    tmp_path: Path, method: str, schedule: str, accountant: str, budget: dict[str, Any] | None
) -> None:
    bounds = read_ledgers(old_result(tmp_path, method, schedule, accountant, budget))[0]
    assert bounds == [Release(GaussianSum(50.0, "zero-out"), 2)]


def test_old_budgets_in_rho_are_no_gaussian_where_pure_releases_were_policed_by_them(tmp_path: Path) -> None:
    """Three exponential mechanisms of rho 1/8 each are 0.375-zCDP, and 1.23-Gaussian-DP each: 2.3 in mu^2 / 2."""
    path = old_result(tmp_path, "python", "uniform", "gaussian", {"rho": 0.375})
    choice = Entry(Release(PureDP(1.0, "zero-out", "exponential"), 3))
    path.write_text("\n".join(to_lines([choice], 0, 0)))
    assert read_ledgers(path)[0] == [Release(ZeroConcentrated(0.375, "zero-out"))]
    with pytest.raises(UnsupportedMechanism, match="rho-zCDP and nothing more"):
        accountants.get("gaussian").epsilon(read_ledgers(path)[0], DELTA)


def test_preprocessing_outside_the_budget_stays_outside(tmp_path: Path) -> None:
    path = old_result(tmp_path, "dp-agd", "uniform", "zcdp", RHO)
    result = json.loads((tmp_path / "result.json").read_text())
    result["privacy"]["budget_covers"] = "training"
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert [entry.within is None for entry in read_entries(path)[0]] == [True, False]
    assert total_rho(read_ledgers(path)[0]) == pytest.approx(0.25 + 1 / 5000)


def test_a_ledger_alone_is_taken_as_it_is_and_a_damaged_result_is_named(tmp_path: Path) -> None:
    path = old_result(tmp_path, "dp-agd", "uniform", "zcdp", RHO)
    (tmp_path / "result.json").write_text('{"privacy": {}}')
    with pytest.raises(DataError, match="damaged result"):
        read_ledgers(path)
    (tmp_path / "recipe.yaml").unlink()
    assert cap_beside(tmp_path) is None
    assert read_ledgers(path)[0] == [Release(GaussianSum(50.0, "zero-out"), 2)]
    path.write_text("\n".join(to_lines([Entry(Release(PureDP(0.1, "zero-out", "laplace", "step")))], 0, 0)))
    with pytest.raises(UnsupportedMechanism, match="does not say within which budget"):
        read_ledgers(path)
