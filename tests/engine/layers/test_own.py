"""Parameters that a module uses in code of its own, products with them, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine.layers import Layer, Own
from dpsgd_cli.errors import ModelError
from tests.engine.conftest import CPU, Case, Of, compare, linear_loss, numbers


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


class Twice(nn.Linear):
    """A dense layer with code of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) + self.weight.sum()


class Turned(nn.Module):
    """A dense layer whose weight is transposed, as in Hugging Face's GPT-2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1)


class Whole(nn.Module):
    """A class token, positions, lists and dictionaries of the root's own, and positions that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 3)), nn.Parameter(torch.randn(1, 4, 3))
        self.gains = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(2))})
        self.table, self.last = nn.Embedding(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x.view(len(x), 3, 3)], 1) + self.places
        y: Tensor = self.last(x + self.table(torch.arange(4)))
        return (y * self.gains[0] + self.gains[1] * self.named["shift"]).flatten(1)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


BUILDS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "own parameter and child": (Gate, (3,)),
    "frozen child": (lambda: frozen(Gate(), "child.weight", "child.bias"), (3,)),
    "frozen own parameter": (lambda: frozen(Gate(), "scale"), (3,)),
    "half-frozen dense layer": (lambda: nn.Sequential(frozen(nn.Linear(3, 2), "weight")), (3,)),
    "half-frozen other half": (lambda: nn.Sequential(frozen(nn.Linear(3, 2), "bias")), (3,)),
    "weight norm": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)), parametrizations.weight_norm(
            nn.Linear(2, 3), dim=1), parametrizations.weight_norm(nn.Linear(3, 2), dim=-1)), (3,),
    ),
    "experts": (
        lambda: Of(
            lambda m, x: (x @ m.w[0]).tanh() @ m.w[-1] + x @ m.w[0] * m.w.sum(), w=nn.Parameter(torch.randn(2, 3, 3)),
        ), (3,),
    ),
    "prelu between layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2)), (3,)),
    "subclass of a dense layer": (lambda: nn.Sequential(Twice(3, 2)), (2, 3)),
    "transposed dense layer": (lambda: nn.Sequential(Turned(3, 2), nn.Tanh(), Turned(2, 4)), (2, 3)),
    "rms normalisation by hand": (
        lambda: Of(lambda m, x: normed(x, m.gain), gain=nn.Parameter(torch.rand(3))), (2, 3),
    ),
    "the root's own": (Whole, (9,)),
    "transposed convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2, stride=2)), (2, 2, 2)),
    "three-dimensional convolution": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2)), (1, 2, 3, 2)),
    "padding by name": (lambda: nn.Sequential(nn.Conv1d(2, 2, 3, padding="same", padding_mode="circular")), (2, 4)),
    "two inputs": (lambda: Of(lambda m, x: m.layer(x, 2 * x), layer=nn.Bilinear(3, 3, 2)), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=5)
@given(data=st.data())
def test_sums_equal_one_example_at_a_time(name: str, data: st.DataObject) -> None:
    build, shape = BUILDS[name]
    apart = {"subclass of a dense layer", "transposed dense layer", "half-frozen dense layer", "half-frozen other half"}
    groups = [[n for n, p in build().named_parameters() if p.requires_grad]] if name in apart else None
    if name == "transposed dense layer":
        groups = None
    compare(data, build, shape, groups=groups)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_tokens(mode: str) -> None:
    tokens = numbers(1, 3, 4).mul(1e3).long().abs() % 7
    Case(lambda: nn.Sequential(nn.EmbeddingBag(7, 3, mode=mode)), tokens, torch.zeros(1, 3), norms=(0.5,)).check()


class Scaled(nn.Embedding):
    """An embedding with code of its own, as in Hugging Face's BART."""

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


def test_products_with_an_own_matrix_have_a_closed_form() -> None:
    """No gradient of the table, or of a dense layer's weight, is held for an example."""
    tokens = torch.tensor([[[0, 1, 1], [2, 4, 0]]])
    model = Of(
        lambda m, x: F.linear(m.table(x), m.weight).flatten(1), table=Scaled(5, 3, padding_idx=1),
        weight=nn.Parameter(torch.randn(4, 3)),
    )  # fmt: skip
    case = Case(lambda: copy.deepcopy(model), tokens, torch.zeros(1, 2), norms=(0.5,))
    case.check()
    pack = case.pack()
    pack.session.begin()
    pack(tokens).sum().backward()
    assert not any(layer.used for layer in pack.members if isinstance(layer, Own))


