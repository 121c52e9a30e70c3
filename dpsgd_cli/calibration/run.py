"""Calibration of a linear model's predictions of numbers: the sums that are released, and the correction from them.

The notation is that of `price.py`. A correction is p -> scale p + shift, so a model with a bias stays a linear model
with other weights. Records are read by `exact_sums` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.calibration.price import LABEL, WEIGHT
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.evaluate import passes
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.noise.run import gaussian

REACH = 8.0
"""b, the bound on a residual, in residuals at which training clips."""
SPREADS = 3.0
"""Least s, in standard deviations of predictions for which all directions of the rows are alike."""
RESOLVED = 100.0
"""Spread of predictions, in standard deviations of its noise, down to which s is wider, so that fewer are clamped."""
LEAST_SPREAD = 8.0
"""Least spread of predictions, in standard deviations of its noise, for which there is a slope."""
MOST_NOISE = 0.1
"""Largest standard deviation of the slope's own noise for which there is a slope."""
DOUBT = 2.0
"""Factor of the share of an estimate's square that noise explains, by which the estimate is shrunk."""
MOST_SLOPE = 0.5
"""Most that the scale of predictions changes by."""


@dataclass(frozen=True)
class Units:
    """c, s and b: the centre and the scale of predictions, and the bound on a residual."""

    centre: float
    scale: float
    bound: float

    @classmethod
    def of(cls, bias: float, spread: float, information: float, residual: float) -> Units:
        """Return the units for predictions around a released `bias`.

        `spread`: their standard deviation if all directions of the rows are alike. `information`: the records, over the
        standard deviation of the release's noise. `residual`: the size at which training clips a residual.
        """
        bound = min(1.0, REACH * residual)
        scale = max(SPREADS, math.sqrt(information / RESOLVED)) * spread
        if not (math.isfinite(scale) and math.isfinite(bias)):
            return cls(0.0, 1.0, bound)
        return cls(min(max(bias, -1.0), 1.0), min(max(scale, 1e-6), 2.0), bound)


@dataclass(frozen=True)
class Correction:
    """The correction p -> scale p + shift, for predictions whose public bounds are -1 and 1."""

    scale: float
    shift: float


@np.errstate(**SILENT)
def exact_sums(predictions: np.ndarray, targets: np.ndarray, units: Units) -> np.ndarray:
    """Return the four sums over predictions (n,) and targets (n,). Private."""
    p, y = predictions.astype(np.float64), targets.astype(np.float64)
    z = np.clip((p - units.centre) / units.scale, -1, 1)
    r = np.clip((np.clip(y, -1, 1) - np.clip(p, -1, 1)) / units.bound, -1, 1)
    parts = np.stack([r, r * z, WEIGHT * z, WEIGHT * z**2])
    return np.asarray(np.where(np.isfinite(p) & np.isfinite(y), parts, 0.0).sum(axis=1))


def corrected(released: np.ndarray, deviation: float, records: int, units: Units) -> Correction:
    """Return the correction from the released sums (4,), whose noise has standard deviation `deviation`.

    `records`: the public number of records. Estimates that noise explains are shrunk.
    """
    residuals, products = float(released[0]), float(released[1])
    mean = min(max(float(released[2]) / WEIGHT / records, -1.0), 1.0)
    spread = float(released[3]) / WEIGHT - records * mean**2
    slope, around = 0.0, units.centre + units.scale * mean
    if spread > LEAST_SPREAD * deviation / WEIGHT * math.hypot(1.0, 2 * mean):
        noise, unit = deviation * math.hypot(1.0, mean), units.bound / units.scale / spread
        if noise * unit <= MOST_NOISE:
            slope = _shrunk(products - mean * residuals, noise) * unit
    slope = min(max(slope, -MOST_SLOPE), MOST_SLOPE)
    shift = _shrunk(residuals, deviation) / records * units.bound
    return Correction(1 + slope, min(max(shift, -1.0), 1.0) - slope * around)


