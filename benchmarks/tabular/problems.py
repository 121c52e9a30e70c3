"""The tables of the page: a recipe for each, of the shipped ones or written from `tables.yaml`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from benchmarks import real

SHIPPED = ("adult", "bank", "ipums")
DETAILED = 10
DEALS = 1
"""How often the records of the listed tables are dealt to five folds; ten times those of the shipped ones."""


@dataclass(frozen=True)
class Problem:
    """A recipe, and how often its records are dealt to five folds at most."""

    recipe: str
    deals: int


@cache
def listed() -> dict[str, dict[str, Any]]:
    """What `tables.yaml` says of each table."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text("utf-8"))
    return found


def names() -> tuple[str, ...]:
    return (*SHIPPED, *listed())


def of_numbers(name: str) -> bool:
    """Whether a table's target is a number."""
    return name not in SHIPPED and "target_bounds" in listed()[name]


def opened(name: str, folder: Path) -> Problem:
    """A shipped table, or one of the list: its records and its recipe are written to `folder`."""
    if name in SHIPPED:
        return Problem(f"tabular/{name}", DETAILED)
    told = dict(listed()[name])
    rows = real.table(*told.pop("source").split("/"))
    rows = rows[[*told["bounds"], *told.get("categorical", ()), told["target"]]].dropna().convert_dtypes()
    rows.to_csv(folder / "rows.csv", index=False)
    whole = [column for column in told["bounds"] if pd.api.types.is_integer_dtype(rows[column])]
    recipe = {
        "name": "table",
        "data": {
            "path": "rows.csv",
            **({"task": "regression"} if "target_bounds" in told else {}),
            **told,
            "split": {"test": 0.2},
            "preprocess": [{"bin": {"integers": whole}}],
        },
        "model": {"kind": "convex", **({"loss": "squared"} if "target_bounds" in told else {})},
        "method": {"kind": "dp-gd"},
        "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}, "noise_source": "seeded"},
        "seed": 0,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return Problem(str(folder / "recipe.yaml"), DEALS)
