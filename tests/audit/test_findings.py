"""Many questions put to one run raise a false alarm no more often than one would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpsgd_cli.audit.findings import by_p_value, exact_finding, judged
from dpsgd_cli.audit.watch import batch_checks


def test_a_row_is_refuted_at_what_all_rows_leave_of_the_confidence() -> None:
    rows = [by_p_value("C", str(i), "found", "claimed", p) for i, p in enumerate((0.011, 0.013, 0.5, 0.9))]
    found = judged([*rows, exact_finding("D", "not by chance", "", "", False)], 0.95)
    assert [row["refuted"] for row in found] == [True, False, False, False, False]
    assert judged([exact_finding("D", "one", "", "", True)], 0.95)[0]["refuted"]


def test_forty_rows_of_true_claims_raise_one_alarm_in_twenty() -> None:
    """2,000 audits of uniform p-values: 100 alarms are expected, 141 have probability 5e-5."""
    p_values = np.random.default_rng(0).random((2000, 40))
    alarms = [any(row["refuted"] for row in judged(_rows(own), 0.95)) for own in p_values]
    assert 60 < sum(alarms) < 141


def _rows(p_values: np.ndarray) -> list:
    return [by_p_value("C", "", "", "", float(p)) for p in p_values]


@pytest.mark.parametrize(("batching", "rate"), [("poisson", 0.2), ("random-allocation", 0.2), ("poisson", 0.21)])
def test_a_step_of_two_groups_draws_half_of_what_the_rate_within_a_group_says(batching: str, rate: float) -> None:
    """Of 20,000 records 2,000 are in each of 10 steps: a tenth, and so a fifth of those of one of two groups."""
    mechanism = SimpleNamespace(sampled=True, sampling_rate=rate, batching=batching, bands=10)
    sampling = SimpleNamespace(records=20_000, groups=2)
    staged = SimpleNamespace(plan=SimpleNamespace(sampling=sampling))
    watch: Any = SimpleNamespace(mechanism=mechanism, sizes=[np.full(1, 2000)] * 10, staged=staged)
    (finding,) = batch_checks(watch)
    assert finding.refutes(0.999) == (rate != 0.2)
