"""Ledgers and results with one value changed and all hashes made anew: no traceback, and no smaller epsilon."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsgd_cli.results.reading import sealed
from tests.cli.accounting import run
from tests.conftest import Train, WriteRecipe

ODD: list[Any] = [
    None, True, [], {}, [[[]]], [None], "x", "", "\ud800", "\x1b[31m", -1, 0, 0.5, 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), 10**30, 10**400, 2**53 + 1, {"mechanism": "zcdp"}, "REMOVED",
]  # fmt: skip
CHOSEN = 250
"""Of all mutations of a result, drawn by a fixed seed."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value of a JSON document, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(document: Any, path: tuple[Any, ...], odd: Any) -> Any:
    copy = json.loads(json.dumps(document))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if odd == "REMOVED":
        del parent[path[-1]]
    else:
        parent[path[-1]] = odd
    return copy


def answer(source: Path, what: object) -> list[dict[str, Any]] | None:
    """The rows, or None for a refusal; fails for a traceback and for what is reported as an internal error."""
    told = run(str(source), "--accountant", "gaussian", "--accountant", "zcdp", "--format", "json")
    assert told.exception is None or isinstance(told.exception, SystemExit), (what, told.exception)
    assert told.exit_code in (0, 1, 2), what
    assert "internal error" not in told.output.lower() and "Traceback" not in told.output, (what, told.output)
    return json.loads(told.stdout) if told.exit_code == 0 else None


def test_a_mutated_ledger_line_is_refused_or_costs_what_it_says(tmp_path: Path) -> None:
    """What is priced after a change that leaves the mechanism alone costs the same (mu = 1/2 exactly)."""
    line: dict[str, Any] = {
        "trial": 0, "seed": 0, "phase": "train", "epoch": 1, "mechanism": "gaussian", "noise_multiplier": 2.0,
        "adjacency": "zero-out", "batching": "shuffle", "sampling_rate": 1.0, "sensitivity": 1.0, "label": "gradient",
        "count": 1,
    }  # fmt: skip
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps(line))
    plain = answer(path, "unchanged")
    assert plain is not None
    harmless = {"trial", "seed", "phase", "epoch", "sensitivity", "label", "within", "unit", "batching", "adjacency"}
    for key in [*line, "within", "unit"]:
        for odd in ODD:
            if odd == "REMOVED" and key not in line:
                continue
            path.write_text(json.dumps(changed({**line, **({} if key in line else {key: 0})}, (key,), odd)))
            rows = answer(path, (key, odd))
            if rows is not None and key in harmless:
                assert all(row["epsilon"] is None or row["epsilon"] >= 0.9999 * plain[0]["epsilon"] for row in rows)
            if rows is not None and key in ("mechanism", "sampling_rate"):
                raise AssertionError((key, odd))


def test_a_mutated_result_is_refused_or_costs_no_less(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe(method={"kind": "dp-gd", "learning_rate": 1}, epochs=1, repeats=2))
    result = directory / "result.json"
    document = json.loads(result.read_text())
    plain = answer(directory, "unchanged")
    assert plain is not None
    cases = [(path, odd) for path in places(document) for odd in ODD]
    for path, odd in random.Random(0).sample(cases, CHOSEN):
        made = changed(document, path, odd)
        try:
            made = sealed(made)
        except (TypeError, AttributeError, KeyError, ValueError):
            continue
        result.write_text(json.dumps(made))
        rows = answer(directory, (path, odd))
        if rows is not None and all(row["delta"] <= plain[0]["delta"] for row in rows):
            least = {row["accountant"]: row["epsilon"] for row in plain}
            assert all(row["epsilon"] is None or row["epsilon"] >= least[row["accountant"]] for row in rows), path
