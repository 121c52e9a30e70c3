"""The slow, obvious truth about clipped sums, and packs to compare it with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums, at_most
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError

Build = Callable[[], nn.Module]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small tensors are quicker on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Of(nn.Module):
    """Layers by their names, and what is computed of them and the input: `run(model, x)`."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def weighted_output(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss (R, B) of outputs (R, B, ...) that no symmetry of a layer can hide: label times a curved sum."""
    weights = torch.arange(1, outputs[0, 0].numel() + 1).to(outputs).sqrt().view(outputs.shape[2:])
    return ((outputs * weights).sin() + outputs.square() / 4).flatten(2).sum(dim=2) * (1 + labels)


@dataclass
class Case:
    """A model, one batch and clip bounds. `x` is (R or 1, B, ...), `y` (R or 1, B), `mask` (R, B).

    `factors` make gradients of a norm as long as `length` says of that and the bound.
    """

    build: Build
    x: Tensor
    y: Tensor
    norms: Sequence[float] = (1.0,)
    mask: Tensor | None = None
    flat: bool = True
    clips: bool = True
    trusted: bool = False
    dtype: torch.dtype = torch.float64
    seeds: Sequence[int] = (0,)
    loss: Callable[[Tensor, Tensor], Tensor] = weighted_output
    groups: Sequence[Sequence[str]] | None = None
    factors: Callable[[Tensor, Tensor], Tensor] = at_most
    length: Callable[[float, float], float] = min
    seen: Diagnostics = field(init=False)

    def pack(self) -> Pack:
        return Pack(self.build, self.seeds, Placement(CPU, self.dtype), self.trusted)

    def clipping(self, layers: int) -> Clipping | None:
        """The bounds, the same for all trials but for a factor 1 + trial."""
        if not self.clips:
            return None
        bounds = [[norm * (1 + trial) for trial in range(len(self.seeds))] for norm in self.norms]
        if not self.flat and len(bounds) == 1:
            bounds = bounds * layers
        return Clipping(torch.tensor(bounds, dtype=self.dtype), self.flat, self.factors)

    def fast(self, pack: Pack | None = None, most: int | None = None) -> dict[str, Tensor]:
        """What the package computes: sums (R, *shape) by the names of the module, `most` rows at a time."""
        pack = self.pack() if pack is None else pack
        pack.sums.zero_()
        self.seen = Diagnostics(pack.trials, CPU)
        rows = self.x.shape[1]
        for start in range(0, rows, most or max(1, rows)):
            part = slice(start, start + (most or max(1, rows)))
            mask = None if self.mask is None else self.mask[:, part]
            batch = (self.x[:, part], self.y[:, part], mask)
            add_clipped_sums(pack, batch, self.loss, self.clipping(len(pack.layers)), self.seen)
        return {
            name: pack.sums[:, offset : offset + shape.numel()].view(-1, *shape).clone()
            for name, (offset, shape) in pack.spans.items()
        }

    def slow(self) -> dict[str, Tensor]:
        """The definition: one example at a time, plain autograd, on the module itself."""
        trials = [self._slow_trial(trial, seed) for trial, seed in enumerate(self.seeds)]
        return {name: torch.stack([sums[name] for sums in trials]) for name in trials[0]}

    def _slow_trial(self, trial: int, seed: int) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.build().to(self.dtype)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        sums = {name: torch.zeros_like(p) for name, p in trained.items()}
        x, y = (t[trial if len(t) > 1 else 0] for t in (self.x, self.y))
        for row in range(len(x)):
            if self.mask is not None and not self.mask[trial, row]:
                continue
            loss = self.loss(module(x[row : row + 1])[None], y[None, row : row + 1]).sum()
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            own = {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(trained.items(), found, strict=True)}
            for name, gradient in self._clipped(own, trial).items():
                sums[name] += gradient
        return sums

    def _clipped(self, gradients: dict[str, Tensor], trial: int) -> dict[str, Tensor]:
        if not self.clips:
            return gradients
        if not all(bool(g.isfinite().all()) for g in gradients.values()):
            return {name: torch.zeros_like(g) for name, g in gradients.items()}
        groups = [list(gradients)] if self.flat else [list(group) for group in self.groups or by_module(gradients)]
        bounds = [norm * (1 + trial) for norm in self.norms]
        clipped = {}
        for group, bound in zip(groups, bounds * (len(groups) if len(bounds) == 1 else 1), strict=True):
            norm = math.sqrt(sum(float(gradients[name].square().sum()) for name in group))
            for name in group:
                clipped[name] = gradients[name] * (self.length(norm, bound) / norm if norm > 0 else 1.0)
        return clipped

    def check(self, both: bool = False) -> dict[str, Tensor]:
        """Assert that fast and slow agree to rounding; returns the sums. `both`: also on whole batches (`trusted`)."""
        slow = self.slow()
        packs = [self.pack(), Pack(self.build, self.seeds, Placement(CPU, self.dtype), True)] if both else [self.pack()]
        for pack in packs:
            fast = self.fast(pack)
            assert list(fast) == list(slow)
            for name in slow:
                torch.testing.assert_close(fast[name], slow[name], rtol=1e-9, atol=1e-10)
        return fast


