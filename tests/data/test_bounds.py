"""Public bounds: on a record's norm, against rows as long as they can be; and those that a recipe declares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.data import Dataset, outline, prepare
from dpsgd_cli.data.cards import Card
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from tests.data.conftest import put


def prepared(data: Data, base: Path = Path()) -> Dataset:
    return prepare(data, base, 1, lambda trial, purpose, exact, mechanism, records: exact, "add-remove")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = pd.DataFrame(
        {"a": [-2.0, 4.0, 0.0] * 4, "b": [0.0, 10.0, 10.0] * 4, "c": ["x", "y", "z"] * 4, "y": [0, 1, 1] * 4}
    )
    rows.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path


def test_columns_of_like_names_are_categories_of_their_own(tmp_path: Path) -> None:
    """`a=1` and `a=2` are two columns of two values each: a record has a one in both, and is sqrt(2) long."""
    rows = pd.DataFrame({"a=1": ["x", "y"] * 6, "a=2": ["y", "x"] * 6, "y": [0, 1] * 6})
    rows.to_csv(tmp_path / "t.csv", index=False)
    categories = {"a=1": ["x", "y"], "a=2": ["x", "y"]}
    data = Data.model_validate(
        {"path": "t.csv", "target": "y", "categorical": categories, "preprocess": [{"one-hot": {}}]}
    )
    assert outline(data, tmp_path).norm_bound == pytest.approx(np.sqrt(2))


def test_columns_that_mark_gaps_lengthen_a_record(tmp_path: Path) -> None:
    """With ones for the two values that are missing and two marks, a record is 2 long."""
    pd.DataFrame({"a": [None, 1.0] * 6, "b": [None, 0.0] * 6, "y": [0, 1] * 6}).to_csv(tmp_path / "t.csv", index=False)
    filling = {"value": 1, "indicator": True}
    data = Data.model_validate(
        {"path": "t.csv", "target": "y", "bounds": [0, 1], "missing": {"a": filling, "b": filling}}
    )
    found = prepared(data, tmp_path)
    longest = np.linalg.norm(np.concatenate([found.train_x, found.test_x]), axis=1).max()
    assert longest == pytest.approx(2) and found.norm_bound == pytest.approx(2)


@pytest.mark.parametrize(
    ("steps", "bound"),
    [
        ([{"scale": {}}, {"one-hot": {}}], np.sqrt(3)),
        ([{"scale": {"to": [-0.5, 2]}}, {"one-hot": {}}], np.sqrt(4 + 4 + 1)),
        ([{"scale": {"to": [-2, 0.5]}}, {"one-hot": {}}], np.sqrt(4 + 4 + 1)),
        ([{"one-hot": {}}], np.sqrt(16 + 100 + 1)),
        ([{"scale": {}}, {"one-hot": {}}, {"bias": {"value": 3}}], np.sqrt(3 + 9)),
        ([{"scale": {}}, {"one-hot": {}}, {"unit-norm": {}}], 1.0),
        ([{"scale": {}}, {"one-hot": {}}, {"unit-norm": {}}, {"bias": {}}], np.sqrt(2)),
        ([{"scale": {}}, {"one-hot": {}}, {"pca": {"components": 2, "public": True}}], np.sqrt(3)),
        ([{"scale": {}}, {"one-hot": {}}, {"pca": {"components": 2, "public": True, "whiten": True}}], None),
        ([{"scale": {"by": "standard"}}, {"one-hot": {}}], None),
    ],
)
def test_no_record_is_longer_than_the_bound(table: Path, steps: list[dict[str, Any]], bound: float | None) -> None:
    columns = {"bounds": {"a": [-2, 4], "b": [0, 10]}, "categorical": {"c": ["x", "y", "z"]}}
    data = Data.model_validate({"path": "t.csv", "target": "y", **columns, "preprocess": steps})
    found = outline(data, table).norm_bound
    if bound is None:
        assert found is None
        return
    assert found == pytest.approx(bound)
    made = prepared(data, table)
    longest = np.linalg.norm(np.concatenate([made.train_x, made.test_x]), axis=1).max()
    assert longest <= bound * (1 + 1e-6)
    if "pca" not in str(steps):
        assert longest >= bound * 0.99


@pytest.mark.parametrize("pair", [(0.0, 1.0), (-3.0, 2.0)])
def test_arrays_are_as_long_as_all_their_numbers_together(tmp_path: Path, pair: tuple[float, float]) -> None:
    """Images of 2 x 3 numbers, each as large as its bounds allow."""
    x = np.full((10, 2, 3), max(pair, key=abs), np.float32)
    np.savez(tmp_path / "t.npz", x=x, y=np.arange(10) % 2)
    data = Data.model_validate({"path": "t.npz", "bounds": pair, "classes": [0, 1], "preprocess": []})
    assert outline(data, tmp_path).norm_bound == pytest.approx(np.linalg.norm(x[0]))


AGES = [-5, 0, 10, 30, 60, 99]


@pytest.fixture
def toy(library: Path, make_card: Callable[..., Card]) -> None:
    text = "".join(f"{age},{'ab'[i % 2]},{'ny'[i % 2]}\n" for i, age in enumerate(AGES))
    make_card(files=[put(library, "toy.csv", text.encode(), records=len(AGES))])


def section(**settings: Any) -> Data:
    return Data.model_validate({"name": "toy", **settings})


def ages(settings: Data) -> list[float]:
    made = prepared(settings)
    return sorted(np.concatenate([made.train_x, made.test_x])[:, 0].tolist())


@pytest.mark.usefixtures("toy")
def test_values_are_clamped_to_the_recipe_s_bounds_and_scaled_by_them() -> None:
    assert ages(section()) == pytest.approx([0, 0, 0.1, 0.3, 0.6, 0.99])
    assert ages(section(bounds={"age": [10, 50]})) == pytest.approx([0, 0, 0, 0.5, 1, 1])


@pytest.mark.usefixtures("toy")
def test_without_scaling_the_bounds_still_hold() -> None:
    settings = section(bounds={"age": [10, 50]}, preprocess=[{"one-hot": {}}])
    assert ages(settings) == [10, 10, 10, 30, 50, 50]
    assert outline(settings, Path()).norm_bound == pytest.approx(np.sqrt(50**2 + 1))


@pytest.mark.usefixtures("toy")
def test_the_declarations_say_whose_bounds_they_are() -> None:
    settings = section(bounds={"age": [10, 50]})
    said = outline(settings, Path()).declarations
    assert "The bounds of age of toy are public (recipe): 10 to 50; values outside are clamped." in said
    assert not any("(data set card)" in one and "numeric" in one for one in said)
    made = prepared(settings)
    assert made.declarations == said
    assert any(
        "numeric columns of toy are public (data set card)" in one for one in outline(section(), Path()).declarations
    )


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("name", ["ages", "job", "label"])
def test_only_numeric_columns_of_the_card_have_bounds(name: str) -> None:
    with pytest.raises(DataError, match=f"data.bounds names '{name}', which is no numeric column of toy"):
        outline(section(bounds={name: [0, 1]}), Path())


def test_bundled_tables_are_clamped_too_and_images_have_no_columns() -> None:
    settings = Data.model_validate({"name": "breast-cancer", "bounds": {"mean radius": [10, 12]}, "preprocess": []})
    made = prepared(settings)
    assert (made.train_x[:, 0].min(), made.train_x[:, 0].max()) == (10, 12)
    with pytest.raises(DataError, match="no numeric column of digits"):
        outline(Data.model_validate({"name": "digits", "bounds": {"pixel": [0, 1]}}), Path())


def test_one_pair_for_all_columns_is_for_own_files() -> None:
    with pytest.raises(ValueError, match="one pair of bounds: only for a file of your own"):
        section(bounds=[0, 1])
