"""Metrics against counting by hand, one trial and one row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from dpsgd_cli.core.evaluation import evaluate
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.tensors import Table

PLACE = Place(torch.device("cpu"), torch.float64)


def made(outputs: int, classes: int | None) -> tuple[Pack, Table]:
    rng = np.random.default_rng(0)
    y = rng.normal(size=11) if classes is None else rng.integers(0, classes, 11)
    pack = Pack(lambda: nn.Linear(3, outputs), [0, 1], PLACE, shares_input=True)
    return pack, Table.load(rng.normal(size=(11, 3)), y, False, PLACE.device, PLACE.dtype)


def scores(pack: Pack, table: Table, trial: int) -> list[list[float]]:
    own = pack.parameters_of(trial)
    return [(own["weight"] @ x + own["bias"]).tolist() for x in table.x]


@pytest.mark.parametrize("most", [1, 4, 100])
def test_classification(most: int) -> None:
    pack, table = made(3, 3)
    found = evaluate(pack, pack.values, table, "classification", most)
    for trial in range(2):
        rows = list(zip(scores(pack, table, trial), table.y.tolist(), strict=True))
        right = sum(max(range(3), key=row.__getitem__) == label for row, label in rows)
        loss = sum(math.log(sum(math.exp(s) for s in row)) - row[label] for row, label in rows)
        assert float(found["accuracy"][trial]) == pytest.approx(right / 11)
        assert float(found["loss"][trial]) == pytest.approx(loss / 11)


@pytest.mark.parametrize("most", [3, 100])
def test_regression(most: int) -> None:
    pack, table = made(1, None)
    found = evaluate(pack, pack.values, table, "regression", most)
    for trial in range(2):
        errors = [row[0] - y for row, y in zip(scores(pack, table, trial), table.y.tolist(), strict=True)]
        assert float(found["mae"][trial]) == pytest.approx(sum(map(abs, errors)) / 11)
        assert float(found["loss"][trial]) == pytest.approx(sum(e * e / 2 for e in errors) / 11)


def test_other_weights_are_tried_and_put_back() -> None:
    pack, table = made(3, 3)
    other, before = torch.zeros_like(pack.values), pack.values.clone()
    found = evaluate(pack, other, table, "classification", 4)
    assert found["loss"].tolist() == pytest.approx([math.log(3)] * 2)
    assert torch.equal(pack.values, before)


def test_an_empty_table_has_no_metrics() -> None:
    pack, _ = made(3, 3)
    empty = Table.load(np.zeros((0, 3)), np.zeros(0, dtype=np.int64), False, PLACE.device, PLACE.dtype)
    assert evaluate(pack, pack.values, empty, "classification", 4) == {}


def test_one_output_tells_two_classes_apart_and_folds_count_their_own_rows() -> None:
    pack, table = made(1, 2)
    held = torch.arange(22).view(11, 2) % 11 < 2
    held[7, 1] = True  # trial 1 has one row fewer
    found = evaluate(
        pack, pack.values, table.with_folds(held), "classification", 4, lambda outputs, labels: outputs.squeeze(-1)
    )
    for trial in range(2):
        own = [row for row in range(11) if not held[row, trial]]
        values = scores(pack, table, trial)
        right = sum((values[row][0] > 0) == bool(table.y[row]) for row in own)
        assert float(found["accuracy"][trial]) == pytest.approx(right / len(own))
        assert float(found["loss"][trial]) == pytest.approx(sum(values[row][0] for row in own) / len(own))
