"""Canaries see as much as the claim allows, on every path that gradients take; and no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpsgd_cli import data
from dpsgd_cli.audit.findings import QUICK
from dpsgd_cli.audit.stage import StagedTrials, build_canaries, without_folds
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto
from tests.audit import alarms
from tests.audit.planted import ALLOCATED, FULL, LAYERS, POISSON, REPLACED, audited

EPSILON_4 = ["folds=null", "privacy.budget={epsilon: 4, delta: 1e-5}", "epochs=20"]
SHUFFLED = ["method={kind: dp-sgd, batching: shuffle, batch_size: 256, learning_rate: 1}", "privacy.adjacency=zero-out",
            "privacy.budget.epsilon=4", "epochs=4"]  # fmt: skip
PATHS = {
    "poisson": ("quickstart", POISSON),
    "poisson, replace-one": ("quickstart", [*POISSON, "privacy.adjacency=replace-one"]),
    "random-allocation": ("quickstart", ALLOCATED),
    "full": ("quickstart", FULL),
    "replace-one": ("quickstart", REPLACED),
    "layers": ("quickstart", LAYERS),
    "shuffled": ("quickstart", SHUFFLED),
    "convex": ("lee2018/dp-gd", EPSILON_4),
    "convex, replace-one": ("lectures/adult-dp-gd", [*EPSILON_4[1:], "privacy.accountant=auto"]),
    "poisson, convex": ("lee2018/sgd-ma", EPSILON_4),
}


CHOOSES = ["folds=null", "privacy.budget={epsilon: 8, delta: 1e-5}", "method.splits=10"]


def test_canaries_of_a_method_that_chooses_see_the_gradients_share_of_its_budget() -> None:
    """Four fifths of rho go to gradients, whose Gaussian has epsilon 6.6; the rest to choices, which no canary sees."""
    found = audited(CHOOSES, recipe="lee2018/dp-agd-better", tiers="ABC")
    assert not found["refuted"] and 3.5 < found["lower_bounds"]["B"] < 6.6
    assert "noise" in {row["name"] for row in found["findings"]}


@pytest.mark.parametrize("path", PATHS)
def test_canaries_come_near_the_claim(path: str) -> None:
    """1,000 of each kind: the bounds of the table at 500 are 76% of the claim, and here at least 60% are asked for."""
    recipe, overrides = PATHS[path]
    found = audited(overrides, recipe=recipe, tiers="AB")
    own = found["training"]["epsilon_of_gradients"]
    assert not found["refuted"] and 0.6 * own < found["lower_bounds"]["B"] < own


def staged(overrides: list[str]) -> tuple[StagedTrials, Watch]:
    loaded = without_folds(resolve_auto(load_recipe("quickstart", overrides)))
    outline = data.outline(loaded.recipe.data, loaded.base)
    plan = plan_of(loaded, outline)
    assert plan is not None
    watch = Watch()
    return build_canaries(loaded, outline, plan, QUICK, watch), watch


@pytest.mark.parametrize("overrides", [FULL, REPLACED, LAYERS], ids=["full", "replace-one", "layers"])
def test_a_canary_moves_its_coordinate_by_the_clip_bound_and_nothing_else(overrides: list[str]) -> None:
    made, _ = staged(overrides)
    method, pack = made.trials.method, made.trials.context.pack
    pack.sums.zero_()
    method.add_sums(0, 0, _nothing(made))  # type: ignore[attr-defined]
    sign = np.where(made.inside, 1.0, -1.0 if overrides is REPLACED else 0.0)
    for columns in made.columns:
        assert np.allclose(pack.sums[:, columns].numpy(), sign, atol=1e-6)
    whole = np.linalg.norm(np.stack([pack.sums[:, columns].numpy() for columns in made.columns]), axis=0)
    moved = 2 if overrides is REPLACED else 1
    assert whole.max() * moved == pytest.approx(made.plan.sensitivity, rel=1e-6)


def _nothing(made: StagedTrials) -> object:
    from dpsgd_cli.clipping.run import Diagnostics

    return Diagnostics(made.inside.shape[0], torch.device("cpu"))


def test_no_real_record_touches_a_canary_coordinate() -> None:
    made, _ = staged(FULL)
    table = made.trials.context.table
    first = made.places[0]
    assert table.x[:first].max() < 1 and table.x[first:].min() > 1e6
    assert table.own is not None
    assert np.array_equal(table.own[:, made.places].numpy() >= 0, made.inside)
    assert 0.4 < made.inside.mean() < 0.6 and len({tuple(row) for row in made.inside.tolist()}) == len(made.inside)


def test_a_true_claim_is_seldom_refuted() -> None:
    """`python -m tests.audit.alarms` does the same 200 times."""
    for name, told in alarms.alarms(6, trials=4).items():
        assert not alarms.too_many(len(told), 6), (name, told)
