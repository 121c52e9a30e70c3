"""Training on records in memory: the recipe, ledger and weights of the same file, and no cell in any message."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import TensorDataset

import dpsgd_cli as dpsgd
from dpsgd_cli.common.plugins import content_of
from dpsgd_cli.data import memory
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.weights import digest
from dpsgd_cli.errors import DataError, DpsgdError, ModelError, RecipeError, RunError, UsageError
from dpsgd_cli.recipe.of_records import StatedFacts, recipe_of_table
from dpsgd_cli.results.store import public_copy

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
        TableRows.of(frame), "price", StatedFacts({"age": [0, 100]}, target_bounds=[100, 10_000]), "records"
    )
    assert made["data"]["target_transform"] == "auto" and Data.model_validate(made["data"]).log_scale


def test_the_same_name_with_other_records_is_no_finished_result(tmp_path: Path) -> None:
    first = train(people(), tmp_path)
    assert train(people(), tmp_path).directory == first.directory
    with pytest.raises(RunError, match=r"another content of the records"):
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
        "bounds (first and last day), or drop: needed for 'born'",
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


def network() -> nn.Module:
    """Two dense layers; every number is 7."""
    made = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for parameter in made.parameters():
        nn.init.constant_(parameter, 7.0)
    return made


class Hub:
    """What a Hugging Face dataset answers."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.column_names, self.columns = [*columns], columns

    def with_format(self, kind: None) -> Hub:
        assert kind is None
        return self

    def __getitem__(self, rows: slice) -> dict[str, Any]:
        return {name: list(column[rows]) for name, column in self.columns.items()}


X = np.random.default_rng(0).random((60, 3)).astype(np.float32)
Y = np.arange(60) % 2
OWN: dict[str, Any] = {"classes": [0, 1], **BUDGET}
STILL = {"epochs": 1, "seed": 3, "runtime.device": "cpu", "method.learning_rate": 1e-30}
"""Steps that move no weight."""
FORMS: dict[str, tuple[Any, Any]] = {
    "array": (X, Y),
    "tensor": (torch.from_numpy(X), torch.from_numpy(Y)),
    "pair": ((X, torch.from_numpy(Y)), None),
    "data set": (TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_own_objects_train_and_predict_as_an_array_does(tmp_path: Path, form: str) -> None:
    records, labels = FORMS[form]
    own: dict[str, Any] = {"model": network(), "weights": "drawn"}
    result = dpsgd.train(records, FAST, target=labels, out=tmp_path, **own, **OWN)
    array = dpsgd.train(X, FAST, target=Y, out=tmp_path / "array", **own, **OWN)
    assert all(np.array_equal(one, other) for one, other in zip(weights(result), weights(array), strict=True))
    assert result.predict(records).tolist() == array.predict(X).tolist()
    again = dpsgd.load(result.directory, **own)
    assert again.predict(torch.from_numpy(X)).tolist() == array.predict(X).tolist()


def test_a_model_in_memory_is_given_again_and_is_the_same(tmp_path: Path) -> None:
    secure = {key: value for key, value in FAST.items() if key != "seed"}
    result = dpsgd.train((X, Y), secure, model=network(), weights="drawn", out=tmp_path, **OWN)
    with pytest.raises(DataError, match=r"Sequential \(in memory\).*dpsgd.load\(folder, model=..., weights=...\)"):
        dpsgd.load(result.directory).predict(X)
    other = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    with pytest.raises(RunError, match=r"another content of Sequential \(in memory\)"):
        dpsgd.load(result.directory, model=other, weights="drawn").predict(X)
    with pytest.raises(RunError, match=r"another content of Sequential \(in memory\)"):
        dpsgd.train((X, Y), secure, model=other, weights="drawn", out=tmp_path, **OWN)
    with pytest.raises(UsageError, match="given in memory"):
        public_copy(result.directory, tmp_path / "public")


CODE = """
width = 3
class Part:
    def size(self): return 5
def build(): return [Part().size() for _ in "12"], width
"""


@pytest.mark.parametrize("change", [("5", "6"), ("12", "13"), ("width = 3", "width = 4"), (".size()", ".size() + 1")])
def test_the_content_of_a_function_is_that_of_all_that_it_names(change: tuple[str, str]) -> None:
    found = []
    for code in (CODE, CODE, CODE.replace(*change)):
        space: dict[str, Any] = {"__name__": "own_networks"}
        exec(code, space)
        found.append(content_of([space["build"]]))
    assert found[0] == found[1] != found[2]


def test_numbers_of_a_module_are_drawn_anew_or_declared(tmp_path: Path) -> None:
    """A trained module's numbers reach no result without a declaration."""
    given = network()
    drawn = dpsgd.train((X, Y), STILL, model=given, weights="drawn", out=tmp_path / "drawn", **OWN)
    for value in weights(drawn):
        assert np.abs(value).max() < 1 and np.unique(value).size == value.size
    kept = dpsgd.train((X, Y), STILL, model=given, weights="public", out=tmp_path / "kept", **OWN)
    assert all((one == 7).all() for one in weights(kept)) and all((p == 7).all() for p in given.parameters())
    told = [one for one in kept.privacy["declarations"] if "weights of Sequential (in memory)" in one]
    assert len(told) == 1 and digest(given.state_dict()) in told[0]
    assert not any("weights of" in one for one in drawn.privacy["declarations"])
    built = dpsgd.train((X, Y), STILL, model=lambda: nn.Linear(3, 2), out=tmp_path / "built", **OWN)
    assert {tuple(one.shape) for one in weights(built)} == {(2, 3), (2,)}


TRAINED = nn.Linear(3, 2)


def holding_a_pass() -> nn.Module:
    made = network()
    made.seen = made(torch.zeros(1, 3))
    return made


class Gained(nn.Module):
    """A gain that nothing draws anew, or something else is drawn."""

    def __init__(self, resets: bool = False) -> None:
        super().__init__()
        self.gain, self.last = nn.Parameter(torch.ones(3)), nn.Linear(3, 2)
        if resets:
            self.reset_parameters = self.last.reset_parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.gain * x)
        return y


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": network()}, 'a module with weights="drawn"'),
        ({"model": Gained(), "weights": "drawn"}, r"Gained has no reset_parameters\(\) that draws all"),
        ({"model": Gained(resets=True), "weights": "drawn"}, r"Gained has no reset_parameters\(\) that draws all"),
        ({"model": network, "weights": "public"}, "a function that builds a module, or"),
        ({"model": lambda: copy.deepcopy(TRAINED)}, "is the same for every seed and no constant.*weights='public'"),
        ({"model": nn.LazyLinear(2), "weights": "drawn"}, "LazyLinear learns its sizes"),
        ({"model": holding_a_pass(), "weights": "drawn"}, "keeps a tensor that a pass computed"),
        ({"model": lambda input_shape, outputs: nn.Linear(input_shape, outputs)}, "line .* is math.prod"),
        ({"weights": "public"}, "a function that builds a module, or"),
        ({"target": Y}, "the labels came with the features"),
    ],
)
def test_own_objects_that_cannot_be_priced_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"bounds": (0, 1), **OWN, "out": tmp_path, **changed}
    with pytest.raises((UsageError, ModelError), match=said):
        dpsgd.train((X, Y), FAST, **asked)


