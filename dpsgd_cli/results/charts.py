"""Charts of a report as SVG elements, drawn in milliseconds: lines, bands, points and bars over one pair of axes.

A report is written after every training, and importing matplotlib takes longer than a small training. Pictures of
comparisons and `account` are matplotlib's (`pictures.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from html import escape

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
"""The palette of Okabe and Ito, which colour-blind readers can distinguish."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 22, 40
_GREY = "#888888"


def ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """Return at most `most` + 1 round numbers in [low, high]: multiples of 1, 2 or 5 times a power of ten.

    >>> ticks(0.0, 1.0, 5), ticks(1.0, 3.0, 5, whole=True)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [1.0, 2.0, 3.0])
    """
    least = max((high - low) / most, 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{step * number:.12g}") for number in range(first, last + 1)]


def day_text(value: float, first_day: date | None) -> str:
    """Return a number as text, or the day that is so many days after `first_day`."""
    return f"{value:.6g}" if first_day is None else (first_day + timedelta(days=round(value))).isoformat()


@dataclass
class Chart:
    """One pair of axes with marks on them; `width` and `height` in pixels.

    `names` label the places 0, 1, ... of the x axis instead of numbers; `whole`: only whole numbers on it; `first_day`:
    numbers are days since then. `span`: ends of the y axis, for charts that share them. `low_legend`: the legend is at
    the bottom instead of the top.
    """

    width: float
    height: float
    xlabel: str = ""
    ylabel: str = ""
    title: str = ""
    names: Sequence[str] = ()
    whole: bool = False
    low_legend: bool = False
    first_day: date | None = None
    span: tuple[float, float] | None = None
    _marks: list[tuple[str, list[tuple[float, ...]], str]] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def line(self, xs: Sequence[float], ys: Sequence[float], colour: str, label: str = "", kind: str = "line") -> None:
        """Add a line, or with `kind` another mark through the same points: `dashed` or `points`."""
        self._add(kind, [xs, ys], colour)
        if label:
            self._legend.append((label, colour))

    def band(
        self, xs: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str, kind: str = "band"
    ) -> None:
        """Fill the area between two lines, or with `kind` = `bars` draw a bar at each place."""
        self._add(kind, [xs, low, high], colour)

    def _add(self, kind: str, columns: Sequence[Sequence[float]], colour: str) -> None:
        points = [tuple(map(float, point)) for point in zip(*columns, strict=True)]
        self._marks.append((kind, [point for point in points if all(map(math.isfinite, point))], colour))

    def drawn(self) -> Iterator[str]:
        """Yield the elements of the chart, from its top left corner."""
        points = [point for _, own, _ in self._marks for point in own]
        x_low, x_high = _span([point[0] for point in points], 0.3 if self.names else 0.0)
        y_low, y_high = _span(self.span or [value for point in points for value in point[1:]], 0.05)
        turned = max(map(len, self.names), default=0) > 4
        x_end, y_end = self.width - _RIGHT, self.height - _BOTTOM - (24 if turned else 0)

        def x(value: float) -> float:
            return round(_LEFT + (value - x_low) / (x_high - x_low) * (x_end - _LEFT), 1)

        def y(value: float) -> float:
            return round(y_end - (value - y_low) / (y_high - y_low) * (y_end - _TOP), 1)

        for value in ticks(y_low, y_high, 6):
            yield _rule(_LEFT, y(value), x_end, y(value), "#e2e2e2")
            yield _text(_LEFT - 5, y(value) + 4, f"{value:.6g}", "end", 11)
        if self.names:
            for place, name in enumerate(self.names):
                yield _text(x(place), y_end + 14, name, "end" if turned else "middle", 10, turned=-40 * turned)
        else:
            apart = 75 if self.first_day is None else 110
            for value in ticks(x_low, x_high, max(2, int(self.width / apart)), self.whole):
                yield _rule(x(value), _TOP, x(value), y_end, "#e2e2e2")
                yield _text(x(value), y_end + 15, day_text(value, self.first_day), "middle", 11)
        if y_low < 0 < y_high:
            yield _rule(_LEFT, y(0), x_end, y(0), _GREY)
        for kind, own, colour in self._marks:
            there = [(x(point[0]), *map(y, point[1:])) for point in own]
            yield from _mark(kind, there, colour)
        yield f'<path d="M{_LEFT} {_TOP}V{y_end}H{x_end}" fill="none" stroke="#444"/>'
        middle = (_LEFT + x_end) / 2
        if self.title:
            yield _text(middle, 14, self.title, "middle", 13)
        if self.xlabel:
            yield _text(middle, self.height - 6, self.xlabel, "middle", 12)
        if self.ylabel:
            yield _text(13, (_TOP + y_end) / 2, self.ylabel, "middle", 12, turned=-90)
        top = y_end - 14 * len(self._legend) - 8 if self.low_legend else _TOP + 8
        for row, (label, colour) in enumerate(self._legend):
            at = top + 14 * row
            yield _rule(x_end - 22, at, x_end - 6, at, colour, 2.5)
            yield _text(x_end - 26, at + 4, label, "end", 11)


def beside(charts: Sequence[Chart], across: int) -> str:
    """Return an SVG element with the charts, all of one size, in rows of `across`."""
    width, height = charts[0].width * min(across, len(charts)), charts[0].height * -(-len(charts) // across)
    parts = [
        f'<g transform="translate({place % across * chart.width:g} {place // across * chart.height:g})">'
        f"{''.join(chart.drawn())}</g>"
        for place, chart in enumerate(charts)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}"'
        f' viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" fill="#1a1a1a">{"".join(parts)}</svg>'
    )


def _span(values: Sequence[float], margin: float) -> tuple[float, float]:
    """Return the ends of an axis that shows all values, with a share of their range as margin."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        half = abs(low) / 10 or 0.5
        return low - half, high + half
    return low - margin * (high - low), high + margin * (high - low)


def _mark(kind: str, points: Sequence[tuple[float, ...]], colour: str) -> Iterator[str]:
    """Yield the elements of one mark through points in pixels."""
    if kind == "points":
        yield from (f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in points)
    elif kind == "bars":
        for x, low, high in points:
            yield f'<path d="M{x} {low}V{high}" stroke="{colour}" stroke-width="4" stroke-opacity=".35"/>'
    elif kind == "band":
        ends = [*((x, high) for x, _, high in points), *((x, low) for x, low, _ in reversed(points))]
        yield f'<polygon points="{_path(ends)}" fill="{colour}" fill-opacity=".16"/>'
    else:
        dashes = ' stroke-dasharray="5 4"' if kind == "dashed" else ""
        yield f'<polyline points="{_path(points)}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'


def _path(points: Sequence[tuple[float, ...]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _rule(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    return f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, text: str, anchor: str, size: int, turned: int = 0) -> str:
    around = f' transform="rotate({turned} {x:g} {y:g})"' if turned else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{around}>{escape(text)}</text>'
