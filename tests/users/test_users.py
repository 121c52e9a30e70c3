"""`privacy.unit` through `dpsgd train`: folds, refusals, hashes. `contracts/test_neighbours.py` replaces users."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.main import main
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.recipe.loading import load_recipe
from tests.conftest import Train, WriteRecipe
from tests.contracts.test_neighbours import BUDGET, FLAT, METHOD, PATE, UNIT, Run, rows_of_users

USERS = METHOD["full, users"]
FULL = USERS["method"]


def test_all_rows_of_a_user_are_in_one_fold(tmp_path: Path) -> None:
    sections = {**USERS, "data": {"test_path": ""}, "folds": 2, "repeats": 1}
    one = Run(tmp_path / "run", rows_of_users(), sections)
    assert one.done.exit_code == 0 and one.result is not None, one.done.stderr
    document = json.loads((one.result / "result.json").read_text())
    told = document["privacy"]["declarations"]
    assert any("The number of users is public: 10; each trial trains on at most 10" in said for said in told)
    assert document["privacy"]["unit"] == {"column": "user", "most_rows": 2}


def refused(folder: Path, sections: dict[str, Any]) -> str:
    done = Run(folder, rows_of_users(), sections)
    assert done.done.exit_code == 2 and done.result is None, done.done.output
    assert "Traceback" not in done.done.output
    return done.done.stderr


UNPROVED = sorted(
    kind for kind, one in METHODS.items() if not one.descriptor.by_unit and one.descriptor.privacy != "refused"
)


@pytest.mark.parametrize("kind", UNPROVED)
def test_a_method_that_looks_at_single_rows_is_refused(kind: str, tmp_path: Path) -> None:
    candidates = [{"kind": "uniform"}, {"kind": "uniform", "initial": 2}]
    extra: dict[str, dict[str, Any]] = {
        "pate": {**PATE, "aggregation": {"kind": "gnmax", "noise": 2}},
        "private-selection": {"batch_size": 4, "candidates": candidates},
        "python": {"file": "own.py"},
    }
    model = {"kind": "linear" if kind in extra else "convex"}
    sections = {**USERS, "model": model, "method": {"kind": kind, **extra.get(kind, {})}}
    told = refused(tmp_path / "run", {**sections, "privacy": {**BUDGET, **UNIT}})
    assert f"nothing is proved of method {kind} where all rows of a user are protected together; use dp-gd" in told


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"method": {**FULL, "batching": "fixed", "batch_size": 1}}, "method dp-sgd, batching fixed"),
        ({"method": {**FULL, "preconditioner": {"kind": "second-moment"}}}, "not for all rows of a user; give null"),
        ({"data": {"validation": {"records": 2, "noise_multiplier": 3}}}, "charged for one record, and a user"),
        ({"data": {"preprocess": [{"pca": {"components": 1, "noise_multiplier": 5}}]}}, "the noise of pca is charged"),
        ({"runtime": {"dtype": "bfloat16"}}, "bfloat16 is proved for single records"),
        ({"privacy": {**FLAT, "unit": {"column": "y", "most_rows": 2}}}, "is the target; name the column"),
        ({"privacy": {**FLAT, "unit": {"column": "user", "most_rows": 0}}}, "most_rows"),
    ],
)  # fmt: skip
def test_what_is_proved_of_single_records_only_is_refused(sections: dict[str, Any], told: str, tmp_path: Path) -> None:
    data = {**USERS["data"], **sections.get("data", {})}
    assert told in refused(tmp_path / "run", {**USERS, **sections, "data": data})


def test_several_processes_are_refused() -> None:
    recipe = load_recipe("beyond/adult-users").recipe
    with pytest.raises(UsageError, match="one process, not in 2"):
        create(SimpleNamespace(recipes=(recipe,), team=SimpleNamespace(size=2)))  # type: ignore[arg-type]


def test_rows_of_users_and_of_records_are_not_stated_together(tmp_path: Path) -> None:
    """A ledger about users and one about records have no common neighbours."""
    plain = {**USERS, "privacy": FLAT, "data": {**USERS["data"], "drop": ["user"]}, "seed": 9}
    users, records = (Run(tmp_path / f"{n}", rows_of_users(), own) for n, own in enumerate((USERS, plain)))
    assert users.result is not None and records.result is not None, records.done.stderr
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((users.result / "ledger.jsonl").read_text() + (records.result / "ledger.jsonl").read_text())
    told = CliRunner().invoke(main, ["account", str(mixed)])
    assert told.exit_code == 2 and "some lines are about single records, others about users" in told.output
    both = CliRunner().invoke(main, ["compare", str(users.result), str(records.result), "--out", str(tmp_path / "c")])
    assert both.exit_code == 0 and "epsilon (add-remove of users)" in both.output, both.output


def test_a_file_of_users_is_hashed_where_nobody_publishes_it(write_recipe: WriteRecipe, train: Train) -> None:
    """Its hash is a function of whose every row is: who knows all others could try out the last one."""
    unit = {"column": "who.npy", "most_rows": 3}
    path = write_recipe(privacy={"unit": unit, "budget": {"epsilon": 4, "delta": 1e-3}, "accountant": "rdp"})
    np.save(path.parent / "who.npy", np.concatenate([np.arange(48) % 16, np.arange(100, 112)]))
    provenance = json.loads((train(path) / "result.json").read_text())["provenance"]
    assert provenance["data_sha256"] == {}
    assert sorted(provenance["nonprivate_data_sha256"]) == ["tiny.npz", "who.npy"]
    np.save(path.parent / "who.npy", np.concatenate([np.arange(48) % 12, np.arange(100, 112)]))
    with pytest.raises(RunError, match=r"made from another content of who\.npy"):
        train(path)