class Reader(nn.Module):
    """Takes two arrays by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(5, 2)

    def forward(self, tokens: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.cat([self.table(tokens).mean(1), share.unsqueeze(-1)], -1))
        return y


def test_columns_are_a_table_or_arrays_by_name(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"tokens": np.arange(240).reshape(60, 4) % 9, "share": X[:, 0], "label": Y}
    own: dict[str, Any] = {"model": Reader, "target": "label", **OWN}
    mapped = dpsgd.train(columns, FAST, out=tmp_path / "dict", **own)
    hub = dpsgd.train(Hub(columns), FAST, out=tmp_path / "hub", **own)
    assert all(np.array_equal(one, other) for one, other in zip(weights(mapped), weights(hub), strict=True))
    new = {"tokens": torch.from_numpy(columns["tokens"][:5]), "share": columns["share"][:5]}
    assert mapped.predict(new).tolist() == hub.predict(Hub(columns)).tolist()[:5]
    frame = people()
    asked: dict[str, Any] = {"target": "churn", **BUDGET, **FACTS}
    flat = {name: frame[name].tolist() for name in frame}
    table = dpsgd.train(flat, FAST, out=tmp_path / "flat", **asked)
    same = train(frame, tmp_path)
    assert all(np.array_equal(one, other) for one, other in zip(weights(table), weights(same), strict=True))
    with pytest.raises(DataError, match="lists of different lengths"):
        dpsgd.train({**columns, "tokens": [[1]] * 59 + [[1, 2]]}, FAST, out=tmp_path, **own)


@pytest.mark.parametrize("born", [lambda day: day.date(), lambda day: day, lambda day: str(day.date())])
def test_dates_are_bounded_by_days(tmp_path: Path, born: Callable[[Any], Any]) -> None:
    """Those of datetime, of pandas and texts become the same numbers, as those of a recipe's form do."""
    days = [born(day) for day in pd.date_range("2000-01-01", periods=120)]
    frame = people().assign(born=pd.Series(days, dtype=None if isinstance(days[0], pd.Timestamp) else object))
    bounds = {"age": (0, 100), "born": (date(1999, 1, 1), pd.Timestamp("2001-12-31"))}
    result = train(frame, tmp_path, bounds=bounds)
    form = {"date": "%Y-%m-%d", "bounds": ["1999-01-01", "2001-12-31"]}
    other = train(frame, tmp_path / "form", columns={"born": form})
    assert all(np.array_equal(one, own) for one, own in zip(weights(result), weights(other), strict=True))


def test_messages_name_arguments_and_no_file(tmp_path: Path) -> None:
    frame = people().assign(code="x")
    frame.loc[3, "age"] = None
    with pytest.raises(DpsgdError) as caught:
        train(frame, tmp_path, columns={"code": {"hash": 8}})
    told = str(caught.value)
    assert "missing" in told and "the records" in told
    assert "data." not in told and ".parquet" not in told


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
    with memory.holding(path, TableRows.of(people())):
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
