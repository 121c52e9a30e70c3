"""How long does a private step take beside a plain one, and beside Opacus?

    python benchmarks/step.py                 # times and ratios of one step, then of a whole training
    python benchmarks/step.py --wide          # of a step of WRN-16-4 (compiling it takes minutes)
    python benchmarks/step.py --memory        # peak memory of each mode, one fresh process each
    python benchmarks/step.py --device cuda   # one step on a GPU; with --wide, of WRN-16-4 on 1,024 images

Everything is measured in one process, in turns, so that a noisy machine disturbs all modes alike; ratios are of
medians. Needs the `bench` extra for the Opacus rows.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dpsgd_cli.batching.memory import keep_freed_memory
from dpsgd_cli.clipping.compiling import Compiled
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import models
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, MlpModel, WrnModel
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop as experiment
from dpsgd_cli.training.plans import resolve_auto

Step = Callable[[], None]
MODES = ("plain", "dpsgd", "opacus-ghost", "opacus-hooks")
# A compiler takes more memory than a step, so these are only timed.
COMPILED = ("plain-compiled", "dpsgd-compiled")


@dataclass(frozen=True)
class Task:
    """A model, a batch of inputs and labels."""

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor

    def model(self) -> nn.Module:
        return self.build().to(self.x.device)


def tasks(device: str = "cpu") -> list[Task]:
    """The two steps that the project is measured by."""
    torch.manual_seed(0)
    return [
        Task(
            "MLP 60-1000-10, batch 600",
            lambda: models.mlp(MlpModel(hidden=[1000]), (60,), 10),
            torch.randn(600, 60, device=device),
            torch.randint(0, 10, (600,), device=device),
        ),
        Task(
            "tanh CNN 1x28x28, batch 256",
            lambda: models.cnn(CnnModel(), (1, 28, 28), 10),
            torch.randn(256, 1, 28, 28, device=device),
            torch.randint(0, 10, (256,), device=device),
        ),
    ]


def wide(device: str) -> Task:
    """A deep network, on a batch that the device gets through."""
    torch.manual_seed(0)
    count = 32 if device == "cpu" else 1024
    return Task(
        f"WRN-16-4 3x32x32, batch {count}",
        lambda: models.BUILT_IN["wrn"](WrnModel(depth=16, width=4), (3, 32, 32), 10),
        torch.randn(count, 3, 32, 32, device=device),
        torch.randint(0, 10, (count,), device=device),
    )


def plain(task: Task) -> Step:
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(task.x), task.y).backward()
        optimizer.step()

    return step


def plain_compiled(task: Task) -> Step:
    """Beside compiled private steps, so that what compiling gives is not taken for what clipping costs."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = torch.compile(lambda x, y: nn.functional.cross_entropy(model(x), y), dynamic=False)

    def step() -> None:
        optimizer.zero_grad()
        loss(task.x, task.y).backward()
        optimizer.step()

    return step


def private(task: Task, compiles: bool = False) -> Step:
    """What `methods/dp_sgd/run.py` does in a step: clipped sums, noise, update; with `runtime.compile` or without."""
    device = task.x.device
    pack = Pack(task.build, [0], Placement(device), trusted=True)
    noise = NoiseSource([SeededStreams(0)], pack.size, device, torch.float32)
    clipping, seen = Clipping(torch.ones(1, 1, device=device)), Diagnostics(1, device)
    scale, rate = torch.ones(1, 1, device=device), torch.full((1, 1), 0.05, device=device)
    function = Compiled() if compiles else sum_clipped
    count = 0

    def step() -> None:
        nonlocal count
        pack.sums.zero_()
        add_clipped_sums(pack, (task.x[None], task.y[None], None), cross_entropy, clipping, seen, function)
        noise.add(pack.sums, count, scale, None)
        pack.values.addcmul_(pack.sums.div_(len(task.y)).float(), rate, value=-1.0)
        count += 1

    return step


def opacus_hooks(task: Task) -> Step:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    model = GradSampleModule(task.model())
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(task.y))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(task.x), task.y).backward()
        optimizer.step()

    return step


def opacus_ghost(task: Task) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model = GradSampleModuleFastGradientClipping(task.model(), max_grad_norm=1.0, use_ghost_clipping=True)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = DPOptimizerFastGradientClipping(
        inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(task.y)
    )
    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss(reduction="mean"), "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(task.x), task.y).backward()
        optimizer.step()

    return step


MAKERS: dict[str, Callable[[Task], Step]] = {
    "plain": plain,
    "plain-compiled": plain_compiled,
    "dpsgd": private,
    "dpsgd-compiled": partial(private, compiles=True),
    "opacus-ghost": opacus_ghost,
    "opacus-hooks": opacus_hooks,
}


