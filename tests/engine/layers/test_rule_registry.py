"""The registry of layer rules: each against one example at a time, and against what it states that it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import TorchDispatchMode

from dpsgd_cli.engine.layers import RULES, Layer, Own, WeightStandardisedConv2d
from dpsgd_cli.engine.layers.base import STATEMENTS
from dpsgd_cli.engine.layers.own import Matrix
from dpsgd_cli.engine.packing import rule_for
from tests.engine.conftest import Case, numbers, spread

ROWS = 16


@dataclass(frozen=True)
class Sample:
    """One layer that a rule takes, with inputs of `shape` (integers below `tokens`, if any)."""

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int = 0

    def inputs(self, seed: int = 0) -> Tensor:
        x = numbers(1, ROWS, *self.shape, seed=seed)
        return (x.abs() * 1e6).long() % self.tokens if self.tokens else x


class Scaled(nn.Module):
    """A module that has no rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh((x.unsqueeze(-1) * self.scale).sum(-2))


def stored(kind: type[nn.modules.batchnorm._BatchNorm]) -> nn.Module:
    """Batch normalisation of two channels by stored statistics."""
    made = kind(2).eval()
    made.running_mean, made.running_var = torch.tensor([-1.0, 2.0]), torch.tensor([0.5, 3.0])
    return made


SAMPLES: dict[type[nn.Module], Sample] = {
    nn.Linear: Sample(lambda: nn.Linear(40, 30), (40,)),
    NonDynamicallyQuantizableLinear: Sample(lambda: NonDynamicallyQuantizableLinear(20, 30), (20,)),
    nn.Conv1d: Sample(lambda: nn.Conv1d(2, 3, 3), (2, 16)),
    nn.Conv2d: Sample(lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 8, 8)),
    nn.Embedding: Sample(lambda: nn.Embedding(300, 8), (3,), tokens=300),
    nn.LayerNorm: Sample(lambda: nn.LayerNorm(6), (6,)),
    nn.RMSNorm: Sample(lambda: nn.RMSNorm(6), (6,)),
    nn.GroupNorm: Sample(lambda: nn.GroupNorm(2, 4), (4, 3)),
    nn.InstanceNorm1d: Sample(lambda: nn.InstanceNorm1d(3, affine=True), (3, 5)),
    nn.InstanceNorm2d: Sample(lambda: nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    nn.InstanceNorm3d: Sample(lambda: nn.InstanceNorm3d(2, affine=True), (2, 2, 2, 2)),
    nn.BatchNorm1d: Sample(lambda: stored(nn.BatchNorm1d), (2,)),
    nn.BatchNorm2d: Sample(lambda: stored(nn.BatchNorm2d), (2, 3, 3)),
    nn.BatchNorm3d: Sample(lambda: stored(nn.BatchNorm3d), (2, 2, 2, 2)),
    WeightStandardisedConv2d: Sample(lambda: spread(WeightStandardisedConv2d(2, 3, 3, padding=1)), (2, 8, 8)),
    Scaled: Sample(Scaled, (4,)),
}
"""One of every kind of module that a rule covers, and one for the rule that takes the rest."""


def built(kind: type[nn.Module]) -> nn.Module:
    return nn.Sequential(SAMPLES[kind].layer(), nn.Flatten())


def rule_of(kind: type[nn.Module]) -> type[Layer]:
    rule = rule_for(SAMPLES[kind].layer(), "")
    assert rule is not None
    return rule


def test_every_kind_of_module_that_a_rule_covers_is_here() -> None:
    covered = [kind for rule in RULES for kind in rule.kinds]
    assert len(covered) == len(set(covered))
    assert set(SAMPLES) == {*covered, Scaled}
    for rule in RULES:
        assert all(rule_of(kind) is rule for kind in rule.kinds)
    assert rule_for(Scaled(), "") is None


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("norm", [0.05, 1e6])
def test_clipped_sums_are_those_of_one_example_at_a_time(kind: type[nn.Module], norm: float) -> None:
    Case(lambda: built(kind), SAMPLES[kind].inputs(), torch.arange(ROWS)[None] % 3, norms=(norm,)).check(
        both=kind is not Scaled
    )


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_norms_of_single_examples_are_those_of_autograd(kind: type[nn.Module]) -> None:
    """No less than the true norm, and no more by a thousandth, however other examples change."""
    case = Case(lambda: built(kind), SAMPLES[kind].inputs(), torch.arange(ROWS)[None] % 3)
    true = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = built(kind).double()
    for row in range(ROWS):
        loss = case.loss(module(case.x[0, row : row + 1])[None], case.y[:, row : row + 1]).sum()
        found = torch.autograd.grad(loss, [p for p in module.parameters() if p.requires_grad])
        true.append(float(torch.stack([one.square().sum() for one in found]).sum().sqrt()))
    ours = norms_of(case, case.x)
    assert ours.tolist() == pytest.approx(true, rel=1e-3)
    assert bool((ours >= torch.tensor(true, dtype=ours.dtype) * (1 - 1e-12)).all())
    others = SAMPLES[kind].inputs(seed=9)
    others[:, 0] = case.x[:, 0]
    assert float(norms_of(case, others)[0]) == pytest.approx(true[0], rel=1e-3)


def norms_of(case: Case, x: Tensor) -> Tensor:
    layer, _ = after_backward(case, x)
    return layer.square_norms()[0].sqrt()


def after_backward(case: Case, x: Tensor) -> tuple[Layer, int]:
    """The one layer of a pack after a recorded pass over `x`, and how many parameters it has."""
    pack = case.pack()
    pack.expect(x.shape[1])
    pack.session.begin()
    case.loss(pack(x), case.y).sum().backward()
    (layer,) = [layer for layer in pack.members if layer.used]
    return layer, pack.size


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, made.numel() if isinstance(made, Tensor) else 0)
        return made


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_a_rule_holds_single_gradients_just_where_it_says_so(kind: type[nn.Module]) -> None:
    """The largest tensor of a norm against examples times parameters, on layers of more parameters than inputs."""
    case = Case(lambda: built(kind), SAMPLES[kind].inputs(), torch.zeros(1, ROWS))
    layer, parameters = after_backward(case, case.x)
    largest_parameter = max(value[0].numel() for value in layer.values.values())
    with Largest() as seen:
        layer.square_norms()
    assert layer.holds_gradients == (seen.numbers >= ROWS * largest_parameter)
    assert parameters >= largest_parameter
    assert layer.holds_gradients != ("no example's own gradient is held" in layer.clipped)


@pytest.mark.parametrize("left_out", STATEMENTS)
@pytest.mark.parametrize("rule", [*RULES, Own, Matrix])
def test_a_rule_that_leaves_out_a_statement_cannot_be_made_even_where_it_derives_from_one(
    rule: type[Layer], left_out: str
) -> None:
    body = {name: getattr(rule, name) for name in STATEMENTS if name != left_out}
    with pytest.raises(TypeError, match=f"must state {left_out}"):
        type("New", (rule,), body)
