"""Training on a device that is not the host (`elsewhere.py`): what would fail, or wait, on a GPU.

Every case trains twice, with the same noise: on the CPU, and on the device. Weights, diagnostics and metrics agree, no
operation mixes tensors of both sides, and no step after the first epoch's asks the device for a number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import dpsgd_cli.training.build_models
import dpsgd_cli.training.start
from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.data.on_disk import DiskRows, stored
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine import streams
from dpsgd_cli.engine.packing import Placement
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import to_host
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.noise import run as noise
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import evaluation, loop
from dpsgd_cli.training.build_models import make_pack
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import DataOverride, Member, Trials, start
from tests.engine.elsewhere import Rule, installed

RECORDS, CLASSES = 40, 3
KEPT = ("train_x", "train_y", "test_x", "test_y")
UNIFORM = {"kind": "uniform", "initial": 1.0}
Case = tuple[tuple[int, ...], dict[str, Any]]


def case(shape: tuple[int, ...], model: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Inputs of a shape, and what a recipe says of them; `privacy=None` leaves privacy out."""
    method = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 10, "learning_rate": 0.1}
    clipping = {"kind": "flat", "norm": 0.5}
    privacy = {
        "clipping": changes.pop("clipping", clipping),
        "schedule": changes.pop("schedule", UNIFORM),
        "budget": changes.pop("budget", None),
        "delta": 1e-5,
    }
    content: dict[str, Any] = {
        "name": "fake",
        "data": {"path": "fake.csv", "target": "y"},
        "model": model or {"kind": "mlp", "hidden": [5]},
        "method": method | changes.pop("method", {}) if "kind" not in changes.get("method", {}) else changes["method"],
        "privacy": privacy,
        "runtime": changes.pop("runtime", {}) | {"threads": 1},
        "epochs": 2,
        "seed": 3,
        "repeats": 2,
    } | changes
    return shape, {key: value for key, value in content.items() if value is not None}


def started(wanted: Case, device: str, folder: Path | None = None) -> Trials:
    """Ready to train on random records, as `trials.start` makes it; they stay on disk where a folder is given."""
    shape, content = wanted
    made = Recipe.model_validate(content | {"runtime": content["runtime"] | {"device": device}})
    loaded, rng = LoadedRecipe(made, Path(), "fake"), np.random.default_rng(0)
    convex = made.model.kind == "convex"
    x = rng.integers(0, 256, (RECORDS + 13, *shape)).astype(np.float32) / 255
    y = rng.integers(0, 2 if convex else CLASSES, RECORDS + 13)
    classes = tuple(range(2 if convex else CLASSES))
    made_of = data.Dataset("fake", x[:RECORDS], y[:RECORDS], x[RECORDS:], y[RECORDS:], False, classes, (), (), {})
    made_of = dataclasses.replace(made_of, keys=Keys.of_places([RECORDS + 13]))
    if made.data.validation is not None:
        made_of = dataclasses.replace(made_of, validation_x=x[RECORDS:], validation_y=y[RECORDS:])
    if folder is not None:
        held: dict[str, Any] = {name: on_disk(getattr(made_of, name), folder / name) for name in KEPT}
        made_of = dataclasses.replace(made_of, **held)
    plan = None
    if made.privacy is not None:
        pack = make_pack(loaded, shape, 1 if convex else CLASSES, [0], Placement(torch.device("cpu")))
        plan = plan_for(made, Facts(RECORDS, groups=len(pack.layers), feature_bound=math.sqrt(7)))
    return start([Member(resolve_auto(loaded), plan)], override=DataOverride(made_of))


def on_disk(rows: np.ndarray, place: Path) -> DiskRows:
    np.save(place.with_suffix(".npy"), rows)
    return DiskRows(stored(place.with_suffix(".npy")))


