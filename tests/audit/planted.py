"""Bugs of private training, each as one change of the code that runs, and the recipe that shows it.

`python -m tests.audit.planted NAME` audits with a bug planted; without a name it lists them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.audit.auditing import audit
from dpsgd_cli.audit.findings import AuditOptions
from dpsgd_cli.batching import run as sampling
from dpsgd_cli.clipping.run import add_clipped_sums
from dpsgd_cli.clipping.settings import PerLayerClipping, QuantileClipping
from dpsgd_cli.data import preparation
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine import models
from dpsgd_cli.engine.evaluate import evaluate
from dpsgd_cli.evaluation import run as evaluation_run
from dpsgd_cli.evaluation.price import held_out_release
from dpsgd_cli.methods.dp_sgd import price as gradient_plan
from dpsgd_cli.methods.dp_sgd import run as dp_sgd
from dpsgd_cli.methods.pate.run import Teaching
from dpsgd_cli.methods.perturbation import OutputPerturbation
from dpsgd_cli.noise import run as noise
from dpsgd_cli.noise.correlation import step_noise
from dpsgd_cli.preconditioning import marginals, second_moments
from dpsgd_cli.preconditioning import run as preconditioning
from dpsgd_cli.preconditioning.maps import Preconditioner
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.schedules.price import AdaptiveSchedulePlan
from dpsgd_cli.training import build_models, plans
from dpsgd_cli.training.plans import resolve_auto

Patch = pytest.MonkeyPatch
POISSON = ["privacy.budget.epsilon=6", "epochs=3", "method.batch_size=144"]
BANDED = [*POISSON, "privacy.noise={kind: banded, bands: 3}"]
ALLOCATED = [*POISSON, "method.batching=random-allocation"]
FIXED = [*POISSON, "method.batching=fixed", "privacy.adjacency=replace-one"]
FULL = ["method={kind: dp-sgd, batching: full, learning_rate: 1}", "privacy.budget.epsilon=6", "epochs=6"]
PRECONDITIONED = ["method={kind: dp-gd, learning_rate: 1, preconditioner: {kind: second-moment}}", *FULL[1:]]
COUNTED = ["method={kind: dp-gd, learning_rate: 1, preconditioner: {kind: marginals}}", *FULL[1:]]
REPLACED = [*FULL, "privacy.adjacency=replace-one"]
USERS = ["epochs=4", "privacy.budget.epsilon=6"]
DECAYS = [*FULL[:1], "privacy.budget=null", "privacy.delta=1e-5", "epochs=6",
          "privacy.schedule={kind: exponential, initial: 4, decay: 0.3}"]  # fmt: skip
LAYERS = [
    *FULL,
    "model={kind: mlp, hidden: [4, 4]}",
    "privacy.clipping={kind: per-layer, norm: 1, noise: as-published}",
]
MIXING = """
import torch
from torch import nn

class Standardise(nn.Module):
    def forward(self, x):
        return (x - x.mean(dim=0)) / (x.std(dim=0) + 0.1)

def model(shape, outputs):
    return nn.Sequential(nn.Flatten(), Standardise(), nn.Linear(64, outputs))
