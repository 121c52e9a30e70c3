"""Splits: by seed and count only, every row exactly once."""

from __future__ import annotations

import numpy as np
import pytest

from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.splits import count_test, cut, pool, split_rows
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema import Split


@pytest.mark.parametrize(("test", "expected"), [(0.2, 20), (0.255, 26), (7, 7), (0.5, 50)])
def test_every_row_is_in_exactly_one_part(test: float, expected: int) -> None:
    train, held_out = split_rows(100, Split(test=test))
    assert len(held_out) == expected == count_test(100, Split(test=test))
    assert sorted([*train, *held_out]) == list(range(100))


def test_the_seed_decides_and_nothing_else() -> None:
    first, again, other = (split_rows(50, Split(test=10, seed=seed))[1].tolist() for seed in (3, 3, 4))
    assert first == again != other
    assert first[:3] == [6, 9, 12]


def test_cut_ignores_values_and_keeps_rows_with_labels() -> None:
    labels = np.arange(30)
    one, two = (Part(np.full((30, 2), value), labels) for value in (0.0, 9.0))
    assert cut(one, Split())[1].y.tolist() == cut(two, Split())[1].y.tolist()
    rows = Part(labels[:, None] * 10.0, labels)
    for part in cut(rows, Split()):
        assert (part.x[:, 0] == part.y * 10).all()


def test_pool_puts_training_rows_first() -> None:
    train, test = Part(np.zeros((2, 1)), np.array([0, 1])), Part(np.ones((1, 1)), np.array([2]))
    assert pool(train, test).y.tolist() == [0, 1, 2]
    assert pool(train, None) is train


@pytest.mark.parametrize(("records", "told"), [(0, "0 rows"), (1, "1 row")])
def test_too_few_rows_to_split_are_refused(records: int, told: str) -> None:
    with pytest.raises(DataError, match=f"{told} cannot be split into training and test rows; give at least 2"):
        split_rows(records, Split())


@pytest.mark.parametrize("test", [0.01, 0.99, 10, 11])
def test_empty_parts_are_refused(test: float) -> None:
    with pytest.raises(DataError, match="both parts need at least one row"):
        split_rows(10, Split(test=test))
