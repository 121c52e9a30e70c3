"""Tier C for the noise grid: whether a run without a seed releases only numbers on the public grid (`noise/run.py`).

A short run draws its noise from the operating system. Each released number v must be (k + 1/2) q for an integer k and
the q computed from public numbers. Sums with floating-point noise do not: n of them all pass with probability 8^-n. A
number on the public grid is on no grid that depends on data.

`parts.py` checks the distribution of the noise. Choices and votes release indices and decisions, not numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit import outputs
from dpsgd_cli.audit.findings import AuditSize, Finding, exact
from dpsgd_cli.audit.stage import at_audit_size, build_canaries
from dpsgd_cli.engine.tensors import Batch
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.noise.run import Grid
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.training.start import Trials

_SIZE = AuditSize(trials=1, canaries=4, rows=20_000)
_SMALL = 2.0**47
"""Number of grid steps up to which float64 shows whether a number is on the grid."""
_OFF = 1 / 16
_LEAST = 20
"""Smallest number of released values that the check needs."""


def off_grid(released: np.ndarray, step: np.ndarray | float) -> np.ndarray:
    """Return the distances of numbers from (k + 1/2) `step`, in steps, 0 to 1/2.

    Numbers beyond 2^47 steps are left out.
    """
    places = np.asarray(released / step, dtype=np.float64).ravel()
    places = places[np.abs(places) < _SMALL] - 0.5
    return np.abs(places - np.rint(places))


class _Seen:
    """Observer that notes the distance of released numbers from the grid, for each kind of release."""

    def __init__(self) -> None:
        self.off: dict[str, list[np.ndarray]] = {}
        self.trials: Trials | None = None

    def note(self, name: str, released: np.ndarray, step: np.ndarray | float) -> None:
        self.off.setdefault(name, []).append(off_grid(released, step))

    def _by_mechanism(self, mechanism: GaussianSum, released: np.ndarray) -> None:
        assert self.trials is not None
        records = self.trials.context.table.summed
        deviation = torch.tensor(mechanism.noise_multiplier * mechanism.sensitivity, dtype=torch.float64)
        step = Grid.of(released.shape[-1], records, [mechanism.noise_multiplier]).steps(deviation)
        self.note(mechanism.label or "release", released, float(step))

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        del exact
        assert isinstance(mechanism, GaussianSum)
        self._by_mechanism(mechanism, noisy.cpu().numpy())

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        del exact
        assert self.trials is not None
        mechanism = self.trials.context.ledgers[trials[0]].entries[-1].release.mechanism
        assert isinstance(mechanism, GaussianSum)
        self._by_mechanism(mechanism, noisy.double().cpu().numpy())

    def drawn(self, step: int, batch: Batch) -> None:
        del step, batch

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        del epoch, step, exact, mean

    def preconditioned(self, trial: int, exact: np.ndarray, noisy: np.ndarray) -> None:
        del trial, exact, noisy


def compare(loaded: SettledRecipe, outline: data.Outline, plan: Plan) -> list[Finding]:
    """Return a finding for each kind of release."""
    update: dict[str, Any] = {"seed": None}
    if loaded.recipe.privacy is not None:
        update["privacy"] = loaded.recipe.privacy.changed(noise_source=None)
    free = dataclasses.replace(loaded, recipe=loaded.recipe.changed(**update))
    seen = _Seen()
    if loaded.recipe.method.described.minibatch or loaded.recipe.method.kind == "dp-agd":
        trials = seen.trials = build_canaries(at_audit_size(free, outline, plan, _SIZE), seen).trials
    else:
        trials = seen.trials = outputs.without_seed(free, outline, plan, seen)
    if isinstance(trials.method, DpSgd):
        _watch_sums(trials.method, seen)
    trials.method.run_epoch(0)
    return [_judged(name, np.concatenate(own)) for name, own in seen.off.items()]


def _judged(name: str, off: np.ndarray) -> Finding:
    apart = int((off > _OFF).sum())
    told = f"{apart:,} of {off.size:,} numbers released without a seed are off the public grid"
    return exact("C", f"grid of {name}", told, f"none, of {_LEAST} or more", apart > 0 or off.size < _LEAST)


def _watch_sums(method: DpSgd, seen: _Seen) -> None:
    own = method.privatise

    def privatise(epoch: int, step: int) -> None:
        own(epoch, step)
        grid, unit = method._grid(epoch), method.bounds.unit
        scale = method._noise_scale(epoch) * getattr(method.step_noise, "_unit", 1.0)
        size = grid.steps(scale if unit is None else scale * unit)
        seen.note("sums of gradients", method.context.pack.sums.cpu().numpy(), size.cpu().numpy())

    method.privatise = privatise  # type: ignore[method-assign]
