"""How long does a private step of a user's network take beside a plain one, and beside Opacus, and in how much memory?

    python -m benchmarks.networks                    # the table: processor time, memory, whole training, BERT-base
    python -m benchmarks.networks BERT LSTM          # steps of these networks only
    python -m benchmarks.networks --profile BERT     # where a private step spends its time

Networks are random, in eval mode (without dropout, as a folder of transformers is loaded), on one thread. All modes
of a network take turns in one process, and each ratio is of the least processor times: other work on the machine only
adds to them. Memory is the peak above the process at rest, in a fresh process for each mode. Opacus is run as its
documentation says (hooks and ghost clipping); where it raises an error, the error's first words are the entry.
Needs the extras `bench` and `transformers`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.step import compare_training
from dpsgd_cli.batching.memory import keep_freed_memory
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine import independence, models
from dpsgd_cli.engine.losses import LossOptions, made
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import MlpModel
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.noise.run import NoiseSource

Step = Callable[[], None]
BATCH, LENGTH, WORDS, WIDTH = 32, 64, 1000, 128
RATE = 0.05


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


def _mean_loss(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y, labels)


def _mean_next_token(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-1)


@dataclass(frozen=True)
class Task:
    """A network, a batch, and whether it predicts the next token; `of_opacus` is what Opacus gets instead.

    `trusted`: a built-in model, which runs on whole batches.
    """

    name: str
    build: Callable[[], nn.Module]
    x: Tensor
    classes: int = 2
    causal: bool = False
    of_opacus: Callable[[], nn.Module] | None = None
    trusted: bool = False

    @property
    def y(self) -> Tensor:
        if self.causal:
            return F.pad(self.x[:, 1:], (0, 1), value=-1)
        return torch.arange(len(self.x)) % self.classes

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        made = self.build().eval()
        for module in made.modules():
            if isinstance(module, nn.RNNBase | nn.TransformerEncoderLayer | nn.MultiheadAttention):
                module.train()  # plain fast paths of eval mode have no backward pass; there is no dropout
        return made


def tasks() -> dict[str, Task]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, WORDS, (BATCH, LENGTH), generator=generator)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator)
    rows = torch.randn(600, 60, generator=generator)
    every = [
        Task("BERT", bert, tokens),
        Task("GPT-2", gpt2, tokens, causal=True),
        Task("Llama", llama, tokens, causal=True),
        Task("LoRA", lora, tokens),
        Task("ResNet-18", resnet18, images, 10),
        Task("LSTM", Lstm, tokens, of_opacus=_opacus_lstm),
        Task("TransformerEncoder", Encoder, tokens),
        Task("MLP", lambda: models.mlp(MlpModel(hidden=[1000]), (60,), 10), rows, 10, trusted=True),
    ]
    return {task.name: task for task in every}


def _opacus_lstm() -> nn.Module:
    from opacus.layers import DPLSTM

    return Lstm(DPLSTM)


def plain(task: Task) -> Step:
    model = task.model()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=RATE)
    loss = _mean_next_token if task.causal else _mean_loss

    def step() -> None:
        optimizer.zero_grad()
        loss(model(task.x), task.y).backward()
        optimizer.step()

    return step


def packed(task: Task) -> Pack:
    return Pack(task.model, [0], Placement(torch.device("cpu")), trusted=task.trusted)


def private(task: Task) -> Step:
    return step_of(packed(task), task)


def step_of(pack: Pack, task: Task) -> Step:
    """What `methods/dp_sgd/run.py` does in a step: clipped sums, noise, update."""
    noise = NoiseSource([SeededStreams(0)], pack.size, pack.values.device, torch.float32)
    clipping, seen = Clipping(torch.ones(1, 1)), Diagnostics(1, pack.values.device)
    scale, rate = torch.ones(1, 1), torch.full((1, 1), RATE)
    loss = made("next-token" if task.causal else None, "classification", LossOptions(), task.causal, False, Path())
    steps = itertools.count()

    def step() -> None:
        pack.sums.zero_()
        add_clipped_sums(pack, (task.x[None], task.y[None], None), loss, clipping, seen)
        noise.add(pack.sums, next(steps), scale, None)
        pack.values.addcmul_(pack.sums.div_(len(task.x)).float(), rate, value=-1.0)

    return step


def opacus(task: Task, ghost: bool) -> Step:
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    raw = (task.of_opacus or task.model)().train()
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
        if not task.causal:
            criterion(y, task.y).backward()
        elif ghost:
            shape = (len(task.x), LENGTH)
            criterion(y.flatten(0, 1), task.y.flatten(), shape=shape).backward()
        else:
            _mean_next_token(y, task.y).backward()
        optimizer.step()

    return step


MODES: dict[str, Callable[[Task], Step]] = {
    "plain": plain,
    "dpsgd": private,
    "opacus-hooks": partial(opacus, ghost=False),
    "opacus-ghost": partial(opacus, ghost=True),
}


def started(task: Task, modes: Iterable[str]) -> tuple[dict[str, Step], dict[str, str]]:
    """Return the modes that run, and what the others said."""
    steps, failed = {}, {}
    for name in modes:
        try:
            steps[name] = MODES[name](task)
            steps[name]()
        except Exception as error:  # a peer's errors have no common type
            if name in ("plain", "dpsgd"):
                raise
            steps.pop(name, None)
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            failed[name] = said.replace("|", "/")[:60]
    return steps, failed


def in_turns(steps: dict[str, Step], rounds: int) -> dict[str, float]:
    """Return the least of each mode's processor seconds: two steps a round, of which the second counts."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            begun = time.process_time()
            step()
            taken[name].append(time.process_time() - begun)
    return {name: min(times) for name, times in taken.items()}