def time_in_turns(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds of each mode's very first step, and of the median of others: four a round, less the first of the four.

    What a mode leaves in caches and memory would otherwise be counted as the next one's time.
    """

    def seconds(step: Step) -> float:
        begun = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    first = {name: seconds(step) for name, step in steps.items()}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds(step)
            taken[name] += [seconds(step) for _ in range(3)]
    return {name: (first[name], statistics.median(times)) for name, times in taken.items()}


def available(task: Task, modes: tuple[str, ...]) -> dict[str, Step]:
    steps = {}
    for name in modes:
        try:
            steps[name] = MAKERS[name](task)
        except ImportError:
            print(f"{name}: not installed (pip install dpsgd[bench])", file=sys.stderr)
    return steps


def compare_steps(compared: list[Task], modes: tuple[str, ...], rounds: int) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, median of {rounds} rounds\n")
    print("| step | mode | ms | over plain | first, s |\n| --- | --- | ---: | ---: | ---: |")
    for task in compared:
        found = time_in_turns(available(task, modes), rounds)
        for name, (first, usual) in found.items():
            ratio = usual / found["plain"][1]
            print(f"| {task.name} | {name} | {1e3 * usual:.2f} | {ratio:.2f} | {first:.1f} |")


def compare_training(epochs: int, rounds: int, clock: Callable[[], float] = time.perf_counter) -> None:
    """A whole `experiment.run` beside a plain loop of the same steps and evaluations, on 60,000 + 10,000 rows.

    On a busy machine `time.process_time` is the `clock` to take, with one thread.
    """
    random = np.random.default_rng(0)
    x = random.standard_normal((70_000, 60)).astype(np.float32)
    y = (x[:, :10] + 0.5 * random.standard_normal((70_000, 10))).argmax(axis=1)
    loops, runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder) / "rows.npz", x=x[:60_000], y=y[:60_000], x_test=x[60_000:], y_test=y[60_000:])
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(
            "name: whole\ndata: {path: rows.npz, preprocess: []}\nmodel: {kind: mlp, hidden: [1000]}\n"
            "method: {kind: dp-sgd, batching: shuffle, batch_size: 600, learning_rate: 0.05}\n"
            "privacy: {schedule: {kind: uniform, initial: 8}, delta: 1.0e-5}\n"
            f"epochs: {epochs}\nseed: 0\n"
        )
        for index in range(rounds):
            begun = clock()
            plain_training(x, y, epochs)
            loops.append(clock() - begun)
            begun = clock()
            experiment.run(
                resolve_auto(load_recipe(str(recipe))), experiment.Options(out=Path(folder) / f"out-{index}")
            )
            runs.append(clock() - begun)
    loop, run = statistics.median(loops), statistics.median(runs)
    print(f"\n{epochs} epochs: plain loop {loop:.2f} s, dpsgd with reading and writing {run:.2f} s: {run / loop:.2f} x")


def plain_training(x: np.ndarray, y: np.ndarray, epochs: int) -> float:
    rows, labels = torch.from_numpy(x), torch.from_numpy(y)
    model = models.mlp(MlpModel(hidden=[1000]), (60,), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    accuracy = 0.0
    for _ in range(epochs):
        for batch in torch.randperm(60_000).split(600):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(rows[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = float((model(rows[60_000:]).argmax(dim=1) == labels[60_000:]).double().mean())
    return accuracy


def measure_memory(mode: str, index: int) -> None:
    """Peak resident growth over 30 steps, in MiB, of this process."""
    task = tasks()[index]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = MAKERS[mode](task)
    for _ in range(30):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)


def compare_memory() -> None:
    print("| step | mode | peak MiB over the process at rest | over plain |\n| --- | --- | --- | --- |")
    for index, task in enumerate(tasks()):
        grown = {}
        for mode in MODES:
            command = [sys.executable, __file__, "--one", mode, str(index)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                grown[mode] = float(done.stdout)
        for mode, mib in grown.items():
            print(f"| {task.name} | {mode} | {mib:.1f} | {mib / grown['plain']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "TASK"), help=argparse.SUPPRESS)
    parser.add_argument("--return-memory", action="store_true", help="leave the C library's own way with freed memory")
    arguments = parser.parse_args()
    if not arguments.return_memory:
        keep_freed_memory()  # as a training does, and for the plain steps too
    if arguments.one:
        measure_memory(arguments.one[0], int(arguments.one[1]))
    elif arguments.memory:
        compare_memory()
    elif arguments.wide:
        compare_steps([wide(arguments.device)], ("plain", "dpsgd", *COMPILED), max(1, arguments.rounds // 20))
    else:
        compare_steps(tasks(arguments.device), (*MODES, *COMPILED), arguments.rounds)
        if arguments.device == "cpu":
            compare_training(arguments.epochs, 3)


if __name__ == "__main__":
    main()
