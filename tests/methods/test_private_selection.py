"""Private choice among schedules: disjoint parts, counts of the last one, the law of the choice, and its charge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsgd_cli.errors import DpsgdError, InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.private_selection import PrivateSelection
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training.loop import plan_recipe
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.conftest import Train, WriteRecipe
from tests.engine.conftest import parameters_of

METHOD: dict[str, Any] = {
    "kind": "private-selection",
    "batching": "shuffle",
    "batch_size": 4,
    "learning_rate": 0.5,
    "epsilon": 0.4,
    "candidates": [
        {"kind": "uniform", "initial": 4},
        {"kind": "exponential", "initial": 5, "decay": 0.1},
        {"kind": "uniform", "initial": 50},
    ],
}
SECTIONS: dict[str, Any] = {"method": METHOD, "privacy": {"budget": {"rho": 0.5}, "delta": 1e-3}, "epochs": 3}


def begin(path: Path) -> PrivateSelection:
    loaded = load_recipe(str(path))
    plan, _ = plan_recipe(resolve_auto(loaded))
    method = start([Member(resolve_auto(loaded), plan)]).method
    assert isinstance(method, PrivateSelection)
    return method


def test_parts_are_disjoint_equal_and_each_candidate_sees_its_own(write_recipe: WriteRecipe) -> None:
    method = begin(write_recipe(**SECTIONS | {"repeats": 3}))
    for trial, part in enumerate(method.parts):
        assert [int((part == index).sum()) for index in range(4)] == [12, 12, 12, 12]
        for candidate in range(3):
            own = method.inner.context.table.own
            assert own is not None
            assert set(own[trial * 3 + candidate].tolist()) == set((part == candidate).nonzero().flatten().tolist())
    assert not torch.equal(method.parts[0], method.parts[1])


def test_a_record_of_another_part_changes_nothing_of_a_candidate(write_recipe: WriteRecipe) -> None:
    """The proof's step (a): only the candidate whose part holds the record is trained differently."""
    path = write_recipe(**SECTIONS)
    changed, before = begin(path), begin(path)
    victim = int((changed.parts[0] == 1).nonzero()[0])
    changed.context.table.x[victim] = 0.0
    for epoch in range(3):
        changed.inner.run_epoch(epoch)
        before.inner.run_epoch(epoch)
    same = [torch.equal(changed.inner.output[i], before.inner.output[i]) for i in range(3)]
    assert same == [True, False, True]


def test_wrong_predictions_are_counted_on_the_last_part_only(write_recipe: WriteRecipe) -> None:
    method = begin(write_recipe(**SECTIONS))
    method.inner.run_epoch(0)
    table, found = method.inner.context.table, method._wrong()
    for trial, part in enumerate(method.parts):
        judges = part == 3
        for candidate in range(3):
            index = trial * 3 + candidate
            weights = parameters_of(method.inner.context.pack, index)
            outputs = table.x[judges].flatten(1) @ weights["1.weight"].T + weights["1.bias"]
            assert found[index] == (outputs.argmax(dim=1) != table.y[judges]).sum()


def test_the_published_weights_are_a_candidates(write_recipe: WriteRecipe) -> None:
    method = begin(write_recipe(**SECTIONS))
    untouched = method.output.clone()
    for epoch in range(3):
        assert torch.equal(method.output, untouched)
        method.run_epoch(epoch)
    for trial, chosen in enumerate(method.chosen):
        assert torch.equal(method.output[trial], method.inner.output[trial * 3 + chosen])


def test_the_ledger_holds_the_dearest_training_and_the_choice(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(write_recipe(**SECTIONS))
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    own = [line for line in lines if line["trial"] == 0]
    assert [line["label"] for line in own] == ["gradient"] * 3 + ["choice"]
    assert [line["noise_multiplier"] for line in own[:3]] == [4, 4, 4]
    assert (own[3]["mechanism"], own[3]["source"], own[3]["epsilon"]) == ("pure", "exponential", 0.4)
    privacy = store.read_document(directory)["privacy"]
    assert privacy["rho"] == pytest.approx(3 / (2 * 4**2) + 0.4**2 / 8)
    assert privacy["parts"]["choice"]["rho"] == pytest.approx(0.4**2 / 8)


@pytest.mark.parametrize(
    ("privacy", "error", "said"),
    [
        ({"budget": {"rho": 0.01}, "delta": 1e-3}, InfeasibleBudget, "leaves nothing of the budget"),
        ({"budget": {"epsilon": 1, "delta": 1e-3}}, PrivacyError, r"give budget: \{rho\}"),
        (
            {"budget": {"rho": 1}, "delta": 1e-3, "schedule": {"kind": "uniform", "initial": 3}},
            DpsgdError,
            "candidates instead",
        ),
        ({"budget": {"rho": 1}, "delta": 1e-3, "adjacency": "add-remove"}, PrivacyError, "cuts the records into parts"),
    ],
)
def test_what_has_no_proof_is_refused(
    train: Train, write_recipe: WriteRecipe, privacy: dict[str, Any], error: type[DpsgdError], said: str
) -> None:
    with pytest.raises(error, match=said):
        train(write_recipe(**SECTIONS | {"privacy": privacy}))
