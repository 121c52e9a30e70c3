"""What a model keeps, changes or draws in a pass is found, and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError

PLACE = Placement(torch.device("cpu"))
Keep = Callable[[Any, Tensor], Any]


class Inner(nn.Module):
    """Gives back its input, once `keep(self, x)` was called; has everything that a model may keep things in."""

    calls: Tensor
    bits: Tensor

    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("bits", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.scale = nn.Parameter(torch.ones(6), requires_grad=False)
        self.number: Any = 0
        self.text = ""
        self.inputs: list[float] = []
        self.table = torch.zeros(6)
        self.listed: list[Any] = [[0.0], {"a": np.zeros(2)}]
        self.beside = SimpleNamespace(mean=0.0)
        self.stream = torch.Generator().manual_seed(0)
        self.numpy_stream = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.keep(self, x)
        return x


class Model(nn.Module):
    def __init__(self, keep: Keep) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Inner(keep), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return y


def deep(model: Any, x: Tensor) -> None:
    model.listed[1]["a"][1] += len(x)


KEPT: dict[str, tuple[Keep, str]] = {
    "integer buffer": (lambda m, x: m.calls.add_(1), "inner.calls"),
    "exchanged buffer": (lambda m, x: setattr(m, "calls", m.calls + 1), "inner.calls"),
    "bool buffer outside of the state": (lambda m, x: m.bits.logical_not_(), "inner.bits"),
    "frozen parameter": (lambda m, x: m.scale.data.add_(1), "inner.scale"),
    "number": (lambda m, x: setattr(m, "number", m.number + 1), "inner.number"),
    "a packed layer's name": (lambda m, x: m.inputs.append(0.0), "inner.inputs"),
    "text": (lambda m, x: setattr(m, "text", m.text + "x"), "inner.text"),
    "tensor": (lambda m, x: m.table.add_(1), "inner.table"),
    "list": (lambda m, x: m.listed[0].append(0.0), r"inner.listed\[0\]"),
    "array in a dict in a list": (deep, r"inner.listed\[1\]\['a'\]"),
    "object": (lambda m, x: setattr(m.beside, "mean", 1 + m.beside.mean), "inner.beside.mean"),
    "new attribute": (lambda m, x: setattr(m, f"x{len(vars(m))}", 1), r"inner.x\d+"),
    "own generator": (lambda m, x: torch.rand(1, generator=m.stream), "inner.stream"),
    "own generator of NumPy": (lambda m, x: m.numpy_stream.random(), "inner.numpy_stream"),
}


@pytest.mark.parametrize(("keep", "name"), KEPT.values(), ids=KEPT)
def test_what_a_model_keeps_of_a_pass_is_refused_by_its_name(keep: Keep, name: str) -> None:
    """None of these changes an output, so nothing but the state tells."""
    pack = Pack(lambda: Model(keep), [0], PLACE)
    with pytest.raises(ModelError, match=rf"^{name} changed in a pass"):
        check_model(pack, (6,), pack.values)


class Alone(nn.Module):
    """Has a parameter and no rule, so it is run one example at a time; may count its calls."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.weight, self.counts, self.calls = nn.Parameter(torch.randn(6)), counts, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counts
        return x * self.weight


@pytest.mark.parametrize("counts", [False, True])
def test_layers_that_run_one_example_at_a_time_are_looked_into(counts: bool) -> None:
    pack = Pack(lambda: nn.Sequential(Alone(counts), nn.Linear(6, 3)), [0, 1], PLACE)
    if counts:
        with pytest.raises(ModelError, match=r"^0.calls changed in a pass"):
            check_model(pack, (6,), pack.values)
    else:
        check_model(pack, (6,), pack.values)
        assert not any(layer.inputs for layer in pack.members)


def test_a_model_that_keeps_nothing_is_not_refused_and_draws_nothing() -> None:
    pack = Pack(lambda: Model(lambda model, x: None), [0, 1], PLACE)
    before = torch.get_rng_state(), random.getstate()
    check_model(pack, (6,), pack.values)
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_a_buffer_that_changed_after_the_checks_keeps_the_result_from_being_written() -> None:
    for change in (KEPT["integer buffer"][0], KEPT["exchanged buffer"][0], KEPT["frozen parameter"][0]):
        pack = Pack(lambda change=change: Model(change), [0], PLACE)  # type: ignore[misc]
        pack.require_untrained_kept()
        pack(torch.zeros(1, 2, 6))
        with pytest.raises(ModelError, match=r"^inner\.(calls|scale) changed in training"):
            pack.require_untrained_kept()
