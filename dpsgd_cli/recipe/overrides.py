"""`KEY=VALUE` on the command line: dotted keys and YAML values, written into a recipe's tree before it is validated.

A key of any other characters stands in brackets and quotes: `data.bounds["mean radius"]=[5, 25]`.
`check.py` decides if the key and the value are allowed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dpsgd_cli.common.yaml_tree import Node, Path, Problem, SourceLocation, dotted, read_tree, undotted
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe import check
from dpsgd_cli.recipe.schema import Recipe

_NO_KEY = (
    'write KEY=VALUE, as method.batch_size=256, or data.bounds["mean age"]=[0, 9] for a name with other characters'
)


def apply_overrides(root: Node, overrides: Sequence[str]) -> list[Problem]:
    """Write each override into `root`, in order. Return the problems of those that could not be written."""
    problems: list[Problem] = []
    for text in overrides:
        place = SourceLocation(f"override {text}")
        path, rest = undotted(text)
        if not path or not rest.startswith("="):
            problems.append(Problem(place, (), _NO_KEY))
            continue
        new, wrong = read_tree(rest[1:], place)
        problems += wrong
        if new is not None:
            written = root.copy()
            problem = write(written, path, new)
            if problem is None:
                root.value = written.value
            else:
                problems.append(problem)
    return problems


def assignments(changes: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Return changes by dotted key as `KEY=VALUE` texts; a sequence of such texts is returned unchanged.

    >>> assignments({"privacy.budget.epsilon": 1, "model": {"kind": "mlp", "hidden": [8]}})
    ('privacy.budget.epsilon=1', 'model={"kind": "mlp", "hidden": [8]}')
    """
    if not isinstance(changes, Mapping):
        return tuple(changes)
    # JSON is YAML
    return tuple(f"{key}={json.dumps(value, default=plain_value)}" for key, value in changes.items())


def plain_value(value: Any) -> Any:
    """Return a path or a NumPy number as plain data. Raises RecipeError for other objects, without showing them."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise RecipeError(f"the recipe: a recipe holds plain values, and no {type(value).__name__}")


def write(root: Node, path: tuple[str, ...], new: Node) -> Problem | None:
    """Write `new` at `path` of `root`, in place. Return the problem if that fails; `root` is then partly changed."""
    here = root
    for depth, key in enumerate(path):
        above = path[:depth]
        if here.value is None and not key.isdecimal():
            here.value = _beginning(above, new.place)
        why = _refusal(here, key, dotted(above))
        if why is not None:
            return Problem(new.place, path, why)
        slot = int(key) if isinstance(here.value, list) else key
        if depth == len(path) - 1:
            here.value[slot] = new
        elif here.child(slot) is None:
            here.value[slot] = Node(None, new.place)
        here = here.value[slot]
    return None


def _refusal(node: Node, key: str, name: str) -> str | None:
    """Return why nothing can be written under `key` of `node`, called `name` in messages; None if it can."""
    if isinstance(node.value, dict):
        return None
    if isinstance(node.value, list):
        if key.isdecimal() and int(key) < len(node.value):
            return None
        held = f"entries 0 to {len(node.value) - 1}" if node.value else "no entries"
        return f"{name} is a list with {held}; give such a number, or the whole list"
    if node.value is None:
        return f"{name} is not set; give it whole, {name}=[...]"
    return f"{name} is {check.shown(node.value)}, which has no keys"


def _beginning(path: Path, place: SourceLocation) -> dict[str, Node]:
    """Return the initial content of a section that the recipe left out: its default kind, if it has one."""
    schema = check.schema_of(Recipe)
    for key in path:
        options = check.sections(schema)
        schema = next((option["properties"][key] for option in options if key in option["properties"]), {})
    default = schema.get("default")
    if isinstance(default, dict) and "kind" in default:
        return {"kind": Node(default["kind"], place)}
    return {}
