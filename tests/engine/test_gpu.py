"""What only a GPU can show: compiled steps, epochs without waiting, and the same sums as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.batching.run import AheadSampler, PoissonSampler
from dpsgd_cli.clipping.compiling import Captured, Compiled
from dpsgd_cli.clipping.run import Clipping, Diagnostics, SumClipped, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import models, precision
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def network() -> nn.Module:
    return models.cnn(CnnModel(), (1, 14, 14), 10)


def table(device: torch.device) -> Table:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 14, 14, generator=generator).numpy()
    return Table.load(x, torch.randint(0, 10, (300,), generator=generator).numpy(), False, device, torch.float32)


def pack_on(device: torch.device) -> Pack:
    precision.keep_sums_exact()
    return Pack(network, [0, 1], Placement(device), trusted=True)


def clipping_on(device: torch.device) -> Clipping:
    return Clipping(torch.tensor([[0.1, 1.0]], device=device))


def trained(device: torch.device, function: SumClipped = sum_clipped, steps: int = 12) -> Tensor:
    """Weights after some Poisson steps with noise that was drawn on the CPU."""
    pack, clipping, rows = pack_on(device), clipping_on(device), table(device)
    streams = [SeededStreams(0), SeededStreams(1)]
    sampler = AheadSampler(PoissonSampler(streams, 300, 40), device)
    noise = NoiseSource(streams, pack.size, CPU, torch.float32)
    seen = Diagnostics(2, device)
    for step in range(steps):
        pack.sums.zero_()
        for part in rows.chunks(sampler.batch(step), 1000):
            add_clipped_sums(pack, part, cross_entropy, clipping, seen, function)
        pack.values.sub_(pack.sums.add_(noise.draw(step).to(device), alpha=0.01), alpha=0.05)
    assert seen.sums()["examples"][0] > 0
    return pack.values.cpu()


def test_steps_train_the_same_weights_as_on_a_cpu() -> None:
    wanted = trained(CPU)
    torch.testing.assert_close(trained(GPU), wanted, rtol=1e-3, atol=1e-4)
    captured = Captured()
    torch.testing.assert_close(trained(GPU, captured), wanted, rtol=1e-3, atol=1e-4)
    assert any(program is not None for program in captured._programs.values())
    torch.testing.assert_close(trained(GPU, Compiled()), wanted, rtol=1e-3, atol=1e-4)


def test_steps_do_not_wait_for_the_device() -> None:
    pack, clipping, rows = pack_on(GPU), clipping_on(GPU), table(GPU)
    streams = [SeededStreams(0), SeededStreams(1)]
    sampler = AheadSampler(PoissonSampler(streams, 300, 40), GPU)
    noise, seen = NoiseSource(streams, pack.size, GPU, torch.float32), Diagnostics(2, GPU)

    def step(number: int) -> None:
        pack.sums.zero_()
        for part in rows.chunks(sampler.batch(number), 1000):
            add_clipped_sums(pack, part, cross_entropy, clipping, seen)
        pack.sums.add_(noise.draw(number))

    for number in range(8):
        step(number)
    waited = float(pack.sums.norm())
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(8):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(pack.sums.norm()) == pytest.approx(waited, rel=1e-4)


def test_noise_of_steps_and_trials_is_independent_and_standard() -> None:
    """False failures: each of the three statements fails by chance less than once in 10^6 seeds."""
    noise = NoiseSource([SeededStreams(0), SeededStreams(1)], 5000, GPU, torch.float32)
    draws = torch.cat([noise.draw(step).double().cpu() for step in range(20)])
    assert float(draws.var()) == pytest.approx(1.0, abs=5 * (2 / draws.numel()) ** 0.5)
    related = torch.corrcoef(draws) - torch.eye(len(draws), dtype=torch.float64)
    assert float(related.abs().max()) < 6.5 / 5000**0.5
    assert len(draws.flatten().unique()) > 0.99 * draws.numel()


@pytest.mark.parametrize("terms", [64, 1024, 16384])
def test_an_accumulator_of_short_products_errs_no_more_than_is_assumed(terms: int) -> None:
    """`precision.py` states the assumption; numbers of one sign make every addition err in one direction."""
    draw = torch.Generator().manual_seed(terms)
    for signed in (False, True):
        a, b = (torch.rand(4, 32, terms, generator=draw).sub_(0.5 * signed).bfloat16() for _ in range(2))
        exact, sizes = a.double() @ b.double().mT, a.double().abs() @ b.double().abs().mT
        found = precision.product(a.to(GPU), b.to(GPU).mT).double().cpu()
        assert float(((found - exact).abs() / sizes).max()) <= terms / 8 * 2**-23


@pytest.mark.parametrize("program", [None, Captured, Compiled])
def test_short_products_keep_the_bound(program: type[Compiled] | None) -> None:
    """Sharp: every gradient is far beyond the bound."""
    pack, rows = pack_on(GPU), table(GPU)
    pack.work_in(torch.bfloat16)
    bounds, function = Clipping(torch.full((1, 2), 1e-3, device=GPU)), sum_clipped if program is None else program()
    for row in range(10):
        pack.sums.zero_()
        part = (50 * rows.x[None, row : row + 1], rows.y[None, row : row + 1], None)
        add_clipped_sums(pack, part, cross_entropy, bounds, Diagnostics(2, GPU), function)
        assert bool((pack.sums.norm(dim=1) <= 1e-3 * (1 + 1e-5)).all())


def test_rounded_products_stay_inside_the_passes() -> None:
    pack, exact = pack_on(GPU), pack_on(GPU)
    pack.work_in(None, rounded_products=True)
    x, y = table(GPU).x[None, :20], table(GPU).y[None, :20]
    for one in (pack, exact):
        add_clipped_sums(one, (x, y, None), cross_entropy, None, Diagnostics(2, GPU))
    torch.testing.assert_close(pack.sums, exact.sums, rtol=0.05, atol=0.05)
    assert not torch.backends.cuda.matmul.allow_tf32


def test_rounded_products_keep_the_bound_of_a_standardised_convolution() -> None:
    """Sharp, as in `test_precision.py`: every gradient is far beyond the bound."""
    pack = Pack(
        lambda: nn.Sequential(WeightStandardisedConv2d(1, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 144, 10)),
        [0], Placement(GPU),
    )  # fmt: skip
    pack.work_in(None, rounded_products=True)
    rows, clipping = table(GPU), Clipping(torch.full((2, 1), 1e-3, device=GPU), flat=False)
    for row in range(10):
        pack.sums.zero_()
        part = (50 * rows.x[None, row : row + 1], rows.y[None, row : row + 1], None)
        add_clipped_sums(pack, part, cross_entropy, clipping, Diagnostics(1, GPU))
        for layer in range(2):
            assert float(pack.sums[0, pack.group_of == layer].double().norm()) <= 1e-3 * (1 + 1e-5)


def test_a_recipe_trains_there_and_costs_the_same(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        loaded = load_recipe("quickstart", (f"runtime.device={device}", "repeats=2"))
        found[device] = store.read_document(loop.run(resolve_auto(loaded), loop.Options(tmp_path / device)))
    assert found["cuda"]["privacy"]["epsilon"] == found["cpu"]["privacy"]["epsilon"]
    accuracies = [found[device]["metrics"]["test_accuracy"]["mean"] for device in ("cpu", "cuda")]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)
