"""The module that joins all parts of a run: recipe -> plan -> data -> trials -> result directory.

The guarantee depends on this order. The plan is priced before data is read. Ledgers are charged before each release,
private preprocessing first. The epsilon in a result comes from the ledgers, not from the plan.

A run that is stopped (Ctrl-C, a full disk, no memory) ends with a RunError and no result. It leaves a checkpoint of the
last finished epoch if one can be written. `training/start.py` argues why a resumed run is as private as an
uninterrupted one.

Not here: how trials start and continue (`training/start.py`), how rows are assembled (`training/assemble.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.clipping.diagnostics import Diagnostics
from dpsgd_cli.common import interrupts
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.discover import found_by_trial
from dpsgd_cli.engine.processes import Team, started_by_a_launcher
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.methods.base import Findings
from dpsgd_cli.recipe.loading import SettledRecipe, dump_recipe, recipe_hash
from dpsgd_cli.recipe.schema import Runtime
from dpsgd_cli.results import provenance, reading, store, tensorboard
from dpsgd_cli.results.result import Released, Result, Unreleased
from dpsgd_cli.training import assemble, checkpoint, inference, plans
from dpsgd_cli.training.build_models import check_without_data, loss_of
from dpsgd_cli.training.evaluation import measure, measure_once, models_of
from dpsgd_cli.training.start import Member, Snapshot, Trials, start
from dpsgd_cli.users.run import UnitTable

Progress = Callable[[int, int], None]
Say = Callable[[str], None]


def _silence(text: str) -> None:
    del text


@dataclass(frozen=True)
class Options:
    """Options of a run that cannot change its result.

    `say` receives messages for the user. `team` is the group of processes that train together; only the first of them
    prints and writes. `save_models` is the default for recipes without `save_model`.
    """

    out: Path = Path("results")
    resume: bool = False
    progress: Progress | None = None
    say: Say = _silence
    team: Team = field(default_factory=Team)
    save_models: bool = False


def plan_recipe(loaded: SettledRecipe) -> tuple[Plan | None, data.Outline]:
    """Return the plan (None for a method without privacy) and the outline of the data, before any value is used."""
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        if loaded.recipe.runtime.tensorboard:
            tensorboard.check_installed()
        outline = data.outline(loaded.recipe.data, loaded.base)
        return plans.plan_of(loaded, outline), outline


def rehearse(loaded: SettledRecipe) -> tuple[Plan | None, data.Outline]:
    """Build and check the model as training would, on synthetic rows; then return the result of `plan_recipe`."""
    plan, outline = plan_recipe(loaded)
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        check_without_data(loaded, outline)
    return plan, outline


def result_directory(loaded: SettledRecipe, out: Path) -> Path:
    """Return the directory of this recipe's result, whether it exists or not."""
    return out / f"{loaded.recipe.name}-{recipe_hash(loaded.recipe)}"


def is_finished(loaded: SettledRecipe, directory: Path, say: Say = _silence) -> bool:
    """Return True if `directory` holds the result of this recipe and of the files that it names.

    Raises RunError if the result was made from other data or code (the recipe's hash covers file names, not contents),
    and DataError if the result's files have changed since they were written.
    """
    if not store.is_complete(directory):
        return False
    for name in provenance.check_unchanged(store.read_whole(directory), loaded, directory):
        say(f"{name} is no longer there, so it could not be compared with what the result was made from.")
    return True


@trusting()
def run(loaded: SettledRecipe, options: Options) -> Path:
    """Train every trial of a recipe, write its result directory and return that directory.

    A finished result is left unchanged. Raises the errors of `dpsgd_cli.errors`. An interruption (Ctrl-C too) becomes
    a RunError that says what was kept.
    """
    directory = result_directory(loaded, options.out)
    if options.team.tell(lambda: is_finished(loaded, directory, options.say)):
        return directory
    plan, _ = plan_recipe(loaded)
    run_pack([Member(loaded, plan)], options)
    return directory


