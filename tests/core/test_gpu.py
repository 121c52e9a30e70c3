"""What only a GPU can show: captured graphs, epochs without waiting, and the same sums as on a CPU."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli import experiment
from dpsgd_cli.core import models, precision
from dpsgd_cli.core.ahead import AheadSampler
from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.layers.forms import Chooser
from dpsgd_cli.core.losses import cross_entropy
from dpsgd_cli.core.memory import rows_that_fit
from dpsgd_cli.core.modules import WeightStandardisedConv2d
from dpsgd_cli.core.noise import NoiseSource
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.replay import Graphs, Replayer
from dpsgd_cli.core.sampling import PoissonSampler
from dpsgd_cli.core.streams import SeededStreams
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.recipe import schema
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def network() -> nn.Module:
    return models.cnn(schema.CnnModel(), (1, 14, 14), 10)


def table(device: torch.device) -> Table:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1, 14, 14, generator=generator).numpy()
    return Table.load(x, torch.randint(0, 10, (300,), generator=generator).numpy(), False, device, torch.float32)


def pack_on(device: torch.device) -> Pack:
    precision.keep_sums_exact()
    return Pack(network, [0, 1], Place(device), shares_input=True)


def clipping_on(device: torch.device) -> Clipping:
    return Clipping(torch.tensor([[0.1, 1.0]], device=device))


def trained(device: torch.device, replays: bool, steps: int = 12) -> Tensor:
    """Weights after some Poisson steps with noise that was drawn on the CPU."""
    pack, clipping, rows = pack_on(device), clipping_on(device), table(device)
    streams = [SeededStreams(0), SeededStreams(1)]
    sampler = AheadSampler(PoissonSampler(streams, 300, 40), device)
    noise = NoiseSource(streams, pack.size, CPU, torch.float32)
    replayer = Replayer(pack, cross_entropy, clipping, Graphs()) if replays else None
    seen = Diagnostics(2, device)
    for step in range(steps):
        pack.sums.zero_()
        for part in rows.chunks(sampler.batch(step), 1000):
            if replayer is None:
                add_clipped_sums(pack, part, cross_entropy, clipping, seen)
            else:
                replayer.add(part, seen)
        pack.values.sub_(pack.sums.add_(noise.draw(step).to(device), alpha=0.01), alpha=0.05)
    assert seen.sums()["examples"][0] > 0
    return pack.values.cpu()


def test_graphs_train_the_same_weights_as_a_cpu() -> None:
    wanted = trained(CPU, replays=False)
    torch.testing.assert_close(trained(GPU, replays=False), wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(trained(GPU, replays=True), wanted, rtol=1e-3, atol=1e-4)


def test_a_graph_is_captured_and_not_given_up() -> None:
    pack = pack_on(GPU)
    replayer = Replayer(pack, cross_entropy, clipping_on(GPU), Graphs())
    x, y = table(GPU).x[None, :20], table(GPU).y[None, :20]
    replayer.add((x, y, None), Diagnostics(2, GPU))
    assert [program is not None for program in replayer._programs.values()] == [True]


def test_a_layer_without_a_rule_is_captured_after_passes_on_another_stream() -> None:
    """What its vectorised passes leave to be collected holds their autograd graphs, and those their streams."""
    pack = Pack(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(196, 8), nn.PReLU(8), nn.Linear(8, 10)), [0, 1], Place(GPU)
    )
    batch = (table(GPU).x[None, :20].expand(2, -1, -1, -1, -1), table(GPU).y[None, :20], None)
    add_clipped_sums(pack, batch, cross_entropy, clipping_on(GPU), Diagnostics(2, GPU))
    wanted = pack.sums.clone()
    replayer = Replayer(pack, cross_entropy, clipping_on(GPU), Graphs())
    pack.sums.zero_()
    replayer.add(batch, Diagnostics(2, GPU))
    assert [program is not None for program in replayer._programs.values()] == [True]
    torch.testing.assert_close(pack.sums, wanted, rtol=1e-4, atol=1e-6)


def test_graphs_outlive_those_of_another_pack() -> None:
    batch = (table(GPU).x[None, :20], table(GPU).y[None, :20], None)
    packs = [pack_on(GPU), pack_on(GPU)]
    replayers = [Replayer(pack, cross_entropy, clipping_on(GPU), Graphs()) for pack in packs]
    for replayer in replayers:
        replayer.add(batch, Diagnostics(2, GPU))
    wanted = packs[0].sums.clone()
    del replayer, replayers[1], packs[1]
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((1 << 24,), torch.nan, device=GPU)
    packs[0].sums.zero_()
    replayers[0].add(batch, Diagnostics(2, GPU))
    torch.testing.assert_close(packs[0].sums, wanted, rtol=1.3e-6, atol=1e-5)


def test_steps_do_not_wait_for_the_device() -> None:
    pack, clipping, rows = pack_on(GPU), clipping_on(GPU), table(GPU)
    streams = [SeededStreams(0), SeededStreams(1)]
    sampler = AheadSampler(PoissonSampler(streams, 300, 40), GPU)
    noise, seen = NoiseSource(streams, pack.size, GPU, torch.float32), Diagnostics(2, GPU)
    replayer = Replayer(pack, cross_entropy, clipping, Graphs())

    def step(number: int) -> None:
        pack.sums.zero_()
        for part in rows.chunks(sampler.batch(number), 1000):
            replayer.add(part, seen)
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
        [0], Place(GPU),
    )  # fmt: skip
    pack.work_in(None, rounded_products=True)
    rows, clipping = table(GPU), Clipping(torch.full((2, 1), 1e-3, device=GPU), flat=False)
    for row in range(10):
        pack.sums.zero_()
        part = (50 * rows.x[None, row : row + 1], rows.y[None, row : row + 1], None)
        add_clipped_sums(pack, part, cross_entropy, clipping, Diagnostics(1, GPU))
        for layer in range(2):
            assert float(pack.sums[0, pack.group_of == layer].double().norm()) <= 1e-3 * (1 + 1e-5)


def test_one_timed_trial_decides_between_near_forms_and_stays() -> None:
    chooser, ran = Chooser(), []
    forms = (lambda: ran.append("gram"), lambda: ran.append("instantiated"))
    for _ in range(2):
        chooser.pick((5, 10, 10), torch.empty(3, device=GPU), forms)
    assert sorted(ran[:4]) == ["gram", "gram", "instantiated", "instantiated"]
    assert len(ran) == 6
    assert ran[4] == ran[5]


def test_rows_that_fit_are_measured() -> None:
    assert rows_that_fit(pack_on(GPU), table(GPU).x[:4]) > 1000


def test_a_recipe_trains_there_and_costs_the_same(tmp_path: Path) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        loaded = load_recipe("quickstart", (f"runtime.device={device}", "repeats=2"))
        found[device] = store.read_document(experiment.run(loaded, experiment.Options(tmp_path / device)))
    assert found["cuda"]["privacy"]["epsilon"] == found["cpu"]["privacy"]["epsilon"]
    accuracies = [found[device]["metrics"]["test_accuracy"]["mean"] for device in ("cpu", "cuda")]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=0.05)
