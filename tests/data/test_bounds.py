"""The public bound on a record's norm, against rows drawn to be as long as they can be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli.data import outline, prepare
from dpsgd_cli.recipe.schema.data import Data


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
    made = prepare(data, table, 1, lambda trial, purpose, shape: np.zeros(shape), "add-remove")
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
