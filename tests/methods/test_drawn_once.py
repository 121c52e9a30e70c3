"""What a method draws while it is made is the same after a resume, whatever its streams are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import GradientMethod
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.recipe.schema import Recipe
from tests.methods import small_network, small_problem

CHOICE = {
    "kind": "private-selection", "batching": "shuffle", "batch_size": 4, "learning_rate": 0.5,
    "candidates": [{"kind": "uniform", "initial": 4}, {"kind": "uniform", "initial": 8}],
}  # fmt: skip
CONVEX: dict[str, dict[str, Any]] = {
    "gd": {"method": {"kind": "gd"}, "epochs": 2, "privacy": None},
    "dp-gd": {"method": {"kind": "dp-gd"}, "epochs": 2},
    "dp-agd": {"method": {"kind": "dp-agd"}},
    "objective-perturbation": {"method": {"kind": "objective-perturbation"}},
    "output-perturbation": {"method": {"kind": "output-perturbation"}},
    "privgene": {"method": {"kind": "privgene"}},
    "non-private": {"method": {"kind": "non-private"}, "privacy": None},
    "majority": {"method": {"kind": "majority"}},
    "dp-sgd": {"method": {"kind": "dp-sgd", "batch_size": 20}, "epochs": 2},
    "dp-sgd, single": {"method": {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1}, "epochs": 2,
                       "privacy": {"budget": {"epsilon": 8.0, "delta": 1e-3}}},
    "sgd": {"method": {"kind": "sgd", "batch_size": 20}, "epochs": 2, "privacy": None},
}  # fmt: skip


class Closed(SecureStreams):
    """Secure streams that nothing may be drawn from yet."""

    def _source(self, *place: object) -> Callable[[int], np.ndarray]:
        raise AssertionError(f"{place} was drawn in a constructor, which a resume would draw anew")

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        self._source(purpose, counter)
        return out

    def coins(self, purpose: str, counter: int) -> Callable[[int], int]:
        self._source(purpose, counter)
        return super().coins(purpose, counter)


def selection_context() -> Context:
    changes = {"method": CHOICE, "privacy": {"budget": {"rho": 1.0}, "delta": 1e-3}}
    one = Recipe.model_validate(small_network.recipe().model_dump(exclude_unset=True) | changes)
    made = small_network.context([small_network.recipe()])
    plan = plan_for(one, Facts(small_network.RECORDS))
    return replace(made, recipes=(one,), plans=(plan,), ledgers=(plan.ledger(),))


# pate, dp-least-squares: tests/methods/test_pate.py, test_least_squares.py
@pytest.mark.parametrize("name", [*CONVEX, "private-selection"])
def test_no_method_draws_from_its_streams_while_it_is_made(name: str) -> None:
    made = selection_context() if name == "private-selection" else small_problem.context(convex(name))
    if name == "objective-perturbation":
        with pytest.raises(PrivacyError, match="needs a seed"):
            create(replace(made, streams=(Closed(),)))
        return
    method = create(replace(made, streams=(Closed(),)))
    assert not any(ledger.entries for ledger in method.context.ledgers), "what is drawn later is charged later"


def convex(name: str) -> Recipe:
    sections = CONVEX[name]
    return small_problem.recipe(sections["method"], **{k: v for k, v in sections.items() if k != "method"})


def test_every_method_is_tried() -> None:
    elsewhere = {"private-selection", "python", "pate", "dp-least-squares"}
    assert {name.split(",")[0] for name in CONVEX} | elsewhere == set(METHODS)


def test_crops_are_the_same_after_a_resume() -> None:
    """Keys come from the initial seeds, which the checkpoint holds."""
    one = small_network.recipe(model={"kind": "cnn"}, data={"augment": {"copies": 2, "crop": 1}})
    images = np.zeros((small_network.RECORDS, 1, 4, 4)), np.zeros(small_network.RECORDS, dtype=np.int64)
    keys = []
    for _ in range(2):
        made = small_network.context([one], data=images)
        method = create(replace(made, streams=(SecureStreams(),)))
        assert isinstance(method, GradientMethod) and method.batches.augment is not None
        keys.append(method.batches.augment.keys)
    assert torch.equal(*keys)
