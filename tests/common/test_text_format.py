"""Printed epsilons are never below the number, and every number that is not 0 is printed as one that is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.common.text_format import epsilon_text, interval_text, metric_text

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
    ("value", "half", "sign", "text"),
    [
        (0.943, 0.008059, "", "0.9430 +- 0.0081"),
        (0.943, None, "", "0.9430"),
        (-0.00175, 0.0171, "+", "-0.0018 +- 0.0171"),
        (0.0, 0.0, "+", "+0.0000 +- 0.0000"),
        (2.5e-7, 1e-8, "", "2.5e-07 +- 1e-08"),
        (3e27, 2e27, "", "3e+27 +- 2e+27"),
    ],
)
def test_a_value_and_its_interval_have_the_same_digits(value: float, half: float | None, sign: str, text: str) -> None:
    assert interval_text(value, half, sign) == text
