"""Tables: what is accepted, and that everything else is refused by name and row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from dpsgd_cli.data import labels, table
from dpsgd_cli.data.cells import Cells
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table import predicted, target_scale
from dpsgd_cli.errors import DataError


def test_unlisted_and_empty_categories() -> None:
    column = Column("job", values=("True", "False"))
    with pytest.raises(DataError, match=r"2 cells, first in data row 1, not among.*\(YAML reads yes, no"):
        table.to_codes(Cells.of("job", ["yes", "no"]), column)
    with pytest.raises(DataError, match=r"1 cell without a listed value, the first \(data row 2\) is empty"):
        table.to_codes(Cells.of("job", ["True", None]), column)
    assert table.to_codes(Cells.of("job", pd.Series([True, False])), column).tolist() == [0, 1]
    assert table.to_codes(Cells.of("n", pd.Series([2.0, 1.0])), Column("n", values=("1", "2"))).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("held", "given", "indices", "classes"),
    [
        (["no", "yes", "no"], None, [0, 1, 0], ("no", "yes")),
        ([10, 9, 10], None, [1, 0, 1], (9, 10)),
        (["10", "9", "10"], None, [1, 0, 1], (9, 10)),
        ([1.0, 2.0, 1.0], None, [0, 1, 0], (1, 2)),
        (["a", "b", "a"], ["b", "a", "c"], [1, 0, 1], ("b", "a", "c")),
        (["1", "0", "1"], [0, 1], [1, 0, 1], (0, 1)),
        ([True, False, True], None, [1, 0, 1], (False, True)),
        (["Yes", "no", "NO"], None, [1, 0, 0], ("NO", "Yes")),
        (["TRUE", "false", "True"], [False, True], [1, 0, 1], (False, True)),
        (["yes", "no", "y"], [True, False], [0, 1, 0], (True, False)),
        ([True, False, True], ["no", "yes"], [1, 0, 1], ("no", "yes")),
        (["Yes", "yes", "no"], ["Yes", "yes", "no"], [0, 1, 2], ("Yes", "yes", "no")),
        (["NA", "EU", "NA"], ["EU", "NA"], [1, 0, 1], ("EU", "NA")),
        (["1.0", "0.0", "1.0"], None, [1, 0, 1], (0.0, 1.0)),
        (["02", "01", "10"], None, [1, 0, 2], ("01", "02", "10")),
        (["True", "False", "True"], None, [1, 0, 1], (False, True)),
        (["true", "false", "true"], None, [1, 0, 1], ("false", "true")),
        (["a b ", "a b", "a b"], None, [1, 0, 0], ("a b", "a b ")),
    ],
)
def test_labels(held: list[Any], given: list[Any] | None, indices: list[int], classes: tuple[Any, ...]) -> None:
    cells = Cells.of("y", pd.Series(held))
    found = labels.found_classes([cells]) if given is None else tuple(given)
    codes = labels.to_labels(cells, found)
    assert (codes.tolist(), codes.dtype, found) == (indices, np.int64, classes)


@pytest.mark.parametrize(("bounds", "unit"), [([100.0, 1e5], 100.0), ([0.0, 2e4], 20.0), ([-50.0, 950.0], 1.0)])
def test_targets_on_a_log_scale_come_back_and_predictions_stay_within_their_bounds(
    bounds: list[float], unit: float
) -> None:
    """log(1 + d / u) by hand; a target out of bounds keeps its value, a prediction does not."""
    told = Data.model_validate(
        {"path": "t.csv", "target": "y", "task": "regression", "target_bounds": bounds, "target_transform": "log"}
    )
    low, high = bounds
    targets = np.array([low, low + unit, (low + high) / 2, high, low - 3 * unit, 2 * high])
    inward = target_scale(told).inward(targets)
    whole = np.log(1 + (high - low) / unit)
    np.testing.assert_allclose(inward[:4], 2 * np.log(1 + (targets[:4] - low) / unit) / whole - 1, atol=1e-12)
    np.testing.assert_allclose(target_scale(told).outward(inward), targets, rtol=1e-9, atol=1e-9)
    for data in (told, told.model_copy(update={"target_transform": None})):
        found = predicted(data, np.array([-7.0, -1.0, 0.3, 1.0, 9.0, np.nan]))
        np.testing.assert_allclose(found[[0, 1, 3, 4]], [low, low, high, high])
        assert low < found[2] < high and np.isnan(found[5])


@pytest.mark.parametrize(
    ("bounds", "log"),
    [([100, 9_999], False), ([100, 10_000], True), ([0, 9_999], False), ([0, 10_000], True), ([-1, 1e6], False)],
)
def test_an_automatic_scale_follows_from_bounds_alone(bounds: list[float], log: bool) -> None:
    told = {"path": "t.csv", "target": "y", "task": "regression", "target_bounds": bounds}
    assert target_scale(Data.model_validate(told | {"target_transform": "auto"})) == target_scale(
        Data.model_validate(told | {"target_transform": "log" if log else None})
    )


def test_a_log_scale_needs_bounds() -> None:
    with pytest.raises(ValidationError, match="target_transform: needs target_bounds"):
        Data.model_validate({"path": "t.csv", "target": "y", "task": "regression", "target_transform": "log"})