"""


@dataclass(frozen=True)
class Bug:
    """`plant` changes the code; the tiers that must say so are `found_by`, of those that are asked."""

    overrides: list[str]
    plant: Callable[[Patch, Path], list[str] | None]
    found_by: str
    recipe: str = "quickstart"


def little_noise(patch: Patch, folder: Path) -> None:
    own = dp_sgd.DpSgd._noise_scale
    patch.setattr(dp_sgd.DpSgd, "_noise_scale", lambda self, epoch: 0.8 * own(self, epoch))


def wrong_divisor(patch: Patch, folder: Path) -> None:
    def privatise(self: Any, epoch: int, step: int) -> None:
        scale = self._noise_scale(epoch) * self.divisor / len(self.context.table)
        self.noise.add(self.context.pack.sums, step, scale, self._grid(epoch) if self.noise.secure else None)

    patch.setattr(dp_sgd.DpSgd, "privatise", privatise)


def without_groups(patch: Patch, folder: Path) -> None:
    def batch(self: Any, step: int) -> Any:
        return sampling._padded([np.asarray(whole.batch(step).rows)[0] for whole in self._whole])

    patch.setattr(sampling.CyclicSampler, "batch", batch)


def heavy_weights(patch: Patch, folder: Path) -> None:
    """Columns of C whose norm is 1.25: noise is .8 of what it must be."""

    def made(shapes: Any, size: int, device: torch.device) -> Any:
        heavy: Any = step_noise(shapes, size, device)
        heavy._unit = heavy._unit / 1.25
        return heavy

    patch.setattr(dp_sgd, "step_noise", made)


def halved(patch: Patch, folder: Path) -> None:
    for module in (gradient_plan, dp_sgd):
        patch.setattr(module, "replace_factor", lambda adjacency: 1)


def clipped_mean(patch: Patch, folder: Path) -> None:
    def summed(pack: Any, examples: Any, loss: Any, clipping: Any, seen: Any, function: Any = None) -> None:
        add_clipped_sums(pack, examples, loss, None, seen)
        bound = clipping.norms[0].double() * examples[1].shape[1]
        norms = torch.linalg.vector_norm(pack.sums, dim=1)
        pack.sums.mul_((bound / norms).clamp(max=1.0)[:, None])

    patch.setattr(dp_sgd, "add_clipped_sums", summed)


def by_row(patch: Patch, folder: Path) -> None:
    """Every row of a user is clipped by itself, and the clipped ones are added up."""

    def summed(pack: Any, examples: Any, loss: Any, clipping: Any, seen: Any, function: Any = None) -> None:
        x, y, mask = examples
        rows = y.transpose(1, 2).flatten(1).expand(pack.trials, -1)
        there = rows >= 0 if mask is None else (rows >= 0) & mask.repeat(1, y.shape[2])
        add_clipped_sums(pack, (x, rows.clamp_min(0), there), loss, clipping, seen)

    patch.setattr(dp_sgd, "add_clipped_sums", summed)


def double_rate(patch: Patch, folder: Path) -> None:
    own = sampling.PoissonSampler.__init__

    def made(self: Any, streams: Any, records: int, batch_size: int) -> None:
        own(self, streams, records, 2 * batch_size)
        self.steps_per_epoch = -(-records // batch_size)

    patch.setattr(sampling.PoissonSampler, "__init__", made)


def mixing(patch: Patch, folder: Path) -> list[str]:
    # a whole batch at once, as only built-in models run, and untested
    patch.setattr(models, "BUILT_IN", {**models.BUILT_IN, "python": None})
    patch.setattr(build_models, "check_model", lambda *rest: None)
    (folder / "mixing.py").write_text(MIXING)
    return [f"model={{kind: python, file: {folder / 'mixing.py'}, factory: model}}"]


def without_root(patch: Patch, folder: Path) -> None:
    patch.setattr(PerLayerClipping, "charged", lambda self, multiplier, layers: multiplier)


def off_by_one(patch: Patch, folder: Path) -> None:
    own = dp_sgd.DpSgd._multiplier
    patch.setattr(dp_sgd.DpSgd, "_multiplier", lambda self, epoch, trial: own(self, epoch + 1, trial))


def free_looks(patch: Patch, folder: Path) -> None:
    def releases_of(self: Any, noise: Any, epoch: int) -> Any:
        return (self.release(noise.multiplier),)

    patch.setattr(AdaptiveSchedulePlan, "releases_of", releases_of)


def little_noise_on_moments(patch: Patch, folder: Path) -> None:
    own = noise.gaussian

    def little(stream: Any, label: str, counter: int, exact: np.ndarray, *more: Any) -> np.ndarray:
        return exact + 0.8 * (own(stream, label, counter, exact, *more) - exact)

    patch.setattr(preconditioning, "gaussian", little)


def long_rows_in_moments(patch: Patch, folder: Path) -> None:
    own = second_moments.exactly_one
    patch.setattr(second_moments, "exactly_one", lambda block: 1.2 * own(block))


def long_rows_in_cells(patch: Patch, folder: Path) -> None:
    own = marginals.counted
    patch.setattr(marginals, "counted", lambda pieces, columns: 1.2 * own(pieces, columns))


def long_rows(patch: Patch, folder: Path) -> None:
    own = Preconditioner.factors
    patch.setattr(Preconditioner, "factors", lambda self, x, per_trial: 1.5 * own(self, x, per_trial))


def little_output_noise(patch: Patch, folder: Path) -> None:
    own = OutputPerturbation._scale
    patch.setattr(OutputPerturbation, "_scale", lambda self, trial: 0.8 * own(self, trial))


def two_votes(patch: Patch, folder: Path) -> None:
    own = Teaching.predictions
    patch.setattr(Teaching, "predictions", lambda self: np.repeat(own(self), 2, axis=0))


def free_count(patch: Patch, folder: Path) -> None:
    """Noise z on the sum, as if the count cost nothing."""
    patch.setattr(QuantileClipping, "applied", lambda self, noise_multiplier: noise_multiplier)


QUANTILE = [*POISSON, "privacy.clipping={kind: quantile, count_noise: 1}"]
LOOKS = [
    "method={kind: dp-sgd, batching: shuffle, batch_size: 256, learning_rate: 1}", "privacy.adjacency=zero-out",
    "data.validation={records: 100, noise_multiplier: 8}", "privacy.budget={rho: 0.5}", "privacy.delta=1e-5",
    "privacy.schedule={kind: validation, initial: 5, decay: 0.7, period: 2}", "epochs=8",
]  # fmt: skip
AGD = ["folds=null", "privacy.budget={epsilon: 4, delta: 1e-5}", "method.splits=10"]
ONCE = ["folds=null", "privacy.budget={epsilon: 4, delta: 1e-5}"]
VOTES = ["method.teachers.epochs=2"]


def public_loss(patch: Patch, folder: Path) -> None:
    """The loss of the training rows, without noise, in a public column of the history."""

    def published(self: Any) -> dict[str, list[float]]:
        context = self.context
        task = context.recipes[0].data.task
        found = evaluate(context.pack, self.output, context.table, task, context.most_rows, context.loss)
        return {"monitor": found["loss"].tolist()}

    patch.setattr(dp_sgd.DpSgd, "published", published)


def split_by_row_number(patch: Patch, folder: Path) -> None:
    """Row numbers decide the parts of a recipe that is stated for add-remove."""
    patch.setattr(preparation, "content_keys", lambda *arrays: Keys.of_places([len(arrays[0])]))


HELD_OUT = [*FULL, "data.split={test: 0.2}", "data.evaluation=private"]


def in_both_parts(patch: Patch, folder: Path) -> None:
    """The held-out part is all records."""
    patch.setattr(preparation, "held_out_rows", lambda source, data, base: source.train)


def little_noise_on_cells(patch: Patch, folder: Path) -> None:
    own = noise.gaussian

    def added(stream: Any, purpose: str, counter: int, exact: Any, mechanism: Any, records: int) -> Any:
        less = replace(mechanism, noise_multiplier=0.8 * mechanism.noise_multiplier)
        return own(stream, purpose, counter, exact, less, records)

    patch.setattr(evaluation_run, "gaussian", added)


def long_cells(patch: Patch, folder: Path) -> None:
    own = noise.gaussian

    def added(stream: Any, purpose: str, counter: int, exact: Any, mechanism: Any, records: int) -> Any:
        return own(stream, purpose, counter, 1.5 * exact, mechanism, records)

    patch.setattr(evaluation_run, "gaussian", added)


def cheap_held_out(patch: Patch, folder: Path) -> None:
    """Held-out records are measured at three times the epsilon of the training."""
    own = held_out_release
    patch.setattr(plans, "held_out_release", lambda name, epsilon, *further: own(name, 3 * epsilon, *further))


BUGS: dict[str, Bug] = {
    "a held-out record that also trains": Bug(HELD_OUT, in_both_parts, "D"),
    "noise on held-out cells times .8": Bug(HELD_OUT, little_noise_on_cells, "C"),
    "held-out records that count one and a half": Bug(HELD_OUT, long_cells, "D"),
    "a held-out part above the claim": Bug(HELD_OUT, cheap_held_out, "D"),
    "a training loss in a public column": Bug(FULL, public_loss, "D"),
    "a split by row number": Bug([*FULL, "data.split={test: 0.2}"], split_by_row_number, "D"),
    "folds by row number": Bug([*FULL, "folds=4"], split_by_row_number, "D"),
    "noise times .8": Bug(FULL, little_noise, "BC"),
    "noise on the mean by the wrong divisor": Bug(POISSON, wrong_divisor, "C"),
    "every group in every step": Bug(BANDED, without_groups, "C"),
    "weights of too large a norm": Bug(BANDED, heavy_weights, "C"),
    "replace-one's sensitivity halved": Bug(REPLACED, halved, "BD"),
    "clipping after averaging": Bug(POISSON, clipped_mean, "BD"),
    "rows clipped instead of users": Bug(USERS, by_row, "BD", "beyond/adult-users"),
    "twice the stated rate": Bug(POISSON, double_rate, "C"),
    "examples mixed by a layer": Bug(FULL, mixing, "D"),
    "noise for one layer of several": Bug(LAYERS, without_root, "BC"),
    "a count of clipped gradients without its charge": Bug(QUANTILE, free_count, "D"),
    "a schedule off by an epoch": Bug(DECAYS, off_by_one, "C"),
    "looks at validation records without their charge": Bug(LOOKS, free_looks, "D"),
    "noise of second moments times .8": Bug(PRECONDITIONED, little_noise_on_moments, "C"),
    "rows of second moments that are too long": Bug(PRECONDITIONED, long_rows_in_moments, "D"),
    "rows of cells that are too long": Bug(COUNTED, long_rows_in_cells, "D", "tabular/adult"),
    "preconditioned rows that are too long": Bug(PRECONDITIONED, long_rows, "D"),
    "noise of an output times .8": Bug(ONCE, little_output_noise, "C", "lee2018/output-perturbation"),
    "votes counted twice": Bug(VOTES, two_votes, "D", "pate/adult-confident"),
}


def audited(
    overrides: list[str], seed: int = 0, tiers: str = "ABCD", trials: int = 20, recipe: str = "quickstart"
) -> dict[str, Any]:
    """The audit of a recipe with `overrides`."""
    loaded = load_recipe(recipe, [*overrides, f"seed={seed}"])
    return audit(resolve_auto(loaded), AuditOptions(tuple(tiers), quick=True, trials=trials))


def run(name: str, patch: Patch, folder: Path, seed: int = 0) -> dict[str, Any]:
    """The audit with a bug planted."""
    bug = BUGS[name]
    more = bug.plant(patch, folder) or []
    return audited([*bug.overrides, *more], seed, recipe=bug.recipe)


if __name__ == "__main__":
    import tempfile

    from dpsgd_cli.audit.findings import lines

    if len(sys.argv) < 2:
        sys.exit("\n".join(BUGS))
    with pytest.MonkeyPatch.context() as one, tempfile.TemporaryDirectory() as where:
        print("\n".join(lines(run(sys.argv[1], one, Path(where)))))
