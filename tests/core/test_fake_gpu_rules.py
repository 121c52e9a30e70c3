"""What runs on a GPU, and what must not, on one that is made of a CPU: captures, waits, memory; and that it tells.

Not here: whole trainings (`test_fake_gpu.py`).
"""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpsgd_cli.trials
from dpsgd_cli.core import memory
from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.isolation import check_examples_stay_apart, stand_in_rows
from dpsgd_cli.core.losses import cross_entropy
from dpsgd_cli.core.modules import WeightStandardisedConv2d
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.problems import rows as problem_rows
from dpsgd_cli.core.processes import Processes, Team
from dpsgd_cli.core.replay import Graphs, Replayer
from dpsgd_cli.core.sampling import PoissonSampler
from dpsgd_cli.core.streamed import StreamedTable
from dpsgd_cli.core.streams import SeededStreams
from dpsgd_cli.core.tensors import Rows
from dpsgd_cli.data.on_disk import DiskRows, Selection, Stored
from dpsgd_cli.errors import ModelError
from tests.core import test_gpu
from tests.core.fake_cuda import MEMORY, installed
from tests.core.fake_gpu import PLACE, Gpu, OnGpu

CLASSES = 3
PLACE_THERE = Place(torch.device("cuda"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with installed(monkeypatch) as device:
        yield device


def streamed(device: torch.device, folder: Path) -> StreamedTable:
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.random((40, 6), np.float32))
    np.save(folder / "y.npy", np.arange(40) % CLASSES)
    features, labels = (DiskRows(Stored(folder / name), Selection(40)) for name in ("x.npy", "y.npy"))
    return StreamedTable.open(features, labels, False, device, torch.float32)


def test_rows_from_disk_come_without_waiting(gpu: Gpu, tmp_path: Path) -> None:
    table, streams = streamed(torch.device("cuda"), tmp_path), [SeededStreams(0), SeededStreams(1)]
    ahead, plain = table.ahead(PoissonSampler(streams, 40, 7)), PoissonSampler(streams, 40, 7)
    here = streamed(torch.device("cpu"), tmp_path)
    for step in range(4):
        with gpu.no_waiting():
            pieces = list(table.chunks(ahead.batch(step), 4))
        for ours, theirs in zip(pieces, here.chunks(plain.batch(step), 4), strict=True):
            assert all(isinstance(x, OnGpu) for x in ours)
            assert all(
                torch.equal(x.cpu(), y) for x, y in zip(ours, theirs, strict=True) if x is not None and y is not None
            )


def test_rows_that_fit_do_not_count_what_libraries_keep(gpu: Gpu) -> None:
    """The control: without a run before the first measurement one row would seem to take nothing."""
    pack, x = packed(gpu), torch.zeros(4, 6, device="cuda")
    most = memory.rows_that_fit(pack, x)
    few, more = (memory._peak(pack, torch.zeros(rows, 6, device="cuda")) for rows in (200, 400))
    assert most == pytest.approx(0.7 * (MEMORY - gpu.held) / ((more - few) / 200), rel=0.2)
    assert gpu.workspaces
    gpu.workspaces.clear()
    cold, warm = (memory._peak(pack, torch.zeros(rows, 6, device="cuda")) for rows in (16, 32))
    assert cold > warm


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], nn.Module]]] = {
    "tokens": ((4,), lambda: nn.Sequential(nn.Embedding(4, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, CLASSES))),
    "sequence": ((4, 6), lambda: nn.Sequential(nn.Linear(6, 2), nn.Flatten(), nn.Linear(8, CLASSES))),
    "conv1d": ((2, 6), lambda: nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, CLASSES))),
    "groups": ((4, 3, 3), lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, CLASSES))),
    "norms": (
        (4,), lambda: nn.Sequential(nn.LayerNorm(4), nn.ReLU(inplace=True), nn.RMSNorm(4), nn.Linear(4, CLASSES))
    ),
    "standardised": (
        (2, 4, 4), lambda: nn.Sequential(WeightStandardisedConv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, CLASSES))
    ),
    "fallback": ((4,), lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, CLASSES))),
}  # fmt: skip


