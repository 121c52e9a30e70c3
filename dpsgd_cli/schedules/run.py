"""Adaptive schedules: noise follows a trial's validation accuracy, and the trial's ledger stops it.

Used by `methods/dp_sgd/run.py` for trials with schedule `validation`; other trials of the pack are unchanged.
The schedule's rule is in `schedules/price.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dpsgd_cli.accounting.ledger import charged_by_epoch
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, merge
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.evaluate import evaluate
from dpsgd_cli.errors import RunError
from dpsgd_cli.noise.run import gaussian
from dpsgd_cli.schedules.price import AdaptiveNoise, AdaptiveSchedulePlan


@dataclass
class AdaptiveRun:
    """State of one trial with an adaptive schedule."""

    trial: int
    plan: AdaptiveSchedulePlan
    noise: AdaptiveNoise


class AdaptiveSchedules:
    """Adaptive schedules of a pack's trials. A trial ends when its next epoch would exceed its budget."""

    def __init__(self, context: PackContext, plans: Sequence[Plan], task: str) -> None:
        self.context, self.task = context, task
        own = {trial: plan for trial, plan in enumerate(plans) if isinstance(plan, AdaptiveSchedulePlan)}
        self.runs = {trial: AdaptiveRun(trial, plan, plan.noise()) for trial, plan in own.items()}
        if self.runs and context.validation is None:
            raise RunError("schedule validation was started without validation records")
        self.lengths = [plan.most_epochs for plan in plans]
        self._settle(0)

    def releases(self, epoch: int, trial: int) -> tuple[Release, ...] | None:
        """Return the trial's releases of the epoch, with the look at private validation records after it.

        None if the trial has no adaptive schedule, so that its plan holds the releases.
        """
        run = self.runs.get(trial)
        return None if run is None else run.plan.releases_of(run.noise, epoch)

    def look(self, epoch: int, output: torch.Tensor) -> None:
        """Measure accuracy after `epoch` where due, set the noise of the next epoch, and end trials without budget."""
        due = [r for r in self.runs.values() if epoch < self.lengths[r.trial] and r.noise.looks_after(epoch)]
        if due:
            context, table = self.context, self.context.validation
            assert table is not None
            found = evaluate(context.pack, output, table, self.task, context.most_rows, context.loss)
            for run in due:
                run.noise.observe(self._released(run, epoch, float(found["accuracy"][run.trial]), len(table)))
        self._settle(epoch + 1)

    def _released(self, run: AdaptiveRun, epoch: int, accuracy: float, records: int) -> float:
        """Return the accuracy on `records` validation records; for private ones, with noise on the correct count."""
        if run.plan.look is None:
            return accuracy
        mechanism = run.plan.look.mechanism
        assert isinstance(mechanism, GaussianSum)
        right = np.array([round(accuracy * records)])
        noisy = gaussian(self.context.streams[run.trial], "validation", epoch, right, mechanism, records)
        return float(noisy[0]) / records

    def _settle(self, epoch: int) -> None:
        """End the trials whose budget does not cover `epoch`."""
        for trial, run in self.runs.items():
            if epoch < self.lengths[trial]:
                planned = run.plan.releases_of(run.noise, epoch)
                if not self.context.ledgers[trial].admits(planned):
                    self.lengths[trial] = epoch

    def charged_for(self, done: int) -> bool:
        """Return True if every ledger holds the releases that its trial's observed accuracies imply, epoch by epoch."""
        return all(self._replayed(run, done) for run in self.runs.values())

    def _replayed(self, run: AdaptiveRun, done: int) -> bool:
        trained = [entry for entry in self.context.ledgers[run.trial].entries if entry.phase == "train"]
        pace, seen, released = run.plan.noise(), iter(run.noise.seen), {}
        for epoch in range(min(done, self.lengths[run.trial])):
            released[epoch] = merge(list(run.plan.releases_of(pace, epoch)))
            if pace.looks_after(epoch):
                pace.observe(next(seen, 0.0))
        return charged_by_epoch(trained) == released and pace == run.noise

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, for `load_state`."""
        return {
            str(trial): [r.noise.multiplier, list(r.noise.seen), r.noise.last, self.lengths[trial]]
            for trial, r in self.runs.items()
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        for trial, run in self.runs.items():
            multiplier, seen, last, self.lengths[trial] = state[str(trial)]
            run.noise = AdaptiveNoise(run.noise.schedule, multiplier, list(seen), last)