def finish(loaded: SettledRecipe, options: Options) -> Path:
    """Write the result of a stopped run from its last checkpoint and return the result directory.

    No further training takes place. The result's epsilon covers the epochs of the checkpoint (`Plan.rest` says when it
    covers more); later epochs were never released. A finished result is left unchanged. Raises RunError if there is no
    checkpoint, if it belongs to another run, or if the method has no result yet.
    """
    directory = result_directory(loaded, options.out)
    if is_finished(loaded, directory, options.say):
        return directory
    if options.team.size > 1 or started_by_a_launcher():
        raise UsageError("--finish is for one process; start it without torchrun")
    member = Member(loaded, plan_recipe(loaded)[0])
    kept = checkpoint_place([member], options.out)
    with interrupts.explained(list(loaded.own_code.values()), lambda: f"{kept} is kept"):
        earlier = checkpoint.load(kept)
        if earlier is None:
            raise RunError(
                f"{kept}: there is no such checkpoint, so there is nothing to finish; train without --finish"
            )
        store.prepare_place(directory)
        trials = start([member], earlier)
        trials.restore(earlier, kept)
        why = None if trials.stopped is None else trials.method.unfinished(trials.done)
        if why is not None:
            told = f"method {loaded.recipe.method.kind} has no result after {count(trials.done, 'epoch')}: {why}"
            raise RunError(f"{kept}: {told}; continue it with --resume")
        _write(trials, [directory], options.save_models)
    forget(kept)
    return directory


@trusting()
def run_pack(members: Sequence[Member], options: Options) -> list[Path]:
    """Train the trials of several recipes as one pack; return one result directory per member, in the members' order.

    Guarantee: a trial's result does not depend on the other trials of the pack, beyond the order of floating-point
    sums. The caller ensures that no member is finished and that all may train together. Raises as `run` does, and
    UsageError if the recipes differ in their data: the number of features may depend on the budget.
    """
    first, *others = (member.loaded.recipe for member in members)
    for other in others:
        if (other.data, other.folds) != (first.data, first.folds):
            raise UsageError(f"{first.name} and {other.name} do not train on the same data; start them one by one")
    directories = [result_directory(member.loaded, options.out) for member in members]
    if options.team.size == 1 and started_by_a_launcher():
        raise UsageError("only `dpsgd train` works in several processes; start this without torchrun")
    if not options.team.first:
        _run_worker(members, options.team)
        return directories
    keeper = _CheckpointWriter(checkpoint_place(members, options.out), members[0].loaded.recipe.runtime)
    own_code = [path for member in members for path in member.loaded.own_code.values()]
    with contextlib.closing(keeper), interrupts.explained(own_code, keeper.rescue):
        for directory in directories:
            store.prepare_place(directory)
        earlier = options.team.tell(lambda: keeper.earlier(options))
        trials = start(members, earlier, options.team)
        for warning in trials.dataset.warnings:
            options.say(f"warning: {warning}")
        if earlier is not None:
            trials.restore(earlier, keeper.path)
            options.say(f"Continuing after epoch {trials.done} of {trials.method.epochs}.")
        for member in members if trials.recipe.runtime.tensorboard else ():
            for text in tensorboard.left_out(member.loaded.recipe.trials):
                options.say(text)
        _train(trials, keeper, options.progress)
        _write(trials, directories, options.save_models)
    forget(keeper.path)
    return directories


def _run_worker(members: Sequence[Member], team: Team) -> None:
    """Train together with process 0, which prints and writes for all processes."""
    own_code = [path for member in members for path in member.loaded.own_code.values()]
    with interrupts.explained(own_code, lambda: "process 0 keeps what can be kept"):
        earlier: dict[str, Any] | None = team.tell(lambda: None)
        trials = start(members, earlier, team)
        if earlier is not None:
            trials.restore(earlier, Path("the checkpoint of process 0"))
        for epoch in range(trials.done, trials.method.epochs):
            trials.method.run_epoch(epoch)


def _write(trials: Trials, directories: Sequence[Path], save_models: bool) -> None:
    """Write the results of all members to hidden places, then publish them together."""
    staged: list[store.Staged] = []
    try:
        for (member, span), directory, result in zip(trials.spans(), directories, results_of(trials), strict=True):
            loaded, wanted = member.loaded, member.loaded.recipe.save_model
            model = (
                inference.bundle_of(trials, span).to_bytes() if (save_models if wanted is None else wanted) else None
            )
            result.provenance.update(provenance.recipe_folder(loaded, directory))
            text = dump_recipe(loaded.recipe)
            staged.append((store.stage_result(directory, result, text, model), directory))
            if trials.recipe.runtime.tensorboard:
                times = [record.ended for record in trials.history]
                tensorboard.write(reading.place(staged[-1][0], tensorboard.FOLDER), result.history, times)
        store.keep([hidden for hidden, _ in staged])
    except BaseException:
        store.discard(staged)
        raise
    store.publish(staged)


def results_of(trials: Trials) -> list[Result]:
    """Return the result of each member of a pack, over the finished epochs."""
    final = _final(trials)
    return [assemble.result(*_finished(trials, member, span, final)) for member, span in trials.spans()]


