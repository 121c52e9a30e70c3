"""Which cells may share a trials axis."""

from __future__ import annotations

import pytest

from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.sweep.expansion import cell_of
from dpsgd_cli.sweep.planning import packs, shared


@pytest.mark.parametrize(
    "override",
    ["method.learning_rate=0.1", "method.weight_decay=0.1", "privacy.clipping.norm=3", "privacy.budget.epsilon=1",
     "epochs=3", "seed=9", "repeats=2", "privacy.schedule={kind: uniform, initial: 3}", "save_model=true"],
)  # fmt: skip
def test_what_methods_read_trial_by_trial_may_differ(override: str) -> None:
    assert shared(load_recipe("quickstart", [override])) == shared(load_recipe("quickstart"))


@pytest.mark.parametrize(
    "override",
    ["method.batch_size=100", "model.bias=false", "method.optimizer={kind: adam}", "privacy.adjacency=zero-out",
     "data.split={test: 0.3}", "runtime.dtype=float64", "privacy.clipping={kind: per-layer}",
     "method.averaging={kind: ema}", "folds=2"],
)  # fmt: skip
def test_everything_else_keeps_cells_apart(override: str) -> None:
    assert shared(load_recipe("quickstart", [override])) != shared(load_recipe("quickstart"))


def test_packs_are_full_but_not_overfull_and_of_like_length() -> None:
    epochs = [10, 40, 11, 12, 39, 38, 10]
    cells = [
        cell_of(i, load_recipe("quickstart", [f"epochs={n}", f"seed={i}", "repeats=2"]), {})
        for i, n in enumerate(epochs)
    ]
    found = packs(cells, 6)
    assert [[cell.loaded.recipe.epochs for cell in pack] for pack in found] == [[10, 10, 11], [12], [38, 39, 40]]
    assert [sum(cell.trials for cell in pack) for pack in found] == [6, 2, 6]


@pytest.mark.parametrize("kind", ["dp-agd", "objective-perturbation", "privgene"])
def test_budgets_of_a_convex_method_train_together_and_its_own_settings_do_not(kind: str) -> None:
    one, other = (load_recipe(f"lee2018/{kind}", [f"privacy.budget.epsilon={e}"]) for e in (1, 2))
    assert shared(one) == shared(other)
    assert shared(load_recipe(f"lee2018/{kind}", ["model.l2=0.5"])) != shared(one)
