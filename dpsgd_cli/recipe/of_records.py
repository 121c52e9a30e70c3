"""Recipe of records in memory, from the facts that their owner states: the recipe that `dpsgd recipe new` drafts.

What is public is stated, never read: bounds of numbers, categories of text, classes of labels or bounds of targets. The
columns' types are public too: columns of integers with whole bounds are declared as whole numbers.
What is left out is refused, with the columns that need it. No message holds a cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.data.cells import Cells, TableRows
from dpsgd_cli.data.memory import ARRAYS, TABLE
from dpsgd_cli.errors import UsageError

LABELS = "y"
"""Name of the array of labels."""
_ANSWERS = [False, True]


@dataclass(frozen=True)
class StatedFacts:
    """Facts that are public knowledge, as their owner states them. All go into the recipe and its statement.

    - `bounds`: [low, high] of each numeric column by name, or one pair for all features; of dates, days.
    - `categories`: the values of each column of text by name.
    - `columns`: what dates, codes of many values and free text become, by name (`data.columns` of a recipe).
    - `classes`: the classes of a classification. "public" reads them from the labels and declares them public.
    - `target_bounds`: [low, high] of the target of a regression.
    - `missing`: by column, what a missing value means (`data.missing` of a recipe).
    - `drop`: columns to leave out.
    - `fitted_before`: what was fitted to the records before, without privacy; the statement does not cover it.
    """

    bounds: Mapping[str, Any] | Sequence[float] | None = None
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    classes: Sequence[Any] | Literal["public"] | None = None
    target_bounds: Sequence[float] | None = None
    missing: Mapping[str, Any] = field(default_factory=dict)
    drop: Sequence[str] = ()
    fitted_before: Sequence[str] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)


def recipe_of_table(
    table: TableRows, target: str, facts: StatedFacts, name: str, model: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the recipe, but for its budget, of a `table` whose column `target` is learnt, by an own `model` if given.

    Raises UsageError with every column that needs a fact, and every fact that is about no column.
    """
    kinds = {name: _kind(table[name]) for name in table.names}
    names = table.names
    problems = _wrong_names(names, target, facts)
    stated = facts.bounds if isinstance(facts.bounds, Mapping) else {}
    numbers: list[str] = []
    texts: list[str] = []
    dates: list[str] = []
    categories: dict[str, Any] = {
        name: values if isinstance(values, str) else list(values) for name, values in facts.categories.items()
    }
    computed = {
        name: use | {"bounds": _days(use.get("bounds"))} if "date" in use else use
        for name, use in facts.columns.items()
    }
    for column, kind in kinds.items():
        if column in (target, *facts.drop, *categories, *computed):
            continue
        pair = stated.get(column)
        if kind in ("date", "text") and _is_pair(pair) and all(isinstance(day, str) for day in _days(pair)):
            computed[column] = {"date": "%Y-%m-%d", "bounds": _days(pair)}
            continue
        if kind == "answer" and column not in stated:
            categories[column] = list(map(str, _ANSWERS))
        elif kind.endswith("number") or column in stated:
            numbers.append(column)
        else:
            (dates if kind == "date" else texts).append(column)
    pairs: Any = stated if isinstance(facts.bounds, Mapping) else dict.fromkeys(numbers, facts.bounds)
    told = {
        "bounds": [one for one in numbers if pairs.get(one) is None],
        "categories": texts,
        "bounds (first and last day), or drop": dates,
    }
    task = _task(facts, quoted(target), kinds.get(target, ""))
    problems += [f"{key}: needed for {', '.join(map(quoted, which))}" for key, which in told.items() if which]
    problems += task.pop("problems")
    if problems:
        raise UsageError(_refusal(problems))
    data = {"path": f"{name}{TABLE}", "target": target, **task, **_told(facts)}
    data |= {key: own for key, own in (("columns", computed), ("categorical", categories)) if own}
    data |= {"bounds": {one: list(pairs[one]) if _is_pair(pairs[one]) else pairs[one] for one in numbers}}
    whole = [
        one
        for one in numbers
        if kinds[one] == "whole number" and _is_pair(pairs[one])
        if all(float(end).is_integer() for end in pairs[one])
    ]
    steps = {} if model else {"preprocess": [{"bin": {"integers": whole} if whole else {}}]}
    return _recipe(name, data | steps, model)


