"""The page of a sweep as a whole: what it found, what all of it costs, and its cells. It needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpsgd_cli.engine.metrics import in_words, less_is_better, usual_metric
from dpsgd_cli.results.document import Bullets, Heading, TableBlock, Text, html
from dpsgd_cli.results.result import NONPRIVATE, Row

_NOT_SHOWN = (NONPRIVATE, "directory", "accountant")


def page(result: dict[str, Any], rows: Sequence[Row], said: Sequence[str]) -> str:
    """Return the page as HTML, of a sweep's result, the rows of its table, and the lines about its privacy.

    Cells are in the order of their usual test metric, the best first. That order is no choice which is priced.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith(_NOT_SHOWN)))
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
                "The best first. Whoever publishes or uses the best because it is the best owes the price of a choice."
            ),
            TableBlock(
                [in_words(column) for column in columns], [[_cell(row.get(c)) for c in columns] for row in ordered]
            ),
        ]
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