def trained(wanted: Case, device: str, gpu: Rule | None = None) -> tuple[torch.Tensor, list[Any]]:
    """Weights, and what every epoch's record says; with `gpu`, no step of the second epoch may wait."""
    trials, history = started(wanted, device), []
    for epoch in range(min(2, trials.method.epochs)):
        with gpu.no_asking() if gpu is not None and epoch else nullcontext():
            seen = trials.method.run_epoch(epoch)
        found = evaluation.record(trials, epoch, seen, True)
        history.append((found.metrics, found.counts))
    theory = trials.method.findings()
    for row in [] if theory is None else [*theory.claimed, *theory.measured]:
        history.append(({name: [value] for name, value in row.items() if isinstance(value, float)}, {}))
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
    # a block of noise for every step
    monkeypatch.setattr(noise, "BLOCK_ELEMENTS", 1)
    monkeypatch.setattr(dpsgd_cli.training.start, "feature_bound", lambda recipe, known: math.sqrt(7))
    monkeypatch.setattr(dpsgd_cli.training.build_models, "check_model", lambda *rest: None)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rule]:
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
    "one by one": case((6,), {"kind": "convex", "radius": 1.0}, method={"batching": "fixed", "batch_size": 1}),
    "cnn": case(IMAGES, {"kind": "cnn"}),
    "cnn, cifar10": case((3, 8, 8), {"kind": "cnn", "layout": "cifar10"}),
    "copies": case(IMAGES, {"kind": "cnn"}, data=AUGMENT),
    "wrn": case(
        (3, 8, 8),
        {"kind": "wrn", "depth": 10, "width": 1, "groups": 4},
        method={"batching": "full", "batch_size": None},
        repeats=1,
    ),
    "bfloat16": case((6,), runtime={"dtype": "bfloat16"}),
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
    assert gpu.ran


CONVEX = {"kind": "convex", "radius": 1.0, "l2": 0.1}
BUDGET = {"budget": {"epsilon": 1.0, "delta": 1e-5}}
CHOICE = {
    "kind": "private-selection", "batching": "shuffle", "batch_size": 5, "learning_rate": 0.1, "epsilon": 1.0,
    "candidates": [{"kind": "uniform", "initial": 4.0}, {"kind": "uniform", "initial": 5.0}],
}  # fmt: skip
FOLLOWING = {"kind": "validation", "initial": 4.0, "decay": 0.9, "threshold": 0.01, "period": 1, "average": 1}
VALIDATED = {"path": "fake.csv", "target": "y", "validation": {"records": 8, "public": True}}
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
    "private-selection": case(
        (6,),
        method=CHOICE,
        privacy={
            "adjacency": "zero-out",
            "clipping": {"kind": "flat", "norm": 0.5},
            "budget": {"rho": 0.3},
            "delta": 1e-5,
        },
        epochs="until-budget",
    ),
    "validation": case(
        (6,),
        method={"batching": "shuffle"},
        schedule=FOLLOWING,
        data=VALIDATED,
        budget={"rho": 1.0},
        epochs="until-budget",
    ),
    "majority": case((6,), CONVEX, method={"kind": "majority"}, privacy=BUDGET, epochs=None),
}


@pytest.mark.parametrize("wanted", WHOLE.values(), ids=WHOLE)
def test_other_methods_release_what_they_release_on_a_cpu(wanted: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, history = trained(wanted, "cpu")
    with installed(monkeypatch) as gpu:
        ours, told = trained(wanted, "cuda")
    torch.testing.assert_close(ours, weights, rtol=1e-3, atol=1e-4)
    assert_close(told, history, 1e-3)
    assert gpu.ran


def test_a_snapshot_goes_to_pinned_memory_and_is_waited_for(gpu: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def pinned(self: torch.Tensor) -> torch.Tensor:
        said.append("pinned")
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pinned)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: said.append(f"waited for {device}"))
    kept = to_host(torch.arange(3.0, device="cuda"))
    assert said == ["pinned", "waited for cuda:0"]
    assert kept.device.type == "cpu" and kept.tolist() == [0, 1, 2]


