"""How long does a private step take beside a plain one, and beside Opacus, and in how much memory?

    python -m benchmarks.steps                       # every network but the large ones, in every mode
    python -m benchmarks.steps MLP CNN --rounds 40   # these networks (--modes plain dpsgd: in these modes)
    python -m benchmarks.steps --memory MLP BERT     # peak memory of each mode, one fresh process each (Linux)
    python -m benchmarks.steps --first BERT-base     # making a pack, its tests, and its first step
    python -m benchmarks.steps --device cuda         # also in tf32 and bfloat16, and what only a GPU does
    python -m benchmarks.steps --device cpu --tiny   # its rehearsal: no number means anything

Networks are random and without dropout. All modes of a network take turns in one process, so that a noisy machine
disturbs them alike. On a CPU a number is the least processor time, on one thread, because other work only adds to it;
on a GPU it is the median of the time that passed. Opacus is run as its documentation says (hooks and ghost clipping);
where a peer raises an error, the error's first words are the entry. Opacus, which has no fast rule for standardised
convolutions, trains the wide network with ordinary ones: less work than ours. Needs the extras `bench` and
`transformers`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpsgd_cli.batching.memory import keep_freed_memory, rows_that_fit
from dpsgd_cli.clipping.compiling import Captured, Compiled
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums, sum_clipped
from dpsgd_cli.engine import chacha, digits, models, precision
from dpsgd_cli.engine.independence import check_model
from dpsgd_cli.engine.layers import WeightStandardisedConv2d
from dpsgd_cli.engine.losses import LossOptions, made, margin_loss
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, MlpModel, WrnModel
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.engine.tensors import to_host
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows
from dpsgd_cli.noise.run import Grid, NoiseSource

Step = Callable[[], object]
LENGTH, WORDS, WIDTH, RATE = 64, 1000, 128, 0.05


class Logits(nn.Module):
    """A model of transformers that returns logits of tokens (B, T), none of which is padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.model(input_ids=x, attention_mask=torch.ones_like(x)).logits
        return y


def _sizes(**more: int) -> dict[str, int]:
    own = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * WIDTH}
    return {**own, "vocab_size": WORDS, "max_position_embeddings": LENGTH, "pad_token_id": 0, **more}


def bert(**more: int) -> nn.Module:
    transformers: Any = import_module("transformers")
    return Logits(transformers.BertForSequenceClassification(transformers.BertConfig(**_sizes(**more))))


def bert_base() -> nn.Module:
    return bert(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, vocab_size=30522,
        max_position_embeddings=512,
    )  # fmt: skip


def gpt2() -> nn.Module:
    transformers: Any = import_module("transformers")
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=WIDTH, n_layer=2, n_head=4, use_cache=False, **ends
    )
    return Logits(transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        **_sizes(num_key_value_heads=2, bos_token_id=1, eos_token_id=1), use_cache=False, tie_word_embeddings=False
    )
    return Logits(transformers.LlamaForCausalLM(config))


def lora() -> nn.Module:
    peft: Any = import_module("peft")
    made: Any = bert()
    made.requires_grad_(False)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"])
    peft.inject_adapter_in_model(config, made.model)
    made.model.classifier.requires_grad_(True)
    return made


class Residual(nn.Module):
    """A basic block with group normalisation (He et al. 2016, with Wu and He 2018)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 + (inputs != outputs)
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(8, outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(8, outputs),
        )  # fmt: skip
        down = [nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(8, outputs)]
        self.skip = nn.Sequential(*down) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.skip(x)).relu()


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32 pixels."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    enter = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()]
    blocks = [Residual(*pair) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*enter, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Lstm(nn.Module):
    """A classifier of tokens; `kind` may be Opacus's own recurrent layer."""

    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.table, self.core = nn.Embedding(WORDS, WIDTH), kind(WIDTH, WIDTH, batch_first=True)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.core(self.table(x))[0].mean(1))
        return y