def packed(gpu: Gpu, trials: int = 2) -> Pack:
    del gpu
    return Pack(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES)), [0, 1][:trials], PLACE_THERE, True
    )


def rows(count: int, seed: int = 0) -> Rows:
    generator = torch.Generator()
    generator.manual_seed(seed)
    x, y = torch.rand(1, count, 6, generator=generator), torch.randint(0, CLASSES, (1, count), generator=generator)
    return x.to("cuda"), y.to("cuda"), None


def bounds() -> Clipping:
    return Clipping(torch.full((1, 2), 0.5, device="cuda"))


@pytest.mark.parametrize("layer", LAYERS, ids=LAYERS)
@pytest.mark.parametrize("clips", ["flat", "per-layer", "none"])
def test_every_rule_from_a_graph(gpu: Gpu, layer: str, clips: str) -> None:
    """Masked rows and a record that is not finite, in a second batch that the graph was not captured from."""
    shape, build = LAYERS[layer]
    batches = []
    for seed in range(2):
        generator = torch.Generator()
        generator.manual_seed(seed)
        x = torch.rand(2, 5, *shape, generator=generator)
        x = (x * 4).long() if layer == "tokens" else x
        if seed and layer != "tokens":
            x[0, 2] = torch.inf
        mask = torch.rand(2, 5, generator=generator) < 0.8
        batches.append((x, torch.randint(0, CLASSES, (2, 5), generator=generator), mask))
    found = []
    for device in ("cpu", "cuda"):
        pack = Pack(build, [0, 1], Place(torch.device(device)))
        bound = torch.full((1 if clips == "flat" else len(pack.layers), 2), 0.2, device=device)
        clipping = None if clips == "none" else Clipping(bound, clips == "flat")
        replayer = Replayer(pack, cross_entropy, clipping, Graphs()) if device == "cuda" else None
        for x, y, mask in batches:
            batch = (x.to(device), y.to(device), mask.to(device))
            if replayer is None:
                add_clipped_sums(pack, batch, cross_entropy, clipping, Diagnostics(2, torch.device(device)))
            else:
                replayer.add(batch, Diagnostics(2, PLACE))
        found.append(pack.sums.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6, equal_nan=True)
    assert (gpu.captures, gpu.replays, gpu.refused) == (1, 2, [])


def test_all_captures_share_a_stream_and_a_pool(gpu: Gpu) -> None:
    replayer = Replayer(packed(gpu), cross_entropy, bounds(), Graphs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in range(1, 7):
            replayer.add(rows(count), Diagnostics(2, PLACE))
    assert gpu.captures == 6
    assert gpu.pools[0] is None
    assert len(set(gpu.pools[1:])) == 1
    # of the thread that calls and the one of backward, on the stream of captures
    assert len(gpu.workspaces) == 2


def test_each_pass_has_a_leaf_of_its_own(gpu: Gpu) -> None:
    """One that outlived its pass would end the next on the stream of its first use, which no capture may wait for."""
    pack, leaves = packed(gpu), []
    for _ in range(2):
        add_clipped_sums(pack, rows(4), cross_entropy, bounds(), Diagnostics(2, PLACE))
        leaves.append(pack.session.anchor)
    check_examples_stay_apart(pack, stand_in_rows((6,), pack.values))
    leaves.append(pack.session.anchor)
    assert len({id(leaf) for leaf in leaves}) == 3
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in leaves)


