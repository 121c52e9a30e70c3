"""The only joiner: recipe -> plan -> data -> trials -> result directory.

Order matters and is the guarantee: the plan is priced before data is read; ledgers are charged before each release
(private preprocessing first); the epsilon that is written comes from the ledgers, not from the plan.

Not here: any mathematics (`core/`, `privacy/`, `methods/`), how rows are assembled (`results/assemble.py`), Click.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.core import models
from dpsgd_cli.core.clipping import Diagnostics
from dpsgd_cli.core.evaluation import evaluate
from dpsgd_cli.core.losses import LOSSES
from dpsgd_cli.core.packing import Pack, Place, check_examples_stay_apart, elements_per_row
from dpsgd_cli.core.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.errors import ModelError, RunError, UsageError
from dpsgd_cli.methods import Context, Method, create
from dpsgd_cli.privacy.ledger import Ledger, entries_from_lines, to_lines
from dpsgd_cli.privacy.plan import Plan, adjacency_of, make_plan
from dpsgd_cli.recipe.loading import LoadedRecipe, dump_recipe, recipe_hash
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import assemble, checkpoint, store

_ELEMENTS_AT_ONCE = 1 << 26
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: nothing here can change a result."""

    out: Path = Path("results")
    resume: bool = False
    progress: Progress | None = None


@dataclass
class Trials:
    """All trials of one recipe while they train."""

    loaded: LoadedRecipe
    context: Context
    method: Method
    test: Table
    dataset: data.Dataset
    done: int = 0
    train_seconds: float = 0.0
    history: list[assemble.EpochRecord] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe


def plan_recipe(loaded: LoadedRecipe) -> tuple[Plan | None, data.Outline]:
    """The plan (None for a method without privacy) and what is known of the data, before any value is used."""
    recipe = loaded.recipe
    outline = data.outline(recipe.data, loaded.base)
    if recipe.privacy is None:
        if recipe.method.batch_size is not None and recipe.method.batch_size > outline.train_records:
            raise UsageError(
                f"method.batch_size is {recipe.method.batch_size}, more than the {outline.train_records} training"
                " records; make it smaller"
            )
        return None, outline
    before = data.private_releases(recipe.data, adjacency_of(recipe))
    groups = None
    if recipe.privacy.clipping.kind == "per-layer":
        groups = _count_layers(loaded, outline)
    return make_plan(recipe, outline.train_records, before, groups), outline


def _count_layers(loaded: LoadedRecipe, outline: data.Outline) -> int:
    pack = _pack(loaded, outline.input_shape, outline.outputs, [0], Place(torch.device("cpu")))
    return len(pack.layers)


def _pack(
    loaded: LoadedRecipe, shape: tuple[int, ...] | None, outputs: int, seeds: Sequence[int], place: Place
) -> Pack:
    if shape is None:
        raise ModelError(f"{loaded.source}: the shape of one input is not known")
    build = models.builder(loaded.recipe.model, shape, outputs, loaded.base)
    return Pack(build, seeds, place, shares_input=loaded.recipe.model.kind in models.BUILT_IN)


def result_directory(loaded: LoadedRecipe, out: Path) -> Path:
    """Where the result of this recipe lies, or will lie."""
    return out / f"{loaded.recipe.name}-{recipe_hash(loaded.recipe)}"


def run(loaded: LoadedRecipe, options: Options) -> Path:
    """Train every trial of a recipe and write its result directory, which is returned.

    A finished result is left as it is. Raises the errors of `dpsgd_cli.errors`; Ctrl-C leaves a checkpoint
    at the last finished epoch and becomes RunError.
    """
    directory = result_directory(loaded, options.out)
    if store.is_complete(directory):
        return directory
    plan, _ = plan_recipe(loaded)
    store.prepare_place(options.out)
    trials = _start(loaded, plan)
    saved = checkpoint.place(directory)
    if options.resume:
        _resume(trials, saved)
    _train(trials, saved, options.progress)
    finished = assemble.Finished(
        loaded, plan, trials.context, trials.dataset, trials.history, _timing(trials), _final_metrics(trials)
    )
    model = _weights(trials) if loaded.recipe.save_model else None
    store.write_result(directory, assemble.result(finished), dump_recipe(loaded.recipe), model)
    saved.unlink(missing_ok=True)
    return directory


