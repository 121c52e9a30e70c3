"""Answers of `dpsgd account`: table, JSON, CSV, or a picture of curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpsgd_cli.account.answers import FALSE_POSITIVES, Row, Series
from dpsgd_cli.account.cases import Case
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.common.text_format import epsilon_text, metric_text
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.guarantee import attack_words

_WIDTH = 118
_FAR_APART = 20.0
"""Ratio of the curves' last values above which a picture has a logarithmic scale."""
_UPWARDS = {"order": "Renyi divergence", FALSE_POSITIVES: "TPR"}


def prices(cases: Sequence[Case], rows: Sequence[Row], form: str | None) -> str:
    """Return rows as JSON or CSV, or as a table with the cases' descriptions above and remarks below."""
    if form in ("json", "csv"):
        return as_json(rows) if form == "json" else as_csv(rows)
    told = [remark for case in cases for remark in (*case.remarks(), *case.uncovered())]
    attackers = {row.case: row for row in rows if row.attacker is not None}
    found = [_attacker_line(row, len(cases) > 1) for _, row in sorted(attackers.items())]
    return "\n".join([*(case.subject for case in cases), table(rows), *found, *dict.fromkeys(told)])


def demands(rows: Sequence[dict[str, Any]], form: str | None) -> str:
    """Return the steps and records that Lecture 9 asks of each recipe, as text or JSON."""
    import json

    if form == "json":
        return json.dumps(rows, indent=2)
    return "\n".join(
        f"{row['recipe']}: at an expected excess risk of {row['excess_risk']:g}, Lecture 9 asks for"
        f" T = {row['steps']:,} steps and n = {row['records']:,} records (it has {row['records_available']:,})"
        for row in rows
    )


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned columns; refusals follow, grouped by reason."""
    priced = [row for row in rows if row.epsilon is not None]
    refused = [row for row in rows if row.epsilon is None]
    lines = _aligned([_header(rows), *(_cells(row, rows) for row in priced)]) if priced else []
    if refused:
        lines += ["", "no statement:"] if lines else ["no statement:"]
        by_reason: dict[str, list[str]] = {}
        for row in refused:
            by_reason.setdefault(row.note.removeprefix("refused: "), []).append(_name(row, rows))
        for reason, names in by_reason.items():
            lines += _wrapped(f"  {', '.join(names)}: {reason}")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> str:
    """Return rows as a JSON list of objects; numbers that are not finite become null, and the note says so."""
    import json

    return json.dumps([_record(row) for row in rows], indent=2)


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with a header."""
    records = [_record(row) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    return "\n".join([",".join(names), *(",".join(_cell(record.get(name)) for name in names) for record in records)])


def series_csv(series: Series) -> str:
    """Return a series as CSV: the axis, then one column per curve."""
    header = ",".join(_cell(name) for name in (series.axis, *series.columns))
    body = zip(series.points, *series.columns.values(), strict=True)
    return "\n".join([header, *(",".join(_cell(_plain(value)) for value in row) for row in body)])


def series_json(series: Series) -> str:
    """Return a series as a JSON list of objects, one per point."""
    import json

    body = zip(series.points, *series.columns.values(), strict=True)
    names = (series.axis, *series.columns)
    return json.dumps([dict(zip(names, map(_plain, row), strict=True)) for row in body], indent=2)


def draw(series: Series, path: str) -> None:
    """Draw the columns `series.shown` into `path`, whose ending selects the format.

    Raises RunError if the picture cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    from dpsgd_cli.results.charts import COLOURS
    from dpsgd_cli.results.pictures import DASHES

    figure, axes = pyplot.subplots(figsize=(8, 4.4), layout="constrained")
    ends = []
    for number, name in enumerate(series.shown):
        values = [math.nan if value is None else value for value in series.columns[name]]
        ends += [value for value in values if value > 0 and math.isfinite(value)][-1:]
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        axes.plot(series.points, values, label=name, color=colour, linestyle=dashes)
    if ends and max(ends) > _FAR_APART * min(ends):
        axes.set_yscale("log")
    axes.set_xlabel(series.axis)
    axes.set_ylabel(_UPWARDS.get(series.axis, "epsilon"))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RunError(f"{path}: cannot write the picture: {error}") from None
    finally:
        pyplot.close(figure)


def _header(rows: Sequence[Row]) -> list[str]:
    names = ["accountant", "epsilon", "delta", "bound", "adjacency", "batching"]
    solved = [name.replace("-", " ") for name in _solved_names(rows)]
    rho = ["rho"] if any(row.rho is not None for row in rows) else []
    source = ["source"] if len({row.source for row in rows}) > 1 else []
    return [*source, *names[:1], *solved, *names[1:3], *rho, *names[3:], "note"]


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    source = [row.source] if len({row.source for row in rows}) > 1 else []
    # unrounded, since a rounded number may cost more than the budget
    solved = [repr(row.solved[name]).removesuffix(".0") if name in row.solved else "" for name in _solved_names(rows)]
    rho = [] if all(other.rho is None for other in rows) else ["" if row.rho is None else f"{row.rho:.6g}"]
    assert row.epsilon is not None
    return [
        *source,
        row.accountant,
        *solved,
        epsilon_text(row.epsilon) if row.bound == "upper" else metric_text(row.epsilon),
        f"{row.delta:.6g}",
        *rho,
        row.bound,
        row.adjacency or "any",
        row.batching,
        row.note,
    ]


def _solved_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.solved))


def _attacker_line(row: Row, several: bool) -> str:
    attacker = row.attacker
    assert attacker is not None
    words = attack_words(attacker.mu, attacker.regret, attacker.true_positives, attacker.proved_by)
    return f"{f'{row.source or row.batching}: ' if several else ''}strongest attack: {words}"


def _attacker_record(attacker: Attacker) -> dict[str, Any]:
    rates = {f"true_positives_at_{rate:g}": share for rate, share in attacker.true_positives.items()}
    return {"mu": _plain(attacker.mu), "regret": attacker.regret, **rates, "attacker_by": attacker.proved_by}


def _name(row: Row, rows: Sequence[Row]) -> str:
    batching = f" ({row.batching})" if len({other.batching for other in rows}) > 1 else ""
    source = f"{row.source} " if len({other.source for other in rows}) > 1 else ""
    return f"{source}{row.accountant}{batching}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _WIDTH, subsequent_indent="      ")


def _record(row: Row) -> dict[str, Any]:
    record: dict[str, Any] = {
        "accountant": row.accountant,
        "epsilon": _plain(row.epsilon),
        "delta": row.delta,
        "adjacency": row.adjacency,
        "batching": row.batching,
        "bound": row.bound,
        "note": row.note,
        "rho": row.rho,
    }
    if row.source:
        record["source"] = row.source
    found = {} if row.attacker is None else _attacker_record(row.attacker)
    return record | found | row.solved


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.12g}"
    text = str(value)
    return '"' + text.replace('"', '""') + '"' if any(mark in text for mark in ',"\n') else text
