"""Packs: names, seeds, values, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dpsgd_cli.engine.packing import Pack, Placement, elements_per_row
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import numbers, parameters_of

PLACE = Placement(torch.device("cpu"), torch.float64)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def test_every_trial_is_the_module_of_its_seed() -> None:
    before = torch.random.get_rng_state()
    pack = Pack(mlp, [5, 9, 5], PLACE)
    assert torch.equal(torch.random.get_rng_state(), before), "the caller's stream is left alone"
    x = numbers(3, 4, 3)
    for trial, seed in enumerate([5, 9, 5]):
        module = seeded(mlp, seed)
        torch.testing.assert_close(pack(x)[trial], module(x[trial]))
        own = parameters_of(pack, trial)
        assert list(own) == [name for name, _ in module.named_parameters()]
        for name, parameter in module.named_parameters():
            assert torch.equal(own[name], parameter)


def test_one_input_serves_all_trials() -> None:
    x = numbers(1, 4, 3)
    wanted = torch.stack([seeded(mlp, seed)(x[0]) for seed in range(3)])
    for trusted in (True, False):
        torch.testing.assert_close(Pack(mlp, [0, 1, 2], PLACE, trusted)(x), wanted)


def test_layers_write_to_the_flat_tensors() -> None:
    pack = Pack(mlp, [0, 1], PLACE)
    assert pack.size == 3 * 5 + 5 + 5 * 2 + 2
    assert pack.group_of.tolist() == [0] * 20 + [1] * 12
    pack.values[1] = 0.0
    assert not pack(torch.ones(2, 1, 3).double())[1].any()
    assert pack(torch.ones(2, 1, 3).double())[0].any()


def test_the_model_itself_is_left_alone() -> None:
    made: list[nn.Module] = []

    def build() -> nn.Module:
        made.append(nn.Sequential(mlp(), nn.Sequential(nn.Linear(2, 2))))
        return made[-1]

    Pack(build, [0], PLACE)
    assert isinstance(made[0][0], nn.Sequential) and type(made[0][0][0]) is nn.Linear  # type: ignore[index]
    assert type(made[0][1][0]) is nn.Linear  # type: ignore[index]


def frozen(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return module


class Holder(nn.Module):
    """A parameter of its own, so that the whole takes the general way; `child` sits inside."""

    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.child(x * self.scale)
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(4), "the model: BatchNorm1d mixes the examples.*use GroupNorm or LayerNorm"),
    "nested": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
        r"layer '0\.1': BatchNorm1d mixes",
    ),
    "frozen": (lambda: nn.Sequential(nn.Linear(4, 4), frozen(nn.BatchNorm2d(4))), "layer '1': BatchNorm2d mixes"),
    "no parameters": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)),
        "layer '1': BatchNorm1d mixes",
    ),
    "in the general way": (lambda: Holder(nn.Sequential(nn.BatchNorm1d(4))), r"layer 'child\.0': BatchNorm1d mixes"),
    "in a frozen whole": (
        lambda: nn.Sequential(nn.Linear(4, 4), frozen(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))),
        r"layer '1\.1': BatchNorm1d mixes",
    ),
    "lazy": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d()), "layer '1': LazyBatchNorm1d mixes"),
    "sizes unknown": (
        lambda: nn.Sequential(nn.LazyLinear(4)),
        "layer '0': LazyLinear learns its sizes from data .* give them",
    ),
    "old weight norm": (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4))), "by a hook.*parametrizations"),
    "old spectral norm": (lambda: Holder(nn.utils.spectral_norm(nn.Linear(4, 4))), "by a hook.*parametrizations"),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, 4)), r"updates its vectors .* call \.eval\(\)"),
    "synchronised": (lambda: nn.Sequential(nn.SyncBatchNorm(4)), "layer '0': SyncBatchNorm mixes"),
    "random slope": (lambda: nn.Sequential(nn.Linear(4, 4), nn.RReLU()), "layer '1': RReLU draws"),
    "running statistics": (
        lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
        "layer '0': InstanceNorm1d with track_running_stats keeps statistics of the data; leave it off",
    ),
    "nothing to train": (lambda: frozen(nn.Linear(4, 4)), "no trainable parameters"),
    "other constants": (
        lambda: nn.Sequential(frozen(nn.Linear(4, 4)), nn.Linear(4, 2)),
        r"0\.weight is not trained and differs from seed to seed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_privately_is_refused(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(ModelError, match=message):
        Pack(build, [0, 1], PLACE)


def test_constants_that_are_the_same_in_every_trial_are_shared() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(frozen(nn.Linear(3, 3)), nn.Linear(3, 2))
        nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
        return model

    pack, x = Pack(build, [0, 1], PLACE), numbers(2, 4, 3)
    torch.testing.assert_close(pack(x), torch.stack([seeded(build, seed)(x[seed]) for seed in range(2)]))
    assert list(parameters_of(pack, 0)) == ["1.weight", "1.bias"]


def test_a_row_holds_at_least_inputs_and_outputs_of_every_layer() -> None:
    pack = Pack(mlp, [0], PLACE)
    assert elements_per_row(pack, torch.ones(2, 3).double()) >= 3 + 5 + 5 + 2


def test_registering_a_rule_for_every_layer_is_not_needed() -> None:
    """Modules without parameters are used as they are, between trials and all."""
    model: Any = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Unflatten(1, (2, 2)), nn.Softmax(-1), nn.Flatten())
    pack = Pack(lambda: model, [0, 0], PLACE)
    x = torch.rand(2, 3, 2, 2).double()
    torch.testing.assert_close(pack(x), torch.stack([model.double()(own) for own in x]))
