"""Rounded passes: how strict clipping stays, how near the gradients are, and what they leave alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import precision
from dpsgd_cli.engine.layers import Own, WeightStandardisedConv2d
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.errors import ModelError, RecipeError
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.engine.conftest import Of, weighted_output
from tests.engine.test_launches import NETWORKS

PLACE = Placement(torch.device("cpu"))
ROWS = 6


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(),
        WeightStandardisedConv2d(4, 3, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(3 * 3 * 3, 8), nn.Tanh(), nn.Linear(8, 3),
    )  # fmt: skip


def inputs(seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(2, ROWS, 1, 8, 8, generator=generator), torch.arange(2 * ROWS).view(2, ROWS) % 3


def sums_of(pack: Pack, x: Tensor, y: Tensor, clipping: Clipping | None) -> Tensor:
    pack.sums.zero_()
    add_clipped_sums(pack, (x, y, None), cross_entropy, clipping, Diagnostics(pack.trials, PLACE.device))
    return pack.sums.clone()


def rounding_pack() -> Pack:
    pack = Pack(network, [0, 1], PLACE)
    pack.work_in(torch.bfloat16)
    return pack


@pytest.mark.parametrize("flat", [True, False])
def test_one_example_adds_exactly_the_bound(flat: bool) -> None:
    """Sharp: every gradient is far beyond the bound, so each example must add a vector of that very norm."""
    pack = rounding_pack()
    bound = 1e-3
    clipping = Clipping(torch.full((1 if flat else len(pack.layers), 2), bound), flat)
    x, y = inputs(scale=20.0)
    for row in range(ROWS):
        added = sums_of(pack, x[:, row : row + 1], y[:, row : row + 1], clipping)
        for trial in range(2):
            if flat:
                # the margins for cancelling terms take up to one part in 1000
                assert bound * (1 - 1e-3) <= float(added[trial].double().norm()) <= bound * (1 + 1e-5)
                continue
            for layer in range(len(pack.layers)):
                own = added[trial, pack.group_of == layer].double()
                assert float(own.norm()) <= bound * (1 + 1e-5)


def test_norms_of_rounded_products_would_not_be_exact_enough() -> None:
    """The control of the test above: norms from products in 8 bits are off by far more than it allows."""
    a, d = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16(), torch.ones(3).bfloat16()
    exact = a.float().norm() * d.float().norm()
    assert abs(float(torch.outer(d, a).square().sum().sqrt()) / float(exact) - 1) > 1e-4


def truncated(a: Tensor, b: Tensor) -> Tensor:
    """A product of short numbers whose accumulator adds up 8 exact products at a time and cuts the sum to 24 bits."""
    missing = -a.shape[-1] % 8
    rows = F.pad(a.double(), (0, missing)).unflatten(-1, (-1, 8)).movedim(-2, 0)
    columns = F.pad(b.double(), (0, 0, 0, missing)).unflatten(-2, (-1, 8)).movedim(-3, 0)
    blocks = rows @ columns
    total = torch.zeros(blocks.shape[1:])
    for block in blocks:
        exact = total + block
        total = exact.float()
        total = torch.where(total.abs() > exact.abs(), total.nextafter(torch.zeros(())), total)
    return total


def longest(build: Callable[[], nn.Module], x: Tensor, weights: Tensor, bounds: Tensor) -> float:
    """The norm of what one example `x` adds, over its bound, at most over `bounds`; `weights` are its d."""
    found = []
    for bound in bounds.tolist():
        pack = Pack(build, [0], PLACE)
        pack.work_in(torch.bfloat16)
        clipping, seen = Clipping(torch.full((1, 1), bound)), Diagnostics(1, PLACE.device)
        batch = (x[None, None], torch.zeros(1, 1), None)
        add_clipped_sums(pack, batch, lambda y, _: (y * weights).flatten(2).sum(dim=2), clipping, seen)
        found.append(float(pack.sums.norm()) / bound)
    return max(found)


def table() -> nn.Module:
    """A table and a dense layer that share their weight."""
    net: Any = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 5, bias=False))
    net[1].weight = net[0].weight
    return net


def adapted() -> nn.Module:
    """A frozen dense layer beside a low-rank adapter, on sequences."""
    made = Of(lambda m, x: m.last((m.base(x) + m.up(m.down(x))).tanh()).mean(1), base=nn.Linear(6, 8),
              down=nn.Linear(6, 2, bias=False), up=nn.Linear(2, 8, bias=False), last=nn.Linear(8, 2))  # fmt: skip
    made.base.requires_grad_(False)
    return made


EVERY: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = NETWORKS | {
    "tied": (lambda: nn.Sequential(table(), nn.Tanh()), lambda trials: torch.randint(0, 5, (trials, 5, 4))),
    "adapter": (adapted, lambda trials: torch.randn(trials, 5, 3, 6)),
}


@pytest.mark.parametrize("name", EVERY)
def test_norms_and_sums_are_those_of_float64(name: str) -> None:
    """The truth: the gradient of one row at a time, by products in float64 of the same recorded numbers."""
    build, rows = EVERY[name]
    torch.manual_seed(1)
    x, y, pack = rows(1), torch.arange(5.0)[None], Pack(build, [0], PLACE)
    pack.work_in(torch.bfloat16)
    pack.expect(1 << 15)
    alone = []
    for row in torch.eye(5, dtype=torch.bool):
        pack.sums.zero_()
        sum_clipped(pack, (x, y, row[None]), weighted_output, None)
        alone.append(pack.sums[0].clone())
    truth = torch.stack(alone)
    pack.expect(5)
    pack.sums.zero_()
    _, squares = sum_clipped(pack, (x, y, None), weighted_output, Clipping(torch.full((1, 1), 0.3)))
    assert squares is not None
    norms, factors = truth.norm(dim=1), (0.3 / squares.sum(dim=0)[0].sqrt()).clamp(max=1.0).double()
    assert bool((squares.sum(dim=0)[0].sqrt() >= norms * (1 - 1e-6)).all())
    assert bool((squares.sum(dim=0)[0].sqrt() <= norms * 1.001).all())
    assert float((pack.sums[0] - factors @ truth).norm()) <= 1e-5 * float(factors @ norms)


BOUNDS = torch.linspace(0.1, 0.2, 60)


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Linear(40, 1, bias=False), torch.ones(40)),
        (lambda: nn.Linear(40, 30, bias=False), torch.ones(3, 40)),
        (lambda: nn.Linear(3, 4, bias=False), torch.ones(9, 3)),
        (lambda: nn.Conv1d(3, 4, 1, bias=False), torch.ones(3, 9)),
        (lambda: nn.Conv1d(8, 16, 1, bias=False), torch.ones(8, 9)),
        (lambda: nn.Conv2d(8, 16, 3, bias=False), torch.ones(8, 4, 4)),
        (table, torch.ones(4, dtype=torch.long)),
        (lambda: WeightStandardisedConv2d(8, 16, 1), torch.tensor([1.0, -1.0]).repeat_interleave(36).view(8, 3, 3)),
    ],
    ids=["dense", "gram", "instantiated", "kept", "instantiated conv", "gram conv", "tied", "standardised"],
)
def test_what_a_split_factor_adds_to_an_example_is_in_its_norm(build: Callable[[], nn.Module], x: Tensor) -> None:
    """Every number of a gradient is one clip factor times a power of two: all are rounded in one direction."""
    assert longest(build, x, torch.ones(()), BOUNDS) <= 1 + 1e-6


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 30), (3, 4)], ids=["gram", "instantiated"])
@pytest.mark.parametrize("conv", [False, True])
def test_rounded_terms_that_cancel_keep_the_bound(inputs: int, outputs: int, conv: bool) -> None:
    """Two terms, of which the last digit is left. A factor times either has digits beyond it, which decide alone."""
    d = torch.tensor([1.0, -(1 - 2**-8)])
    if conv:
        found = longest(lambda: nn.Conv1d(inputs, outputs, 1, bias=False), torch.ones(inputs, 2), d, BOUNDS)
    else:
        found = longest(lambda: nn.Linear(inputs, outputs, bias=False), torch.ones(2, inputs), d[:, None], BOUNDS)
    assert found <= 1 + 1e-6


@pytest.mark.parametrize("kind", ["gram", "instantiated"])
def test_what_an_accumulator_cuts_off_is_in_the_norm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of (1 + 2^-7)^2 need more than 24 bits. They are in one of two terms that cancel, or in all terms."""
    monkeypatch.setattr(precision, "_short_product", truncated)
    many, odd = 1 << 15, 1 + 2**-7
    x, d = torch.ones(2, many), torch.tensor([[1.0], [-1.0]])
    x[1] = odd
    if kind == "instantiated":
        x, d = torch.full((many, 2), odd), torch.full((many, 1), odd)
    pack = Pack(lambda: nn.Linear(x.shape[1], 3, bias=False), [0], PLACE)
    pack.work_in(torch.bfloat16)
    batch = (x[None, None], torch.zeros(1, 1), None)
    _, squares = sum_clipped(pack, batch, lambda y, _: (y * d).flatten(2).sum(dim=2), Clipping(torch.ones(1, 1)))
    true = 3**0.5 * float((d.double().T @ x.double()).norm())
    assert squares is not None and float(squares.sqrt()) >= true * (1 - 1e-6)


