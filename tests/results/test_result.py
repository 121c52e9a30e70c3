"""Means and intervals against the textbook formulas; what is missing stays missing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpsgd_cli.results.result import Result, summarise, summarise_columns


def test_mean_deviation_and_student_interval() -> None:
    values = [0.91, 0.93, 0.915, 0.94, 0.9]
    found = summarise(values)
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["std"] == pytest.approx(np.std(values, ddof=1))
    assert (found["mean"] - found["ci95"], found["mean"] + found["ci95"]) == pytest.approx((low, high))
    assert found["n"] == 5


def test_one_trial_has_no_spread() -> None:
    assert summarise([0.5]) == {"mean": 0.5, "std": None, "ci95": None, "n": 1}


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_a_value_that_is_missing_leaves_no_mean_of_the_others(missing: Any) -> None:
    """A mean over the trials that happened to converge would flatter the method."""
    assert summarise([0.9, missing, 0.8]) == {"mean": None, "std": None, "ci95": None, "n": 3}
    found = summarise_columns({"accuracy": [0.9, missing], "loss": [1.0, 2.0]})
    assert (found["accuracy"]["mean"], found["loss"]["mean"]) == (None, 1.5)


def test_the_document_holds_everything_but_the_tables() -> None:
    result = Result("a", {"epsilon": 1.0}, {}, {}, {}, [{"trial": 0}], [{"epoch": 0}], ["{}"], ["careful"])
    document = result.document()
    sections = {"name", "privacy", "metrics", "timing", "provenance", "trials"}
    assert set(document) == sections | {"warnings", "nonprivate_warnings", "diverged"}
    assert (document["trials"], document["warnings"]) == ([{"trial": 0}], ["careful"])
