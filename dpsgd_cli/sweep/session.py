"""One call of `dpsgd sweep`: its cells, its shard, its folder, from the first check to the last table.

Not here: what is printed (`commands/sweep.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dpsgd_cli.results import leftovers, publishing, store
from dpsgd_cli.sweep import expansion, folder, grouping, planning, pricing, report
from dpsgd_cli.sweep.expansion import Cell
from dpsgd_cli.sweep.loading import load_sweep
from dpsgd_cli.sweep.planning import Planned
from dpsgd_cli.sweep.running import Job, is_open
from dpsgd_cli.sweep.schema import RandomStopping, Sweep


@dataclass(frozen=True)
class Session:
    """`every` has all cells of the file, `running` those that run in any shard, `cells` those of this shard."""

    sweep: Sweep
    source: str
    every: Sequence[Cell]
    running: Sequence[Cell]
    cells: Sequence[Cell]
    out: Path

    @classmethod
    def open(cls, source: str, overrides: Sequence[str], out: Path, shard: str | None = None) -> Session:
        """Read and check a sweep; raises RecipeError with everything that is wrong in any cell."""
        part = expansion.parse_shard(shard)
        loaded = load_sweep(source, overrides)
        every = expansion.expand(loaded)
        running = expansion.drawn(loaded, every)
        return cls(loaded.sweep, source, every, running, expansion.shard_of(running, part), out)

    @cached_property
    def folder(self) -> folder.Folder:
        return folder.folder_of(self.sweep.name, self.running, self.out)

    @cached_property
    def planner(self) -> planning.Planner:
        return planning.shared_planner()

    def packs(self) -> list[grouping.CellPack]:
        """This shard's cells, finished or not, as they train together."""
        return grouping.packs(self.cells, self.sweep.most_trials, self._steps)

    def _steps(self, cell: Cell) -> int:
        return planning.steps_of(self.planner.plan(cell))

    def begin(self) -> None:
        """See that the folder can be written, and say there what the sweep consists of."""
        store.prepare_place(self.folder.file(folder.INDEX).with_suffix(".probe"))
        folder.write_index(self.folder, self.source, self.running)
        publishing.roll_forward(self.out)
        leftovers.sweep_up(self.out)

    def jobs(self, retry_failed: bool, fail_fast: bool) -> list[Job]:
        """What is left to run. Packs are made of all cells, so that a pack that was stopped finds its checkpoint."""
        found = []
        for pack in self.packs():
            left = tuple(cell for cell in pack.cells if is_open(cell, self.out, retry_failed))
            if left:
                found.append(Job(left, self.out, retry_failed, fail_fast))
        return found

    def failed(self) -> int:
        """How many of this shard's cells have failed."""
        return sum(
            folder.failure_place(cell, self.out).exists() and not store.is_complete(self.out / cell.directory)
            for cell in self.cells
        )

    def finish(self) -> dict[str, Any]:
        """Write the tables over all shards, as far as they are."""
        every = [self.planner.plan(cell) for cell in self._planned_at_the_end()]
        return report.write(self.folder, self.sweep, self.running, every)

    def _planned_at_the_end(self) -> Sequence[Cell]:
        """Random stopping is priced for all cells; otherwise ledgers say everything."""
        return self.every if isinstance(self.sweep.select, RandomStopping) else []

    def planned_privacy(self) -> dict[str, Any]:
        """The three statements, from plans alone."""
        running = [self.planner.plan(cell) for cell in self.running]
        every = [self.planner.plan(cell) for cell in self.every]
        return pricing.statement(report.planned_spending(running), self.sweep, report.planned_releases(every))

    def dry_run(self) -> tuple[list[str], list[str]]:
        """Lines about packs and cells of this shard, and what is wrong with any of them."""
        planned = {cell.directory: self.planner.plan(cell) for cell in self.cells}
        lines, total, unknown = [], 0.0, False
        for number, pack in enumerate(self.packs(), start=1):
            members = [planned[cell.directory] for cell in pack.cells]
            valid = [one for one in members if one.error is None]
            seconds = planning.estimated_seconds(pack, valid) if valid else 0.0
            total, unknown = total + (seconds or 0.0), unknown or seconds is None
            about = "time unknown" if seconds is None else f"about {seconds:.1f} s"
            lines.append(f"pack {number}: {len(pack.cells)} cells, {pack.trials} trials, {about}")
            lines += [f"  {self._described(one)}" for one in members]
        trials = sum(cell.trials for cell in self.cells)
        time = "" if unknown else f", at least {total:.0f} s of training on this machine"
        lines.append(f"{self.sweep.name}: {len(self.cells)} cells, {trials} trials{time}")
        problems = [f"{self.source}: {cell.label}: {error}" for cell, error in report.problems(list(planned.values()))]
        return lines, problems

    def _described(self, planned: Planned) -> str:
        cell = planned.cell
        begin = f"{cell.number:>4}  {cell.label}: {cell.trials} trials"
        if planned.error is not None:
            return f"{begin}; ERROR, see below"
        if planned.plan is None:
            return f"{begin}; no privacy"
        plan = planned.plan
        noise = f"{min(plan.noise_multipliers):.5g}" if plan.noise_multipliers else "as it goes"
        if plan.noise_multipliers and max(plan.noise_multipliers) != min(plan.noise_multipliers):
            noise += f" to {max(plan.noise_multipliers):.5g}"
        told = plan.guarantee()
        state = "done" if store.is_complete(self.out / cell.directory) else f"{len(plan.epochs)} epochs"
        return (
            f"{begin}, {state}, noise {noise}, epsilon {told.epsilon:.4f} at delta {plan.delta:g} ({told.accountant})"
        )
