"""Training on a GPU that is made of a CPU (`fake_gpu.py`): what would fail, or wait, on a real one.

Every case trains twice, with the same noise: on the CPU, and on the device, small steps from captured graphs. Weights,
diagnostics and metrics agree, no capture was given up, and no step after the first epoch's waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpsgd_cli.trials
from dpsgd_cli import data, experiment
from dpsgd_cli.core import memory, noise
from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.isolation import check_examples_stay_apart, stand_in_rows
from dpsgd_cli.core.losses import cross_entropy
from dpsgd_cli.core.modules import WeightStandardisedConv2d
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.replay import Graphs, Replayer
from dpsgd_cli.core.sampling import PoissonSampler
from dpsgd_cli.core.streamed import StreamedTable
from dpsgd_cli.core.streams import SeededStreams
from dpsgd_cli.core.tensors import Rows
from dpsgd_cli.data.on_disk import DiskRows, Selection, Stored
from dpsgd_cli.errors import ModelError
from dpsgd_cli.methods.dp_sgd import DpSgd
from dpsgd_cli.privacy.planning import Facts, plan_for
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.trials import Member, Trials, make_pack, start
from tests.core.fake_cuda import MEMORY, installed
from tests.core.fake_gpu import PLACE, Gpu, OnGpu

RECORDS, CLASSES = 40, 3
PLACE_THERE = Place(torch.device("cuda"))
UNIFORM = {"kind": "uniform", "initial": 1.0}
Case = tuple[tuple[int, ...], dict[str, Any]]


def case(shape: tuple[int, ...], model: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Inputs of a shape, and what a recipe says of them; `privacy=None` leaves privacy out."""
    method = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 10, "learning_rate": 0.1}
    clipping = {"kind": "flat", "norm": 0.5}
    privacy = {
        "clipping": changes.pop("clipping", clipping),
        "schedule": changes.pop("schedule", UNIFORM),
        "delta": 1e-5,
    }
    content: dict[str, Any] = {
        "name": "fake",
        "data": {"path": "fake.csv", "target": "y"},
        "model": model or {"kind": "mlp", "hidden": [5]},
        "method": method | changes.pop("method", {}) if "kind" not in changes.get("method", {}) else changes["method"],
        "privacy": privacy,
        "runtime": changes.pop("runtime", {}) | {"threads": 1, "compile": False},
        "epochs": 2,
        "seed": 3,
        "repeats": 2,
    } | changes
    return shape, {key: value for key, value in content.items() if value is not None}


def started(wanted: Case, device: str) -> Trials:
    """Ready to train on random records, as `trials.start` makes it."""
    shape, content = wanted
    made = Recipe.model_validate(content | {"runtime": content["runtime"] | {"device": device}})
    loaded, rng = LoadedRecipe(made, Path(), "fake"), np.random.default_rng(0)
    convex = made.model.kind == "convex"
    x = rng.random((RECORDS + 13, *shape), dtype=np.float32)
    y = rng.integers(0, 2 if convex else CLASSES, RECORDS + 13)
    classes = tuple(range(2 if convex else CLASSES))
    made_of = data.Dataset(
        "fake", x[:RECORDS], y[:RECORDS], x[RECORDS:], y[RECORDS:], False, classes, (), (), {}
    )  # fmt: skip
    plan = None
    if made.privacy is not None:
        pack = make_pack(loaded, shape, 1 if convex else CLASSES, [0], Place(torch.device("cpu")))
        plan = plan_for(made, Facts(RECORDS, groups=len(pack.layers), feature_bound=math.sqrt(7)))
    return start([Member(loaded, plan)], stand_in=made_of)


def trained(wanted: Case, device: str, gpu: Gpu | None = None) -> tuple[torch.Tensor, list[Any]]:
    """Weights, and what every epoch's record says; with `gpu`, no step of the second epoch may wait."""
    trials, history = started(wanted, device), []
    for epoch in range(min(2, trials.method.epochs)):
        with gpu.no_waiting() if gpu is not None and epoch else nullcontext():
            seen = trials.method.run_epoch(epoch)
        found = experiment._record(trials, epoch, seen, True)
        history.append((found.metrics, found.counts))
    return trials.method.output.cpu(), history


def assert_close(ours: list[Any], theirs: list[Any], within: float) -> None:
    """Metrics and diagnostics of every epoch."""
    for own, other in zip(ours, theirs, strict=True):
        for named, numbers in zip(own, other, strict=True):
            assert named == {name: pytest.approx(value, rel=within, abs=within) for name, value in numbers.items()}


