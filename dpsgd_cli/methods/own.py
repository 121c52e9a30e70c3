"""A user's own method: what the recipe's Python file makes of a context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import RecipeError
from dpsgd_cli.methods.base import Context, Method
from dpsgd_cli.plugins import load_attribute, refusal_of_call
from dpsgd_cli.recipe.schema.method import PythonMethod


def create(context: Context) -> Method:
    """The user's method; RecipeError where the file gives anything else."""
    settings = context.recipes[0].method
    assert isinstance(settings, PythonMethod)
    factory = own_factory(settings, context.base)
    made = factory(context)
    if not isinstance(made, Method):
        what = factory.__name__ if isinstance(factory, type) else type(made).__name__
        raise RecipeError(f"{settings.file}: {settings.factory} gives {what}, not a dpsgd_cli.methods.Method")
    return made


def own_factory(settings: PythonMethod, base: Path) -> Callable[[Context], Any]:
    """What makes a user's own method; RecipeError where it is not there, or does not take a context."""
    factory = load_attribute(base / settings.file, settings.factory)
    refusal = refusal_of_call(factory, settings.factory, {"context": None}, {})
    if refusal is not None:
        raise RecipeError(f"{settings.file}: {refusal}")
    found: Callable[[Context], Any] = factory
    return found
