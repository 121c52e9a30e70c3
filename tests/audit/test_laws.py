"""Attacks by the law of a Gaussian release: as much as the law allows, and what a canary moves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dpsgd_cli import data
from dpsgd_cli.audit.findings import QUICK
from dpsgd_cli.audit.stage import build_canaries, without_folds
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto
from tests.audit.planted import ONCE, PRECONDITIONED, audited


def test_two_means_are_told_apart_as_well_as_their_law_allows() -> None:
    sharper = [*ONCE, "privacy.budget.epsilon=8", "method.steps=30"]
    found = audited(sharper, recipe="lee2018/output-perturbation", trials=800)
    (row,) = [one for one in found["findings"] if one["tier"] == "A"]
    allowed = float(row["found"].rpartition(" ")[2])
    assert not found["refuted"] and 0.4 * allowed < found["lower_bounds"]["B"] < allowed < found["claim"]["epsilon"]


def aimed(overrides: list[str]) -> LoadedRecipe:
    return without_folds(resolve_auto(load_recipe("quickstart", overrides)))


@pytest.mark.parametrize("kind", ["full", "poisson"])
def test_a_step_moves_a_canarys_coordinate_by_what_was_worked_out_beforehand(kind: str) -> None:
    """A root lets other canaries through a little: hundredths of a sensitivity."""
    poisson = "method={kind: dp-sgd, batch_size: 144, learning_rate: 1, preconditioner: {kind: second-moment}}"
    loaded = aimed(PRECONDITIONED if kind == "full" else [poisson, "privacy.budget.epsilon=6", "epochs=2"])
    outline = data.outline(loaded.recipe.data, loaded.base)
    plan = plan_of(resolve_auto(loaded), outline)
    assert plan is not None
    apart = []

    class Compared(Watch):
        def released(self, epoch: int, step: int, exact: torch.Tensor, mean: torch.Tensor) -> None:
            made = self.staged
            assert made.vectors is not None
            batch = self._batch
            drawn = made.inside if batch is None else made.inside & self._members(batch, made.places)
            expected = made.vectors.gradients()[0] * drawn[..., None]
            seen = np.stack([exact[:, columns].numpy() for columns in made.columns], axis=2)
            apart.append(float(np.abs(seen - expected).max()) / made.plan.sensitivity)
            assert float(np.linalg.norm(expected, axis=2).max()) > 0.5 * made.plan.sensitivity
            super().released(epoch, step, exact, mean)

    watch = Compared()
    made = build_canaries(resolve_auto(loaded), outline, plan, dataclasses.replace(QUICK, trials=3), watch)
    watch.begin(made)
    for epoch in range(2):
        made.trials.method.run_epoch(epoch)
    assert apart and max(apart) < 0.05