@pytest.fixture(autouse=True)
def same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's seeded noise is another stream than a CPU's; here both draw as the former."""

    def normal(self: SeededStreams, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(out.device)
        generator.manual_seed(self._key(purpose, counter) & (2**63 - 1))
        return out.normal_(generator=generator)

    monkeypatch.setattr(SeededStreams, "normal", normal)
    monkeypatch.setattr(noise, "_PARTS", {})
    monkeypatch.setattr(dpsgd_cli.trials, "feature_bound", lambda recipe, base: math.sqrt(7))
    monkeypatch.setattr(dpsgd_cli.trials, "check_examples_stay_apart", lambda pack, rows: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with installed(monkeypatch) as device:
        yield device


PER_LAYER = {"kind": "per-layer", "norm": 0.3}
IMAGES = (1, 16, 16)
AUGMENT = {"path": "fake.npz", "augment": {"copies": 2, "crop": 2, "flip": True}}
SGD = {"kind": "sgd", "batching": "poisson", "batch_size": 10, "learning_rate": 0.1}
STEPWISE = {
    "mlp": case((6,)),
    "shuffle": case((6,), method={"batching": "shuffle"}),
    "full": case((6,), method={"batching": "full", "batch_size": None}),
    "pieces": case((6,), runtime={"micro_batch": 4}),
    "per-layer": case((6,), clipping=PER_LAYER),
    "as-published": case((6,), clipping=PER_LAYER | {"noise": "as-published"}),
    "sgd": case((6,), method=SGD, privacy=None),
    "adam": case((6,), method={"optimizer": {"kind": "adam"}, "weight_decay": 0.01}),
    "momentum, ema": case((6,), method={"optimizer": {"kind": "sgd", "momentum": 0.9}, "averaging": {"kind": "ema"}}),
    "tail": case((6,), method={"averaging": {"kind": "tail", "fraction": 0.5}}),
    "rates": case((6,), method={"learning_rate": {"kind": "step", "initial": 0.2, "decay": 0.9, "period": 1}}),
    "folds": case((6,), folds=4, repeats=1, method={"batch_size": 6}),
    "linear": case((6,), {"kind": "linear"}),
    "convex": case((6,), {"kind": "convex", "radius": 1.0, "l2": 0.01}),
    "one by one": case((6,), {"kind": "convex", "radius": 1.0}, method={"batching": "single", "batch_size": None}),
    "cnn": case(IMAGES, {"kind": "cnn"}),
    "cnn, cifar10": case((3, 8, 8), {"kind": "cnn", "layout": "cifar10"}),
    "scattering-mnist": case((4, 4, 4), {"kind": "cnn", "layout": "scattering-mnist"}),
    "scattering-cifar10": case((4, 4, 4), {"kind": "cnn", "layout": "scattering-cifar10"}),
    "copies": case(IMAGES, {"kind": "cnn"}, data=AUGMENT),
    "wrn": case(
        (3, 8, 8),
        {"kind": "wrn", "depth": 10, "width": 1, "groups": 4},
        method={"batching": "full", "batch_size": None},
        repeats=1,
    ),
    "vit": case((1, 8, 8), {"kind": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4}),
    "bfloat16": case(
        (1, 8, 8), {"kind": "vit", "dim": 8, "depth": 1, "heads": 2, "patch": 4}, runtime={"dtype": "bfloat16"}
    ),
    "tf32": case((6,), runtime={"dtype": "tf32"}),
    "float64": case((6,), runtime={"dtype": "float64"}),
}


@pytest.mark.parametrize("wanted", STEPWISE.values(), ids=STEPWISE)
def test_trains_as_on_a_cpu_and_does_not_wait(wanted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, history = trained(wanted, "cpu")
    with installed(monkeypatch) as gpu:
        ours, told = trained(wanted, "cuda", gpu)
    # kernels of attention round differently
    rounded = wanted[1]["runtime"].get("dtype") == "bfloat16"
    torch.testing.assert_close(ours, weights, rtol=1e-4, atol=2e-3 if rounded else 1e-5)
    assert_close(told, history, 1e-2 if rounded else 1e-4)
    single = wanted[1]["method"]["batching"] == "single"
    assert (gpu.replays == 0) if single else (gpu.replays >= 2 * gpu.captures > 0)
    assert not gpu.refused


CONVEX = {"kind": "convex", "radius": 1.0, "l2": 0.1}
BUDGET = {"budget": {"epsilon": 1.0, "delta": 1e-5}}
AGD = {"kind": "dp-agd", "step_candidates": 4}
WHOLE = {
    "dp-gd": case((6,), CONVEX, method={"kind": "dp-gd", "learning_rate": 0.1, "averaging": {"kind": "all"}}),
    "dp-gd, network": case((6,), method={"kind": "dp-gd", "learning_rate": 0.1}),
    "gd": case((6,), CONVEX, method={"kind": "gd", "learning_rate": "theorem"}, privacy=None),
    "gd, hinge": case((6,), CONVEX | {"loss": "hinge"}, method={"kind": "gd", "learning_rate": 0.1}, privacy=None),
    "gd, folds": case((6,), CONVEX, method={"kind": "gd", "learning_rate": 0.1}, privacy=None, folds=4, repeats=1),
    "dp-agd": case((6,), CONVEX, method=AGD, privacy=BUDGET, epochs=None),
    "dp-agd, hinge": case((6,), CONVEX | {"loss": "hinge"}, method=AGD, privacy=BUDGET, epochs=None),
    "dp-agd, network": case((6,), method=AGD, privacy=BUDGET, epochs=None),
    "dp-agd, samples": case((6,), CONVEX, method=AGD | {"sample": 20}, privacy=BUDGET, epochs=None),
    "objective": case(
        (6,), CONVEX | {"radius": None}, method={"kind": "objective-perturbation"}, privacy=BUDGET, epochs=None
    ),
    "output": case((6,), CONVEX, method={"kind": "output-perturbation", "steps": 3}, privacy=BUDGET, epochs=None),
    "privgene": case(
        (6,),
        CONVEX,
        method={"kind": "privgene", "rounds": 2, "population": 9, "survivors": 2},
        privacy=BUDGET,
        epochs=None,
    ),
    "non-private": case((6,), CONVEX, method={"kind": "non-private"}, privacy=None, epochs=None),
    "majority": case((6,), CONVEX, method={"kind": "majority"}, privacy=BUDGET, epochs=None),
}


@pytest.mark.parametrize("wanted", WHOLE.values(), ids=WHOLE)
def test_other_methods_release_what_they_release_on_a_cpu(wanted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, history = trained(wanted, "cpu")
    with installed(monkeypatch) as gpu:
        ours, told = trained(wanted, "cuda")
    torch.testing.assert_close(ours, weights, rtol=1e-3, atol=1e-4)
    assert_close(told, history, 1e-3)
    assert not gpu.refused


def test_trials_that_are_over_stay_as_they_are_and_nothing_waits(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    method = started(case((6,)), "cuda").method
    method.run_epoch(0)
    monkeypatch.setattr(DpSgd, "lengths", property(lambda self: [1, 2]))
    before = method.output.cpu()
    with gpu.no_waiting():
        method.run_epoch(1)
    after = method.output.cpu()
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_secure_noise_is_fetched_without_waiting(gpu: Gpu) -> None:
    """Seedless trials draw from the operating system, on the host."""
    method = started(case((6,), seed=None), "cuda").method
    method.run_epoch(0)
    uploads = len(gpu.ran)
    with gpu.no_waiting():
        method.run_epoch(1)
    assert len(gpu.ran) > uploads
    assert not bool(torch.isnan(method.output).any())


def test_a_checkpoint_on_the_host_is_taken_up(gpu: Gpu) -> None:
    wanted = case((6,), method={"optimizer": {"kind": "adam"}, "averaging": {"kind": "ema"}})
    whole, stopped, resumed = (started(wanted, "cuda").method for _ in range(3))
    for epoch in range(2):
        whole.run_epoch(epoch)
    stopped.run_epoch(0)
    kept = stopped.state()
    resumed.load_state({name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in kept.items()})
    resumed.run_epoch(1)
    torch.testing.assert_close(resumed.output.cpu(), whole.output.cpu(), rtol=0, atol=0)


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


def test_all_captures_share_a_stream_and_a_pool(gpu: Gpu) -> None:
    replayer = Replayer(packed(gpu), cross_entropy, bounds(), Graphs())
    for count in range(1, 7):
        replayer.add(rows(count), Diagnostics(2, PLACE))
    assert gpu.captures == 6
    assert gpu.pools[0] is None
    assert len(set(gpu.pools[1:])) == 1
    # of the thread that calls and the one of backward, on the stream of captures
    assert len(gpu.workspaces) == 2


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
    torch.testing.assert_close(one.sums.cpu(), other.sums.cpu())
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
    torch.testing.assert_close(one.sums.cpu(), other.sums.cpu())


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
        dpsgd_cli.trials._device("cuda:1")
        assert torch.cuda.current_device() == 1
