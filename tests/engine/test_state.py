"""What a model keeps or changes in a pass is found, and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

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
        self.listed: list[Any] = []

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


KEPT: dict[str, tuple[Keep, str]] = {
    "integer buffer": (lambda m, x: m.calls.add_(1), "inner.calls"),
    "exchanged buffer": (lambda m, x: setattr(m, "calls", m.calls + 1), "inner.calls"),
    "bool buffer outside of the state": (lambda m, x: m.bits.logical_not_(), "inner.bits"),
    "frozen parameter": (lambda m, x: m.scale.data.add_(1), "inner.scale"),
    "training mode": (lambda m, x: m.train(not m.training), "inner.training"),
}


@pytest.mark.parametrize(("keep", "name"), KEPT.values(), ids=KEPT)
def test_what_a_model_keeps_of_a_pass_is_refused_by_its_name(keep: Keep, name: str) -> None:
    """None of these changes an output, so nothing but the state tells."""
    pack = Pack(lambda: Model(keep), [0], PLACE)
    with pytest.raises(ModelError, match=rf"^{name} changed in a pass"):
        check_model(pack, (6,), pack.values)


@pytest.mark.parametrize(
    ("keep", "name"),
    [(lambda m, x: setattr(m, "last_seen", x), "last_seen"), (lambda m, x: m.listed.append({"x": x}), "listed")],
    ids=["attribute", "list"],
)
def test_a_tensor_that_a_model_keeps_is_refused_wherever_it_is(keep: Keep, name: str) -> None:
    pack = Pack(lambda: Model(keep), [0], PLACE)
    with pytest.raises(ModelError, match=rf"a tensor is kept after the pass that computed it \(in inner\.{name}\)"):
        check_model(pack, (6,), pack.values)


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
