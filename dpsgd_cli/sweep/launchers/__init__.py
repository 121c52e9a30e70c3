"""Where packs run, by name. A launcher takes jobs and gives outcomes as they come; each knows nothing of the others.

Adding one is one file here and one line in `LAUNCHERS`, which the command line
reads, too. Not here: what a job does (`sweep/running.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast

from dpsgd_cli.errors import UsageError

if TYPE_CHECKING:
    from dpsgd_cli.sweep.running import Job, Outcome
    from dpsgd_cli.sweep.schema import Resources

    Launcher: TypeAlias = Callable[[Sequence[Job], Resources], Iterator[Outcome]]

LAUNCHERS = {
    "local": "dpsgd_cli.sweep.launchers.local",
    "slurm": "dpsgd_cli.sweep.launchers.slurm",
    "ray": "dpsgd_cli.sweep.launchers.ray",
}


def get(name: str) -> Launcher:
    """The launcher called `name`; UsageError where what it needs is not installed."""
    try:
        module = importlib.import_module(LAUNCHERS[name])
    except ModuleNotFoundError as error:
        raise UsageError(f"--launcher {name} needs {error.name}: pip install 'dpsgd[{name}]'") from None
    return cast("Launcher", module.launch)
