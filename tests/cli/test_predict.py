"""Predictions from the command line: columns beside them, rows that cannot be used, categories never seen."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.preprocess import ExpandCategories
from dpsgd_cli.data.step_settings import Bin, OneHot
from dpsgd_cli.errors import DataError
from dpsgd_cli.main import main
from dpsgd_cli.training.inference import Trained
from tests.conftest import Train, WriteRecipe

NEW = """id,note,age,job
007,=cmd(),30,smith
008,b,old,smith
009,c,40,pilot
010,d,,nurse
011,e,inf,nurse
012,f,50,nurse
"""


@pytest.fixture
def result(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 100, 60), "job": rng.choice(["smith", "nurse"], 60)})
    frame["y"] = np.where(frame["age"] > 50, "yes", "no")
    frame.to_csv(tmp_path / "own.csv", index=False)
    data = {"path": "own.csv", "target": "y", "classes": ["no", "yes"], "bounds": {"age": [0, 100]},
            "categorical": {"job": ["smith", "nurse"]}, "preprocess": [{"bin": {}}]}  # fmt: skip
    return train(write_recipe(data=data, repeats=1), save_models=True)


def predict(*arguments: object) -> tuple[list[dict[str, str]], Any]:
    done = CliRunner().invoke(main, ["predict", *map(str, arguments)])
    return list(csv.DictReader(io.StringIO(done.stdout))), done


def test_a_category_that_was_never_seen_is_none_of_the_categories(result: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text(NEW)
    rows, done = predict(result, tmp_path / "new.csv", "--unknown", "ignore")
    assert [bool(row["prediction"]) for row in rows] == [True, False, True, False, False, True]
    trained = Trained.load(result)
    found = trained.source.one_by_one(tmp_path / "new.csv", unknown="ignore")
    inputs = trained.inputs(found.x, 0)
    known = trained.pipeline(0).layouts[-1].columns
    jobs = [at for at, column in enumerate(known or ()) if column.name.startswith("job=")]
    assert (inputs[:, jobs] != 0).sum(axis=1).tolist() == [1, 0, 1]
    assert done.exit_code == 0


def test_a_date_that_does_not_exist_is_no_unknown_category(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    (tmp_path / "own.csv").write_text("day,y\n" + "".join(f"2024-0{1 + n % 9}-01,{'ab'[n % 2]}\n" for n in range(40)))
    data = {"path": "own.csv", "target": "y", "classes": ["a", "b"],
            "columns": {"day": {"date": "%Y-%m-%d", "bounds": ["2024-01-01", "2024-12-31"]}}}  # fmt: skip
    result = train(write_recipe(data=data, repeats=1), save_models=True)
    (tmp_path / "new.csv").write_text("day\n2024-02-31\n2024-02-28\n")
    rows, done = predict(result, tmp_path / "new.csv", "--unknown", "ignore")
    assert [bool(row["prediction"]) for row in rows] == [False, True] and done.exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--keep", "ID"], 2, "no column 'ID'; did you mean 'id'"),
        (["--keep", "prediction"], 2, "a column 'prediction' of its own"),
        (["--unknown", "guess"], 2, "guess"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    result: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "new.csv").write_text(NEW.replace("note", "prediction"))
    _, done = predict(result, tmp_path / "new.csv", *arguments)
    assert done.exit_code == code and said in done.stderr and done.stdout == ""


def test_a_file_without_a_row_that_can_be_used_is_refused(result: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,job\nold,smith\n,nurse\n")
    _, done = predict(result, tmp_path / "new.csv")
    assert done.exit_code == 2 and "no row can be used; the first says: column 'age' holds no number" in done.stderr
    for name, said in (("nowhere.csv", "no such file"), ("new.npy", "but the model takes a table")):
        (tmp_path / "new.npy").write_bytes(b"x")
        _, done = predict(result, tmp_path / name)
        assert done.exit_code == 2 and said in done.stderr


def test_columns_are_kept_of_tables_only(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    directory = train(write_recipe(repeats=1), save_models=True)
    np.save(tmp_path / "new.npy", np.zeros((2, 4)))
    _, done = predict(directory, tmp_path / "new.npy", "--keep", "id")
    assert done.exit_code == 2 and "for the columns of a table" in done.stderr


def test_advice_is_what_a_trained_model_can_follow(result: Path) -> None:
    trained = Trained.load(result)
    for age, job, said in (
        ("old", "nurse", "holds no number in data row 1"),
        (3, "pilot", "not among its public values"),
    ):
        with pytest.raises(DataError, match=said) as caught:
            trained.source.rows(pd.DataFrame({"age": [age], "job": [job]}))
        assert str(caught.value).endswith("; fix such rows, or leave them out")
        assert "data.categorical" not in str(caught.value) and "add it there" not in str(caught.value)


@pytest.mark.parametrize("pairs", [None, 2])
def test_a_code_below_0_is_no_feature(pairs: int | None) -> None:
    """By hand: of two categories, and of their pairs; the column before an unknown category keeps its own 1."""
    layout = Layout((2,), (Column("a", values=("x", "y")), Column("b", values=("u", "v", "w"))))
    rows = np.array([[0.0, -1.0], [-1.0, 0.0], [1.0, 2.0]])
    expanded = ExpandCategories(OneHot(), "add-remove").transform(layout, None)(rows)
    assert expanded.tolist() == [[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 1, 0, 0, 1]]
    binned = BinColumns(Bin(bins=4, pairs=pairs), "add-remove").transform(layout, None)
    made = binned(rows) != 0
    assert made[:, :5].tolist() == expanded.tolist()
    if pairs is not None:
        assert made[:2, 5:-1].sum() == 0 and np.flatnonzero(made[2, 5:-1]).tolist() == [5]
    assert made[:, -1].all()