def recipe_of_arrays(
    arrays: Mapping[str, np.ndarray], target: str | None, facts: StatedFacts, name: str, model: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the recipe, but for its budget, of arrays: `x`, or several by name, and labels `target`, or None.

    An own `model` gets the features as they are, unless there are `bounds`. Without labels it learns the next token.
    """
    task: dict[str, Any] = {"task": "next-token", "problems": []} if target is None else _task(facts, "the labels", "")
    problems: list[str] = task.pop("problems")
    inputs = {one: array for one, array in arrays.items() if one != target}
    named = [*inputs] != ["x"]
    if model is None and named:
        problems.insert(0, "model: needed for arrays by name: a module that takes them as keyword arguments")
    elif not _is_pair(facts.bounds) and (model is None or facts.bounds is not None):
        problems.insert(0, "bounds: needed, one [low, high] for all features of an array")
    unusable = [key for key in ("categories", "columns", "missing", "drop") if getattr(facts, key)]
    problems += [f"{key}: is for the columns of a table" for key in unusable]
    if problems:
        raise UsageError(_refusal(problems))
    data = {"path": f"{name}{ARRAYS}", **({"target": target} if target else {}), **task, **_told(facts)}
    data |= {"preprocess": []} if facts.bounds is None else {"bounds": list(facts.bounds)}
    kinds = {True: "real", False: "integer"}
    shapes = {one: {"shape": [*a.shape[1:]], "kind": kinds[a.dtype.kind == "f"]} for one, a in inputs.items()}
    return _recipe(name, data | ({"inputs": shapes} if named else {}), model)


def _recipe(name: str, data: dict[str, Any], model: dict[str, Any] | None) -> dict[str, Any]:
    method = {"kind": "dp-sgd", "batching": "poisson" if model else "full"}
    data = data | {"split": {"test": 0.2}}
    return {"name": name, "data": data, "model": model or {"kind": "linear"}, "method": method}


def _told(facts: StatedFacts) -> dict[str, Any]:
    lists = {
        "columns": dict(facts.columns),
        "missing": dict(facts.missing),
        "drop": list(facts.drop),
        "fitted_before": list(facts.fitted_before),
    }
    return {key: value for key, value in lists.items() if value}


def _task(facts: StatedFacts, target: str, kind: str) -> dict[str, Any]:
    """Return the recipe's keys about the target, and `problems`; `kind` is that of the target's column."""
    if facts.target_bounds is not None and facts.classes is None:
        bounds = list(facts.target_bounds)
        return {"task": "regression", "target_bounds": bounds, "target_transform": "auto", "problems": []}
    if facts.target_bounds is None and isinstance(facts.classes, str) and facts.classes == "public":
        return {"task": "classification", "problems": []}
    classes = _ANSWERS if facts.classes is None and kind == "answer" else facts.classes
    if facts.target_bounds is None and classes is not None and not isinstance(classes, str):
        # in the order that the caller knows
        told = {"positive": str(classes[1])} if len(classes) == 2 else {}
        return {"task": "classification", "classes": list(classes), **told, "problems": []}
    which = "either" if facts.classes is None or facts.target_bounds is None else "only one of"
    said = 'classes=[...] (or "public": what the labels hold is public) or target_bounds=[low, high]'
    return {"problems": [f"target: say what {target} can be: {which} {said}"]}


def _wrong_names(names: Sequence[str], target: str, facts: StatedFacts) -> list[str]:
    given = {"target": [target], "categories": facts.categories, "missing": facts.missing, "drop": facts.drop}
    given |= {"columns": facts.columns}
    given |= {"bounds": facts.bounds if isinstance(facts.bounds, Mapping) else ()}
    return [
        f"{key}: there is no column {quoted(name)}{suggested(str(name), names)}"
        for key, which in given.items()
        for name in which
        if name not in names
    ]


def _kind(cells: Cells) -> Literal["answer", "whole number", "number", "date", "text"]:
    """Return what a column's type says of its values. A type is a fact of the frame, which is public."""
    from pyarrow import types

    if types.is_boolean(cells.array.type):
        return "answer"
    if types.is_integer(cells.array.type):
        return "whole number"
    if cells.is_typed or types.is_decimal(cells.array.type):
        return "number"
    return "date" if cells.is_temporal else "text"


def _days(value: Any) -> Any:
    """Return a pair of dates as texts; all else as it is."""
    pair = list(value) if _is_pair(value) else []
    dates = pair and all(hasattr(day, "isoformat") or isinstance(day, np.datetime64) for day in pair)
    return [str(day)[:10] for day in pair] if dates else value


def _is_pair(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2


def _refusal(problems: Sequence[str]) -> str:
    return (
        "what the training takes to be public has to be stated, from public knowledge and never from the records"
        " (or leave columns out with drop=[...]):\n  " + "\n  ".join(problems)
    )