class Encoder(nn.Module):
    """`nn.TransformerEncoder` of two layers on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True, dropout=0.0)
        self.core = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.core(self.table(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        z: Tensor = self.last(y.mean(1))
        return z


def _opacus_lstm() -> nn.Module:
    from opacus.layers import DPLSTM

    return Lstm(DPLSTM)


@dataclass(frozen=True)
class Task:
    """A network, a batch, and whether it predicts the next token; `of_peers` is what Opacus gets instead.

    `trusted`: a built-in model, which runs on whole batches.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    classes: int = 2
    causal: bool = False
    of_peers: Callable[[], nn.Module] | None = None
    trusted: bool = False

    @property
    def y(self) -> Tensor:
        if self.causal:
            return F.pad(self.x[:, 1:], (0, 1), value=-1)
        return torch.arange(len(self.x), device=self.x.device) % self.classes

    def model(self, peers: bool = False) -> nn.Module:
        torch.manual_seed(0)
        made = ((self.of_peers if peers else None) or self.build)().eval().to(self.x.device)
        for module in made.modules():
            if isinstance(module, nn.RNNBase | nn.TransformerEncoderLayer | nn.MultiheadAttention):
                module.train()  # plain fast paths of eval mode have no backward pass; there is no dropout
        return made

    def loss(self, outputs: Tensor) -> Tensor:
        if self.causal:
            return F.cross_entropy(outputs.flatten(0, 1), self.y.flatten(), ignore_index=-1)
        return F.cross_entropy(outputs, self.y)


LARGE = ("WRN", "BERT-base")