def has_rules(build: Build) -> bool:
    """Whether a built-in model may have these layers."""
    try:
        Pack(build, [0], Placement(CPU), trusted=True)
    except ModelError:
        return False
    return True


def by_module(names: dict[str, Tensor]) -> list[list[str]]:
    """Parameter names by the module that owns them, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return list(groups.values())


def parameters_of(pack: Pack, trial: int) -> dict[str, Tensor]:
    """One trial's trained tensors under the names of the original module."""
    spans = pack.spans.items()
    return {name: pack.values[trial, at : at + shape.numel()].view(shape).clone() for name, (at, shape) in spans}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normals, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(
    data: st.DataObject, build: Build, shape: tuple[int, ...], tokens: int = 0, groups: list[list[str]] | None = None
) -> dict[str, Tensor]:
    """Compares fast and slow on a batch that Hypothesis picks, of inputs of `shape`; returns the sums.

    1 or 3 trials, 0 to 3 rows, an input for each trial or one that all share, a mask or none, flat or per-layer
    clipping, bounds that bite always, sometimes or never. `tokens` > 0 makes inputs integers below it.
    """
    trials, rows = data.draw(st.sampled_from([1, 3])), data.draw(st.integers(0, 3))
    shared, seed = data.draw(st.booleans()), data.draw(st.integers(0, 2**20))
    x = numbers(1 if shared else trials, rows, *shape, seed=seed)
    if tokens:
        x = (x.abs() * 1e6).long() % tokens
    made = Case(
        build,
        x,
        torch.arange(trials * rows).view(trials, rows) % 3,
        norms=(data.draw(st.sampled_from([0.01, 1.0, 1e6])),),
        mask=(numbers(trials, rows, seed=seed + 1) > -0.5) if data.draw(st.booleans()) else None,
        flat=data.draw(st.booleans()),
        trusted=shared and data.draw(st.booleans()) and has_rules(build),
        seeds=list(range(trials)),
        groups=groups,
    )
    return made.check()


def spread(module: nn.Module) -> nn.Module:
    """Gains and biases as after some training, not as at the start."""
    for layer in module.modules():
        if isinstance(layer, WeightStandardisedConv2d):
            nn.init.normal_(layer.gain)
            assert layer.bias is not None
            nn.init.normal_(layer.bias)
    return module


def linear_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Has the gradient (1, 2, 3, ...) + label whatever the output is."""
    weights = torch.arange(1, outputs.shape[-1] + 1).to(outputs)
    return (outputs * (weights + labels.unsqueeze(-1))).sum(dim=-1)