def test_pinning_on_another_thread_spoils_no_capture(gpu: Gpu) -> None:
    """As reading ahead does; the control is a capture that forbids it to every thread."""
    failed: list[BaseException] = []

    def pin() -> None:
        try:
            torch.zeros(3).pin_memory()
        except RuntimeError as error:
            failed.append(error)

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=pin)
        thread.start()
        thread.join()
        return cross_entropy(outputs, labels)

    Replayer(packed(gpu), loss, bounds(), Graphs()).add(rows(4), Diagnostics(2, PLACE))
    assert (gpu.captures, failed) == (1, [])
    with pytest.raises(RuntimeError, match="previous error"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        loss(torch.zeros(1, 1, 3, device="cuda"), torch.zeros(1, 1, device="cuda", dtype=torch.long))
    assert len(failed) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_within_a_capture(gpu: Gpu, fails: bool) -> None:
    """A graph that an earlier pack left in it cannot be taken apart there."""
    collects = []

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        collects.append((gpu.capturing is not None, gc.isenabled()))
        return cross_entropy(outputs + 0 * torch.rand_like(outputs) if fails else outputs, labels)

    Replayer(packed(gpu), loss, bounds(), Graphs()).add(rows(4), Diagnostics(2, PLACE))
    assert collects[:3] == [(False, True), (False, True), (True, False)]
    assert gc.isenabled()
    assert gpu.captures == (0 if fails else 1)


@pytest.mark.parametrize("ask", ["item", "mask", "draw"])
def test_what_asks_the_host_or_draws_is_not_captured(gpu: Gpu, ask: str) -> None:
    """The control of `not gpu.refused`: steps go on, one operation after the other, on the stream as before."""

    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if ask == "item":
            assert float(outputs.detach().sum()) < 1e9
        elif ask == "mask":
            assert outputs[outputs > -1e9].numel() == outputs.numel()
        else:
            outputs = outputs + 0 * torch.rand_like(outputs)
        return cross_entropy(outputs, labels)

    stream, (one, other) = torch.cuda.current_stream(), (packed(gpu), packed(gpu))
    replayer = Replayer(one, loss, bounds(), Graphs())
    for seed in range(2):
        replayer.add(rows(4, seed), Diagnostics(2, PLACE))
        add_clipped_sums(other, rows(4, seed), cross_entropy, bounds(), Diagnostics(2, PLACE))
    # float64 sums of float32 products
    torch.testing.assert_close(one.sums.cpu(), other.sums.cpu(), rtol=1.3e-6, atol=1e-5)
    assert (gpu.captures, gpu.replays) == (0, 0)
    # what waits is found before a capture begins, which it would leave in pieces
    assert bool(gpu.refused) == (ask == "draw")
    assert torch.cuda.current_stream() is stream


def test_tensors_of_both_sides_do_not_meet(gpu: Gpu) -> None:
    """The control of everything here: bounds, masks and labels that were left on the host."""
    pack, (x, y, _) = packed(gpu), rows(4)
    here = torch.full((1, 2), 0.5)
    for batch, clipping in [
        ((x, y, None), Clipping(here)),
        ((x, y.cpu(), None), bounds()),
        ((x, y, torch.ones(2, 4, dtype=torch.bool)), bounds()),
    ]:
        with pytest.raises(RuntimeError, match="at least two devices"):
            add_clipped_sums(pack, batch, cross_entropy, clipping, Diagnostics(2, PLACE))


def test_the_device_tells_what_waits(gpu: Gpu) -> None:
    x, here = torch.arange(6.0, device="cuda"), torch.arange(6.0)
    asks: list[Callable[[], object]] = [
        lambda: float(x.sum()), lambda: bool((x > 1).all()), x.tolist, x.cpu, x.nonzero, lambda: x[x > 2],
        lambda: here.to("cuda"), lambda: here.to("cuda", non_blocking=True), lambda: torch.tensor([1.0], device="cuda"),
        lambda: x.copy_(here), lambda: x[[0, 1]], lambda: torch.equal(x, x), torch.cuda.synchronize,
    ]  # fmt: skip
    with gpu.no_waiting():
        for ask in asks:
            with pytest.raises(RuntimeError, match="synchronizing"):
                ask()
        pinned = here.pin_memory()
        y = pinned.to("cuda", non_blocking=True) + x.copy_(pinned, non_blocking=True) + x[torch.zeros_like(x).long()]
    assert y.tolist() == (2 * here).tolist()
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()
    with pytest.raises(TypeError, match="numpy"):
        np.asarray(x)


def test_a_graph_runs_nothing_until_it_is_replayed_and_then_on_the_same_memory(gpu: Gpu) -> None:
    """What the tape is worth: a capture leaves no numbers, and memory given back is noticed."""
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        twice = 2 * x
        total.add_(twice)
    assert total.tolist() == [0.0] * 3
    assert all(math.isnan(value) for value in twice.tolist())
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert twice.tolist() == [2 * value] * 3
    assert total.tolist() == [12.0] * 3
    del x
    with pytest.raises(RuntimeError, match="given back"):
        graph.replay()


def test_writing_a_step_down_for_a_compiler_moves_no_memory_of_a_graph(gpu: Gpu) -> None:
    build = lambda: nn.Sequential(WeightStandardisedConv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, CLASSES))  # noqa: E731
    one, other = (Pack(build, [0], PLACE_THERE) for _ in range(2))
    x, y = torch.rand(1, 5, 1, 3, 3).to("cuda"), torch.zeros(1, 5, dtype=torch.long, device="cuda")
    clipping, replayer = Clipping(torch.ones(1, 1, device="cuda")), None
    replayer = Replayer(one, cross_entropy, clipping, Graphs())
    for _ in range(2):
        replayer.add((x, y, None), Diagnostics(1, PLACE))
        add_clipped_sums(other, (x, y, None), cross_entropy, clipping, Diagnostics(1, PLACE))
        with one.traced_on(torch.zeros_like(one.values), torch.zeros_like(one.sums)):
            pass
    assert gpu.replays == 2
    # float64 sums of float32 products
    torch.testing.assert_close(one.sums.cpu(), other.sums.cpu(), rtol=1.3e-6, atol=1e-5)


