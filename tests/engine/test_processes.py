"""Two processes train what one process trains: same batches, one draw of noise, same ledger; and end together."""

from __future__ import annotations

import csv
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dpsgd_cli.batching.run import FullSampler, Sampler, part_of
from dpsgd_cli.engine.processes import Reduction, Team, started_by_a_launcher
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, SharedStreams
from dpsgd_cli.engine.tensors import Batch
from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.noise.correlation import CorrelatedStepNoise
from dpsgd_cli.noise.run import Grid, NoiseSource
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import GRADIENT, OWN, WAYS, Train, WriteRecipe, recipe_writer

ROOT = Path(__file__).parents[2]
SIZE = 4001
ALONE = {
    "single": "method dp-sgd, one record a step trains in one process, not in 2",
    "shuffle-validation": "privacy.schedule validation looks at records between epochs",
    "private-selection": "method private-selection trains in one process, not in 2",
    "dp-agd": "method dp-agd trains in one process, not in 2",
}
TOGETHER = [*(way for way in WAYS if way not in ALONE), "folds", "sgd", "on-disk", "augmented"]
CONVEX: dict[str, Any] = {"data": {"name": "breast-cancer"}, "model": {"kind": "convex"}, "runtime": {"device": "cpu"}}
CASES: dict[str, dict[str, Any]] = {
    **WAYS,
    "folds": {"folds": 3, "data": OWN | {"evaluation": "public"}},
    "secure": {"seed": None},
    "sgd": {"method": GRADIENT | {"kind": "sgd"}, "privacy": None},
    "on-disk": {"data": OWN | {"path": "x.npy", "target": "y.npy", "evaluation": "public"}},
    "augmented": {
        "data": {"name": "digits", "split": {"test": 0.97}, "augment": {"copies": 2, "crop": 1}},
        "model": {"kind": "mlp", "hidden": [4]},
    },
    "single": CONVEX
    | {
        "method": {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1, "learning_rate": 0.1},
        "privacy": {
            "schedule": {"kind": "uniform", "initial": 4},
            "delta": 1e-3,
            "adjacency": "replace-one",
            "accountant": "rdp",
        },
        "epochs": 1,
    },
    "dp-agd": CONVEX
    | {
        "method": {"kind": "dp-agd"},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "accountant": "zcdp"},
        "epochs": "until-budget",
    },
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def side_by_side(command: list[str], cwd: Path, **more: str) -> list[subprocess.CompletedProcess[str]]:
    """The command in two processes that find each other, without a launcher that would end one for the other."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    environment = os.environ | common | {"PYTHONPATH": str(ROOT)} | more
    started = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = []
    for process in started:
        out, err = process.communicate(timeout=120)
        ended.append(subprocess.CompletedProcess(command, process.returncode, out, err))
    return ended


@dataclass(frozen=True)
class Together:
    """The folder of `two_processes.py`, and what each process wrote."""

    folder: Path
    found: list[dict[str, Any]]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Together:
    """All recipes of CASES trained by two processes."""
    folder = tmp_path_factory.mktemp("together")
    write = recipe_writer(folder)
    with np.load(folder / "tiny.npz") as arrays:
        np.save(folder / "x.npy", arrays["x"])
        np.save(folder / "y.npy", arrays["y"])
    for name, sections in CASES.items():
        write(name=name, save_model=True, **sections).rename(folder / f"{name}.yaml")
    for ended in side_by_side([str(Path(__file__).with_name("two_processes.py")), str(folder)], folder):
        assert ended.returncode == 0, ended.stderr
    return Together(folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)])


@pytest.mark.parametrize("case", TOGETHER)
def test_two_processes_train_what_one_trains(together: Together, case: str) -> None:
    """The same ledger to the byte, the same weights to rounding; noise is more than a thousand times that."""
    assert [found["outcomes"][case] for found in together.found] == ["", ""]
    loaded = load_recipe(str(together.folder / f"{case}.yaml"), ())
    alone = loop.run(resolve_auto(loaded), loop.Options(together.folder / "alone"))
    both = together.folder / "together" / alone.name
    assert (both / "ledger.jsonl").read_bytes() == (alone / "ledger.jsonl").read_bytes()
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (both, alone))
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    ours_document, theirs_document = (store.read_document(folder) for folder in (both, alone))
    assert ours_document["privacy"] == theirs_document["privacy"]
    assert ours_document["metrics"].keys() == theirs_document["metrics"].keys()
    for row, other in zip(history(both), history(alone), strict=True):
        assert row["nonprivate_examples"] == other["nonprivate_examples"], "every record of a batch is counted once"


def history(folder: Path) -> list[dict[str, str]]:
    with (folder / "history.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_no_result_but_one(together: Together) -> None:
    """Each recipe has one result, and the processes left nothing else behind."""
    found = sorted(path.name.rpartition("-")[0] for path in (together.folder / "together").iterdir())
    assert found == sorted([*TOGETHER, "secure"])


@pytest.mark.parametrize("case", ALONE)
def test_what_has_no_rule_is_refused_by_all(together: Together, case: str) -> None:
    said = [found["outcomes"][case] for found in together.found]
    assert said[0] == said[1] and said[0].startswith(f"UsageError: {ALONE[case]}")


def test_secure_processes_draw_the_same_batches(together: Together) -> None:
    """And the trials of a pack different ones."""
    first, second = (found["secure"]["drawn"] for found in together.found)
    assert first == second
    steps = first[:3]
    assert steps[0] != steps[1] and steps[0][0] != steps[0][1]
    assert first[3] != first[4]


def test_a_run_without_a_seed_ends_well_on_all(together: Together) -> None:
    """Process 1 draws noise for its own numbers only: `SharedStreams.normal` raises there."""
    assert [found["outcomes"]["secure"] for found in together.found] == ["", ""]


def test_noise_is_drawn_once_in_all(together: Together) -> None:
    """10,000 entries of 1 on each of two processes: mean 2 and deviation 1, to 6 standard errors (2e-9 by chance).

    Noise of each process would have deviation sqrt(2), and a sum that was left out mean 1: both are over 20 such errors
    away.
    """
    sums = np.array([found["secure"]["sums"] for found in together.found])
    assert np.array_equal(sums[0], sums[1])
    assert abs(sums[0].mean() - 2) < 6 / 100
    assert abs(sums[0].std() - 1) < 6 / math.sqrt(2 * 10_000)
    assert "must not draw any" in together.found[1]["secure"]["refused"]
    assert together.found[0]["secure"]["refused"] == ""


def test_process_0_tells_values_and_errors(together: Together) -> None:
    assert together.found[0]["told"] == [{"rank": 0}, "RunError: of process 0"]
    assert together.found[1]["told"] == [{"rank": 0}, "SaidElsewhere: 1"]


def test_an_end_of_one_process_is_the_end_of_all(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    """Process 1 runs out of memory in the third epoch of four and, when that is resumed, is interrupted in the fourth.

    Each time process 0 says why, and keeps the epochs before. One process ends the run as if nothing had happened.
    """
    path = write_recipe(repeats=1, save_model=True, epochs=4)
    script = str(Path(__file__).with_name("two_processes.py"))
    command = ["train", str(path), "--out", "stopped", "--resume"]
    for epoch, how, why, code in ((2, "memory", "out of memory", 1), (3, "interrupt", "interrupted", 130)):
        ended = side_by_side([script, "stop", str(epoch), how, *command], tmp_path)
        assert [one.returncode for one in ended] == [1, code], ended[0].stderr + ended[1].stderr
        assert f"process 1 of 2 failed ({why}" in ended[0].stderr and f"{epoch} of 4 epochs are kept" in ended[0].stderr
        assert f"error: process 1 of 2: {why}" in ended[1].stderr
        assert ended[0].stdout == ended[1].stdout == ""
        assert "Traceback" not in ended[0].stderr + ended[1].stderr
        assert not list((tmp_path / "stopped").glob("tiny-*")), "no result of half a run"
    resumed, whole = (train(path, out=tmp_path / out, resume=out == "stopped") for out in ("stopped", "whole"))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (resumed, whole))
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5)
    assert (resumed / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


def test_torchrun_runs_the_command(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    write_recipe()
    port = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *port, "-m", "dpsgd_cli", "train"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "tiny.yaml", "--out", "out"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("  accuracy ") == 1 and ended.stdout.count("  result ") == 1
    assert [path.name[:5] for path in (tmp_path / "out").iterdir()] == ["tiny-"]


def test_what_process_0_says_no_other_repeats() -> None:
    """An error that all have is said once; one of process 1 alone is said with its name."""
    distributed: Any = torch.distributed
    board = distributed.HashStore()
    first, second = (Team(rank, 2, board) for rank in range(2))
    assert str(first.say_of(DataError("no such file"))) == "no such file"
    with pytest.raises(SystemExit) as silent:
        second.say_of(DataError("no such file"))
    assert silent.value.code == 2
    assert str(second.say_of(DataError("another"))) == "process 1 of 2: another"
    assert first._lost("closed") == "process 1 of 2 failed (another)"
    assert Team(0, 2, distributed.HashStore())._lost("closed").endswith("(closed)")


def test_other_commands_refuse_to_run_in_several_processes(
    write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert started_by_a_launcher()
    loaded = load_recipe(str(write_recipe()), ())
    with pytest.raises(UsageError, match="only `dpsgd train` works in several processes"):
        loop.run(resolve_auto(loaded), loop.Options())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not started_by_a_launcher()


def forked(size: int, folder: Path, work: Callable[[Team], Any]) -> list[Any]:
    """What `work` gives in each of `size` processes, which are forked from this one and find each other in a file."""
    distributed: Any = torch.distributed
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                store = distributed.FileStore(str(folder / "store"), size)
                distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
                found = work(Team(rank, size, distributed.PrefixStore("dpsgd", store)))
                (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))
                distributed.barrier()
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * size
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(size)]


def released(team: Team, planted: str) -> tuple[np.ndarray, int]:
    """Two trials' sums of ones on each process, as a step releases them without a seed, and the digits drawn here."""
    drawn: list[int] = []
    as_it_is = SecureStreams.normal

    def normal(self: SecureStreams, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        drawn.append(out.numel())
        return as_it_is(self, purpose, counter, out)

    pytest.MonkeyPatch().setattr(SecureStreams, "normal", normal)
    streams = team.streams([SecureStreams(), SecureStreams()])
    noise, sums = NoiseSource(streams, SIZE, torch.device("cpu"), torch.float64), torch.ones(2, SIZE).double()
    adding = Reduction(team, sums, planted != "all")
    adding.before_noise(())
    grid, own = Grid.of(2 * SIZE, team.size, [1.0]), team.part(2 * SIZE)
    if planted == "all":
        torch.distributed.broadcast(sums, src=0)
        own = slice(0, 2 * SIZE)
    if planted != "none" or team.rank:
        noise.add(sums, 0, torch.ones(2, 1), grid, own)
    if planted == "all":
        torch.distributed.all_reduce(sums)
        sums.sub_(team.size * (team.size - 1))
    else:
        team.share(sums, apart=True)
    return sums.numpy().ravel(), sum(drawn)


def is_noised_once(sums: np.ndarray, size: int) -> bool:
    """Mean `size` and deviation 1 of each process's slice, to 5.5 standard errors: false once in 4 million."""
    parts = [sums[Team(rank, size).part(len(sums))] for rank in range(size)]
    return all(
        abs(part.mean() - size) < 5.5 / math.sqrt(len(part)) and abs(part.std() - 1) < 5.5 / math.sqrt(2 * len(part))
        for part in parts
    )


@pytest.mark.parametrize("size", [2, 3])
def test_each_process_draws_the_noise_of_its_own_numbers(size: int, tmp_path: Path) -> None:
    """Every number once; noise of all processes on all numbers, and none on a slice, are found."""

    def work(team: Team) -> list[tuple[np.ndarray, int]]:
        return [released(team, planted) for planted in ("", "all", "none")]

    found = forked(size, tmp_path, work)
    right = [one[0] for one in found]
    assert all(np.array_equal(own[0], right[0][0]) for own in right)
    assert [own[1] for own in right] == [len(range(2 * SIZE)[Team(rank, size).part(2 * SIZE)]) for rank in range(size)]
    assert len(set(right[0][0] % 1)) > 2 * SIZE - 5, "no two numbers have the same noise"
    assert [is_noised_once(one[0], size) for one in found[0]] == [True, False, False]


@pytest.mark.parametrize("seed", [0, None], ids=["seed", "no seed"])
def test_three_processes_train_what_one_trains(
    seed: int | None, write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    """The same weights with a seed; without one, the same on all, and about as far from those of no noise."""
    path = write_recipe(epochs=1, repeats=2, seed=seed, save_model=True, runtime={"micro_batch": 2, "device": "cpu"})
    drawn: list[int] = []
    as_it_is = NoiseSource.add

    def add(self: NoiseSource, sums: torch.Tensor, step: int, *more: Any) -> None:
        before = sums.clone()
        as_it_is(self, sums, step, *more)
        drawn.append(int((sums != before).sum()))

    def work(team: Team) -> tuple[list[int], int]:
        pytest.MonkeyPatch().setattr(NoiseSource, "add", add)
        loop.run(resolve_auto(load_recipe(str(path), ())), loop.Options(tmp_path / "three", team=team))
        return drawn, 0

    found = [own[0] for own in forked(3, tmp_path, work)]
    alone = train(path, out=tmp_path / "alone")
    ours, theirs = (
        load_file(next((tmp_path / name).glob("tiny-*")) / "model.safetensors") for name in ("three", "alone")
    )
    numbers = sum(values.size for values in theirs.values())
    for step in zip(*found, strict=True) if seed is None else zip(found[0], strict=True):
        assert sum(step) == numbers, "every number of both trials gets noise once"
    if seed is None:
        assert all(abs(own[0] - numbers / 3) <= 1 for own in found)
        return
    assert found[1:] == [[], []]
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert (alone / "ledger.jsonl").exists()


def test_correlated_noise_is_drawn_by_process_0(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """Without a seed: its past is kept there. `NoiseSource.add`, which draws for a part of the numbers, is not used."""
    path, calls, as_it_is = write_recipe(**WAYS["poisson-banded"] | {"seed": None}), [], CorrelatedStepNoise.add

    def add(self: CorrelatedStepNoise, *given: Any) -> None:
        calls.append("process 0's")
        as_it_is(self, *given)

    def work(team: Team) -> list[str]:
        pytest.MonkeyPatch().setattr(CorrelatedStepNoise, "add", add)
        pytest.MonkeyPatch().setattr(NoiseSource, "add", lambda *_: calls.append("a part's"))
        loop.run(resolve_auto(load_recipe(str(path), ())), loop.Options(tmp_path / "two", team=team))
        return sorted(set(calls))

    assert forked(2, tmp_path, work) == [["process 0's"], []]


def test_noise_with_a_seed_is_no_matter_of_several_processes() -> None:
    noise = NoiseSource([SeededStreams(0), SecureStreams()], 5, torch.device("cpu"), torch.float64)
    with pytest.raises(ValueError, match="drawn by one process"):
        noise.add(torch.ones(2, 5).double(), 0, torch.ones(2, 1), Grid.of(10, 2, [1.0]), slice(0, 3))


@given(st.integers(1, 5), st.integers(0, 40), st.booleans())
def test_every_number_has_one_owner(size: int, count: int, apart: bool) -> None:
    pieces = Team(0, size).owned(count, apart)
    assert [at for _, part in pieces for at in range(part.start, part.stop)] == list(range(count))
    assert all(part == Team(owner, size).part(count) for owner, part in pieces) if apart else len(pieces) <= 1


class Fixed(Sampler):
    """The same padded batch at every step."""

    steps_per_epoch = 1

    def __init__(self, rows: np.ndarray, mask: np.ndarray | None) -> None:
        self.fixed = Batch(rows, mask)

    def batch(self, step: int) -> Batch:
        return self.fixed


@given(st.integers(1, 5), st.integers(0, 20), st.integers(1, 3), st.booleans())
def test_the_parts_of_a_batch_are_the_batch(size: int, columns: int, trials: int, padded: bool) -> None:
    rng = np.random.default_rng(columns)
    rows = rng.integers(0, 100, (trials, columns))
    mask = rng.random((trials, columns)) < 0.5 if padded else None
    parts = [part_of(Team(rank, size).part, 100, Fixed(rows, mask).batch(0)) for rank in range(size)]
    assert np.array_equal(np.concatenate([part.rows for part in parts if part.rows is not None], axis=1), rows)
    if mask is not None:
        assert np.array_equal(np.concatenate([part.mask for part in parts if part.mask is not None], axis=1), mask)
    spans = [part_of(Team(rank, size).part, columns, FullSampler().batch(0)).span for rank in range(size)]
    assert [row for span in spans if span for row in range(*span)] == list(range(columns))


def test_shared_streams_are_functions_of_key_purpose_and_counter() -> None:
    """Alike on two processes; another key, purpose, counter or kind of draw gives others."""
    here, there = SharedStreams(b"key", True), SharedStreams(b"key", False)
    for draw in (
        lambda s, purpose, step: s.bits(purpose, step),
        lambda s, purpose, step: tuple(s.distinct(purpose, step, 10**6, 20)),
        lambda s, purpose, step: tuple(s.permutation(purpose, step, 50)),
        lambda s, purpose, step: s.integer(f"{purpose}{step}"),
    ):
        assert draw(here, "a", 3) == draw(there, "a", 3)
        others = [(here, "a", 4), (here, "b", 3), (SharedStreams(b"other", True), "a", 3)]
        assert len({draw(here, "a", 3), *(draw(*other) for other in others)}) == 4
    with pytest.raises(RuntimeError, match="must not draw any"):
        there.normal("noise", 0, torch.empty(3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="must not draw any"):
        there.coins("choice", 0)
    assert here.coins("choice", 0)(64) != here.coins("choice", 0)(64)
    one, other = (here.normal("noise", 0, torch.empty(3, dtype=torch.int64)) for _ in range(2))
    assert not torch.equal(one, other)
