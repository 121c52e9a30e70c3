"""What a reader of the pictures could misread: positions, ticks, and lines that lie on each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.pictures import _by_budget, _by_epoch, _label_logarithms, _styles, by_epoch


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
    figure = _by_budget(plt, comparison, _styles(comparison), "test_accuracy", "test accuracy")
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


@pytest.mark.parametrize("budgets", [(1.0, 2.0, 3.0), (0.5, 1.0, 3.0)])
def test_ticks_stand_only_at_the_budgets(plt: Any, budgets: tuple[float, ...]) -> None:
    axes = drawn(plt, *(entry(method, 0.99 * budget, budget) for method in "ab" for budget in budgets))
    assert list(axes.get_xticks()) == list(budgets)
    assert labels(axes.xaxis) == [f"{budget:g}" for budget in budgets]
    assert list(axes.get_xticks(minor=True)) == []
    assert axes.get_xlabel().startswith("epsilon (budget) ")


def test_epsilons_that_were_not_matched_have_labels_enough(plt: Any) -> None:
    axes = drawn(plt, *(entry(f"a{number}", epsilon) for number, epsilon in enumerate((0.5, 1.0, 4.0))))
    low, high = axes.get_xlim()
    assert len([tick for tick in axes.get_xticks() if low <= tick <= high]) == len(labels(axes.xaxis)) >= 3


def test_what_was_not_matched_stands_where_it_is(plt: Any) -> None:
    axes = drawn(plt, entry("a", 1.7), entry("b", 2.4))
    assert sorted(line.get_xdata()[0] for line in axes.get_lines() if line.get_marker() in "os") == [1.7, 2.4]


@pytest.mark.parametrize(("low", "high"), [(44, 56), (13.3, 13.3), (1, 1000), (0.7, 1.4), (0.002, 0.0021), (99, 101)])
def test_a_logarithmic_axis_has_at_least_three_labels(plt: Any, low: float, high: float) -> None:
    _, axes = plt.subplots()
    axes.set_yscale("log")
    axes.plot([1, 2], [low, high])
    _label_logarithms(plt, axes.yaxis)
    axes.figure.canvas.draw()
    bottom, top = axes.get_ylim()
    assert list(axes.get_yticks(minor=True)) == []
    inside = [label for label in axes.yaxis.get_ticklabels() if bottom <= label.get_position()[1] <= top]
    assert len({label.get_text() for label in inside}) == len(inside) >= 3
    assert bottom <= low <= high <= top and top / bottom < (2 * high / low if high > low else 20)


def test_coinciding_curves_differ_in_more_than_colour(plt: Any) -> None:
    entries = [replace(entry(method, 2.0, 2.0)) for method in "abcde"]
    for one in entries:
        one.__dict__["recipe_text"] = "data: {name: digits}\nmethod: {batching: poisson}\n"
    comparison = Comparison(entries, "test_accuracy", "a")
    history = [{"trial": "0", "epoch": str(epoch), "noise_multiplier": "5"} for epoch in range(50)]
    histories = {id(one): history for one in entries}
    figure = _by_epoch(plt, comparison, _styles(comparison), histories, "noise_multiplier")
    lines = figure.axes[0].get_lines()
    assert len({str(line._dash_pattern) for line in lines}) == len({line.get_marker() for line in lines}) == 5
    assert [line.get_linewidth() for line in lines] == sorted((line.get_linewidth() for line in lines), reverse=True)
    starts = [line.get_markevery()[0] for line in lines]
    assert len(set(starts)) == 5 and all(start < math.ceil(50 / 8) for start in starts)


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
