"""How fast are private steps and packs on a GPU, beside plain training, Opacus and torch.func?

    python benchmarks/gpu.py                          # or: make bench-gpu
    python benchmarks/gpu.py --device cpu --tiny      # a rehearsal: every mode runs (only the MLP is compiled, which
                                                      # takes minutes otherwise); no number means anything
    python benchmarks/gpu.py --noise --device cpu     # the tables of noise only, on a CPU, too

Small networks beside Opacus; a wide residual network of 4,096 images a step, with peak memory; 1,000 logistic
regressions at once beside one; eight trials of a network beside one; what is kept of an epoch; images as bytes; noise
of large sums, of one process and of several; the check of a user's network. For steps also the floor: operations over
the rate that matrix products reached in the same run. The peers train the same network with ordinary convolutions in
place of standardised ones, which they have no fast rule for: less work than ours.

Not here: a CPU's numbers (`step.py`).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpsgd_cli.batching.memory import rows_that_fit
from dpsgd_cli.clipping import run as clipping_room
from dpsgd_cli.clipping.compiling import Compiled
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import chacha, digits, models, precision
from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.losses import cross_entropy, margin_loss
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, MlpModel, WrnModel
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.engine.tensors import Batch, Table, to_host
from dpsgd_cli.errors import ModelError
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows
from dpsgd_cli.noise.run import Grid, NoiseSource

Step = Callable[[], object]


@dataclass(frozen=True)
class Task:
    """A network (and, for the peers, one of ordinary layers), and a batch."""

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    y: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device

    def ordinary(self) -> nn.Module:
        return _without_standardisation(self.build()).to(self.device)


def tasks(device: torch.device, tiny: bool) -> tuple[list[Task], Task]:
    """Two small networks, and the wide residual one."""

    def images(count: int, *shape: int) -> tuple[Tensor, Tensor]:
        return torch.randn(count, *shape, device=device), torch.randint(0, 10, (count,), device=device)

    wide = WrnModel(depth=10, width=1) if tiny else WrnModel(depth=16, width=4)
    small = [
        Task("MLP 60-1000-10, batch 600", lambda: models.mlp(MlpModel(hidden=[1000]), (60,), 10),
             *images(60 if tiny else 600, 60)),
        Task("tanh CNN 1x28x28, batch 256", lambda: models.cnn(CnnModel(), (1, 28, 28), 10),
             *images(16 if tiny else 256, 1, 28, 28)),
    ]  # fmt: skip
    count, side = (8, 8) if tiny else (4096, 32)
    name = "WRN-10-1 (rehearsal)" if tiny else "WRN-16-4 3x32x32, batch 4096"
    return small, Task(name, lambda: models.BUILT_IN["wrn"](wide, (3, side, side), 10), *images(count, 3, side, side))


def _without_standardisation(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        if isinstance(child, WeightStandardisedConv2d):
            sizes = (child.in_channels, child.out_channels, child.kernel_size)
            setattr(module, name, nn.Conv2d(*sizes, child.stride, child.padding))  # type: ignore[arg-type]
        else:
            _without_standardisation(child)
    return module


def plain(task: Task, dtype: str = "float32", model: nn.Module | None = None) -> Step:
    """Forward, backward and SGD, in pieces no larger than the device holds, without any privacy."""
    model = task.build().to(task.device) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step() -> None:
        optimizer.zero_grad()
        with _as_plain(task.device, dtype):
            nn.functional.cross_entropy(model(task.x), task.y).backward()
        optimizer.step()

    return step


@contextmanager
def _as_plain(device: torch.device, dtype: str) -> Iterator[None]:
    """What a plain training loop would do for that precision."""
    with precision.rounded_products(dtype == "tf32"):
        if dtype == "bfloat16":
            with torch.autocast(device.type, torch.bfloat16):
                yield
        else:
            yield


def private(
    task: Task, dtype: str = "float32", compiles: bool = False, piece: int | None = None, trials: int = 1
) -> Step:
    """Return the step of `methods/dp_sgd/run.py`: clipped sums, `piece` rows at a time, noise, update."""
    pack = Pack(task.build, range(trials), Placement(task.device), trusted=True)
    most = piece or rows_that_fit(pack, task.x[:4])
    pack.work_in(precision.PASSES.get(dtype), dtype == "tf32")
    noise = NoiseSource([*map(SeededStreams, range(trials))], pack.size, task.device, torch.float32)
    clipping, seen = Clipping(torch.ones(1, trials, device=task.device)), Diagnostics(trials, task.device)
    function = Compiled() if compiles else sum_clipped
    count = 0

    def step() -> None:
        nonlocal count
        pack.sums.zero_()
        for start in range(0, len(task.y), most):
            rows = (task.x[None, start : start + most], task.y[None, start : start + most], None)
            add_clipped_sums(pack, rows, cross_entropy, clipping, seen, function)
        pack.sums.add_(noise.draw(count))
        pack.values.sub_(pack.sums.div_(len(task.y)), alpha=0.05)
        count += 1

    return step


def _never_asking(step: Step) -> Step:
    """Return the step that copies what is recorded, to set rows that are not finite to 0, without asking for one."""

    def copying() -> None:
        usual, clipping_room.WORTH_ASKING = clipping_room.WORTH_ASKING, sys.maxsize
        try:
            step()
        finally:
            clipping_room.WORTH_ASKING = usual

    return copying


def opacus(task: Task, ghost: bool) -> Step:
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    criterion: Callable[..., Tensor]
    if ghost:
        model = GradSampleModuleFastGradientClipping(task.ordinary(), max_grad_norm=1.0, use_ghost_clipping=True)
    else:
        model = GradSampleModule(task.ordinary())
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimizer = kind(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(task.y))
    criterion = nn.CrossEntropyLoss(reduction="mean")
    if ghost:
        criterion = DPLossFastGradientClipping(model, optimizer, criterion, "mean")

    def step() -> None:
        optimizer.zero_grad()
        criterion(model(task.x), task.y).backward()
        optimizer.step()

    return step


def torch_func(task: Task) -> Step:
    """vmap of grad, in pieces of 64 examples, clipped and summed."""
    model = task.ordinary()
    values = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, values, (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def step() -> None:
        sums = {name: torch.zeros_like(value) for name, value in values.items()}
        for start in range(0, len(task.y), 64):
            found = each(values, task.x[start : start + 64], task.y[start : start + 64])
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
            factors = (1.0 / norms).clamp(max=1.0)
            for name, g in found.items():
                sums[name] += torch.tensordot(factors, g, dims=1)
        for name, total in sums.items():
            values[name].sub_((total + torch.randn_like(total)) / len(task.y), alpha=0.05)

    return step


def seconds(step: Step, device: torch.device, rounds: int) -> float:
    """Median of one step, after three that warm up; on a CPU, of processor time."""
    taken, clock = [], time.process_time if device.type == "cpu" else time.perf_counter
    for index in range(rounds + 3):
        _wait(device)
        begun = clock()
        step()
        _wait(device)
        if index >= 3:
            taken.append(clock() - begun)
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rate(device: torch.device, dtype: str, side: int) -> float:
    """Operations a second that a product of square matrices reaches."""
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    with precision.rounded_products(dtype == "tf32"):
        return float(2 * side**3 / seconds(lambda: torch.mm(a, b), device, 10))


def operations(task: Task) -> float:
    """Of one plain step."""
    counter = FlopCounterMode(display=False)
    with counter:
        plain(task)()
    return float(counter.get_total_flops())


def measure(name: str, make: Callable[[], Step], task: Task, rounds: int) -> tuple[float, float] | None:
    """Seconds and peak MiB of a step; None (and why, on stderr) where the mode cannot run."""
    gc.collect()
    if task.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        taken = seconds(make(), task.device, rounds)
    except (ImportError, RuntimeError, NotImplementedError, ModelError) as error:
        print(f"{task.name}, {name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    peak = torch.cuda.max_memory_allocated() / 2**20 if task.device.type == "cuda" else float("nan")
    return taken, peak


def table(task: Task, modes: dict[str, Callable[[], Step]], side: int, rounds: int) -> None:
    """A row a mode; ratios are to the plain step of the same precision."""
    done = operations(task)
    found: dict[str, tuple[float, float]] = {}
    for name, make in modes.items():
        result = measure(name, make, task, rounds)
        if result is None:
            continue
        found[name] = result
        dtype = next((kind for kind in ("bfloat16", "tf32") if kind in name), "float32")
        base = found.get(f"plain {dtype}", found["plain float32"])
        floor = done / rate(task.device, dtype, side)
        taken, peak = result
        print(
            f"| {task.name} | {name} | {1e3 * taken:.3f} | {len(task.y) / taken:,.0f} | {taken / base[0]:.2f}"
            f" | {peak:,.0f} | {peak / base[1]:.2f} | {taken / floor:.1f} |"
        )


def logistic(device: torch.device, tiny: bool, rounds: int) -> None:
    """Clipped full-batch gradients of logistic regression on 48,842 x 108 rows, by number of trials."""
    records = 500 if tiny else 48_842
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(records, 108, generator=generator) < 0.12).float().to(device)
    rows = SignedRows.load(x, torch.randint(2, (records,), generator=generator).to(device), residual=False, bias=True)
    risk = LinearRisk(rows, margin_loss("logistic"))
    print("\n| logistic regressions at once | ms | trials a second over one's | over the floor of reading the rows |")
    print("| ---: | ---: | ---: | ---: |")
    alone = 0.0
    copy = torch.empty_like(rows.z)
    reading = seconds(lambda: copy.copy_(rows.z), device, rounds) / 2  # half of it is writing
    for trials in (1, 32, 1000):
        values, bounds = torch.zeros(trials, x.shape[1] + 1, device=device), torch.ones(trials, device=device)

        def gradient(values: Tensor = values, bounds: Tensor = bounds) -> None:
            values.sub_(risk.gradient_sums_at(values, bounds), alpha=1e-5)

        taken = seconds(gradient, device, rounds)
        alone = alone or taken
        print(f"| {trials} | {1e3 * taken:.3f} | {trials * alone / taken:.0f} | {taken / reading:.1f} |")


def packs(device: torch.device, tiny: bool, rounds: int) -> None:
    """Eight trials of a network at once, beside one: each operation is one for all of them."""
    side = 16 if tiny else 32
    images = torch.randn(16 if tiny else 256, 1, side, side, device=device)
    photographs = torch.randn(8 if tiny else 1024, 3, 32, 32, device=device)
    large = CnnModel(layout="cifar10")
    print("\n| network | ms of one trial | ms of eight | over one |\n| --- | ---: | ---: | ---: |")
    for name, build, x in (
        ("tanh CNN", lambda: models.cnn(CnnModel(), (1, side, side), 10), images),
        ("CNN of photographs", lambda: models.cnn(large, (3, 32, 32), 10), photographs),
    ):
        task = Task(name, build, x, torch.randint(0, 10, (len(x),), device=device))
        one, eight = (1e3 * seconds(private(task, trials=trials), device, rounds) for trials in (1, 8))
        print(f"| {name} | {one:.3f} | {eight:.3f} | {eight / one:.2f} |")


def snapshots(device: torch.device, tiny: bool, rounds: int) -> None:
    """What is kept of weights and Adam's two moments at the end of each epoch: on the host, beside a second copy."""
    numbers = 1000 if tiny else 100_000_000
    held = [torch.randn(1, numbers, device=device) for _ in range(3)]
    print(f"\n| state of {numbers:,} weights by Adam, kept | ms an epoch | MiB of the device |\n| --- | ---: | ---: |")
    for name, keep in (("on the host", to_host), ("on the device", torch.clone)):
        kept = [keep(x) for x in held]
        taken = seconds(lambda keep=keep: [keep(x) for x in held], device, max(3, rounds // 6))  # type: ignore[misc]
        there = sum(x.numel() * x.element_size() for x in kept if x.device.type != "cpu")
        print(f"| {name} | {1e3 * taken:.1f} | {there / 2**20:.0f} |")


def rows(device: torch.device, tiny: bool, rounds: int) -> None:
    """Images that stay bytes on the device, beside floats: what they take, and reading a batch of 4,096."""
    count = 500 if tiny else 50_000
    images = np.random.default_rng(0).integers(0, 256, (count, 3, 32, 32)).astype(np.float32) / 255
    batch = Batch(np.random.default_rng(1).integers(0, count, (1, 64 if tiny else 4096)))
    print("\n| images | MiB of the device | ms a batch |\n| --- | ---: | ---: |")
    for name, small in (("float32", False), ("bytes", True)):
        table = Table.load(images, np.zeros(count, np.int64), False, device, torch.float32, small)
        taken = seconds(lambda table=table: list(table.chunks(batch, 1 << 20)), device, rounds)  # type: ignore[misc]
        size = table.stored.numel() * table.stored.element_size()
        print(f"| {name} | {size / 2**20:.0f} | {1e3 * taken:.3f} |")


def noise(device: torch.device, tiny: bool, rounds: int) -> None:
    """Digits of a large sum's noise: drawn on the host and sent, drawn on the device, and with compiled blocks."""
    count = 1 << (16 if tiny else 22)
    out, usual = torch.empty(count, dtype=torch.int64, device=device), chacha.blocks

    def fetched() -> None:
        here = torch.empty(count, dtype=torch.int64)
        digits.fill(here, digits.fresh())
        out.copy_(here.pin_memory() if device.type == "cuda" else here, non_blocking=True)

    def drawn(blocks: Callable[[Tensor, Tensor], Tensor]) -> None:
        chacha.blocks = blocks  # type: ignore[assignment]
        digits.fill(out, digits.fresh(), chacha.ChaCha(device))
        chacha.blocks = usual

    modes = {"on the host, by AES": fetched, "on the device, by ChaCha20": lambda: drawn(usual)}
    if device.type == "cuda":
        modes["the same, compiled"] = partial(drawn, torch.compile(usual, fullgraph=True, dynamic=False))
    print(f"\n| noise of {count:,} numbers, drawn | ns a number |\n| --- | ---: |")
    for name, step in modes.items():
        print(f"| {name} | {1e9 * seconds(step, device, max(3, rounds // 6)) / count:.2f} |")


def parts(device: torch.device, tiny: bool, rounds: int) -> None:
    """Noise that one of several processes adds to its own numbers of a sum, by their number."""
    size = 1 << (16 if tiny else 24)
    sums, scale, grid = torch.zeros(1, size, device=device).double(), torch.ones(1, 1), Grid.of(size, 1000, [1.0])
    source, steps = NoiseSource([SecureStreams()], size, device, torch.float32), itertools.count()
    print(f"\n| processes that add noise to {size:,} numbers | ms of one |\n| ---: | ---: |")
    for processes in (1, 2, 8):
        own = slice(0, size // processes)
        taken = seconds(
            lambda own=own: source.add(sums, next(steps), scale.to(device), grid, own),  # type: ignore[misc]
            device,
            max(3, rounds // 6),
        )
        print(f"| {processes} | {1e3 * taken:.2f} |")


def check(device: torch.device, tiny: bool) -> None:
    """The tests of a user's network before its training, on the training's device, beside the host."""
    side = 16 if tiny else 128
    print("\n| test of a user's network, on | s |\n| --- | ---: |")
    for place in dict.fromkeys((device, torch.device("cpu"))):
        pack = Pack(lambda: models.cnn(CnnModel(), (1, side, side), 10), [0], Placement(place))
        start = time.perf_counter()
        check_model(pack, (1, side, side), torch.zeros(1, device=place))
        print(f"| {place} | {time.perf_counter() - start:.2f} |")


def steps(device: torch.device, tiny: bool, rounds: int) -> None:
    """Steps of small networks and of a wide one, in every mode."""
    print("\n| step | mode | ms | examples a second | over plain | peak MiB | over plain | over the floor |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    small, wide = tasks(device, tiny)
    side = 64 if tiny else 8192
    for task in small:
        modes: dict[str, Callable[[], Step]] = {
            "plain float32": lambda task=task: plain(task),  # type: ignore[misc]
            "dpsgd float32": lambda task=task: private(task),  # type: ignore[misc]
            "dpsgd float32, compiled": lambda task=task: private(task, compiles=True),  # type: ignore[misc]
            "opacus ghost": lambda task=task: opacus(task, ghost=True),  # type: ignore[misc]
            "opacus hooks": lambda task=task: opacus(task, ghost=False),  # type: ignore[misc]
        }
        if tiny and task is not small[0]:
            del modes["dpsgd float32, compiled"]
        table(task, modes, side, rounds)
    modes = {}
    for dtype in ("float32", "tf32", "bfloat16"):
        modes[f"plain {dtype}"] = lambda dtype=dtype: plain(wide, dtype)  # type: ignore[misc]
        modes[f"dpsgd {dtype}"] = lambda dtype=dtype: private(wide, dtype)  # type: ignore[misc]
        # an eighth of the batch at a time (`runtime.micro_batch`), for the memory
        part = len(wide.y) // 8
        modes[f"dpsgd {dtype}, micro_batch {part}"] = lambda dtype=dtype, part=part: private(  # type: ignore[misc]
            wide, dtype, piece=part
        )
    if not tiny:
        modes["dpsgd float32, compiled"] = lambda: private(wide, compiles=True)
    modes["dpsgd float32, rows set to 0 without asking"] = lambda: _never_asking(private(wide))
    modes["plain float32, ordinary convolutions"] = lambda: plain(wide, model=wide.ordinary())
    modes["opacus ghost"] = lambda: opacus(wide, ghost=True)
    modes["opacus hooks"] = lambda: opacus(wide, ghost=False)
    modes["torch.func"] = lambda: torch_func(wide)
    table(wide, modes, side, max(3, rounds // 6))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes: a rehearsal")
    parser.add_argument("--noise", action="store_true", help="the tables of noise only")
    parser.add_argument("--rounds", type=int, default=30)
    settings = parser.parse_args()
    device = torch.device(settings.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        return 1
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    precision.keep_sums_exact()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, CUDA {torch.version.cuda}, median of {settings.rounds} rounds\n")
    if settings.noise:
        noise(device, settings.tiny, settings.rounds)
        parts(device, settings.tiny, settings.rounds)
        return 0
    for measure in (logistic, packs, snapshots, rows, parts, noise):
        measure(device, settings.tiny, settings.rounds)
        sys.stdout.flush()
    check(device, settings.tiny)
    steps(device, settings.tiny, settings.rounds)  # last: it takes longest
    return 0


if __name__ == "__main__":
    sys.exit(main())
