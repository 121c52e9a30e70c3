"""One call of `dpsgd sweep`: its cells, its shard, its folder, from the first check to the last table."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd_cli.common.text_format import count, epsilon_text
from dpsgd_cli.errors import DpsgdError, PrivacyError, UsageError
from dpsgd_cli.results import files, store
from dpsgd_cli.results.guarantee import sweep_lines
from dpsgd_cli.sweep import booking, expansion, folder, planning, pricing, private_tuning
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.folder import Folder
from dpsgd_cli.sweep.planning import Planned
from dpsgd_cli.sweep.running import Outcome, PackJob, pending_jobs, run_job
from dpsgd_cli.sweep.settings import Sweep, load_sweep
from dpsgd_cli.training.build_models import check_without_data

if TYPE_CHECKING:
    from dpsgd_cli.sweep.launchers import Launcher


@dataclass(frozen=True)
class SweepSession:
    """A sweep with its folder and shard.

    `every` has all cells of the file, `running` those that run in any shard, `cells` those of this shard.
    """

    sweep: Sweep
    source: str
    every: Sequence[Cell]
    part: tuple[int, int]
    out: Path

    @classmethod
    def open(cls, source: str, overrides: Sequence[str], out: Path, shard: str | None = None) -> SweepSession:
        """Read and check a sweep; raises RecipeError with everything that is wrong in any cell."""
        part = expansion.parse_shard(shard)
        loaded = load_sweep(source, overrides)
        every = expansion.expand(loaded)
        private_tuning.check_choice(loaded.sweep, source, every)
        return cls(loaded.sweep, source, every, part, out)

    @property
    def drawn(self) -> Sequence[Cell] | None:
        """The cells that run: all, or those that random stopping drew; None before it has drawn."""
        select = self.sweep.select
        if select is None:
            return self.every
        if self.secret and private_tuning.published(self.folder) is not None:
            return []
        kept = (
            private_tuning.read_draw(self.place, self.every)
            if select.seed is None
            else private_tuning.draw(select, len(self.every))
        )
        return None if kept is None else private_tuning.repeated(self.every, kept)

    @cached_property
    def running(self) -> Sequence[Cell]:
        """The cells that run, once the sweep has begun: `drawn`, which is then known."""
        found = self.drawn
        assert found is not None, "random stopping draws when the sweep begins"
        return found

    @cached_property
    def cells(self) -> Sequence[Cell]:
        return expansion.shard_of(self.running, self.part)

    @cached_property
    def folder(self) -> Folder:
        select = self.sweep.select
        names = [cell.directory for cell in self.every] + ([] if select is None else [select.model_dump_json()])
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
        return Folder(self.out, f"{self.sweep.name}-{digest}")

    @cached_property
    def secret(self) -> bool:
        """True if only the best run may be seen (`private_tuning.py`)."""
        return private_tuning.is_secret(self.sweep, self.every)

    @cached_property
    def place(self) -> Folder:
        """The folder of the runs, which is hidden if the sweep is `secret`."""
        return private_tuning.private_folder(self.folder) if self.secret else self.folder

    def check_choice(self) -> None:
        """Raise PrivacyError for a private choice among runs that measure private held-out records."""
        if self.sweep.select is not None and any(c.loaded.recipe.data.measured_privately for c in self.every):
            raise PrivacyError(f"{self.source}: select: {pricing.MEASURED}")

    def begin(self) -> None:
        """Check that the folder can be written, draw the runs for random stopping, and write the sweep's index."""
        self.check_choice()
        store.prepare_place(self.folder.file(store.INDEX).with_suffix(".probe"))
        if self.secret:
            private_tuning.open_private(self.place)
            folder.write_index(self.folder, self.source, [], secret=True)
            files.sweep_up(self.out)
        select = self.sweep.select
        if select is not None and self.drawn is None:
            if self.part[0] > 1:
                raise UsageError(
                    f"{self.place.path} has no {self.folder.stem}{private_tuning.DRAW}: shard 1/{self.part[1]} draws"
                    " the number of runs for all shards; begin with it, and give the others its folder or a copy of"
                    " that file"
                )
            private_tuning.write_draw(self.place, select, self.every)
        folder.write_index(self.place, self.source, self.running)
        store.roll_forward(self.place.path)
        files.sweep_up(self.place.path)

    def jobs(self, retry_failed: bool, fail_fast: bool) -> list[PackJob]:
        """Return the packs left to run."""
        how = {"retry_failed": retry_failed, "fail_fast": fail_fast, "quiet": self.secret}
        found = pending_jobs(self.cells, self.place.path, self.sweep.most_trials, **how)
        self._charge([cell for job in found for cell in job.cells])
        return found

    @cached_property
    def book(self) -> Path | None:
        """The book of the sweep's recipes; None without one."""
        return booking.book_of(self.every, self.sweep)

    def _charge(self, left: Sequence[Cell]) -> None:
        """Charge the book for everything that this call may publish: the cells in `left`, and a choice."""
        if self.book is None:
            return
        select, out = self.sweep.select, self.place.path
        if select is not None:
            if private_tuning.published(self.folder) is None:
                booking.reserve_best(self.book, self.out, self.every, select, self.folder.stem)
            return
        done = [cell for cell in self.cells if self.folder.is_complete(cell)]
        booking.reserve(self.book, out, [*done, *left], "sweep")

    def outcomes(self, launch: Launcher, jobs: Sequence[PackJob]) -> Iterator[Outcome]:
        """Run packs by a launcher; yield their outcomes as they finish."""
        return launch(run_job, jobs, self.sweep.resources)

    def failed(self) -> int:
        """Return the number of this shard's cells that have failed."""
        return sum(
            folder.failure_place(cell, self.place.path).exists() and not self.place.is_complete(cell)
            for cell in self.cells
        )

    def finish(self) -> dict[str, Any] | None:
        """Write the tables of all shards, as far as they have run, and return the result.

        A secret sweep publishes only the best run; the result is None before all runs have ended. Tables, statements
        and choice are about one list of finished cells. If another shard finished a cell meanwhile, they are written
        again, so that the last of several shards leaves those of all cells, whatever the order of their writing.
        """
        # random stopping is priced for all cells; otherwise ledgers hold everything
        every = planning.planned_spending([] if self.sweep.select is None else self.every)
        if self.secret:
            return private_tuning.publish(self.folder, self.sweep, self.running, every, self.book)
        while True:
            finished = self.folder.finished(self.running)
            spent = [one for cell, document in finished for one in folder.spent(cell, document, self.folder)]
            privacy = pricing.statement(spent, self.sweep, every)
            chosen = private_tuning.choose(self.sweep, self.running, finished)
            told = folder.write_tables(self.folder, self.running, finished, privacy, chosen)
            if sum(map(self.folder.is_complete, self.running)) == len(finished):
                return told

    def told(self, result: dict[str, Any]) -> list[str]:
        """Return lines that describe the result of `finish`."""
        chosen = [] if result["chosen"] is None else [f"{'chosen':<25} {folder.chosen_line(result['chosen'])}"]
        tables = "" if self.secret else ".table.csv, .report.html and "
        written = f"results in {self.out}: {self.folder.stem}{tables}.result.json"
        return [*sweep_lines(result["privacy"]), *chosen, written]

    def dry_run(self) -> tuple[list[str], list[str]]:
        """Return lines about packs, cells and the price of this shard, and the problems of its cells.

        The price is left out if there is a problem. For random stopping, every cell is shown with one run, because the
        numbers of runs that are drawn are secret.
        """
        self.check_choice()
        select, cells = self.sweep.select, self.every
        if select is not None:
            cells = private_tuning.repeated(self.every, [1] * len(self.every))
        cells = expansion.shard_of(cells, self.part)
        planned = {cell.directory: planning.shared_planner().plan(cell) for cell in cells}
        lines = list[str]()
        for number, pack in enumerate(planning.packs(cells, self.sweep.most_trials), start=1):
            members = [planned[cell.directory] for cell in pack]
            left = [one for one in members if one.error is None and not self._is_done(one.cell)]
            try:
                for one in left[:1]:
                    if one.outline is not None:
                        check_without_data(one.cell.loaded, one.outline)
            except DpsgdError as error:
                planned[left[0].cell.directory] = Planned(left[0].cell, error=error)
            trials = sum(cell.trials for cell in pack)
            lines.append(f"pack {number}: {count(len(pack), 'cell')}, {count(trials, 'trial')}")
            lines += [f"  {self._described(one)}" for one in members]
        trials = sum(cell.trials for cell in cells)
        lines.append(f"{self.sweep.name}: {count(len(cells), 'cell')}, {count(trials, 'trial')}")
        if select is not None:
            lines.append(f"{self.sweep.name}: runs of cells are drawn when it begins, {select.mean:g} on average")
        wrong = [one for one in planned.values() if one.error is not None]
        problems = [f"{self.source}: {one.cell.label}: {one.error}" for one in wrong]
        if problems:
            return lines, problems
        spent = planning.planned_spending(self.every)
        privacy = pricing.statement(spent, self.sweep, spent)
        # the number of runs that random stopping draws is secret
        privacy |= {"all_trials": None} if select is not None else {}
        return [*lines, *sweep_lines(privacy)], problems

    def _is_done(self, cell: Cell) -> bool:
        return not self.secret and self.folder.is_complete(cell)

    def _described(self, planned: Planned) -> str:
        cell = planned.cell
        begin = f"{cell.number:>4}  {cell.label}: {count(cell.trials, 'trial')}"
        if planned.error is not None:
            return f"{begin}; ERROR, see below"
        if planned.plan is None:
            return f"{begin}; no privacy"
        plan = planned.plan
        noise = f"{min(plan.noise_multipliers):.5g}" if plan.noise_multipliers else "as it goes"
        if plan.noise_multipliers and max(plan.noise_multipliers) != min(plan.noise_multipliers):
            noise += f" to {max(plan.noise_multipliers):.5g}"
        told = plan.guarantee()
        state = "done" if self._is_done(cell) else count(len(plan.epochs), "epoch")
        price = f"epsilon {epsilon_text(told.epsilon)} at delta {plan.delta:g} ({told.accountant})"
        return f"{begin}, {state}, noise {noise}, {price}"
