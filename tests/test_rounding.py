"""Printed epsilons are never below the number, and every number that is not 0 is printed as one that is not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.rounding import epsilon_text, metric_text

POSITIVE = st.floats(min_value=1e-300, max_value=1e300)


@given(POSITIVE)
def test_an_epsilon_is_rounded_up_by_little(epsilon: float) -> None:
    printed = float(epsilon_text(epsilon))
    assert epsilon <= printed <= epsilon * 1.0011 + (1e-4 if epsilon >= 0.01 else 0)


@given(POSITIVE)
def test_a_metric_is_rounded_by_little_and_never_to_nothing(value: float) -> None:
    assert float(metric_text(value)) == pytest.approx(value, rel=6e-3)
    assert metric_text(-value) == f"-{metric_text(value)}"
    assert len(metric_text(value)) <= 12


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [(1e-6, "1e-06"), (0.4, "0.4000"), (2.99991, "3.0000"), (2.9999, "2.9999"), (0.00999999, "0.01"), (0.0, "0.0000")],
)
def test_epsilons(epsilon: float, text: str) -> None:
    assert epsilon_text(epsilon) == text


def test_numbers_without_digits() -> None:
    assert (epsilon_text(math.inf), metric_text(math.inf), metric_text(math.nan)) == ("inf", "inf", "nan")


def test_a_diverged_loss_is_short() -> None:
    assert metric_text(3262659971121966963065094144.0) == "3.263e+27"
