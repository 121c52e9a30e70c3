"""What a method draws while it is made is the same after a resume, whatever its streams are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.errors import PrivacyError, RunError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.descriptor import plan_for
from dpsgd_cli.methods.dp_sgd.run import GradientMethod
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.recipe.schema import Recipe
from tests.conftest import WAYS, StopAt, Train, WriteRecipe
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


class Fresh(SeededStreams):
    """Streams of which nothing but noise can be drawn twice, as if they were secure, but the first time is known."""

    reproducible = False

    def __init__(self, trial: int, asked: dict[tuple[object, ...], int]) -> None:
        super().__init__(trial)
        self.asked = asked

    def _purpose(self, kind: str, purpose: str, counter: int) -> str:
        place = (self.seed, kind, purpose, counter)
        self.asked[place] = self.asked.get(place, 0) + 1
        return purpose if self.asked[place] == 1 else f"{purpose}, time {self.asked[place]}"

    def bits(self, purpose: str, counter: int) -> int:
        return super().bits(self._purpose("bits", purpose, counter), counter)

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return super().distinct(self._purpose("distinct", purpose, counter), counter, n, size)

    def integers(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return super().integers(self._purpose("integers", purpose, counter), counter, n, size)

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        return super().permutation(self._purpose("permutation", purpose, counter), counter, n)

    def integer(self, purpose: str) -> int:
        return super().integer(self._purpose("integer", purpose, 0))


AGD = {
    "data": {"path": "two.npz", "bounds": [0, 1], "classes": [0, 1]},
    "model": {"kind": "convex"},
    "method": {"kind": "dp-agd", "refresh": 1, "splits": 5, "gamma": 0.5},
    "privacy": {"budget": {"epsilon": 1, "delta": 1e-3}},
    "epochs": None,
}


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("name", [*WAYS, "dp-agd"])
def test_a_run_without_a_seed_goes_on_as_if_it_had_not_been_stopped(
    train: Train, write_recipe: WriteRecipe, stop_at: StopAt, monkeypatch: pytest.MonkeyPatch, name: str, stop: int
) -> None:
    """`private-selection` once drew a new partition."""
    recipe = write_recipe(**(WAYS | {"dp-agd": AGD})[name] | {"seed": None, "save_model": True})
    stored = dict(np.load(recipe.parent / "tiny.npz"))
    two = {key: value % 2 if key.startswith("y") else value for key, value in stored.items()}
    np.savez(recipe.parent / "two.npz", **two)

    def trained(out: str, **options: Any) -> Path:
        return train(recipe, out=recipe.parent / out, **options)

    asked: dict[tuple[object, ...], int] = {}
    monkeypatch.setattr(Team, "streams", lambda _, own: tuple(Fresh(i, asked) for i in range(len(own))))
    whole = load_file(trained("whole") / "model.safetensors")
    asked.clear()
    with pytest.raises(RunError, match=f"{stop} of"):
        trained("stopped", progress=stop_at(stop, KeyboardInterrupt()))
    continued = load_file(trained("stopped", resume=True) / "model.safetensors")
    assert all(torch.equal(value, continued[key]) for key, value in whole.items())