def checkpoint_place(members: Sequence[Member], out: Path) -> Path:
    """Return the checkpoint's path: beside the result of a single recipe, else named by a hash of all members."""
    if len(members) == 1:
        return checkpoint.place(result_directory(members[0].loaded, out))
    names = " ".join(member.hash for member in members)
    return checkpoint.place(out / f"pack-{hashlib.sha256(names.encode()).hexdigest()[:8]}")


NOT_COVERED = (
    "What TensorBoard showed of the run that was stopped was another training: this run's epsilon does not cover it."
)


def forget(kept: Path, say: Say | None = None) -> None:
    """Remove a checkpoint and the TensorBoard files of its run; pass NOT_COVERED to `say` if there were such files."""
    kept.unlink(missing_ok=True)
    if tensorboard.remove_live(kept) and say is not None:
        say(NOT_COVERED)


class _CheckpointWriter:
    """Writer of a run's checkpoint, at intervals and when the run is stopped."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self.path = path
        self._seconds = runtime.checkpoint_seconds
        self._watching = tensorboard.Watching(path) if runtime.tensorboard else None
        self._last_saved = time.monotonic()
        self._trials: Trials | None = None
        self._snapshot: Snapshot | None = None
        self._on_disk = 0

    def earlier(self, options: Options) -> dict[str, Any] | None:
        """Return the checkpoint to continue from; None without `options.resume` or without a checkpoint."""
        if tensorboard.remove_live(self.path) and not options.resume:
            options.say(NOT_COVERED)
        if not options.resume:
            if self.path.exists():
                options.say(
                    f"{self.path} is left from a run that was stopped; it is ignored and will be replaced"
                    " (--resume continues it)."
                )
            return None
        content = checkpoint.load(self.path)
        if content is None:
            options.say(f"There is no checkpoint {self.path}; training starts from the beginning.")
        else:
            self._on_disk = content["done"]
        return content

    def note(self, trials: Trials) -> None:
        """Take a snapshot of the trials at the start of training or at the end of an epoch."""
        self._trials, self._snapshot = trials, trials.snapshot()

    def save_if_due(self) -> None:
        if time.monotonic() - self._last_saved >= self._seconds:
            self._save()

    def _save(self) -> None:
        assert self._trials is not None and self._snapshot is not None
        checkpoint.save(self.path, self._trials.checkpoint(self._snapshot))
        self._on_disk = self._snapshot.done
        self._last_saved = time.monotonic()
        self.show()

    def show(self) -> None:
        """Show the epochs that the checkpoint on disk holds in TensorBoard, and no others."""
        if self._watching is None or self._trials is None or self._on_disk == 0:
            return
        times = [record.ended for record in self._trials.history]
        for member, span in self._trials.spans():
            finished = _finished(self._trials, member, span, _Final())
            rows = [row for row in assemble.history_so_far(*finished) if row["epoch"] < self._on_disk]
            self._watching.show(f"{member.loaded.recipe.name}-{member.hash}", rows, times)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.close()

    def rescue(self) -> str:
        """Save the last finished epoch of a run that was stopped, and say what is kept. Never raises."""
        if self._trials is None or self._snapshot is None or self._snapshot.done == 0:
            return "nothing was written"
        if self._on_disk < self._snapshot.done:
            try:
                self._save()
            except (OSError, RuntimeError, MemoryError, KeyboardInterrupt):
                if self._on_disk == 0:
                    return "no checkpoint could be written, so nothing is kept"
        total = self._trials.method.epochs
        return f"{self._on_disk} of {total} epochs are kept: the same command with --resume continues there"


def _train(trials: Trials, keeper: _CheckpointWriter, progress: Progress | None) -> None:
    """Train the remaining epochs, with a checkpoint at intervals."""
    total, runtime = trials.method.epochs, trials.recipe.runtime
    keeper.note(trials)
    keeper.show()
    for epoch in range(trials.done, 0 if trials.method.finished else total):
        begun = time.perf_counter()
        seen = trials.method.run_epoch(epoch)
        if trials.context.pack.values.device.type == "cuda":
            torch.cuda.synchronize(trials.context.pack.values.device)
        trials.train_seconds += time.perf_counter() - begun
        last = epoch + 1 == total or trials.method.finished
        wanted = (epoch + 1) % runtime.evaluate_every == 0 or last
        trials.history.append(record(trials, epoch, seen, wanted))
        trials.done = epoch + 1
        keeper.note(trials)
        if not last:
            keeper.save_if_due()
        if progress is not None:
            progress(trials.done, total)
        if last:
            break


def record(trials: Trials, epoch: int, seen: Diagnostics, wanted: bool) -> assemble.EpochRecord:
    """Return the record of a finished epoch. If `wanted`, it includes metrics on test and public validation records."""
    loss, models = loss_of(trials.recipe, raw=True), models_of(trials)
    found = measure(models, trials.method.rows_for_output(trials.test), loss) if wanted else {}
    named = {f"test_{k}": v for k, v in found.items()}
    cut, rows = trials.recipe.data.validation, trials.context.validation
    if wanted and rows is not None and cut is not None and cut.public:
        rows = trials.method.rows_for_output(rows)
        named.update({f"validation_{k}": v for k, v in measure(models, rows, loss).items()})
    named.update(trials.method.published())
    return assemble.EpochRecord(epoch, named, seen.sums(), time.time())


@dataclass(frozen=True)
class _Final:
    """Final metrics of each trial of a pack: on public rows, and (non-private) on training rows."""

    metrics: dict[str, list[float]] = field(default_factory=dict)
    on_train: dict[str, list[float]] = field(default_factory=dict)
    findings: Findings | None = None


def _final(trials: Trials) -> _Final:
    """Measure the published weights of all trials."""
    models = models_of(trials)
    rows_of = trials.method.rows_for_output
    table = trials.context.table
    inference = table.row_by_row() if isinstance(table, UnitTable) else table
    on_train = measure(models, rows_of(inference), trials.context.loss)
    last = trials.history[-1].metrics if trials.history else {}
    # findings exist only for a complete training
    findings = trials.method.findings() if trials.stopped is None else None
    measured, constants = measure_once(models, rows_of(trials.test))
    last = last | {f"test_{k}": v for k, v in measured.items()} | {f"constant_{k}": v for k, v in constants.items()}
    if isinstance(trials.recipe.model, ConvexModel):
        squares = trials.method.output.double().square().sum(dim=1).tolist()
        l2 = [recipe.model.l2 for recipe in trials.context.recipes if isinstance(recipe.model, ConvexModel)]
        pairs = zip(on_train["loss"], l2, squares, strict=True)
        on_train["objective"] = [loss + c / 2 * square for loss, c, square in pairs]
    return _Final(last, {f"train_{name}": values for name, values in on_train.items()}, findings)


def _finished(trials: Trials, member: Member, span: slice, final: _Final) -> tuple[Released, Unreleased]:
    """Return the released and the unreleased (non-private) results of one member, separately."""
    context, dataset, findings = trials.context, trials.dataset, final.findings
    wanted = member.loaded.recipe.epochs
    length = wanted if member.plan is None and isinstance(wanted, int) else len(trials.history)
    history = [record.of(span) for record in trials.history[:length]]
    fetched, own = provenance.hashes(member.loaded, dataset.sha256)
    counted, measured = _timing(trials, span.stop - span.start, length)
    discovered = found_by_trial(member.loaded.recipe.data, dataset.released, range(span.start, span.stop))
    told = dict.fromkeys(warning for found in discovered for warning in found.warnings)
    released = Released(
        loaded=member.loaded,
        plan=member.plan,
        ledgers=context.ledgers[span],
        reproducible=all(stream.reproducible for stream in context.streams[span]),
        declarations=dataset.declarations,
        uncovered_steps=dataset.nonprivate,
        warnings=(*dataset.warnings, *told, *(() if findings is None else findings.warnings)),
        data_sha256=fetched,
        device=str(context.pack.values.device),
        epochs=[record.metrics for record in history],
        metrics={name: values[span] for name, values in final.metrics.items()},
        finite=torch.isfinite(trials.method.output[span]).all(dim=1).tolist(),
        timing=counted,
        findings=None if findings is None else findings.claimed[span],
        stopped=trials.stopped,
        discovered=[found.lines for found in discovered],
    )
    unreleased = Unreleased(
        epochs=[record.counts for record in history],
        metrics={name: values[span] for name, values in final.on_train.items()},
        data_sha256=own,
        timing=measured,
        findings=None if findings is None else findings.measured[span],
    )
    return released, unreleased


def _timing(trials: Trials, own: int, epochs: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return planned counts, and measured times of `own` trials over `epochs` epochs.

    The pack's time is divided equally among its trials. Examples are counted by expected batch sizes, because the
    realised sizes are private.
    """
    settings = trials.recipe.method
    per_epoch = len(trials.context.table)
    if BATCHINGS[settings.batching].sampled and settings.batch is not None:
        per_epoch = trials.method.steps * settings.batch
    examples = per_epoch * trials.done * trials.context.trials
    rate = examples / trials.train_seconds if trials.train_seconds > 0 else 0.0
    counted = {
        "steps": epochs * trials.method.steps,
        "pack_trials": trials.context.trials,
        "processes": trials.context.team.size,
    }
    measured = {"train_seconds": trials.train_seconds * own / trials.context.trials, "examples_per_second": rate}
    return counted, measured
