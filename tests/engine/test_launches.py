"""Operations of a step on a GPU, counted on the device of `elsewhere.py`, which the trials of a pack share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine import digits
from dpsgd_cli.engine.chacha import ChaCha
from dpsgd_cli.engine.layers import WeightStandardisedConv2d, conv
from dpsgd_cli.engine.losses import Loss
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.streams import WORTH_A_KEYSTREAM, SecureStreams
from tests.engine.conftest import Of, weighted_output
from tests.engine.elsewhere import Rule, installed

ROWS = 5
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def images() -> nn.Module:
    """Convolutions with and without groups and bias, with strides and dilation, one used twice; `wide` by its Gram."""
    return Of(
        lambda m, x: m.line(m.wide(m.norm(m.twice(m.twice(m.plain(x))))).relu().flatten(2)).flatten(1),
        plain=nn.Conv2d(2, 4, 3, stride=2, padding=1), twice=nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2),
        norm=nn.GroupNorm(2, 4), wide=nn.Conv2d(4, 8, 3, stride=2, padding=1), line=nn.Conv1d(8, 3, 2, bias=False),
    )  # fmt: skip


def tokens() -> nn.Module:
    """An embedding with padding, layer norms with and without bias, and dense layers."""
    return Of(
        lambda m, x: m.last(m.second(m.first(m.table(x)).tanh()).mean(1)),
        table=nn.Embedding(7, 6, padding_idx=0), first=nn.LayerNorm(6), second=nn.LayerNorm((4, 6), bias=False),
        last=nn.Linear(6, 3),
    )  # fmt: skip


def standardised() -> nn.Module:
    return nn.Sequential(WeightStandardisedConv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(108, 2))


def own_code() -> nn.Module:
    """Parameters that a module uses by itself, each example's own copies of which are differentiated."""
    return Of(lambda m, x: (m.last(x) * m.gain).cos(), gain=nn.Parameter(torch.rand(3)), last=nn.Linear(6, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "images": (images, lambda trials: torch.randn(trials, ROWS, 2, 6, 6)),
    "tokens": (tokens, lambda trials: torch.randint(0, 7, (trials, ROWS, 4))),
    "standardised": (standardised, lambda trials: torch.randn(trials, ROWS, 2, 6, 6)),
}


def made(build: Callable[[], nn.Module], trials: int, device: torch.device, trusted: bool = True) -> Pack:
    """A pack whose trials all differ from the first values of layers, such as gains of 1."""
    pack = Pack(build, range(trials), Placement(device), trusted=trusted)
    moves = torch.rand(8, pack.size, generator=torch.Generator().manual_seed(0))[:trials]
    moves = moves.to(device)
    pack.values.mul_(0.5 + moves).add_(0.2 * moves)
    return pack


def clip(pack: Pack, x: Tensor, loss: Loss = weighted_output) -> Tensor:
    """Clipped sums (R, P) of one step, some of whose gradients are longer than their bound."""
    device = pack.values.device
    y = torch.arange(ROWS).float().expand(len(x), ROWS).to(device)
    bounds, seen = Clipping(torch.full((1, pack.trials), 5.0, device=device)), Diagnostics(pack.trials, device)
    pack.sums.zero_()
    add_clipped_sums(pack, (x.to(device), y, None), loss, bounds, seen)
    return pack.sums


@pytest.mark.parametrize("shared", [False, True], ids=["own rows", "shared rows"])
@pytest.mark.parametrize("name", NETWORKS)
def test_trials_share_each_operation(name: str, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build, rows = NETWORKS[name]
    torch.manual_seed(0)
    x = rows(1 if shared else 8)
    wanted, counted = clip(made(build, 8, CPU), x), {}
    with installed(monkeypatch) as rule:
        for trials in (1, 3, 8):
            pack = made(build, trials, GPU)
            begun = rule.ran
            found = clip(pack, x[:trials])
            counted[trials] = rule.ran - begun
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert counted[8] == counted[3] <= 1.3 * counted[1]


def test_large_convolutions_of_trials_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """They give what the shared ones give; trials that share their rows keep one convolution in the first layer."""
    torch.manual_seed(0)
    counted = {}
    with installed(monkeypatch) as rule:
        for large in (1, 1 << 28):
            monkeypatch.setattr(conv, "LARGE", large)
            for rows in (1, 3):
                x = torch.randn(3, ROWS, 2, 6, 6, generator=torch.Generator().manual_seed(1))[:rows]
                wanted = clip(made(images, 3, CPU), x)
                rule.named.clear()
                found = clip(made(images, 3, GPU), x)
                counted[large, rows] = rule.named["convolution"] + rule.named["convolution_backward"]
                torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert counted[1, 3] == 3 * counted[1 << 28, 3]
    assert counted[1, 1] == 3 * counted[1 << 28, 1] - 2  # the first layer's


@pytest.mark.parametrize("name", NETWORKS)
def test_rounded_products_are_of_short_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a CPU; on a GPU, one product is made of two short tensors for each part of a factor."""
    build, rows = NETWORKS[name]
    torch.manual_seed(0)
    x, found, short = rows(3), {}, []
    bmm = torch.bmm

    def counted(a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
        short.append((a.dtype, b.dtype, *kwargs.values()) == (torch.bfloat16, torch.bfloat16, torch.float32))
        return bmm(a, b, **kwargs)

    monkeypatch.setattr(torch, "bmm", counted)
    for device in (CPU, GPU):
        with installed(monkeypatch) if device == GPU else nullcontext():
            pack = made(build, 3, device)
            pack.work_in(torch.bfloat16)
            short.clear()
            found[device] = clip(pack, x).cpu()
    torch.testing.assert_close(found[GPU], found[CPU], rtol=0.01, atol=0.01)
    assert sum(short) > 2


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("large", [1, 1 << 28], ids=["one by one", "side by side"])
@pytest.mark.parametrize("build", [images, standardised])
def test_short_images_have_channels_last(
    build: Callable[[], nn.Module], large: int, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images, weights and gradients of each convolution of one group, on a GPU; elsewhere they are as they were."""
    monkeypatch.setattr(conv, "LARGE", large)
    torch.manual_seed(0)
    x, found, run, last = torch.randn(1, ROWS, 2, 6, 6), {}, Rule.run, list[tuple[bool, ...]]()

    def watched(self: Rule, func: Any, args: Any, kwargs: Any) -> Any:
        parts, groups = args[:2], args[8] if func is torch.ops.aten.convolution.default else 0
        if func is torch.ops.aten.convolution_backward.default and args[10][0]:
            parts, groups = (args[0], args[2]), args[9]
        if groups == 1 and parts[0].dim() == 4:
            last.append(tuple(p.numbers.is_contiguous(memory_format=torch.channels_last) for p in parts))
        return run(self, func, args, kwargs)

    monkeypatch.setattr(Rule, "run", watched)
    for device in (CPU, GPU):
        with installed(monkeypatch) if device == GPU else nullcontext():
            pack = made(build, 1, device)
            pack.work_in(torch.bfloat16 if short else None)
            found[device] = clip(pack, x).cpu()
    torch.testing.assert_close(found[GPU], found[CPU], rtol=0.01, atol=0.01)
    assert last and {*last} == {(short, short)}


class Counted(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Counter[str]()

    @property
    def ran(self) -> int:
        return self.named.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.named[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def experts() -> nn.Module:
    """One weight is taken apart, and one is normalised, neither for each example alone."""
    stack = nn.Parameter(torch.rand(4, 6, 6))
    return Of(
        lambda m, x: m.last(sum(x @ m.stack[i] for i in range(4))), stack=stack, last=weight_norm(nn.Linear(6, 3))
    )


@pytest.mark.parametrize("build", [own_code, experts])
def test_trials_share_the_operations_of_a_modules_own_code(build: Callable[[], nn.Module]) -> None:
    counted = []
    for trials in (3, 8):
        pack = made(build, trials, CPU, trusted=False)
        with Counted() as mode:
            clip(pack, torch.randn(trials, ROWS, 6))
        counted.append(mode)
    assert counted[0].ran == counted[1].ran > 20
    assert not counted[0].named["select_backward"]


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_row_that_is_not_finite_adds_nothing(name: str, bad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is never asked whether there is one: it sets numbers to 0 in any case."""
    build, rows = NETWORKS[name]
    torch.manual_seed(0)
    x = rows(2)
    if bad and x.is_floating_point():
        x[1, 3] = torch.inf
    loss = (lambda y, labels: weighted_output(y, labels) / (labels - 2)) if bad else weighted_output
    wanted = clip(made(build, 2, CPU), x, loss)
    with installed(monkeypatch) as rule:
        pack = made(build, 2, GPU)
        rule.named.clear()
        with rule.no_asking():
            found = clip(pack, x, loss)
        assert rule.named["masked_fill"] > 5
        torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert bool(wanted.isfinite().all()) and bool(wanted.any())


def test_a_large_draw_of_noise_is_made_on_its_device_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many operations for four times as many numbers, whose digits are those of the same keys on a CPU.

    A tenth of a byte for each number comes from the host, which would send 8; operations read and write 2.5 KB.
    """
    monkeypatch.setattr(os, "urandom", lambda size: bytes(range(size)))
    counted = []
    for size in (WORTH_A_KEYSTREAM, 4 * WORTH_A_KEYSTREAM):
        wanted = torch.empty(size, dtype=torch.int64)
        digits.fill(wanted, digits.fresh(), ChaCha(CPU))
        with installed(monkeypatch) as rule:
            room = torch.empty(size, dtype=torch.int64, device="cuda")
            digits._cells(room.device)
            begun = rule.ran, rule.sent, rule.touched
            with rule.no_asking():
                SecureStreams().normal("noise", 0, room)
            counted.append(rule.ran - begun[0])
            sent, touched = (rule.sent - begun[1]) / size, (rule.touched - begun[2]) / size
        assert torch.equal(room.cpu(), wanted)
    assert counted[0] == counted[1] < 530
    assert sent < 0.1 and touched < 2560


def test_a_small_draw_of_noise_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(monkeypatch) as rule, rule.no_asking():
        room = torch.empty(WORTH_A_KEYSTREAM - 1, dtype=torch.int64, device="cuda")
        rule.named.clear()
        SecureStreams().normal("noise", 0, room)
        named, sent = dict(rule.named), rule.sent
    assert named == {"copy_": 1} and sent == 8 * (WORTH_A_KEYSTREAM - 1)