def _shrunk(estimate: float, deviation: float) -> float:
    """Return an estimate times max(0, 1 - DOUBT deviation^2 / estimate^2)."""
    return 0.0 if estimate == 0 else estimate * max(0.0, 1 - DOUBT * (deviation / estimate) ** 2)


class Calibrating:
    """Corrections of a pack's trials: each is released when the trial's own training ends, or loaded."""

    def __init__(self, context: PackContext, plans: Sequence[Plan], norms: Sequence[float], conditioned: bool) -> None:
        """Take bounds on the norms of gradients, one per trial; `conditioned` says whether rows are preconditioned."""
        self.context, self.norms, self.records = context, norms, [plan.sampling.records for plan in plans]
        self.mechanisms = {trial: own for trial, plan in enumerate(plans) for own in plan.mechanisms(LABEL)}
        self.due = set(self.mechanisms)
        """Trials whose release is not made yet: each was charged for one."""
        self.bias = next(at for name, (at, _) in context.pack.spans.items() if name.endswith("bias"))
        self.corrections = torch.tensor([[1.0, 0.0]] * context.trials, dtype=torch.float64)
        """Scale and shift (R, 2) of each trial, on the host."""
        features = math.prod(context.table.input_shape)
        if conditioned:
            self.size, self.directions = 1.0, features
        else:
            self.size = math.sqrt(features) if context.feature_bound is None else context.feature_bound
            self.directions = 1
        """Root mean square norm of a row, or a bound on it, and the number of directions that share it equally."""

    def applied(self, weights: Tensor) -> Tensor:
        """Return flat weights (R, P) of models whose predictions are corrected."""
        scale, shift = self.corrections.to(weights).split(1, dim=1)
        moved = weights * scale
        moved[:, self.bias] += shift[:, 0]
        return moved

    def _units(self, trial: int, weights: np.ndarray) -> Units:
        """Return the units of a trial, from its released `weights` (P,) on rows behind the preconditioner."""
        mechanism = self.mechanisms[trial]
        others = float(np.linalg.norm(np.delete(weights, self.bias)))
        return Units.of(
            float(weights[self.bias]),
            others * self.size / math.sqrt(self.directions),
            self.records[trial] / (mechanism.noise_multiplier * mechanism.sensitivity),
            self.norms[trial] / math.hypot(self.size, 1.0),
        )

    def release(self, trials: Sequence[int], inner: Tensor, weights: Tensor, table: Table) -> None:
        """Make the releases of the `trials` that ended, and their corrections. A trial's second release is left out.

        `weights` (R, P) are the models that predict the rows of `table`; `inner` the same on preconditioned rows.
        """
        due = [trial for trial in trials if trial in self.due]
        self.due.difference_update(due)
        if not due:
            return
        context, exact = self.context, np.zeros((len(due), 4))
        units = {trial: self._units(trial, inner[trial].double().cpu().numpy()) for trial in due}
        for outputs, labels, mask in passes(context.pack, weights, table, context.most_rows):
            told, truth = outputs[..., 0].double().cpu().numpy(), labels[0].double().cpu().numpy().reshape(-1)
            taken = None if mask is None else mask.cpu().numpy()
            for sums, trial in zip(exact, due, strict=True):
                own = slice(None) if taken is None else taken[trial]
                sums += exact_sums(told[trial][own], truth[own], units[trial])
        mechanisms = [self.mechanisms[trial] for trial in due]
        noisy = np.stack(
            [
                gaussian(context.streams[trial], LABEL, 0, sums, mechanism, context.table.summed)
                for trial, sums, mechanism in zip(due, exact, mechanisms, strict=True)
            ]
        )
        if context.watcher is not None:  # which may change `noisy`, whose memory the tensor shares
            context.watcher.prepared(mechanisms[0], torch.from_numpy(exact), torch.from_numpy(noisy))
        for trial, released, mechanism in zip(due, noisy, mechanisms, strict=True):
            deviation = mechanism.noise_multiplier * mechanism.sensitivity
            made = corrected(released, deviation, self.records[trial], units[trial])
            self.corrections[trial] = torch.tensor([made.scale, made.shift], dtype=torch.float64)