def _start(loaded: LoadedRecipe, plan: Plan | None) -> Trials:
    recipe = loaded.recipe
    place = Place(_device(recipe.runtime.device), getattr(torch, recipe.runtime.dtype))
    if recipe.runtime.threads is not None:
        torch.set_num_threads(recipe.runtime.threads)
    streams = _streams(recipe)
    ledgers = tuple(Ledger() if plan is None else plan.ledger() for _ in streams)
    for ledger in ledgers:
        for release in plan.before if plan is not None else ():
            ledger.spend(release, phase="before")
    dataset = data.prepare(recipe.data, loaded.base, len(streams), _normals(streams), adjacency_of(recipe))
    if plan is not None and len(dataset.train_y) != plan.sampling.records:
        raise RunError(
            f"{dataset.name} has {len(dataset.train_y)} training rows, but {plan.sampling.records} were planned"
        )
    train = Table.load(dataset.train_x, dataset.train_y, dataset.per_trial, place.device, place.dtype)
    test = Table.load(dataset.test_x, dataset.test_y, dataset.per_trial, place.device, place.dtype)
    outputs = len(dataset.classes) if dataset.classes is not None else 1
    pack = _pack(loaded, train.input_shape, outputs, [s.integer("init") for s in streams], place)
    rows = _check_model(pack, train, outputs, recipe.runtime.micro_batch)
    repeated, loss = len(streams), LOSSES[recipe.data.task]
    context = Context((recipe,) * repeated, (plan,) * repeated, ledgers, streams, pack, train, loss, rows, loaded.base)
    return Trials(loaded, context, create(context), test, dataset)


