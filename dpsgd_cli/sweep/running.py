"""Execution of packs: skip finished cells, train the rest, and bisect a failed pack to the faulty cell.

Packs are independent, so any process on any machine that sees the same folder may run one. `planning.py` forms the
packs; `launchers.py` decides where they run. `dpsgd sweep` and `dpsgd compare` run the same packs.
"""

from __future__ import annotations

import functools
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dpsgd_cli.common import interrupts
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import DpsgdError, RecipeError, RunError
from dpsgd_cli.results import store
from dpsgd_cli.results.comparison import Entry
from dpsgd_cli.sweep import booking, folder
from dpsgd_cli.sweep.expansion import Cell, cell_of
from dpsgd_cli.sweep.matching import SharedTerms, matched
from dpsgd_cli.sweep.planning import packs, shared_planner
from dpsgd_cli.training import loop
from dpsgd_cli.training.start import Member


@dataclass(frozen=True)
class PackJob:
    """A pack, ready to run anywhere: its cells, their folder, and whether failed cells are tried again.

    `quiet`: print nothing that reveals which cells run, or how many.
    """

    cells: tuple[Cell, ...]
    out: Path
    retry_failed: bool = False
    fail_fast: bool = False
    quiet: bool = False

    @property
    def charged(self) -> Literal["runs", "whole"]:
        """The charges of a book before the packs run (`loop.Options`): every cell, or a secret sweep as one."""
        return "whole" if self.quiet else "runs"

    @property
    def say(self) -> Callable[[str], None]:
        # stderr is the log of a pack on a cluster
        return (lambda text: None) if self.quiet else functools.partial(print, file=sys.stderr, flush=True)

    @property
    def trials(self) -> int:
        return sum(cell.trials for cell in self.cells)

    @property
    def pending(self) -> tuple[Cell, ...]:
        """The cells that still have to run: without a result, and without a failure unless it is tried again."""
        return tuple(
            cell
            for cell in self.cells
            if not store.is_complete(self.out / cell.directory)
            and (self.retry_failed or not folder.failure_place(cell, self.out).exists())
        )


@dataclass
class Outcome:
    """Results of a job: finished and failed cells (with the message), the number of trials, and the seconds taken."""

    done: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    trials: int = 0
    seconds: float = 0.0


def pending_jobs(
    cells: Sequence[Cell], out: Path, most_trials: int | Literal["auto"] = "auto", **how: bool
) -> list[PackJob]:
    """Return the packs left to run; `how` sets the flags of `PackJob`.

    Packs are formed from all cells, so that a stopped pack finds its checkpoint.
    """
    jobs = [PackJob(pack, out, **how) for pack in packs(cells, most_trials)]
    return [replace(job, cells=left) for job in jobs if (left := job.pending)]


@trusting()
def run_job(job: PackJob) -> Outcome:
    """Run the cells of a job that are still open; results and failures are in the folder when it returns.

    Raises RunError if a cell fails under `fail_fast`, and any error that would stop every pack too: an interruption, or
    a folder that takes no files.
    """
    begun, outcome = time.perf_counter(), Outcome()
    store.roll_forward(job.out)
    ready: list[tuple[Cell, Member]] = []
    for cell in job.pending:
        found = shared_planner().plan(cell)
        if found.error is not None:
            _fail(job, cell, found.error, outcome)
        else:
            ready.append((cell, Member(cell.settled, found.plan)))
    if ready:
        _train(job, ready, outcome)
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _train(job: PackJob, ready: Sequence[tuple[Cell, Member]], outcome: Outcome) -> None:
    """Train cells together. If that fails, train each half alone, down to the faulty cell."""
    members = [member for _, member in ready]
    place = loop.checkpoint_place(members, job.out)
    try:
        loop.run_pack(members, loop.Options(job.out, resume=place.exists(), say=job.say, charged=job.charged))
    except Exception as error:
        if isinstance(error, OSError) or interrupts.stops_everything(error):
            raise
        place.unlink(missing_ok=True)
        if len(ready) == 1:
            _fail(job, ready[0][0], error, outcome)
            return
        half = len(ready) // 2
        for part in (ready[:half], ready[half:]):
            left = [one for one in part if not store.is_complete(job.out / one[0].directory)]
            if left:
                _train(job, left, outcome)
        return
    for cell, _ in ready:
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


def compared(recipes: Sequence[str], terms: dict[str, Any], out: Path, say: Callable[[str], None]) -> list[Entry]:
    """Return every recipe at every matched budget as an entry of a comparison, trained if it has no result.

    Raises one RecipeError for all recipes that cannot run, and RunError if a training fails.
    """
    asked = matched(recipes, SharedTerms(**terms))
    cells = [cell_of(number, loaded, {}) for number, (_, _, loaded) in enumerate(asked)]
    problems = [
        f"{label}{'' if epsilon is None else f' at epsilon {epsilon:g}'}: {error}"
        for (label, epsilon, _), cell in zip(asked, cells, strict=True)
        if (error := shared_planner().plan(cell).error) is not None
    ]
    if problems:
        raise RecipeError(problems)
    with interrupts.kill_is_interrupt():
        jobs = pending_jobs(cells, out, retry_failed=True)
        store.prepare_place(out / "comparison.probe")
        if (book := booking.book_of(cells)) is not None:
            booking.reserve(book, out, cells, "compare")
        for number, job in enumerate(jobs, start=1):
            outcome = run_job(job)
            say(f"pack {number}/{len(jobs)}: {count(outcome.trials, 'trial')} in {outcome.seconds:.1f} s")
            if outcome.failed:
                raise RunError("\n".join(f"{name}: {error}" for name, error in outcome.failed.items()))
    return [
        Entry(label, epsilon, out / cell.directory, store.read_whole(out / cell.directory))
        for (label, epsilon, _), cell in zip(asked, cells, strict=True)
    ]