def test_trials_that_are_over_stay_as_they_are_and_nothing_waits(gpu: Rule) -> None:
    method = started(case((6,)), "cuda").method
    method.run_epoch(0)
    assert isinstance(method, DpSgd)
    method.lengths[0] = 1
    before = method.output.cpu()
    with gpu.no_asking():
        method.run_epoch(1)
    after = method.output.cpu()
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize("least", [0, streams.WORTH_A_KEYSTREAM], ids=["drawn there", "fetched"])
def test_secure_noise_is_had_without_waiting(gpu: Rule, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seedless trials draw from the operating system: a key of the device, or digits of the host."""
    monkeypatch.setattr(streams, "WORTH_A_KEYSTREAM", least)
    method = started(case((6,), seed=None), "cuda").method
    method.run_epoch(0)
    before = gpu.ran
    with gpu.no_asking():
        method.run_epoch(1)
    assert gpu.ran > before
    assert (gpu.named["masked_scatter_"] > 0) == (least == 0)
    assert not bool(torch.isnan(method.output).any())


@pytest.mark.parametrize("batching", ["poisson", "shuffle"])
def test_rows_that_stay_on_disk_train_the_same_weights(gpu: Rule, tmp_path: Path, batching: str) -> None:
    """They are read by another thread."""
    wanted = case((6,), method={"batching": batching}, runtime={"micro_batch": 7})
    found = []
    for folder in (None, tmp_path):
        method = started(wanted, "cuda", folder).method
        method.run_epoch(0)
        with gpu.no_asking():
            method.run_epoch(1)
        found.append(method.output.cpu())
    torch.testing.assert_close(*found)


def test_a_checkpoint_on_the_host_is_taken_up(gpu: Rule) -> None:
    """A snapshot makes no second copy of weights, optimizer and average on the device."""
    wanted = case((6,), method={"optimizer": {"kind": "adam"}, "averaging": {"kind": "ema"}})
    whole, stopped, resumed = (started(wanted, "cuda").method for _ in range(3))
    for epoch in range(2):
        whole.run_epoch(epoch)
    stopped.run_epoch(0)
    gpu.named.clear()
    kept = stopped.state()
    assert gpu.named == {"detach": 4, "copy_": 4}
    assert {name for name, x in kept.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"} == {
        "values", "update.first", "update.second", "average",
    }  # fmt: skip
    stopped.run_epoch(1)
    resumed.load_state(kept)
    resumed.run_epoch(1)
    torch.testing.assert_close(resumed.output.cpu(), whole.output.cpu(), rtol=0, atol=0)


def test_a_whole_run_writes_its_results(gpu: Rule, tmp_path: Path) -> None:
    loaded = load_recipe("quickstart", ("runtime.device=cuda", "repeats=2", "epochs=2", "save_model=true"))
    directory = loop.run(resolve_auto(loaded), loop.Options(tmp_path))
    document = store.read_document(directory)
    assert document["provenance"]["device"] == "cuda:0"
    assert 0 < document["metrics"]["test_accuracy"]["mean"] <= 1
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    assert all(bool(torch.isfinite(x).all()) for x in weights.values())


def test_tensors_of_both_sides_do_not_meet(gpu: Rule) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    for mix in (lambda: here + there, lambda: there @ here, lambda: torch.cat([here, there])):
        with pytest.raises(RuntimeError, match="cuda:0 and cpu meet"):
            mix()
    assert (there + 1.0).tolist() == [2.0] * 3


def test_what_asks_the_device_is_told(gpu: Rule) -> None:
    there = torch.arange(3.0, device="cuda")
    asking = (there.tolist, there.cpu, lambda: bool(there.sum()), lambda: there[there > 1], lambda: there[[0, 1]])
    for ask in asking:
        ask()
        with pytest.raises(RuntimeError, match="the host waits"), gpu.no_asking():
            ask()