def peaks(name: str, modes: Iterable[str]) -> dict[str, float]:
    """Return the peak MiB of each mode above the process at rest, each in a process of its own."""
    found = {}
    for mode in modes:
        command = [sys.executable, "-m", "benchmarks.networks", "--one", mode, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            found[mode] = float(done.stdout.split()[-1])
    return found


def measure_memory(mode: str, name: str) -> None:
    task = tasks()[name]
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


def table(chosen: list[Task], modes: list[str], rounds: int) -> None:
    print(f"torch {torch.__version__}, one thread, batch {BATCH}, {LENGTH} tokens, least of {rounds} rounds\n")
    print("| network | mode | processor ms | over plain | peak MiB | over plain |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for task in chosen:
        steps, failed = started(task, modes)
        times, memory = in_turns(steps, rounds), peaks(task.name, steps)
        for mode, taken in times.items():
            held = memory.get(mode, float("nan"))
            ratios = taken / times["plain"], held / memory["plain"]
            print(f"| {task.name} | {mode} | {1e3 * taken:.1f} | {ratios[0]:.2f} | {held:.0f} | {ratios[1]:.2f} |")
        for mode, said in failed.items():
            print(f"| {task.name} | {mode} | fails: {said} | | | |")


def first_step_of_bert_base() -> None:
    """Print the processor seconds of making a pack of BERT-base, its tests, and its first step."""
    begun = time.process_time()
    task = Task("BERT-base", bert_base, torch.randint(1, WORDS, (BATCH, LENGTH)))
    pack = packed(task)
    step = step_of(pack, task)
    loaded = time.process_time()
    independence.check_model(pack, (LENGTH,), task.x)
    tested = time.process_time()
    step()
    done = time.process_time()
    plain_step = plain(task)
    plain_begun = time.process_time()
    plain_step()
    print(
        f"\nBERT-base: {loaded - begun:.1f} s to make, {tested - loaded:.1f} s of its test,"
        f" first step {done - tested:.1f} s; together {done - begun:.1f} s; a plain step"
        f" {time.process_time() - plain_begun:.1f} s"
    )


def profile(task: Task) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    for mode in ("plain", "dpsgd"):
        step = MODES[mode](task)
        step()
        with profiled(activities=[ProfilerActivity.CPU]) as found:
            for _ in range(5):
                step()
        print(mode, found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", help="networks of the table; all, training and BERT-base by default")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "NETWORK"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of Opacus about its own hooks
    torch.set_num_threads(1)
    keep_freed_memory()  # as a training does, and for the plain steps too
    if arguments.one:
        measure_memory(*arguments.one)
        return
    every = tasks()
    chosen = [every[name] for name in arguments.networks or every]
    if arguments.profile:
        for task in chosen:
            profile(task)
        return
    table(chosen, arguments.modes, arguments.rounds)
    if not arguments.networks:
        compare_training(20, 3, time.process_time)
        first_step_of_bert_base()


if __name__ == "__main__":
    main()