def _check_model(pack: Pack, train: Table, outputs: int, asked: int | None) -> int:
    """See that the model fits the data and keeps examples apart; returns how many rows a trial may hold at once."""
    # values of no record: alternating 0 and 1 are valid pixels, scaled numbers and token ids alike
    probe = (torch.arange(4 * train.x[0, 0].numel() if train.per_trial else 4 * train.x[0].numel()) % 3 % 2).reshape(
        4, *train.input_shape
    )
    probe = probe.to(train.x)
    try:
        with torch.no_grad():
            shape = tuple(pack(probe[None]).shape[2:])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        raise ModelError(f"the model does not take inputs of shape {train.input_shape}: {error}") from error
    if shape != (outputs,):
        raise ModelError(f"the model gives outputs of shape {shape} for one example; the data needs ({outputs},)")
    check_examples_stay_apart(pack, probe)
    return asked or max(1, _ELEMENTS_AT_ONCE // (pack.trials * elements_per_row(pack, probe)))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"runtime.device {name!r} is not usable here: {str(error).splitlines()[0]}") from error
    return device


def _streams(recipe: Recipe) -> tuple[Streams, ...]:
    """A seed gives seeded streams; none gives the operating system's."""
    if recipe.seed is None:
        return tuple(SecureStreams() for _ in range(recipe.repeats))
    return tuple(SeededStreams(recipe.seed + trial) for trial in range(recipe.repeats))


def _normals(streams: Sequence[Streams]) -> Callable[[int, str, tuple[int, ...]], np.ndarray]:
    def normal(trial: int, purpose: str, shape: tuple[int, ...]) -> np.ndarray:
        return streams[trial].normal(purpose, 0, torch.empty(shape, dtype=torch.float64)).numpy()

    return normal


def _train(trials: Trials, saved: Path, progress: Progress | None) -> None:
    """Epoch by epoch, with a checkpoint now and then and at an interruption."""
    total, runtime = trials.method.epochs, trials.recipe.runtime
    last_saved = time.monotonic()
    snapshot = _snapshot(trials)
    try:
        for epoch in range(trials.done, total):
            begun = time.perf_counter()
            seen = trials.method.run_epoch(epoch)
            _synchronise(trials.context.pack.values.device)
            trials.train_seconds += time.perf_counter() - begun
            wanted = (epoch + 1) % runtime.evaluate_every == 0 or epoch + 1 == total
            trials.history.append(_record(trials, epoch, seen, wanted))
            trials.done = epoch + 1
            snapshot = _snapshot(trials)
            if time.monotonic() - last_saved >= runtime.checkpoint_seconds and epoch + 1 < total:
                checkpoint.save(saved, snapshot)
                last_saved = time.monotonic()
            if progress is not None:
                progress(epoch + 1, total)
    except KeyboardInterrupt:
        if snapshot["done"] == 0:
            raise RunError("interrupted before the first epoch ended; nothing was written") from None
        checkpoint.save(saved, snapshot)
        raise RunError(
            f"interrupted after {snapshot['done']} of {total} epochs; the same command with --resume continues"
        ) from None


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(trials: Trials, epoch: int, seen: Diagnostics, wanted: bool) -> assemble.EpochRecord:
    found = _evaluate(trials, trials.test) if wanted else {}
    return assemble.EpochRecord(epoch, {f"test_{k}": v for k, v in found.items()}, seen.sums())


def _evaluate(trials: Trials, table: Table) -> dict[str, list[float]]:
    context = trials.context
    found = evaluate(context.pack, trials.method.output, table, trials.recipe.data.task, context.most_rows)
    return {name: values.tolist() for name, values in found.items()}


def _final_metrics(trials: Trials) -> dict[str, list[float]]:
    """Metrics of the published weights; those on training rows are named non-private."""
    on_train = _evaluate(trials, trials.context.table)
    last = trials.history[-1].metrics if trials.history else {}
    return {**last, **{f"nonprivate_train_{name}": values for name, values in on_train.items()}}


def _timing(trials: Trials) -> dict[str, Any]:
    steps = trials.method.epochs * trials.method.steps
    examples = sum(sum(record.counts["examples"]) for record in trials.history)
    rate = examples / trials.train_seconds if trials.train_seconds > 0 else 0.0
    return {"train_seconds": trials.train_seconds, "steps": steps, "examples_per_second": rate}


def _weights(trials: Trials) -> dict[str, torch.Tensor]:
    """Trained tensors by name; those of trial i under `trial-i/` when there are several."""
    pack = trials.context.pack
    pack.values.copy_(trials.method.output)
    several = pack.trials > 1
    return {
        f"trial-{trial}/{name}" if several else name: tensor.cpu().contiguous()
        for trial in range(pack.trials)
        for name, tensor in pack.parameters_of(trial).items()
    }


def _snapshot(trials: Trials) -> dict[str, Any]:
    recipe = trials.recipe
    lines = [to_lines(ledger, i, _seed(recipe, i)) for i, ledger in enumerate(trials.context.ledgers)]
    return {
        "hash": recipe_hash(recipe),
        "data": dict(trials.dataset.sha256),
        "done": trials.done,
        "train_seconds": trials.train_seconds,
        "method": trials.method.state(),
        "ledgers": lines,
        "history": [(r.epoch, r.metrics, r.counts) for r in trials.history],
    }


def _seed(recipe: Recipe, trial: int) -> int | None:
    return None if recipe.seed is None else recipe.seed + trial


def _resume(trials: Trials, saved: Path) -> None:
    """Continue from the checkpoint, when there is one; otherwise start from the beginning."""
    content = checkpoint.load(saved)
    if content is None:
        return
    if content["hash"] != recipe_hash(trials.recipe) or content["data"] != dict(trials.dataset.sha256):
        raise RunError(f"{saved}: belongs to another recipe or other data; remove it and train again")
    for ledger, lines in zip(trials.context.ledgers, content["ledgers"], strict=True):
        entries = next(iter(entries_from_lines(lines, str(saved)).values()), [])
        for entry in entries[len(ledger.entries) :]:
            ledger.spend(entry.release, entry.epoch, entry.phase)
    trials.method.load_state(content["method"])
    trials.done, trials.train_seconds = content["done"], content["train_seconds"]
    trials.history = [assemble.EpochRecord(*record) for record in content["history"]]
