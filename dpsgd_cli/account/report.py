"""Answers of `dpsgd account`: table, JSON, CSV, or a picture of curves."""

from __future__ import annotations

import csv
import io
import json
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from dpsgd_cli.account.answers import FALSE_POSITIVES, Row, Series, reasons_of, warnings_of_case
from dpsgd_cli.account.cases import Case, noise_facts, span_words
from dpsgd_cli.common.text_format import epsilon_text, metric_text
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.guarantee import attack_words

_WIDTH = 118
_FAR_APART = 20.0
"""Ratio of the curves' last values above which a picture has a logarithmic scale."""
_UPWARDS = {"order": "Renyi divergence", FALSE_POSITIVES: "TPR"}


def prices(cases: Sequence[Case], rows: Sequence[Row], form: str | None) -> str:
    """Return rows as JSON or CSV, or as a table with the cases' descriptions above and conditions below."""
    if form in ("json", "csv"):
        return as_json(rows) if form == "json" else as_csv(rows)
    told = [remark for case in cases for remark in case.conditions()]
    told += [f"warning: {text}" for case in cases for text in warnings_of_case(case, rows)]
    attacked = {id(row.case): row for row in rows if row.attack is not None}
    found = [_attack_line(attacked[id(case)], len(cases) > 1) for case in cases if id(case) in attacked]
    return "\n".join([*(case.subject for case in cases), table(rows), *found, *dict.fromkeys(told)])


def demands(rows: Sequence[dict[str, Any]], form: str | None) -> str:
    """Return the steps and records that Lecture 9 asks of each recipe, as text or JSON."""
    if form == "json":
        return json.dumps(rows, indent=2)
    return "\n".join(
        f"{row['recipe']}: at an expected excess risk of {row['excess_risk']:g}, Lecture 9 asks for"
        f" T = {row['steps']:,} steps and n = {row['records']:,} records (it has {row['records_available']:,})"
        for row in rows
    )


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned columns; refusals follow, grouped by reason."""
    priced = [_columns(row, rows) for row in rows if row.epsilon is not None]
    refused = reasons_of(rows)
    lines = _aligned([[*priced[0]], *([*cells.values()] for cells in priced)]) if priced else []
    proved = [row for row in rows if row.epsilon is not None and row.bound == "upper"]
    if len(proved) > 1 and len({id(row.case) for row in proved}) == 1:
        lines.append("each upper bound holds, so the least one counts")
    if refused:
        lines += ["", "no statement:"] if lines else ["no statement:"]
        for reason, own in refused.items():
            told = f"  {', '.join(_name(row, rows) for row in own)}: {reason}"
            lines += textwrap.wrap(told, _WIDTH, subsequent_indent="      ")
    return "\n".join(lines)


def as_json(rows: Sequence[Row]) -> str:
    """Return rows as a JSON list of objects; numbers that are not finite become null, and the note says so."""
    return json.dumps([_record(row, rows) for row in rows], indent=2)


def as_csv(rows: Sequence[Row]) -> str:
    """Return rows as CSV, with a header."""
    records = [_record(row, rows) for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record))
    return _csv([names, *([record.get(name) for name in names] for record in records)])


def series(found: Series, form: str | None) -> str:
    """Return a series as CSV (the axis, then one column per curve), or as a JSON list of objects, one per point."""
    names = (found.axis, *found.columns)
    body = [[*map(_plain, row)] for row in zip(found.points, *found.columns.values(), strict=True)]
    if form == "json":
        return json.dumps([dict(zip(names, row, strict=True)) for row in body], indent=2)
    return _csv([names, *body])


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
    for number, (name, label) in enumerate(series.shown.items()):
        values = [math.nan if value is None else value for value in series.columns[name]]
        ends += [value for value in values if value > 0 and math.isfinite(value)][-1:]
        colour, dashes = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
        axes.plot(series.points, values, label=label, color=colour, linestyle=dashes)
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


def _columns(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Return the cells of a priced row of `rows`, by the names of the table's columns."""
    assert row.epsilon is not None
    # unrounded, since a rounded number may cost more than the budget
    solved = {name: repr(row.solved[name]).removesuffix(".0") if name in row.solved else "" for name in _solved(rows)}
    facts, found = _facts(row), {"source": row.case.label} if _several_sources(rows) else {}
    found |= {"accountant": row.accountant, **{name.replace("-", " "): text for name, text in solved.items()}}
    found["epsilon"] = epsilon_text(row.epsilon) if row.bound == "upper" else metric_text(row.epsilon)
    found["delta"] = f"{row.delta:.6g}"
    if any(other.rho is not None for other in rows):
        found["rho"] = "" if row.rho is None else f"{row.rho:.6g}"
    found |= {"bound": row.bound, "adjacency": row.adjacency or "any"}
    # multipliers of different sensitivities are ranked: a replaced record moves a sum by 2 C
    if len({other.adjacency for other in rows if other.adjacency is not None}) > 1:
        found["noise / C"] = span_words(facts["noise_over_clip"]) if facts else ""
    return found | {"batching": row.case.batching, "note": row.note}


def _several_sources(rows: Sequence[Row]) -> bool:
    return len({row.case.label for row in rows}) > 1


def _facts(row: Row) -> dict[str, Any]:
    """Return the noise of the composition that is priced (`noise_facts`)."""
    return {} if row.priced is None else noise_facts(parts[0] for parts in row.priced.trials)


def _solved(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.solved))


def _attack_line(row: Row, several: bool) -> str:
    attack = row.attack
    assert attack is not None
    words = attack_words(attack.mu, attack.regret, attack.true_positives, attack.proved_by)
    return f"{f'{row.case.label or row.case.batching}: ' if several else ''}strongest attack: {words}"


def _name(row: Row, rows: Sequence[Row]) -> str:
    batching = f" ({row.case.batching})" if len({other.case.batching for other in rows}) > 1 else ""
    return f"{f'{row.case.label} ' if _several_sources(rows) else ''}{row.accountant}{batching}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _record(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """Return a row with everything that the text says of it: figures, who is protected, and all conditions."""
    case, attack = row.case, row.attack
    record: dict[str, Any] = {
        "accountant": row.accountant,
        "epsilon": _plain(row.epsilon),
        "delta": row.delta,
        "adjacency": row.adjacency,
        "batching": case.batching,
        "bound": row.bound,
        "note": row.note,
        "rho": row.rho,
        "source": case.label,
        "about": case.subject,
        "unit": case.unit,
        "group": case.group,
        "trials": case.together or 1,
        "best_of": None if case.choice is None else case.choice.mean,
        "law": None if case.choice is None else case.choice.law,
        **_facts(row),
        "conditions": case.conditions(),
        "warnings": warnings_of_case(case, rows),
    }
    if attack is not None:
        rates = {f"true_positives_at_{rate:g}": share for rate, share in attack.true_positives.items()}
        record |= {"mu": _plain(attack.mu), "regret": attack.regret, **rates, "attacker_by": attack.proved_by}
    return record | row.solved


def _plain(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _csv(rows: Iterable[Iterable[object]]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(map(_cell, row) for row in rows)
    return written.getvalue().removesuffix("\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.12g}"
    return "; ".join(map(_cell, value)) if isinstance(value, list) else str(value)