def test_gradients_are_those_of_full_precision_to_the_rounding() -> None:
    x, y = inputs()
    exact, rounded = sums_of(Pack(network, [0, 1], PLACE), x, y, None), sums_of(rounding_pack(), x, y, None)
    gap = (rounded - exact).norm() / exact.norm()
    assert 1e-5 < float(gap) < 0.05


def test_weights_and_evaluation_are_not_rounded() -> None:
    pack, exact = rounding_pack(), Pack(network, [0, 1], PLACE)
    x, y = inputs()
    sums_of(pack, x, y, None)
    assert pack.values.dtype == torch.float32 and pack.sums.dtype == torch.float64
    assert torch.equal(pack.values, exact.values)
    assert torch.equal(pack(x), exact(x))


def test_new_weights_are_used_by_the_next_pass() -> None:
    pack = rounding_pack()
    x, y = inputs()
    before = sums_of(pack, x, y, None)
    pack.values.mul_(0.5)
    after = sums_of(pack, x, y, None)
    other = Pack(network, [0, 1], PLACE)
    other.values.mul_(0.5)
    exact = sums_of(other, x, y, None)
    assert float((after - exact).norm() / exact.norm()) < 0.05 < float((before - exact).norm() / exact.norm())


def test_a_layer_without_a_rule_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Pack(lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU()), [0], PLACE)
    monkeypatch.setattr(Own, "rounds", False)
    with pytest.raises(ModelError, match=r"bfloat16: 1 \(Own\) has no rule for rounded passes; use float32"):
        pack.work_in(torch.bfloat16)
    pack.work_in(None, rounded_products=True)


