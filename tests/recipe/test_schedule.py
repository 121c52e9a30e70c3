"""Noise and step lengths by epoch: the papers' formulas, and no noise too small to protect."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
from pydantic import TypeAdapter

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.schema.learning_rate import Rate, rate_at
from dpsgd_cli.recipe.schema.schedule import LEAST, Schedule

ADAPTER: TypeAdapter[Any] = TypeAdapter(Schedule)


def schedule(**settings: Any) -> Any:
    return ADAPTER.validate_python(settings)


# Yu et al. 2019, section IV-A2, written out by hand for epochs 0, 1, 9, 10, 100 and 150.
EPOCHS = (0, 1, 9, 10, 100, 150)
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({"kind": "uniform", "initial": 8}, [8] * 6),
    ({"kind": "time", "initial": 10, "decay": 0.05}, [10, 10 / 1.05, 10 / 1.45, 10 / 1.5, 10 / 6, 10 / 8.5]),
    (
        {"kind": "exponential", "initial": 10, "decay": 0.01},
        [10, 9.900498337491681, 9.139311852712282, 9.048374180359595, 3.6787944117144233, 2.231301601484298],
    ),
    ({"kind": "step", "initial": 10, "decay": 0.6, "period": 10}, [10, 10, 10, 6, 10 * 0.6**10, 10 * 0.6**15]),
    (
        {"kind": "polynomial", "initial": 10, "final": 2, "decay": 3, "period": 100},
        [10, 2 + 8 * 0.99**3, 2 + 8 * 0.91**3, 2 + 8 * 0.9**3, 2, 2],
    ),
    ({"kind": "time", "initial": 10, "decay": 0.05, "period": 10}, [10, 10, 10, 10 / 1.05, 10 / 1.5, 10 / 1.75]),
    (
        {"kind": "exponential", "initial": 10, "decay": 0.1, "period": 10},
        [10, 10, 10, 9.048374180359595, 3.6787944117144233, 2.231301601484298],
    ),
    (
        {"kind": "polynomial", "initial": 10, "final": 2, "decay": 1, "period": 100, "every": 4},
        [10, 10, 10 - 8 * 0.08, 10 - 8 * 0.08, 2, 2],
    ),
    (
        {
            "kind": "piecewise",
            "parts": [
                {"epochs": 9, "schedule": {"kind": "uniform", "initial": 12}},
                {"epochs": 1, "schedule": {"kind": "time", "initial": 5, "decay": 1}},
                {"schedule": {"kind": "step", "initial": 8, "decay": 0.5, "period": 90}},
            ],
        },
        [12, 12, 5, 8, 4, 4],
    ),
    ({"kind": "validation", "initial": 9, "decay": 0.5}, [9] * 6),
]


@pytest.mark.parametrize(("settings", "expected"), CASES, ids=lambda case: str(case)[:30])
def test_published_values(settings: dict[str, Any], expected: list[float]) -> None:
    found = [schedule(**settings).noise_multiplier(epoch) for epoch in EPOCHS]
    assert found == pytest.approx(expected, rel=1e-14)


def test_every_schedule_of_the_schema_has_its_formula() -> None:
    assert {settings["kind"] for settings, _ in CASES} == {
        one.model_fields["kind"].default for one in get_args(get_args(Schedule)[0])
    }


def test_noise_too_small_to_protect_is_refused_with_its_epoch() -> None:
    decaying = schedule(kind="exponential", initial=1, decay=1)
    last = math.floor(-math.log(LEAST))
    assert decaying.noise_multiplier(last) >= LEAST > decaying.noise(last + 1)
    with pytest.raises(PrivacyError, match=rf"exponential has noise multiplier \S+ at epoch {last + 1}"):
        decaying.noise_multiplier(last + 1)


def test_auto_has_no_value_of_its_own() -> None:
    with pytest.raises(PrivacyError, match="auto"):
        schedule(kind="uniform", initial="auto").noise_multiplier(0)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"epochs": 3, "schedule": {"kind": "uniform", "initial": 1}}], "leave it out of the last part"),
        ([{"schedule": {"kind": "uniform", "initial": 1}}] * 2, "only the last part lasts to the end"),
    ],
)
def test_only_the_last_part_is_open(parts: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedule(kind="piecewise", parts=parts)


def test_free_numbers_are_named_and_set() -> None:
    free = schedule(
        kind="piecewise",
        parts=[
            {"epochs": 3, "schedule": {"kind": "uniform", "initial": 1}},
            {"schedule": {"kind": "time", "initial": "auto", "decay": 1}},
        ],
    )
    assert free.free_numbers() == ["parts.1.initial"]
    assert free.with_number("parts.1.initial", 4.0).noise_multiplier(3) == 4
    assert schedule(kind="step", initial=1, decay="auto", period="auto").free_numbers() == ["decay", "period"]


@pytest.mark.parametrize("settings", [settings for settings, _ in CASES], ids=lambda case: str(case)[:30])
def test_every_epoch_of_a_scaled_schedule_has_scaled_noise(settings: dict[str, Any]) -> None:
    kind = schedule(**settings)
    scaled = kind.scaled(2.5)
    found = [scaled.noise_multiplier(epoch) for epoch in range(12)]
    assert found == pytest.approx([2.5 * kind.noise_multiplier(epoch) for epoch in range(12)], rel=1e-14)


# Step lengths of epochs 0, 5, 10, 20 and 40, written out by hand.
RATES: list[tuple[dict[str, Any], list[float]]] = [
    ({"kind": "constant", "initial": 0.3}, [0.3] * 5),
    ({"kind": "linear", "initial": 0.1, "final": 0.05, "epochs": 10}, [0.1, 0.075, 0.05, 0.05, 0.05]),
    ({"kind": "step", "initial": 1, "decay": 0.5, "period": 10}, [1, 1, 0.5, 0.25, 0.0625]),
    ({"kind": "cosine", "initial": 1, "final": 0.5, "epochs": 20}, [1, 0.9267766952966369, 0.75, 0.5, 0.5]),
    ({"kind": "cosine", "initial": 1}, [1, 0.9619397662556434, 0.8535533905932737, 0.5, 0]),
]


@pytest.mark.parametrize(("settings", "expected"), RATES, ids=lambda case: str(case)[:40])
def test_rates_of_a_training_of_40_epochs(settings: dict[str, Any], expected: list[float]) -> None:
    rate: Any = TypeAdapter(Rate).validate_python(settings)
    assert rate_at(0.15, 7, 40) == 0.15, "a number is itself"
    assert [rate_at(rate, epoch, 40) for epoch in (0, 5, 10, 20, 40)] == pytest.approx(expected, abs=1e-15)
