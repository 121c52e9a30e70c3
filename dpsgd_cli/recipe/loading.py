"""Recipes between disk and memory: find one, read it with overrides, write it resolved, name its content.

Not here: YAML with line numbers (`tree.py`), `KEY=VALUE` (`overrides.py`), wording of problems (`problems.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, the directory that its relative paths start from, and a name to show."""

    recipe: Recipe
    base: Path
    source: str


def load_recipe(source: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read the recipe file, or shipped recipe, `source` with `KEY=VALUE` overrides applied before validation.

    Raises RecipeError with every problem at once.
    """
    path = Path(source)
    if not path.is_file():
        from dpsgd_cli.resources import shipped

        path = shipped("recipes") / f"{source}.yaml"
    if not path.is_file():
        raise RecipeError(f"{source}: no such file, nor a shipped recipe")
    data = yaml.safe_load(path.read_text("utf-8"))
    for override in overrides:
        key, _, value = override.partition("=")
        here = data
        *parents, last = key.split(".")
        for part in parents:
            here = here[int(part)] if isinstance(here, list) else here.setdefault(part, {})
        here[last] = yaml.safe_load(value)
    try:
        return LoadedRecipe(Recipe.model_validate(data), path.parent, source)
    except ValueError as error:
        raise RecipeError(str(error)) from None


def resolved(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data: defaults filled in, YAML keys, schema order."""
    return recipe.model_dump(mode="json", by_alias=True)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; `load_recipe` reads it back to an equal recipe."""
    return yaml.safe_dump(resolved(recipe), sort_keys=False, allow_unicode=True)


def recipe_hash(recipe: Recipe) -> str:
    """8 hex digits of everything that can change a result."""
    content = json.dumps(resolved(recipe), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:8]