def test_hooks_of_a_dense_layer_are_kept() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 2)
        layer.register_forward_hook(lambda module, inputs, output: output * 3)
        return nn.Sequential(layer)

    Case(build, numbers(1, 4, 3), torch.zeros(1, 4), norms=(0.5,)).check()


def test_a_module_runs_on_one_example_at_a_time() -> None:
    """Batch statistics inside such a module are those of one example: nothing is mixed."""

    def centred() -> nn.Module:
        return Of(lambda m, x: (x - 0.5 * x.mean(0)) * m.scale, scale=nn.Parameter(torch.rand(3)))

    Case(centred, numbers(1, 4, 3), torch.zeros(1, 4), norms=(0.5,)).check()


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


def layers(run: Callable[[Any, Tensor], Tensor], **more: nn.Module) -> Callable[[], nn.Module]:
    return lambda: copy.deepcopy(Of(run, layer=nn.Linear(3, 3), **more))


BESIDE: dict[str, Callable[[], nn.Module]] = {
    "transposed": layers(lambda m, x: m.layer(x).tanh() @ m.layer.weight),
    "alone": layers(lambda m, x: x @ m.layer.weight.T),
    "in a function": layers(lambda m, x: F.linear(m.layer(x).tanh(), m.layer.weight, m.layer.bias)),
    "by its data": layers(lambda m, x: m.layer(x) @ m.layer.weight.data),
    "detached": layers(lambda m, x: m.layer(x) * m.layer.weight.detach().sum()),
    "summed": layers(lambda m, x: m.layer(m.layer(x)) + m.layer.weight.square().sum() * x.sum(1, keepdim=True)),
    "of an embedding": layers(
        lambda m, x: m.layer(m.table(x.abs().long() % 4).mean(1) @ m.table.weight.T)[:, :3] * x,
        table=nn.Embedding(3, 3),
    ),
}


