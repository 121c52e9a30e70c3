"""Rows, series and the gate."""

from __future__ import annotations

import dataclasses
import math

import pytest

from dpsgd_cli.account import answers
from dpsgd_cli.account.cases import Numbers
from dpsgd_cli.accounting import accountants
from dpsgd_cli.errors import BudgetExceeded, UnsupportedMechanism

CASE = POISSON = Numbers("poisson", "add-remove", 1e-5, noise_multiplier=4.0, sampling_rate=0.01, steps=250).case()
ROW = answers.Row(CASE, "rdp", 2.0, 1e-5, "upper", "a note")


def test_the_gate_asks_for_a_bound_from_every_source() -> None:
    answers.check_gate([CASE], [ROW, dataclasses.replace(ROW, epsilon=9.0)], 2.0)
    with pytest.raises(BudgetExceeded, match=r"epsilon 2 \(rdp\) exceeds"):
        answers.check_gate([CASE], [ROW], 1.9)
    cases = [CASE, dataclasses.replace(CASE, label="other")]
    with pytest.raises(BudgetExceeded, match="other: epsilon 2"):
        answers.check_gate(cases, [dataclasses.replace(ROW, epsilon=0.1), dataclasses.replace(ROW, case=cases[1])], 1.0)
    with pytest.raises(BudgetExceeded, match="no accountant asked proves a bound"):
        answers.check_gate([CASE], [dataclasses.replace(ROW, bound="estimate")], 5.0)
    with pytest.raises(BudgetExceeded):
        answers.check_gate([CASE], [ROW], math.nan)


def test_series_name_their_columns_by_what_differs() -> None:
    shuffled = Numbers("shuffle", "zero-out", 1e-5, 4.0, 0.01, epochs=2).case()
    asked = [(POISSON, [accountants.get("rdp")]), (shuffled, [accountants.get("zcdp"), accountants.get("moments")])]
    series = answers.epoch_curve(asked, with_rho=True)
    assert list(series.columns) == ["poisson rdp", "shuffle rho", "shuffle zcdp"]
    assert series.points == [1, 2, 3]
    assert series.columns["shuffle zcdp"][2] is None
    with pytest.raises(UnsupportedMechanism, match="no accountant covers this"):
        answers.epoch_curve([(POISSON, [accountants.get("gaussian")])], with_rho=False)
