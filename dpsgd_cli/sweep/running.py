"""Execution of one pack of a sweep: skip finished cells, train the rest, and bisect a failed pack to the faulty cell.

Packs are independent, so any process on any machine that sees the same folder may run one. `planning.py` forms the
packs; `launchers/` decides where they run.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dpsgd_cli.common import interrupts
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.errors import DpsgdError, RunError
from dpsgd_cli.results import store
from dpsgd_cli.sweep import folder
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.planning import shared_planner
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member


@dataclass(frozen=True)
class PackJob:
    """A pack, ready to run anywhere: its cells, their folder, and whether failed cells are tried again.

    `quiet`: print nothing that reveals which cells run, or how many. `charged`: as in `loop.Options`.
    """

    cells: tuple[Cell, ...]
    out: Path
    retry_failed: bool = False
    fail_fast: bool = False
    quiet: bool = False
    charged: Literal["none", "runs", "whole"] = "none"

    @property
    def say(self) -> Callable[[str], None]:
        # stderr is the log of a pack on a cluster
        return (lambda text: None) if self.quiet else functools.partial(print, file=sys.stderr, flush=True)

    @property
    def trials(self) -> int:
        return sum(cell.trials for cell in self.cells)


@dataclass
class Outcome:
    """Results of a job: finished and failed cells (with the message), the number of trials, and the seconds taken."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    trials: int = 0
    seconds: float = 0.0


def is_pending(cell: Cell, out: Path, retry_failed: bool) -> bool:
    """Return True if a cell still has to run."""
    if store.is_complete(out / cell.directory):
        return False
    return retry_failed or not folder.failure_place(cell, out).exists()


@trusting()
def run_job(job: PackJob) -> Outcome:
    """Run the cells of a job that are still open; results and failures are in the folder when it returns.

    Raises RunError if a cell fails under `fail_fast`, and any error that would stop every pack too: an interruption, or
    a folder that takes no files.
    """
    begun, outcome = time.perf_counter(), Outcome()
    store.roll_forward(job.out)
    _run(job, [cell for cell in job.cells if is_pending(cell, job.out, job.retry_failed)], outcome)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _run(job: PackJob, cells: Sequence[Cell], outcome: Outcome) -> None:
    members: list[Member] = []
    planned: list[Cell] = []
    for cell in cells:
        found = shared_planner().plan(cell)
        if found.error is not None:
            _fail(job, cell, found.error, outcome)
            continue
        members.append(Member(resolve_auto(cell.loaded), found.plan))
        planned.append(cell)
    if members:
        _train(job, planned, members, outcome)


def _train(job: PackJob, cells: Sequence[Cell], members: Sequence[Member], outcome: Outcome) -> None:
    """Train cells together. If that fails, train each half alone, down to the faulty cell."""
    place = loop.checkpoint_place(members, job.out)
    try:
        loop.run_pack(members, loop.Options(job.out, resume=place.exists(), say=job.say, charged=job.charged))
    except Exception as error:
        if isinstance(error, OSError) or interrupts.stops_everything(error):
            raise
        loop.forget(place, job.say)
        if len(cells) == 1:
            _fail(job, cells[0], error, outcome)
            return
        half = len(cells) // 2
        for part in (slice(0, half), slice(half, None)):
            left = [i for i, c in enumerate(cells) if c in cells[part] and not store.is_complete(job.out / c.directory)]
            if left:
                _train(job, [cells[i] for i in left], [members[i] for i in left], outcome)
        return
    for cell in cells:
        folder.failure_place(cell, job.out).unlink(missing_ok=True)
        outcome.done.append(cell.directory)
        outcome.trials += cell.trials


def _fail(job: PackJob, cell: Cell, error: Exception, outcome: Outcome) -> None:
    if job.fail_fast:
        where = "a run failed" if job.quiet else f"{cell.label}: {error}"
        raise RunError(f"{where}; stopped because of --fail-fast") from error
    told = error if isinstance(error, DpsgdError) else RunError("".join(traceback.format_exception(error)))
    folder.record_failure(cell, job.out, told)
    outcome.failed[cell.directory] = str(error)
