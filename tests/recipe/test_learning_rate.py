"""Step lengths by epoch, against values written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from dpsgd_cli.recipe.schema.learning_rate import Rate, rate_at

ADAPTER: TypeAdapter[Any] = TypeAdapter(Rate)
EPOCHS = (0, 5, 10, 20, 40)
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({"kind": "constant", "initial": 0.3}, [0.3] * 5),
    ({"kind": "linear", "initial": 0.1, "final": 0.05, "epochs": 10}, [0.1, 0.075, 0.05, 0.05, 0.05]),
    ({"kind": "step", "initial": 1, "decay": 0.5, "period": 10}, [1, 1, 0.5, 0.25, 0.0625]),
    ({"kind": "cosine", "initial": 1, "final": 0.5, "epochs": 20}, [1, 0.9267766952966369, 0.75, 0.5, 0.5]),
    ({"kind": "cosine", "initial": 1}, [1, 0.9619397662556434, 0.8535533905932737, 0.5, 0]),
]


@pytest.mark.parametrize(("settings", "expected"), CASES, ids=lambda case: str(case)[:40])
def test_rates_of_a_training_of_40_epochs(settings: dict[str, Any], expected: list[float]) -> None:
    rate = ADAPTER.validate_python(settings)
    assert [rate_at(rate, epoch, 40) for epoch in EPOCHS] == pytest.approx(expected, abs=1e-15)


def test_a_number_is_itself() -> None:
    assert rate_at(0.15, 7, 40) == 0.15
