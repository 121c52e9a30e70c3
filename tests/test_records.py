"""Training on records in memory: the recipe, ledger and weights of the same file, and no cell in any message."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import dpsgd_cli as dpsgd
from dpsgd_cli.data import memory
from dpsgd_cli.data.cells import Table
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError, DpsgdError, RecipeError, RunError, UsageError
from dpsgd_cli.recipe.of_records import StatedFacts, recipe_of_table

FACTS: dict[str, Any] = {
    "bounds": {"age": (0, 100)},
    "categories": {"job": ["nurse", "smith"]},
    "classes": ["no", "yes"],
}
BUDGET: dict[str, Any] = {"epsilon": 2, "delta": 1e-4}
FAST = {"epochs": 2, "method.batching": "full", "seed": 3, "runtime.device": "cpu"}
MARK = "sEcReT"


def people(rows: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 100, rows), "job": rng.choice(["smith", "nurse"], rows)})
    frame["member"] = rng.random(rows) > 0.5
    frame["churn"] = np.where(frame["age"] > 50, "yes", "no")
    return frame


def train(frame: Any, tmp_path: Path, **changed: Any) -> dpsgd.Result:
    asked: dict[str, Any] = {"target": "churn", **BUDGET, **FACTS, "out": tmp_path / "out", **changed}
    return dpsgd.train(frame, asked.pop("overrides", FAST), **asked)


def weights(result: dpsgd.Result) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in result.trained.bundle.weights[0].values()]


def test_a_frame_trains_as_its_file_does_from_the_shell(tmp_path: Path) -> None:
    frame = people()
    before = frame.copy()
    result = train(frame, tmp_path)
    assert frame.equals(before)
    assert not list(tmp_path.rglob("*.parquet"))
    frame.to_parquet(tmp_path / "records.parquet")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((result.directory / "recipe.yaml").read_text())
    shell = dpsgd.train(recipe, out=tmp_path / "shell")
    assert result.directory.name == shell.directory.name
    assert (result.directory / "ledger.jsonl").read_text() == (shell.directory / "ledger.jsonl").read_text()
    assert all(np.array_equal(one, other) for one, other in zip(weights(result), weights(shell), strict=True))
    assert (result.privacy, result.metrics) == (shell.privacy, shell.metrics)
    assert set(result.predict(frame)) <= {"no", "yes"}


def test_targets_from_python_have_the_transform_that_recipe_new_writes() -> None:
    frame = people()[["age"]].assign(price=1.0)
    made = recipe_of_table(
        Table.of(frame), "price", StatedFacts({"age": [0, 100]}, target_bounds=[100, 10_000]), "records"
    )
    assert made["data"]["target_transform"] == "auto" and Data.model_validate(made["data"]).log_scale


def test_the_same_name_with_other_records_is_no_finished_result(tmp_path: Path) -> None:
    first = train(people(), tmp_path)
    assert train(people(), tmp_path).directory == first.directory
    with pytest.raises(RunError, match=r"another content of records\.parquet"):
        train(people().iloc[::-1].reset_index(drop=True).assign(age=7), tmp_path)


@pytest.mark.parametrize("split", [{"test": 0}, {"test": 30}])
def test_records_are_tested_on_as_asked_for(tmp_path: Path, split: dict[str, int]) -> None:
    result = train(people(), tmp_path, overrides=FAST | {"data.split": split})
    assert ("test_accuracy" in result.metrics) == bool(split["test"])
    assert any("test records are public" in said for said in result.privacy["declarations"]) == bool(split["test"])
    assert f"The number of training records is public: {120 - split['test']}." in result.privacy["declarations"]


def test_arrays_and_dictionaries(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 3)), np.arange(60) % 2
    options: dict[str, Any] = {"bounds": (0, 1), "classes": [0, 1], "out": tmp_path / "out", **BUDGET}
    result = dpsgd.train(x, FAST, target=y, **options)
    np.savez(tmp_path / "records.npz", x=x, y=y)
    recipe = yaml.safe_load((result.directory / "recipe.yaml").read_text())
    recipe["data"]["path"] = str(tmp_path / "records.npz")
    shell = dpsgd.train(recipe, out=tmp_path / "shell")
    assert all(np.array_equal(one, other) for one, other in zip(weights(result), weights(shell), strict=True))
    assert y.flags.writeable and x.flags.writeable
    with pytest.raises(UsageError, match="has its own data and budget"):
        dpsgd.train(recipe, epsilon=1)
    with pytest.raises(RecipeError, match="did you mean epochs"):
        dpsgd.train(recipe | {"epoch": 2})
    with pytest.raises(RecipeError, match="plain values, and no DataFrame"):
        dpsgd.train(recipe | {"data": people()})
    for labels in (None, y[:-1], np.array([object()] * 60), "y"):
        with pytest.raises(UsageError, match="one for each row"):
            dpsgd.train(x, FAST, target=labels, **options)
    with pytest.raises(UsageError, match=r"one \[low, high\] for all features"):
        dpsgd.train(x, FAST, target=y, **(options | {"bounds": {"a": (0, 1)}}))


def test_a_target_in_bounds(tmp_path: Path) -> None:
    frame = people().assign(pay=lambda table: 100 + 2.0 * table["age"]).drop(columns="churn")
    result = train(frame, tmp_path, target="pay", classes=None, target_bounds=(100, 300))
    assert "test_mae" in result.metrics and result.predict(frame).between(100, 300).all()


def refused(tmp_path: Path, **changed: Any) -> str:
    with pytest.raises(UsageError) as caught:
        train(changed.pop("frame", people()), tmp_path, **changed)
    return str(caught.value)


def test_what_is_not_stated_is_refused_with_the_columns(tmp_path: Path) -> None:
    told = refused(tmp_path, bounds=None, categories=None, classes=None, frame=people().assign(born=pd.Timestamp(0)))
    for said in (
        "bounds: needed for 'age'",
        "categories: needed for 'job'",
        "dates",
        "for 'born'",
        "say what 'churn' can",
    ):
        assert said in told
    assert "member" not in told
    assert "there is no column 'aeg'; did you mean 'age'" in refused(tmp_path, bounds={"aeg": (0, 1), "age": (0, 9)})
    assert "only one of" in refused(tmp_path, target_bounds=(0, 1))
    assert "either" in refused(tmp_path, classes="all")
    assert "no column 'chrun'" in refused(tmp_path, target="chrun")
    assert "as text" in refused(tmp_path, target=None)
    for budget in ({"epsilon": None}, {"delta": None}):
        assert "a guarantee has no default" in refused(tmp_path, **budget)
    assert "a list is neither" in refused(tmp_path, frame=[1, 2])
    assert not (tmp_path / "out").exists()


def test_what_was_fitted_before_is_named_in_the_statement(tmp_path: Path) -> None:
    result = train(people(), tmp_path, fitted_before=["StandardScaler 'scale'"])
    assert result.privacy["uncovered_steps"] == [
        "StandardScaler 'scale' was fitted to the records, without noise, before they were given"
    ]
    assert any("StandardScaler" in warning for warning in result.warnings)


class Odd:
    """A cell that shows itself in whatever goes wrong."""

    def __repr__(self) -> str:
        return MARK

    def __hash__(self) -> int:
        raise ValueError(MARK)

    def __float__(self) -> float:
        raise ValueError(MARK)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"age": MARK},
        {"age": [MARK] + ["5"] * 119},
        {"job": MARK},
        {"job": ["smith"] * 119 + [MARK]},
        {"churn": ["yes"] * 119 + [MARK]},
        {"member": MARK},
        {"age": [Odd()] * 120},
        {"job": [Odd()] * 120},
        {"churn": [Odd()] * 120},
        {"age": [[MARK]] * 120},
        {"job": [{MARK: MARK}] * 120},
        {"age": [MARK, None] * 60},
        {"age": pd.to_datetime(["2020-01-01"] * 120)},
    ],
)
def test_no_traceback_holds_a_cell(tmp_path: Path, spoilt: dict[str, Any]) -> None:
    """Guarantee: whatever a column holds, neither message nor traceback shows it."""
    frame = people().assign(**spoilt)
    with pytest.raises(DpsgdError) as caught:
        train(frame, tmp_path)
    shown = "".join(traceback.format_exception(caught.value))
    assert MARK not in shown and "DataFrame" not in shown
    calls: list[Callable[[], Any]] = [
        lambda: dpsgd.train([frame], out=tmp_path / "out"),
        lambda: dpsgd.train(people(), {"data.bounds": frame}, target="churn", **BUDGET, **FACTS),
        lambda: dpsgd.train({"name": "x", "data": frame}, out=tmp_path / "out"),
        lambda: dpsgd.train(people(), target="churn", **BUDGET, **(FACTS | {"bounds": {"age": frame["age"]}})),
    ]
    for call in calls:
        with pytest.raises(DpsgdError) as caught:
            call()
        assert MARK not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_another_library_is_told_without_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> str:
        raise KeyError(MARK)

    monkeypatch.setattr(memory, "_digest_of_table", broken)
    with pytest.raises(RunError, match=r"KeyError in test_records\.py, line") as caught:
        train(people(), tmp_path)
    assert MARK not in "".join(traceback.format_exception(caught.value))


def test_records_are_held_no_longer_than_the_training(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"
    with memory.holding(path, Table.of(people())):
        assert memory.is_there(path) and memory.at(path) is not None
    assert not memory.is_there(path)
    with pytest.raises(DataError, match="several levels"):
        memory.table_of(pd.DataFrame(np.zeros((2, 2)), columns=pd.MultiIndex.from_tuples([("a", "b"), ("a", "c")])))
    with pytest.raises(DataError, match="two columns are called 'a'"):
        memory.table_of(pd.DataFrame(np.zeros((2, 2)), columns=["a", "a"]))


def test_bounds_and_categories_may_be_private(tmp_path: Path) -> None:
    """They are released at a share of the budget, as in a recipe, and charged to the ledger."""
    given = {"bounds": {"age": "private"}, "categories": {"job": "private"}}
    result = train(people(2000), tmp_path, **given, epsilon=4)
    assert result.privacy["epsilon"] <= 4
    assert len(set((result.directory / "ledger.jsonl").read_text().splitlines())) > 2
