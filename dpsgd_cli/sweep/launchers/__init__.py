"""Launchers, by name. A launcher runs jobs (`sweep/running.py`) and yields their outcomes as they finish.

To add one, write a file here and add a line to `LAUNCHERS`, which the command line reads too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from dpsgd_cli.errors import UsageError

if TYPE_CHECKING:
    from dpsgd_cli.sweep.running import Outcome, PackJob
    from dpsgd_cli.sweep.schema import Resources

    Launcher: TypeAlias = Callable[[Sequence[PackJob], Resources], Iterator[Outcome]]

LAUNCHERS = {
    "local": "dpsgd_cli.sweep.launchers.local",
    "slurm": "dpsgd_cli.sweep.launchers.slurm",
    "ray": "dpsgd_cli.sweep.launchers.ray",
}


def get(name: str) -> Launcher:
    """Return the launcher called `name`. Raises UsageError if a package that it needs is not installed."""
    try:
        module = importlib.import_module(LAUNCHERS[name])
    except ModuleNotFoundError as error:
        raise UsageError(f"--launcher {name} needs {error.name}: pip install 'dpsgd[{name}]'") from None
    return cast("Launcher", module.launch)
