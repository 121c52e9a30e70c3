"""Trials whose noise follows their validation accuracy: each at its own pace, each stopped by its own ledger.

Used by `dp_sgd.py` where the schedule is `validation`. Not here: the rule (`privacy/adaptive_schedule.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from dpsgd_cli.core.evaluation import evaluate
from dpsgd_cli.errors import RunError
from dpsgd_cli.methods.base import Context
from dpsgd_cli.privacy.adaptive_schedule import Pace, PacedPlan


class Pacer:
    """The paces of all trials. A trial is over as soon as its next epoch would not fit its budget."""

    def __init__(self, context: Context, plans: list[PacedPlan]) -> None:
        if context.validation is None:
            raise RunError("schedule validation was started without validation records")
        self.context = context
        self.plans = plans
        self.paces: list[Pace] = [plan.pace() for plan in plans]
        self.lengths = [plan.most_epochs for plan in plans]
        self._settle(0)

    def spend(self, epoch: int, trial: int) -> None:
        """Charge the trial for the epoch, and for the look at private records after it."""
        for release in self.plans[trial].releases_of(self.paces[trial], epoch):
            self.context.ledgers[trial].spend(release, epoch)

    def look(self, epoch: int, output: torch.Tensor) -> None:
        """After `epoch`: measure accuracy where that is due, set the noise of the next epoch, end what it ends."""
        active = [epoch < length for length in self.lengths]
        due = [on and pace.looks_after(epoch) for on, pace in zip(active, self.paces, strict=True)]
        if any(due):
            for trial, accuracy in enumerate(self._accuracies(epoch, output)):
                if due[trial]:
                    self.paces[trial].observe(accuracy)
        self._settle(epoch + 1)

    def _settle(self, epoch: int) -> None:
        """End the trials for which `epoch` does not fit."""
        for trial, (plan, pace) in enumerate(zip(self.plans, self.paces, strict=True)):
            if epoch < self.lengths[trial]:
                planned = plan.releases_of(pace, epoch)
                if not self.context.ledgers[trial].admits(planned):
                    self.lengths[trial] = epoch

    def _accuracies(self, epoch: int, output: torch.Tensor) -> list[float]:
        """Share of right predictions on the validation records, with the noise that was charged."""
        context, table = self.context, self.context.validation
        assert table is not None
        found = evaluate(context.pack, output, table, context.recipes[0].data.task, context.most_rows)
        accuracies: list[float] = found["accuracy"].tolist()
        for trial, plan in enumerate(self.plans):
            if plan.look is not None:
                draw = context.streams[trial].normal("validation", epoch, torch.empty(1, dtype=torch.float64))
                accuracies[trial] += float(draw) * plan.look.mechanism.noise_multiplier / len(table)  # type: ignore[union-attr]
        return accuracies

    def state(self) -> list[Any]:
        """Plain values that `load_state` continues from."""
        return [[p.multiplier, list(p.seen), p.last, n] for p, n in zip(self.paces, self.lengths, strict=True)]

    def load_state(self, state: list[Any]) -> None:
        """Inverse of `state`."""
        for trial, (multiplier, seen, last, length) in enumerate(state):
            self.paces[trial] = Pace(self.paces[trial].schedule, multiplier, list(seen), last)
            self.lengths[trial] = length
