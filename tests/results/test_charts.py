"""Charts: the right numbers at the right places, and XML whatever the names are."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from dpsgd_cli.results.charts import Chart, beside, ticks


@pytest.mark.parametrize("low", [-3.7, 0.0, 1e-9, 12.0, 1e12])
@pytest.mark.parametrize("width", [1e-7, 0.3, 1.0, 7.0, 2500.0])
@pytest.mark.parametrize("most", [3, 5, 9])
def test_ticks_are_few_and_round_and_inside(low: float, width: float, most: int) -> None:
    if width < 1e-6 * abs(low):
        return
    found = ticks(low, low + width, most)
    assert 1 <= len(found) <= most + 1
    assert all(low - 1e-6 * width <= one <= low + width * (1 + 1e-6) for one in found)
    steps = {float(f"{b - a:.3g}") for a, b in itertools.pairwise(found)}
    assert len(steps) <= 1 and all(f"{step:e}"[0] in "125" for step in steps)


def test_one_value_and_no_value_have_axes_and_names_have_places() -> None:
    one, none, named = Chart(200, 200), Chart(200, 200), Chart(200, 200, names=["<script>", ""])
    one.line([3], [5], "#000000", kind="points")
    named.line([0, 1], [1, -1], "#000000", kind="points")
    named.band([0, 1], [0, -2], [2, 0], "#000000", "bars")
    text = beside([one, none, named], 3)
    assert ElementTree.fromstring(text) is not None and "<script>" not in text
    assert "nan" not in text and "inf" not in text
