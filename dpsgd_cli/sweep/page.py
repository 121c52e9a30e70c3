"""The page of a sweep as a whole: what it found, what all of it costs, and its cells. It needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsgd_cli.engine.metrics import in_words, is_of_class, less_is_better, usual_metric
from dpsgd_cli.results.document import Bullets, Heading, TableBlock, Text, html
from dpsgd_cli.results.result import NONPRIVATE, Row

_NOT_SHOWN = (NONPRIVATE, "directory", "accountant", "constant_")
_INTERVAL = "_ci95"


def page(result: dict[str, Any], rows: Sequence[Row], said: Sequence[str]) -> str:
    """Return the page as HTML, of a sweep's result, the rows of its table, and the lines about its privacy.

    Cells are in the order of their usual test metric, the best first. That order is not a choice that is priced. The
    baseline's metrics are left out: they are the same for all cells of a data set.
    """
    columns = [key for row in rows for key in row if not key.startswith(_NOT_SHOWN) and not key.endswith(_INTERVAL)]
    columns = [column for column in dict.fromkeys(columns) if not is_of_class(column)]
    metric = usual_metric(columns)
    ordered = list(rows)
    if metric is not None:
        sign = 1 if less_is_better(metric) else -1
        known = [row for row in rows if row.get(metric) is not None]
        ordered = sorted(known, key=lambda row: sign * row[metric]) + [row for row in rows if row not in known]
    best = "" if metric is None or not ordered else f"; the best {in_words(metric)} is {_cell(ordered[0].get(metric))}"
    done = f"{result['finished']} of {result['cells']} cells are done, {result['failed']} failed{best}."
    chosen = result["chosen"]
    return html(
        [
            Heading(f"{result['sweep']}: {result['finished']} of {result['cells']} cells", 1),
            Text(done),
            Heading("What it costs"),
            Bullets([" ".join(line.split()) for line in said]),
            *([] if chosen is None else [Text("One of the runs was chosen privately; its price is above.")]),
            Heading("The cells"),
            Text(
                "The best first. If you publish or use the best because it is the best, you owe the price of a choice."
            ),
            TableBlock(
                [in_words(column) for column in columns], [[_with_interval(row, c) for c in columns] for row in ordered]
            ),
        ]
    )


def _with_interval(row: Row, column: str) -> str:
    """Return a cell, with its 95% interval where the row has one."""
    around = row.get(f"{column}{_INTERVAL}")
    return _cell(row.get(column)) + ("" if around is None else f" +- {_cell(around)}")


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
