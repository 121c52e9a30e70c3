"""Shapes that a model learnt of each column, and its test curves: their file beside a result, pages and tables.

`training/explain.py` computes them. The file `explained.json` holds functions of released weights and of test records
that are declared public, so it may be published with the model. Pictures are drawn from it without torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dpsgd_cli.common.text_format import metric_text
from dpsgd_cli.errors import DataError
from dpsgd_cli.results import files, reading
from dpsgd_cli.results.charts import COLOURS, Chart, beside, day_text
from dpsgd_cli.results.document import Block, Heading, Picture, TableBlock, Text
from dpsgd_cli.results.result import Row

NAME = "explained.json"
Ends = tuple[float, float]
MOST_PICTURES = 12
MOST_COEFFICIENTS = 60
"""Coefficients of the table in a report; `dpsgd explain --out` writes all."""
_IN_A_ROW = 4
_MOST_NAMES = 12


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shape(_Part):
    """The effect of one column on each output: G values (numbers, or names of categories) by `effects` (G, K).

    Numbers of a column of dates are days since `first_day`.
    `noise`: the standard deviation of training noise in each effect (G,); None where its law is not known. `intervals`:
    ends of the 95% interval of each effect (G, K), None where noise hides it; None if the recipe asked for none. `size`
    is the standard deviation of the effects over the values, the largest of the outputs.
    """

    column: str
    first_day: date | None = None
    values: list[float] | list[str]
    effects: list[list[float]]
    noise: list[float] | None
    intervals: list[list[Ends | None]] | None = None
    size: float


class Coefficient(_Part):
    """A weight as published, and its estimate with the ends of its 95% interval; None where noise hides them."""

    feature: str
    output: str
    weight: float
    estimate: float | None = None
    ends: Ends | None = None
    note: str = ""


class TestCurves(_Part):
    """Quality on the test records of a result, which are declared public; of classes or of numbers.

    `roc`: false and true positive rates. `predicted`: mean prediction, mean target, 10th and 90th percentile of the
    target, of groups of records with similar predictions.
    """

    roc: list[tuple[float, float]] = []
    predicted: list[tuple[float, float, float, float]] = []


class Explained(_Part):
    """Shapes of the columns, the largest first, on the scale `unit`; `about_noise` says what the band is, or is not."""

    trial: int
    outputs: list[str]
    unit: str
    about_noise: str
    about_intervals: str = ""
    coefficients: list[Coefficient] = []
    shapes: list[Shape]
    curves: TestCurves = TestCurves()
    left_out: list[str]


def keep(directory: Path, explained: Explained) -> None:
    """Write the file beside a finished result."""
    files.write_whole(reading.place(directory, NAME), explained.model_dump_json() + "\n")


def read(directory: Path) -> Explained | None:
    """Return what the file beside a result says; None without such a file. Raises DataError if it is damaged."""
    path = directory / NAME
    if not path.is_file():
        return None
    try:
        return Explained.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        raise DataError(f"{path}: cannot be read ({type(error).__name__}); remove it: pages do without") from None


def rows(explained: Explained) -> list[Row]:
    """Return the shapes as a table: a row for each column, value and output."""
    return [
        {
            "column": shape.column,
            "value": value,
            "output": output,
            "effect": effects[number],
            "noise": None if shape.noise is None else shape.noise[at],
        }
        | ({} if shape.intervals is None else _ends(shape.intervals[at][number]))
        for shape in explained.shapes
        for at, (value, effects) in enumerate(zip(shape.values, shape.effects, strict=True))
        for number, output in enumerate(explained.outputs)
    ]


def _ends(known: Ends | None) -> Row:
    return dict.fromkeys(("low", "high")) if known is None else {"low": known[0], "high": known[1]}


def coefficient_rows(coefficients: Sequence[Coefficient]) -> list[Row]:
    """Return the coefficients as a table, a row for each feature and output."""
    return [
        {"feature": one.feature, "output": one.output, "weight": one.weight, "estimate": one.estimate}
        | _ends(one.ends)
        | {"note": one.note}
        for one in coefficients
    ]


def summary(explained: Explained) -> list[tuple[str, str, str, str]]:
    """Return, for each column, its size and the values with the least and the greatest effect on the first output."""
    told = []
    for shape in explained.shapes:
        effects = [own[0] for own in shape.effects]
        least, greatest = (
            f"{_value(shape.values[at], shape.first_day)} ({effects[at]:+.3g})"
            for at in (effects.index(min(effects)), effects.index(max(effects)))
        )
        told.append((shape.column, metric_text(shape.size), least, greatest))
    return told


def blocks(explained: Explained) -> list[Block]:
    """Return the part of a page that explains a model."""
    told: list[Block] = []
    if explained.shapes:
        head = ("column", "size", "least effect at", "greatest effect at")
        told = [
            Heading("What the model learnt"),
            Text(
                f"The effect of each column on the {explained.unit}, with the other columns drawn evenly from their"
                " public bounds and values; the mean over a column is 0. Computed from the released weights alone, so"
                f" it costs nothing. {explained.about_noise}"
            ),
            Picture(_draw_shapes(explained), "effect of each column"),
            TableBlock(head, summary(explained)),
        ]
    if explained.coefficients:
        told += [Heading("Coefficients with 95% intervals"), Text(explained.about_intervals)]
        listed = coefficient_rows(explained.coefficients[:MOST_COEFFICIENTS])
        told.append(TableBlock(tuple(listed[0]), [tuple(map(_cell, row.values())) for row in listed]))
    if explained.left_out and explained.shapes:
        told.append(Text(f"Left out: {'; '.join(explained.left_out)}."))
    return told


def quality(curves: TestCurves) -> list[Block]:
    """Return a heading and one picture of quality on public test records; nothing without them."""
    if curves.roc:
        return roc(curves.roc, "public test records")
    title = "Predicted against true"
    axes = ("predicted", "true: mean, 10% to 90%")
    return _diagonal(title, axes, curves.predicted, "public test records") if curves.predicted else []


def roc(points: Sequence[Sequence[float]], records: str) -> list[Block]:
    """Return a heading and a ROC curve through points (false positive rate, true positive rate, low, high).

    The last two, the ends of an interval, may be left out.
    """
    return _diagonal("Telling the classes apart", ("false positive rate", "true positive rate"), points, records)


def _diagonal(title: str, axes: tuple[str, str], points: Sequence[Sequence[float]], records: str) -> list[Block]:
    """Return a heading and a chart of points (x, y), or (x, y, low, high), beside the diagonal."""
    chart = Chart(420, 320, *axes)
    x, y, *ends = zip(*points, strict=True)
    corners = (min(x + y), max(x + y))
    chart.line(corners, corners, "#888888", kind="dashed")
    if ends:
        chart.band(x, ends[0], ends[1], COLOURS[0])
    chart.line(x, y, COLOURS[0])
    return [Heading(title), Picture(beside([chart], 1), f"{title}, on {records}")]


def _value(value: float | str, first_day: date | None = None) -> str:
    return day_text(value, first_day) if isinstance(value, float) else value or "(missing)"


def _cell(value: Any) -> str:
    return "" if value is None else metric_text(value) if isinstance(value, float) else str(value)


def _draw_shapes(explained: Explained) -> str:
    """Draw a panel for each of the largest columns, on one scale: lines over numbers, points over categories, bands.

    Of many categories, those with the largest effects are shown.
    """
    charts: list[Chart] = []
    shown = [_strongest(shape) for shape in explained.shapes[:MOST_PICTURES]]
    effects = [effect for shape in shown for own in shape.effects for effect in own]
    for shape in shown:
        numbers = [value for value in shape.values if isinstance(value, float)]
        names = [_short(str(value), 10) or "(missing)" for value in shape.values] if not numbers else []
        places = numbers or list(map(float, range(len(names))))
        span = (min(effects), max(effects))
        chart = Chart(300, 230, title=_short(shape.column), names=names, first_day=shape.first_day, span=span)
        for number, output in enumerate(explained.outputs):
            own, colour = [effects[number] for effects in shape.effects], COLOURS[number % len(COLOURS)]
            low, high = _band(shape, number, own)
            if low:
                chart.band(places, low, high, colour, "band" if numbers else "bars")
            label = output if len(explained.outputs) > 1 and not charts else ""
            chart.line(places, own, colour, label, "line" if numbers else "points")
        charts.append(chart)
    return beside(charts, _IN_A_ROW)


def _strongest(shape: Shape) -> Shape:
    """Return a shape with the categories of its largest effects, in their order; any other shape as it is."""
    if not isinstance(shape.values[0], str) or len(shape.values) <= _MOST_NAMES:
        return shape
    size = [max(map(abs, own)) for own in shape.effects]
    kept = sorted(sorted(range(len(size)), key=lambda at: -size[at])[:_MOST_NAMES])
    columns = ("values", "effects", "noise", "intervals")
    lists = {name: own for name in columns if (own := getattr(shape, name)) is not None}
    return Shape(**dict(shape) | {name: [own[at] for at in kept] for name, own in lists.items()})


def _band(shape: Shape, number: int, effects: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the ends of the band around an output's effects: intervals, else noise of training, else none."""
    if shape.intervals is not None:
        ends = [own[number] or (math.nan, math.nan) for own in shape.intervals]
        return [low for low, _ in ends], [high for _, high in ends]
    if shape.noise is None:
        return [], []
    reach = [1.96 * noise for noise in shape.noise]
    pairs = list(zip(effects, reach, strict=True))
    return [effect - own for effect, own in pairs], [effect + own for effect, own in pairs]


def _short(text: str, most: int = 28) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"
