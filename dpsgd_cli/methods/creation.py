"""Creation of the training method that recipes name, built-in or from a user's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.common.naming import named
from dpsgd_cli.common.plugins import load_attribute, refusal_of_call
from dpsgd_cli.engine.context import Context
from dpsgd_cli.errors import RecipeError, UsageError
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.settings import PythonMethod


def create(context: Context) -> Method:
    """Return the method that the recipes name, ready for its first epoch.

    Raises UsageError for several processes, or rows that stay on disk, if the method does not support them.
    """
    _refuse(context)
    made: Method = named(context.recipes[0].method.described.runs)(context)
    return made


def _refuse(context: Context) -> None:
    settings, processes, privacy = context.recipes[0].method, context.team.size, context.recipes[0].privacy
    if processes > 1 and privacy is not None and privacy.unit is not None:
        raise UsageError(
            f"privacy.unit: users are trained on in one process, not in {processes}; start without torchrun"
        )
    if settings.described.in_processes:
        followed = any(r.privacy is not None and r.privacy.schedule.adaptive for r in context.recipes)
        if followed and processes > 1:
            raise UsageError(
                "privacy.schedule validation looks at records between epochs, which has no rule for"
                f" {processes} processes; start it without torchrun, or use another schedule"
            )
        return
    name = f"method {settings.kind}{', one record a step' if settings.batching == 'fixed' else ''}"
    if processes > 1:
        raise UsageError(f"{name} trains in one process, not in {processes}; start it without torchrun")
    if isinstance(context.table, StreamedTable):
        raise UsageError(
            f"{name} holds all rows in memory, and those of a npy file, or with data.on_disk, stay on disk; save"
            " features and labels as one npz file, or leave data.on_disk out"
        )


def own(context: Context) -> Method:
    """Return the user's own method; RecipeError if the factory returns anything but a `Method`."""
    settings = context.recipes[0].method
    assert isinstance(settings, PythonMethod)
    factory = own_factory(settings, context.base)
    made = factory(context)
    if not isinstance(made, Method):
        what = factory.__name__ if isinstance(factory, type) else type(made).__name__
        raise RecipeError(f"{settings.file}: {settings.factory} gives {what}, not a dpsgd_cli.methods.base.Method")
    return made


def own_factory(settings: PythonMethod, base: Path) -> Callable[[Context], Any]:
    """Return the factory of a user's own method; RecipeError if it is missing or does not take a context."""
    factory = load_attribute(base / settings.file, settings.factory)
    refusal = refusal_of_call(factory, settings.factory, {"context": None}, {})
    if refusal is not None:
        raise RecipeError(f"{settings.file}: {refusal}")
    found: Callable[[Context], Any] = factory
    return found
