"""What a reader of the pictures could misread: positions, ticks, and lines that lie on each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.pictures import _by_budget, _by_setting, _styles, by_epoch


@pytest.fixture
def plt() -> Iterator[Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    yield pyplot
    pyplot.close("all")


def entry(method: str, epsilon: float | None, target: float | None = None, mean: float = 0.9) -> Entry:
    privacy = {"epsilon": epsilon, "delta": None if epsilon is None else 1e-5,
               "adjacency": None if epsilon is None else "add-remove"}  # fmt: skip
    metric = {"mean": mean, "std": 0.01, "ci95": 0.02, "n": 5}
    found = Entry(method, target, Path(method), {"privacy": privacy, "metrics": {"test_accuracy": metric}})
    found.__dict__["recipe_text"] = "data: {name: digits}\nmethod: {batching: poisson}\n"
    return found


def drawn(plt: Any, *entries: Entry) -> Any:
    comparison = Comparison(entries, "test_accuracy", entries[0].method)
    figure = _by_budget(plt, comparison, _styles(comparison))
    figure.canvas.draw()
    return figure.axes[0]


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels() if tick.get_text()]


@pytest.mark.parametrize("target", [2.0, None])
def test_at_one_budget_the_axis_is_one_of_methods(plt: Any, target: float | None) -> None:
    axes = drawn(plt, entry("a", 2.0, target), entry("b", 1.999, target), entry("free", None))
    assert labels(axes.yaxis) == ["a", "b", "free (no privacy)"]
    assert axes.get_title() == f"epsilon {'2' if target else '2.0000'} at delta 1e-05 (add-remove)"
    low, high = axes.get_xlim()
    assert 0.8 < low < 0.9 < high <= 1  # the values are on the other axis, which has no epsilon


def test_a_trial_that_has_ended_keeps_what_it_reached() -> None:
    """Otherwise the mean would jump to that of the few that still train, and its interval explode."""
    history = [
        {"trial": str(trial), "epoch": str(epoch), "test_accuracy": f"0.{epoch + 1}", "noise_multiplier": "2"}
        for trial, length in (("0", 2), ("1", 4))
        for epoch in range(length)
    ]
    history[0]["test_accuracy"] = ""
    assert by_epoch(history, "test_accuracy") == {
        1: [0.1], 2: [0.2, 0.2], 3: [0.2, 0.3], 4: [0.2, 0.4]
    }  # fmt: skip
    assert by_epoch(history, "noise_multiplier") == {1: [2, 2], 2: [2, 2], 3: [2], 4: [2]}


def test_a_metric_is_drawn_over_the_one_number_that_a_sweep_varied(plt: Any) -> None:
    rates = [replace(entry(f"rate {rate}", 1.0, mean=rate), settings={"rate": rate}) for rate in (0.3, 0.1, 0.2)]
    axes = _by_setting(plt, rates, "test_accuracy").axes[0]
    assert axes.get_xlabel() == "rate"
    assert axes.lines[0].get_xdata().tolist() == axes.lines[0].get_ydata().tolist() == [0.1, 0.2, 0.3]
    silent = replace(entry("silent", 1.0), settings={"rate": 0.4})
    silent.document["metrics"]["test_accuracy"]["mean"] = None
    assert _by_setting(plt, [*rates, silent], "test_accuracy").axes[0].lines[0].get_xdata().tolist() == [0.1, 0.2, 0.3]
    assert _by_setting(plt, [silent], "test_accuracy") is None
    others: tuple[dict[str, Any], ...] = ({"rate": True}, {"rate": "0.4"}, {"rate": 0.1}, {"rate": 0.4, "size": 2}, {})
    for settings in others:
        assert _by_setting(plt, [*rates, replace(rates[0], settings=settings)], "test_accuracy") is None