def test_examples_are_seen_to_stay_apart_there(gpu: Gpu) -> None:
    pack = packed(gpu)
    check_examples_stay_apart(pack, stand_in_rows((6,), pack.values))
    mixing = Pack(lambda: nn.Sequential(nn.Linear(6, 5), Mixing(), nn.Linear(5, CLASSES)), [0], PLACE_THERE)
    with pytest.raises(ModelError, match="mixes"):
        check_examples_stay_apart(mixing, stand_in_rows((6,), mixing.values))


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=0)


def test_the_gpu_that_a_recipe_names_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(monkeypatch, devices=2):
        assert dpsgd_cli.trials._device("cuda:1", Team()) == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 1


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_each_process_takes_its_own_gpu_before_it_touches_any(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    team = Processes(1, 2, None)
    taken = team.device

    with installed(monkeypatch, devices=2) as gpu:

        def device(wanted: torch.device) -> torch.device:
            assert not gpu.ran
            return taken(wanted)

        monkeypatch.setattr(team, "device", device)
        assert dpsgd_cli.trials._device(asked, team) == torch.device("cuda", 1)
        assert torch.cuda.current_device() == 1
        assert gpu.ran


def test_only_sums_travel_between_gpus(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest goes by way of the hosts: NCCL takes no tensors from there, and gloo none from here."""
    sent: list[tuple[str, str]] = []
    for name in ("reduce", "broadcast"):
        monkeypatch.setattr(
            torch.distributed, name, lambda x, name=name, **_: sent.append((name, x.device.type)), raising=False
        )
    team, seen = Processes(0, 2, None), Diagnostics(2, PLACE)
    team.release(torch.zeros(2, 3, device="cuda"), lambda: None)
    add_clipped_sums(packed(gpu), rows(4), cross_entropy, bounds(), seen)
    assert team.total(seen).sums()["examples"] == [4.0, 4.0]
    assert sent == [("reduce", "cuda"), ("broadcast", "cuda"), ("reduce", "cpu")]


@pytest.mark.parametrize("name", [name for name in dir(test_gpu) if name.startswith("test_") and "recipe" not in name])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_what_is_meant_for_a_real_one_runs_here(gpu: Gpu, name: str) -> None:
    """So that it does not fail there for its own sake; all but the training from a recipe, which takes long."""
    getattr(test_gpu, name)()


def test_rows_are_merged_there_too(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem_rows, "_WORTH_MERGING", 1)
    x, y = torch.arange(12.0).remainder(3).view(12, 1), torch.arange(12) % 2
    ours, theirs = (
        problem_rows.Rows.load(x.to(device), y.to(device), residual=False, bias=True).merged()
        for device in ("cuda", "cpu")
    )
    assert ours.several == theirs.several == 6
    assert ours.z.cpu().sort(dim=0).values.tolist() == theirs.z.sort(dim=0).values.tolist()
