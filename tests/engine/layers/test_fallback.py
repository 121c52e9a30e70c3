"""Modules without a rule of their own: whole, partly frozen, with children, parametrised, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpsgd_cli.engine.layers import Fallback
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import Case, Of, compare, numbers


class Gate(nn.Module):
    """A parameter of its own beside a child and a buffer."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3))
        self.child = nn.Linear(3, 2)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.child(torch.tanh(x * self.scale + self.shift))
        return y


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, parameter in module.named_parameters():
        if name in names:
            parameter.requires_grad_(False)
            parameter.data.fill_(0.5)  # the same in every trial
    return module


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "own parameter and child": Gate,
    "frozen child": lambda: frozen(Gate(), "child.weight", "child.bias"),
    "frozen own parameter": lambda: frozen(Gate(), "scale"),
    "half-frozen dense layer": lambda: nn.Sequential(frozen(nn.Linear(3, 2), "weight")),
    "half-frozen other half": lambda: nn.Sequential(frozen(nn.Linear(3, 2), "bias")),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2))),
    "prelu between layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)),
    "subclass of a dense layer": lambda: nn.Sequential(type("Own", (nn.Linear,), {})(3, 2)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=6)
@given(data=st.data())
def test_sums_equal_one_example_at_a_time(name: str, data: st.DataObject) -> None:
    whole = {"own parameter and child": ["scale", "child.weight", "child.bias"]}
    halves = {"frozen own parameter": ["child.weight", "child.bias"], "frozen child": ["scale"]}
    weight_norm = {
        "weight norm": ["0.bias", "0.parametrizations.weight.original0", "0.parametrizations.weight.original1"]
    }
    group = (whole | halves | weight_norm).get(name)
    compare(data, BUILDS[name], (3,), groups=None if group is None else [group])


@settings(max_examples=10)
@given(data=st.data(), sides=st.lists(st.integers(2, 4), min_size=3, max_size=3))
def test_three_dimensional_convolution(data: st.DataObject, sides: list[int]) -> None:
    compare(data, lambda: nn.Sequential(nn.Conv3d(1, 2, 2)), (1, *sides))


def test_hooks_of_a_dense_layer_are_kept() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.register_forward_hook(lambda module, inputs, output: output * 3)
        return nn.Sequential(layer)

    made = Case(build, numbers(1, 4, 3), torch.zeros(1, 4), clips=False)
    assert isinstance(made.pack().layers[0], Fallback)
    made.check()


def test_a_module_runs_on_one_example_at_a_time() -> None:
    """Batch statistics inside such a module are those of one example: nothing is mixed."""

    def centred() -> nn.Module:
        return Of(lambda m, x: (x - 0.5 * x.mean(0)) * m.scale, scale=nn.Parameter(torch.rand(3)))

    Case(centred, numbers(1, 4, 3), torch.zeros(1, 4), norms=(0.5,)).check()


def branch() -> nn.Module:
    """Looks at a value to decide what to compute."""
    return Of(lambda m, x: x * m.scale if x.sum() > 0 else x, scale=nn.Parameter(torch.ones(3)))


class Counting(nn.Module):
    """Keeps statistics in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum(0)
        return x * self.scale


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (branch, "Of cannot be trained privately: running it one example at a time failed"),
        (Counting, "Counting cannot be trained privately"),
    ],
)
def test_what_cannot_run_example_by_example_is_refused(build: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Case(build, torch.ones(1, 2, 3).double(), torch.zeros(1, 2)).fast()


def encoder_layer(**settings: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, **settings)


def encoder(**settings: Any) -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(**settings), 2, enable_nested_tensor=False)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("build", [lambda: encoder(batch_first=True), lambda: encoder_layer(batch_first=True)])
def test_transformer_encoders_are_clipped_as_a_whole(build: Callable[[], nn.Module]) -> None:
    model = Of(lambda m, x: m.layer(x).mean(dim=1), layer=build())
    group = [f"layer.{name}" for name, _ in build().named_parameters()]
    Case(lambda: copy.deepcopy(model), numbers(1, 3, 5, 4), torch.zeros(1, 3), norms=(0.5,), groups=[group]).check()


TAKES_SEVERAL: dict[str, tuple[nn.Module, str]] = {
    "lstm": (nn.LSTM(3, 2, batch_first=True), "LSTM takes or returns several tensors.* use LSTM or GRU of dpsgd_cli"),
    "cell": (nn.LSTMCell(3, 2), "LSTMCell takes or returns several tensors.* use LSTM or GRU of dpsgd_cli"),
    "attention": (nn.MultiheadAttention(4, 2), "MultiheadAttention .* use nn.TransformerEncoderLayer"),
    "bilinear": (nn.Bilinear(3, 3, 2), "Bilinear .* use products of dense layers"),
    "sequence first": (encoder(), "TransformerEncoder takes examples for places of a sequence; give batch_first=True"),
}


@pytest.mark.parametrize("name", TAKES_SEVERAL)
def test_modules_of_several_tensors_are_refused_by_name(name: str) -> None:
    module, said = TAKES_SEVERAL[name]
    with pytest.raises(ModelError, match=f"layer '1': {said}"):
        Case(lambda: nn.Sequential(nn.Linear(3, 3), module), numbers(1, 2, 3), torch.zeros(1, 2)).pack()


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (x + y) * self.scale


def test_a_layer_that_is_called_with_several_arguments_is_refused() -> None:
    for run in (lambda m, x: m.layer(x, x), lambda m, x: m.layer(x, y=x)):
        with pytest.raises(ModelError, match="Sum is called with several arguments"):
            Case(lambda run=run: Of(run, layer=Sum()), numbers(1, 2, 3), torch.zeros(1, 2)).fast()  # type: ignore[misc]


def test_layers_tell_their_sizes_and_keep_their_weights_to_themselves() -> None:
    sized = Of(lambda m, x: m.layer(x) * m.layer.out_features, layer=nn.Linear(3, 2))
    Case(lambda: copy.deepcopy(sized), numbers(1, 2, 3), torch.zeros(1, 2)).check()
    used = Of(lambda m, x: x @ m.layer.weight.T, layer=nn.Linear(3, 2))
    with pytest.raises(AttributeError, match="Linear is clipped by what it is called with, and its weight may not be"):
        Case(lambda: used, numbers(1, 2, 3), torch.zeros(1, 2)).fast()


def test_dropout_of_nothing_changes_nothing() -> None:
    with_it = nn.Sequential(nn.Linear(3, 4), nn.Dropout(p=0), nn.Linear(4, 2))
    Case(lambda: copy.deepcopy(with_it), numbers(1, 3, 3), torch.zeros(1, 3), norms=(0.5,)).check()
