"""Training methods, one file each; which there are stands with their settings (`recipe/schema/descriptor.py`)."""

from __future__ import annotations

from dpsgd_cli.core.streamed import StreamedTable
from dpsgd_cli.errors import UsageError
from dpsgd_cli.methods.base import Context, Method
from dpsgd_cli.recipe.schema.descriptor import named

__all__ = ["Context", "Method", "create"]


def create(context: Context) -> Method:
    """The method that the recipes name, ready for its first epoch.

    Raises UsageError where several processes train it, or its rows stay on disk, and there is no rule for that.
    """
    _refuse(context)
    made: Method = named(context.recipes[0].method.described.runs)(context)
    return made


def _refuse(context: Context) -> None:
    settings, processes = context.recipes[0].method, context.team.size
    if settings.described.in_processes:
        followed = any(r.privacy is not None and r.privacy.schedule.adaptive for r in context.recipes)
        if followed and processes > 1:
            raise UsageError(
                "privacy.schedule validation looks at records between epochs, which has no rule for"
                f" {processes} processes; start it without torchrun, or use another schedule"
            )
        return
    name = f"method {settings.kind}{', batching fixed' if settings.batching == 'fixed' else ''}"
    if processes > 1:
        raise UsageError(f"{name} trains in one process, not in {processes}; start it without torchrun")
    if isinstance(context.table, StreamedTable):
        raise UsageError(
            f"{name} holds all rows in memory, and those of a npy file stay on disk; save features and labels as one"
            " npz file"
        )
