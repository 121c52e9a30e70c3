"""Comparison as tables: Markdown for people, CSV and JSON for programs, with notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpsgd_cli.accounting.tradeoff import RATES, percent
from dpsgd_cli.common.text_format import count, epsilon_text, interval_text
from dpsgd_cli.results import files
from dpsgd_cli.results.comparison import Comparison
from dpsgd_cli.results.result import NONPRIVATE, Row


def to_markdown(comparison: Comparison) -> str:
    """Return the table for people, followed by notes on its columns."""
    metric, told = comparison.metric, told_apart(comparison)
    epsilons = [f"epsilon ({adjacency})" for adjacency in comparison.adjacencies]
    found = [f"found at {rate * 100:g}%" for rate in RATES]
    priced = [*epsilons, "accountant", *found] if epsilons else []
    names = [column.replace("_", " ") for column in told]
    columns = ["method", *names, *priced, f"{metric} (95% CI)", "trials", f"difference from {comparison.baseline}"]
    lines = [f"| {' | '.join([*columns, 'verdict'])} |", f"|{'---|' * (len(columns) + 1)}"]
    for row in comparison.rows:
        cells = [row["method"], *(row[column] for column in told), *(_epsilon(row, name) for name in epsilons)]
        cells += [row["accountant"] or "", *(_found(row, rate) for rate in RATES)] if priced else []
        cells += [_spread(row[metric], row["ci95"], ""), "" if row["n"] is None else str(row["n"])]
        cells += [_spread(row["difference"], row["difference_ci95"], "+"), row["verdict"]]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join([*lines, "", *notes(comparison)]) + "\n"


def told_apart(comparison: Comparison) -> list[str]:
    """Return the columns about the test data whose values differ between rows."""
    rows = comparison.rows
    return [
        column
        for column, several in (
            ("data", len(comparison.data) > 1),
            ("test_records", len({row["test_records"] for row in rows}) > 1),
        )
        if several
    ]


def notes(comparison: Comparison) -> list[str]:
    """Return the notes that a reader needs to judge the table."""
    told = [
        "Values are means over trials with 95% intervals (Student). Each epsilon is of one trial on its own. "
        + _of_all(comparison.why_apart)
    ]
    if any(row["verdict"].startswith("not compared: different") for row in comparison.rows):
        told.append(
            "A difference is taken only between results on the same records of the same data, and at equal budgets;"
            " a verdict says which of these does not hold."
        )
    if len(comparison.adjacencies) > 1:
        told.append(
            f"Epsilons for {' and '.join(comparison.adjacencies)} are different guarantees and stand in columns of"
            " their own; methods are compared only with a baseline of their own adjacency."
        )
    accountants = list(dict.fromkeys(row["accountant"] for row in comparison.rows if row["accountant"]))
    if len(accountants) > 1:
        told.append(
            f"Epsilons are stated by different accountants ({', '.join(accountants)}): for the same noise a looser one"
            " states a larger epsilon, so equal epsilons are not equal noise."
        )
    if any(row[f"true_positives_at_{RATES[0]:g}"] is not None for row in comparison.rows):
        told.append(
            "Found at 1% and 0.1%: of the records that were there, the share that the best attacker finds who knows all"
            " others and raises so many false alarms; a blind guess finds 1% and 0.1%."
        )
    estimates = [e.method for e in comparison.entries if e.privacy.get("bound") == "estimate"]
    if estimates:
        told.append(f"Epsilon is an estimate, not an upper bound, for {', '.join(dict.fromkeys(estimates))}.")
    if comparison.differences == 1:
        told.append("The difference is judged at 5%.")
    elif comparison.differences:
        told.append(f"{count(comparison.differences, 'difference')} are judged together at 5% (Holm).")
    return told


def _of_all(why_apart: str | None) -> str:
    if why_apart is not None:
        return f"Nothing is stated of all of them published together: {why_apart}."
    return "What all of them cost together, `dpsgd account --trials all` says of the folder that holds these results."


def _epsilon(row: Row, name: str) -> str:
    value = row[name]
    return "" if value is None else f"{'about ' if row['bound'] == 'estimate' else ''}{epsilon_text(value)}"


def _found(row: Row, rate: float) -> str:
    """Return the best attacker's true positive rate at a false positive rate, as text; empty if it is unknown."""
    share = row[f"true_positives_at_{rate:g}"]
    return "" if share is None else f"{'' if row['mu'] is not None else '<= '}{percent(share)}"


def _spread(mean: float | None, half: float | None, sign: str) -> str:
    return "" if mean is None else interval_text(mean, half, sign)


def write(comparison: Comparison, out: Path, stem: str = "comparison") -> list[Path]:
    """Write `.csv`, `.json` and `.md`, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        "metric": comparison.metric,
        "baseline": comparison.baseline,
        "notes": notes(comparison),
        "rows": comparison.rows,
        "privacy": {str(e.directory): e.privacy for e in comparison.entries},
    }
    content = {"csv": files.to_csv(comparison.rows), "json": files.to_json(document), "md": to_markdown(comparison)}
    hidden = comparison.metric.startswith(NONPRIVATE)
    for ending, text in content.items():
        files.write_whole(out / f"{stem}.{ending}", text, owner_only=hidden)
    return [out / f"{stem}.{ending}" for ending in content]