def tasks(device: torch.device, tiny: bool = False) -> dict[str, Task]:
    """Networks by name: the batches of a GPU are larger, and a rehearsal's are as small as can be."""
    gpu, generator = device.type == "cuda", torch.Generator().manual_seed(0)

    def images(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def tokens(length: int) -> Tensor:
        return torch.randint(1, WORDS, (4 if tiny else 32, length), generator=generator).to(device)

    wrn = WrnModel(depth=10, width=1) if tiny else WrnModel(depth=16, width=4)
    side, shape = (16, (3, 8, 8)) if tiny else (28, (3, 32, 32))
    wide = partial(models.BUILT_IN["wrn"], wrn, shape, 10)
    words = tokens(LENGTH)
    every = [
        Task("MLP", lambda: models.mlp(MlpModel(hidden=[1000]), (60,), 10), images(60 if tiny else 600, 60), 10,
             trusted=True),
        Task("CNN", lambda: models.cnn(CnnModel(), (1, side, side), 10), images(16 if tiny else 256, 1, side, side), 10,
             trusted=True),
        Task("BERT", bert, words),
        Task("GPT-2", gpt2, words, causal=True),
        Task("Llama", llama, words, causal=True),
        Task("LoRA", lora, words),
        Task("ResNet-18", resnet18, images(4 if tiny else 32, 3, 32, 32), 10),
        Task("LSTM", Lstm, words, of_peers=_opacus_lstm),
        Task("TransformerEncoder", Encoder, words),
        Task("WRN", wide, images(8 if tiny else 4096 if gpu else 32, *shape), 10, trusted=True,
             of_peers=lambda: _without_standardisation(wide())),
        Task("BERT-base", bert if tiny else bert_base, tokens(128 if gpu and not tiny else LENGTH)),
    ]  # fmt: skip
    return {task.name: task for task in every}


def _without_standardisation(module: nn.Module) -> nn.Module:
    for name, child in list(module.named_children()):
        if isinstance(child, WeightStandardisedConv2d):
            sizes = (child.in_channels, child.out_channels, child.kernel_size)
            setattr(module, name, nn.Conv2d(*sizes, child.stride, child.padding))  # type: ignore[arg-type]
        else:
            _without_standardisation(child)
    return module


def plain(task: Task, dtype: str = "float32", compiles: bool = False) -> Step:
    """Forward, backward and SGD, without any privacy, as a user would run it at that precision."""
    model = task.model()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
    whole: Callable[[Tensor], Tensor] = lambda x: task.loss(model(x))  # noqa: E731
    loss = torch.compile(whole, dynamic=False) if compiles else whole

    def step() -> None:
        optimizer.zero_grad()
        with _as_plain(task.x.device, dtype):
            value = loss(task.x)
        value.backward()
        optimizer.step()

    return step


@contextmanager
def _as_plain(device: torch.device, dtype: str) -> Iterator[None]:
    with precision.rounded_products(dtype == "tf32"), torch.autocast(device.type, torch.bfloat16, dtype == "bfloat16"):
        yield


def packed(task: Task, trials: int = 1) -> Pack:
    return Pack(task.model, range(trials), Placement(task.x.device), trusted=task.trusted)


def private(task: Task, dtype: str = "float32", trials: int = 1, program: type[Compiled] | None = None) -> Step:
    return step_of(packed(task, trials), task, dtype, program)


def step_of(pack: Pack, task: Task, dtype: str = "float32", program: type[Compiled] | None = None) -> Step:
    """What `methods/dp_sgd/run.py` does in a step: clipped sums, of as many rows as a GPU holds; noise; update."""
    device, trials = task.x.device, pack.trials
    most = rows_that_fit(pack, task.x[:4]) if device.type == "cuda" else len(task.x)
    pack.work_in(precision.PASSES.get(dtype), dtype == "tf32")
    noise = NoiseSource([*map(SeededStreams, range(trials))], pack.size, device, torch.float32)
    clipping, seen = Clipping(torch.ones(1, trials, device=device)), Diagnostics(trials, device)
    scale, rate = torch.ones(trials, 1, device=device), torch.full((trials, 1), RATE, device=device)
    loss = made("next-token" if task.causal else None, "classification", LossOptions(), task.causal, False, Path())
    function, steps = sum_clipped if program is None else program(), itertools.count()

    def step() -> None:
        pack.sums.zero_()
        for start in range(0, len(task.x), most):
            rows = (task.x[None, start : start + most], task.y[None, start : start + most], None)
            add_clipped_sums(pack, rows, loss, clipping, seen, function)
        noise.add(pack.sums, next(steps), scale, None)
        pack.values.addcmul_(pack.sums.div_(len(task.x)).float(), rate, value=-1.0)

    return step


def opacus(task: Task, ghost: bool) -> Step:
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    raw = task.model(peers=True).train()
    for part in raw.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    how: dict[str, Any] = {"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}
    model: Any = (GradSampleModuleFastGradientClipping if ghost else GradSampleModule)(raw, **how)
    inner = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
    kind: Any = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    optimizer = kind(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=len(task.x))
    criterion: Any = nn.CrossEntropyLoss(ignore_index=-1)
    if ghost:
        criterion = DPLossFastGradientClipping(model, optimizer, criterion, "mean")

    def step() -> None:
        optimizer.zero_grad()
        y = model(task.x)
        if task.causal and ghost:
            criterion(y.flatten(0, 1), task.y.flatten(), shape=tuple(task.x.shape)).backward()
        elif ghost:
            criterion(y, task.y).backward()
        else:
            task.loss(y).backward()
        optimizer.step()

    return step


MODES: dict[str, Callable[[Task], Step]] = {
    "plain": plain,
    "plain-compiled": partial(plain, compiles=True),
    "dpsgd": private,
    "dpsgd-captured": partial(private, program=Captured),
    "dpsgd-compiled": partial(private, program=Compiled),
    "plain-tf32": partial(plain, dtype="tf32"),
    "dpsgd-tf32": partial(private, dtype="tf32"),
    "dpsgd-tf32-captured": partial(private, dtype="tf32", program=Captured),
    "plain-bfloat16": partial(plain, dtype="bfloat16"),
    "plain-bfloat16-compiled": partial(plain, dtype="bfloat16", compiles=True),
    "dpsgd-bfloat16": partial(private, dtype="bfloat16"),
    "dpsgd-bfloat16-captured": partial(private, dtype="bfloat16", program=Captured),
    "dpsgd-bfloat16-compiled": partial(private, dtype="bfloat16", program=Compiled),
    "opacus-hooks": partial(opacus, ghost=False),
    "opacus-ghost": partial(opacus, ghost=True),
}
OURS = ("plain", "dpsgd")
AIMS = {
    ("BERT-base", "dpsgd-bfloat16"): 45.0,
    ("BERT-base", "dpsgd-bfloat16-compiled"): 18.0,
    ("WRN", "dpsgd-bfloat16"): 390.0,
    ("WRN", "dpsgd-bfloat16-compiled"): 160.0,
}
"""Milliseconds that a step should take on an H100."""
USUAL = (*OURS, "opacus-hooks", "opacus-ghost")


def started(task: Task, modes: list[str]) -> tuple[dict[str, tuple[Step, float]], dict[str, str]]:
    """Return the modes that run, each with the seconds of its first step, and what the others said."""
    steps, failed = {}, {}
    for name in modes:
        try:
            step = MODES[name](task)
            begun = time.perf_counter()
            step()
            _wait(task.x.device)
            steps[name] = (step, time.perf_counter() - begun)
        except Exception as error:  # a peer's errors have no common type
            if name in OURS and not isinstance(error, ImportError):
                raise
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failed[name] = said.replace("|", "/")[:60]
    return steps, failed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, device: torch.device) -> float:
    """Of one step: processor time on a CPU, else the time that passed."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    _wait(device)
    begun = clock()
    step()
    _wait(device)
    return clock() - begun


def usual(step: Step, device: torch.device, rounds: int) -> float:
    """Of a step after three that warm up: the least on a CPU, else the median."""
    for _ in range(3):
        step()
    taken = [seconds(step, device) for _ in range(rounds)]
    return min(taken) if device.type == "cpu" else statistics.median(taken)


def table(task: Task, modes: list[str], rounds: int) -> None:
    device = task.x.device
    gc.collect()  # of the network before
    steps, failed = started(task, modes)
    taken: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, float("nan"))
    for _ in range(rounds):
        for name, (step, _) in steps.items():
            step()  # what another mode leaves in caches and memory would be counted as this one's time
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken[name].append(seconds(step, device))
            if device.type == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**20
    times = {n: min(found) if device.type == "cpu" else statistics.median(found) for n, found in taken.items()}
    for mode, own in times.items() if modes[0] in times else ():
        ratios = own / times[modes[0]], peaks[mode] / peaks[modes[0]]
        print(
            f"| {task.name} | {len(task.x)} | {mode} | {1e3 * own:.2f} | {ratios[0]:.2f} | {steps[mode][1]:.1f}"
            f" | {peaks[mode]:,.0f} | {ratios[1]:.2f} |"
        )
        aim = AIMS.get((task.name, mode)) if device.type == "cuda" else None
        if aim is not None and 1e3 * own > aim:
            print(f"| {task.name} | {len(task.x)} | {mode} | misses its aim of {aim:g} ms | | | | |")
    for mode, said in failed.items():
        print(f"| {task.name} | {len(task.x)} | {mode} | fails: {said} | | | | |")
    sys.stdout.flush()


def compare_memory(names: list[str], modes: list[str]) -> None:
    """Peak MiB above the process at rest: what other modes leave would be counted, so each has its own process."""
    print("| network | mode | MiB | over plain |\n| --- | --- | ---: | ---: |")
    for name in names:
        found: dict[str, float] = {}
        for mode in modes:
            command = [sys.executable, "-m", "benchmarks.steps", "--one", mode, name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found[mode] = float(done.stdout.split()[-1])
                print(f"| {name} | {mode} | {found[mode]:.0f} | {found[mode] / found[modes[0]]:.2f} |")


def measure_memory(mode: str, task: Task) -> None:
    with torch.device("meta"):
        task.build()  # what loading a library takes is not a step's
    torch.ones(2, 2).requires_grad_().mm(torch.ones(2, 2)).sum().backward()
    if mode.startswith("opacus"):
        import opacus.optimizers  # noqa: F401
    MODES[mode](replace(task, x=task.x[:2]))()  # nor what its code takes
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _peak()
    step = MODES[mode](task)
    for _ in range(6):
        step()
    print(_peak() - before)


def _peak() -> float:
    """Return the peak MiB of memory that this process has held (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def first(task: Task) -> None:
    """Print the seconds of a pack, its tests of independence and its first step, beside those of a plain step."""
    made: list[Pack] = []
    device = task.x.device
    parts = {
        "making the pack": lambda: made.append(packed(task)),
        "its tests": lambda: check_model(made[0], tuple(task.x.shape[1:]), task.x),
        "its first step": lambda: step_of(made[0], task)(),
        "a plain model and its step": lambda: plain(task)(),
    }
    print(f"| {task.name}, {len(task.x)} rows | s |\n| --- | ---: |")
    for name, part in parts.items():
        print(f"| {name} | {seconds(part, device):.2f} |")


def of_a_device(device: torch.device, tiny: bool, rounds: int) -> Iterator[tuple[str, Step, int]]:
    """What a GPU does in a way of its own: words, a step, and the numbers of which each takes its share of the time."""
    records = 500 if tiny else 48_842
    x = (torch.rand(records, 108, generator=torch.Generator().manual_seed(0)) < 0.12).float().to(device)
    labels = torch.arange(records, device=device) % 2
    risk = LinearRisk(SignedRows.load(x, labels, residual=False, bias=True), margin_loss("logistic"))
    for trials in (1, 32, 1000):
        values, bounds = torch.zeros(trials, 109, device=device), torch.ones(trials, device=device)
        step: Step = partial(risk.gradient_sums_at, values, bounds)
        yield f"logistic regressions on {records:,} rows at once: {trials}", step, 1
    large = CnnModel(layout="cifar10")
    photographs = torch.randn(8 if tiny else 1024, 3, 32, 32, device=device)
    for task in (
        tasks(device, tiny)["CNN"],
        Task("CNN of photographs", lambda: models.cnn(large, (3, 32, 32), 10), photographs, 10, trusted=True),
    ):
        for trials in (1, 8):
            yield f"trials of a {task.name} at once: {trials}", private(task, trials=trials), 1
    held = [torch.randn(1, 1000 if tiny else 100_000_000, device=device) for _ in range(3)]
    for name, keep in (("on the host", to_host), ("on the device", torch.clone)):
        yield f"an epoch's state of {held[0].numel():,} weights by Adam, kept {name}", partial(_each, keep, held), 1
    del held
    size = 1 << (16 if tiny else 24)
    sums, scale, grid = (
        torch.zeros(1, size, device=device).double(),
        torch.ones(1, 1, device=device),
        Grid.of(size, 1000, [1.0]),
    )
    source, steps = NoiseSource([SecureStreams()], size, device, torch.float32), itertools.count()
    for processes in (1, 2, 8):
        own = slice(0, size // processes)
        yield (
            f"noise of {size:,} numbers, that of one of {processes} processes",
            lambda own=own: source.add(sums, next(steps), scale, grid, own),  # type: ignore[misc]
            1,
        )
    count = 1 << (16 if tiny else 22)
    out = torch.empty(count, dtype=torch.int64, device=device)

    def fetched() -> None:
        here = torch.empty(count, dtype=torch.int64)
        digits.fill(here, digits.fresh())
        out.copy_(here.pin_memory() if device.type == "cuda" else here, non_blocking=True)

    def drawn() -> None:
        digits.fill(out, digits.fresh(), chacha.ChaCha(device))

    def drawn_compiled() -> None:
        chacha.ChaCha.computed = chacha.WORTH_COMPILING
        drawn()

    yield "a number of noise, on the host by AES", fetched, count
    yield "a number of noise, on the device by ChaCha20", drawn, count
    if device.type == "cuda":
        yield "the same, compiled", drawn_compiled, count


def _each(keep: Callable[[Tensor], object], held: list[Tensor]) -> None:
    for x in held:
        keep(x)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="all but the large ones by default, and on a GPU these too")
    parser.add_argument("--modes", nargs="+", choices=MODES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="small shapes, and what a GPU does: a rehearsal")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "NETWORK"), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    device = torch.device(settings.device)
    gpu = device.type == "cuda"
    if gpu and not torch.cuda.is_available():
        print("no GPU here: nothing was measured", file=sys.stderr)
        return 1
    warnings.simplefilter("ignore")  # of Opacus about its own hooks
    torch.set_num_threads(1)
    precision.keep_sums_exact()
    keep_freed_memory()  # as a training does, and for the plain steps too
    every = tasks(device, settings.tiny)
    if settings.one:
        measure_memory(settings.one[0], every[settings.one[1]])
        return 0
    names = settings.networks or [name for name in every if gpu or settings.tiny or name not in LARGE]
    modes = settings.modes or [mode for mode in MODES if gpu or settings.tiny or mode in USUAL]
    if settings.tiny and not settings.modes:
        modes = [mode for mode in modes if "compiled" not in mode and "captured" not in mode]  # minutes, or a GPU only
    print(f"{torch.cuda.get_device_name(device) if gpu else 'CPU, one thread'}, torch {torch.__version__}\n")
    if settings.memory:
        compare_memory(names, modes)
    elif settings.first:
        for name in names:
            first(every[name])
    else:
        if gpu or settings.tiny:
            print("| measured | time |\n| --- | ---: |")
            for words, step, count in of_a_device(device, settings.tiny, settings.rounds):
                taken = usual(step, device, 3 + settings.rounds // 6)
                print(
                    f"| {words} | {1e3 * taken:.3f} ms |"
                    if count == 1
                    else f"| {words} | {1e9 * taken / count:.2f} ns |"
                )
            print()
        print("| network | batch | mode | ms | over plain | first, s | MiB | over plain |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |")
        for name in names:
            unasked = name in LARGE and not settings.modes  # these compile for minutes
            own = [mode for mode in modes if not (unasked and mode in ("dpsgd-compiled", "dpsgd-bfloat16-compiled"))]
            table(every[name], own, settings.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