@pytest.mark.parametrize("build", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_a_weight_that_code_uses_beside_its_layer_has_one_gradient(
    build: Callable[[], nn.Module], seeds: tuple[int, ...]
) -> None:
    """Of both uses together, in one clipping group, as one example at a time."""
    case = Case(build, numbers(1, 4, 3), torch.arange(4)[None] % 3, norms=(0.3,), seeds=seeds)
    case.check()
    pack = case.pack()
    groups = len(pack.layers)
    pack(case.x)
    assert len(pack.layers) == groups


def test_a_weight_is_used_in_passes_only() -> None:
    pack = Case(layers(lambda m, x: m.layer(x)), torch.ones(1, 2, 3), torch.zeros(1, 2)).pack()
    with pytest.raises(AttributeError, match="Linear is clipped by what it is called with"):
        pack.template.layer.weight + 1  # type: ignore[union-attr, operator]


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "counts in a buffer": (
        Counting,
        r"line \d+ of test_own.py .*written into a tensor that all examples share",
    ),
    "input changed after its use": (
        layers(lambda m, x: (lambda h: h.add_(m.next(h)))(m.layer(x)), next=nn.Linear(3, 3)),
        "the input of a layer was changed in place after the layer had used it",
    ),
    "an if": (layers(lambda m, x: m.layer(x * float(x.sum()))), r"line \d+ of test_own.py .*asks for a number"),
    "rows by a mask": (layers(lambda m, x: m.layer(x[x.sum(1) > 0])), r"line \d+ of test_own.py .*shape of a tensor"),
    "random numbers": (layers(lambda m, x: m.layer(x + torch.poisson(x))), "use nn.Dropout, torch.rand"),
    "written into zeros": (
        layers(lambda m, x: torch.zeros(len(x), 3).index_copy_(1, torch.arange(3), m.layer(x))),
        r"line \d+ of test_own.py",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_to_be_an_examples_own_is_refused(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises((ModelError, AttributeError), match=message):
        Case(build, torch.ones(1, 2, 3).double(), torch.zeros(1, 2)).fast()


def test_layers_tell_what_they_are() -> None:
    """Shapes, dtypes and devices may be read, also of parameters that are listed."""

    def told(m: Any, x: Tensor) -> Tensor:
        weight = m.layer.weight
        assert weight.shape == (3, 3) and weight.dtype == x.dtype and weight.device == x.device
        assert weight.dim() == weight.ndim == 2 and weight.numel() == 9 and weight.is_floating_point()
        assert isinstance(weight, Tensor) and {p.dtype for p in m.parameters()} == {x.dtype}
        y: Tensor = m.layer(x.to(weight.dtype)) * m.layer.out_features * m.drop.p
        return y

    Case(layers(told, drop=nn.Dropout(0.5).eval()), numbers(1, 2, 3), torch.zeros(1, 2), norms=(0.5,)).check()


def idioms(m: Any, x: Tensor) -> Tensor:
    """One layer on rows of all positions, on positions alone and on frames; an activation in place."""
    y = m.layer(x.reshape(-1, 3)).relu_().view(len(x), -1, 3)
    y = y + m.places(torch.arange(y.shape[1])) + m.layer(torch.eye(3).to(x))[:2]
    frames = m.conv(y.reshape(-1, 1, 3))
    return torch.cat([y.flatten(1), frames.view(len(x), -1)], 1)


def test_common_idioms_are_clipped_like_anything_else() -> None:
    build = layers(idioms, places=nn.Embedding(2, 3), conv=nn.Conv1d(1, 2, 2))
    Case(build, numbers(2, 3, 2, 3), torch.arange(6).view(2, 3), norms=(0.5,), seeds=(0, 1)).check()


def test_a_trained_parameter_that_is_kept_aside_is_refused() -> None:
    def build() -> nn.Module:
        made = Of(lambda m, x: m.layer(x) * m.aside[0].sum(), layer=nn.Linear(3, 2))
        made.aside = [made.layer.weight]  # type: ignore[assignment, union-attr]
        return made

    with pytest.raises(ModelError, match="aside keeps a trained parameter outside of torch's registry"):
        Case(build, numbers(1, 2, 3), torch.zeros(1, 2)).pack()


def test_dropout_of_nothing_changes_nothing() -> None:
    with_it = nn.Sequential(nn.Linear(3, 4), nn.Dropout(p=0), nn.Linear(4, 2))
    Case(lambda: copy.deepcopy(with_it), numbers(1, 3, 3), torch.zeros(1, 3), norms=(0.5,)).check()


def test_a_built_in_model_needs_a_rule_for_every_layer() -> None:
    case = Case(lambda: nn.Sequential(nn.PReLU()), numbers(1, 2, 3), torch.zeros(1, 2), trusted=True)
    with pytest.raises(ModelError, match="layer '0': PReLU has no rule"):
        case.pack()


def test_every_member_is_a_rule() -> None:
    pack = Case(Whole, numbers(1, 2, 9), torch.zeros(1, 2)).pack()
    assert all(isinstance(layer, Layer) for layer in pack.members)


def test_copies_of_an_example_have_one_gradient() -> None:
    """The gradient of the mean loss of an example's copies, clipped as one."""
    pack = Case(Whole, numbers(1, 2, 9), torch.zeros(1, 2)).pack()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Whole().double()
    x, bound = numbers(4, 9), 0.5
    wanted = torch.zeros(pack.size, dtype=torch.float64)
    for row in (0, 1):
        loss = linear_loss(module(x[[row, 2 + row]])[None], torch.zeros(1, 2)).mean()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        wanted += gradient * min(1.0, bound / float(gradient.norm()))
    clipping = Clipping(torch.full((1, 1), bound, dtype=torch.float64))
    add_clipped_sums(pack, (x[None], torch.zeros(1, 2), None), linear_loss, clipping, Diagnostics(1, CPU))
    torch.testing.assert_close(pack.sums[0], wanted)


FIXED, SHIFT = numbers(4, 3), numbers(4)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.last(F.linear(x, FIXED, bias=SHIFT)),
        lambda m, x: m.last(F.linear(input=x, weight=FIXED)),
        lambda m, x: m.last(F.linear(x, FIXED) + F.linear(FIXED[0], FIXED, SHIFT)),
        lambda m, x: m.last(torch.func.vmap(lambda row: F.linear(row, FIXED, SHIFT))(x)),
        lambda m, x: m.last(F.linear(x.squeeze(0), FIXED)).unsqueeze(0) if len(x) == 1 else m.last(F.linear(x, FIXED)),
    ],
    ids=["of rows", "by name", "of a constant", "in a vmap of its own", "of one row"],
)
def test_products_with_constants_are_each_examples_own(run: Any) -> None:
    Case(lambda: Of(run, last=nn.Linear(4, 2)), numbers(1, 5, 3), torch.arange(5)[None], norms=(0.5,)).check()