def test_products_are_rounded_inside_the_passes_only() -> None:
    precision.keep_sums_exact()
    with precision.rounded_products(True):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    with precision.rounded_products(False):
        assert not torch.backends.cuda.matmul.allow_tf32


def equal_records(count: int, width: int | None) -> Tensor:
    """What `count` equal records add in rounded passes, in double precision, padded to `width` rows or not at all."""
    generator = torch.Generator().manual_seed(3)
    record, pack = torch.randn(64, generator=generator), Pack(wide, [0, 1], PLACE)
    pack.work_in(torch.bfloat16)
    rows = count if width is None else width
    mask = (torch.arange(rows) < count).expand(2, -1)
    batch = (record.expand(2, rows, -1), torch.zeros(2, rows, dtype=torch.long), mask)
    pack.sums.zero_()
    clipping = Clipping(torch.full((1, 2), 0.01))
    add_clipped_sums(pack, batch, cross_entropy, clipping, Diagnostics(2, PLACE.device))
    return pack.sums.double()


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


@pytest.mark.parametrize("width", [16, 32, None])
def test_one_more_record_leaves_the_others_as_they_were(width: int | None) -> None:
    """Without padding this holds for the rules by themselves, which compute rows alike whatever their number."""
    moved = equal_records(16, width) - equal_records(15, width)
    assert float(moved.norm(dim=1).max()) <= 0.01 * (1 + 1e-4)


def test_every_piece_of_a_rounded_step_has_one_public_width(write_recipe: Callable[..., Path]) -> None:
    """Poisson batches of 12 of 48: the width is 12 + 3 isqrt(12) + 1 whoever is in them, and varies in float32."""
    widths = {}
    for dtype in ("bfloat16", "float32"):
        loaded = load_recipe(str(write_recipe()), (f"runtime.dtype={dtype}",))
        settled = resolve_auto(loaded)
        method = start([Member(settled, loop.plan_recipe(settled)[0])]).method
        assert isinstance(method, DpSgd)
        widths[dtype] = {y.shape[1] for step in range(20) for _, y, _ in method.batches.pieces(step)}
    assert widths["bfloat16"] == {22}
    assert len(widths["float32"]) > 3


@pytest.mark.parametrize("name", ["lee2018/dp-agd", "lee2018/dp-gd", "yu2019/mnist-private-selection"])
def test_methods_whose_passes_have_no_proof_are_refused(name: str) -> None:
    with pytest.raises(RecipeError, match="bfloat16 is for dp-sgd and sgd, not"):
        load_recipe(name, ("runtime.dtype=bfloat16",))


def test_all_records_at_once_are_refused_where_records_come_and_go(write_recipe: Callable[..., Path]) -> None:
    loaded = load_recipe(str(write_recipe(method={"kind": "dp-sgd", "batching": "full", "learning_rate": 1})))
    rounding = load_recipe(loaded.source, ("runtime.dtype=bfloat16",))
    with pytest.raises(RecipeError, match="rounded anew when one comes or goes"):
        loop.run(resolve_auto(rounding), loop.Options(Path(loaded.source).parent / "out"))


def test_no_product_is_made_of_tiles_which_some_virtual_machines_only_announce() -> None:
    product = "import torch, dpsgd_cli.engine; x = torch.ones(64, 64).bfloat16(); print((x @ x).float().sum().item())"
    own = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    ran = subprocess.run(
        [sys.executable, "-c", product], env=own | {"ONEDNN_VERBOSE": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "262144.0"
    assert "AMX" not in ran.stdout
