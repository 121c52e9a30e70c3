"""The module that joins all parts of a run: recipe -> plan -> data -> trials -> result directory.

The guarantee depends on this order. The plan is priced before data is read. Ledgers are charged before each release,
private preprocessing first. The epsilon in a result comes from the ledgers, not from the plan.

A run that is stopped (Ctrl-C, a full disk, no memory) ends with a RunError and no result. It leaves a checkpoint of the
last finished epoch if one can be written. `training/start.py` argues why a resumed run is as private as an
uninterrupted one.

Not here: how trials start and continue (`training/start.py`), what is measured (`training/evaluation.py`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.common import interrupts
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.common.text_format import count
from dpsgd_cli.engine.processes import Team, started_by_a_launcher
from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.methods.experiment import Runtime
from dpsgd_cli.recipe.loading import SettledRecipe, dump_recipe, recipe_hash, resolved
from dpsgd_cli.results import mlflow, provenance, reading, store
from dpsgd_cli.results.earlier import earlier_of
from dpsgd_cli.training import charging, checkpoint, evaluation, inference, plans
from dpsgd_cli.training.build_models import check_without_data
from dpsgd_cli.training.start import Member, Snapshot, Trials, start

Progress = Callable[[int, int], None]
Logger = Callable[[str], None]


def silence(text: str) -> None:
    del text


@dataclass(frozen=True)
class Options:
    """Options of a run that cannot change its result.

    `say` receives messages for the user. `team` is the group of processes that train together; only the first of them
    prints and writes. `save_models` is the default for recipes without `save_model`. `charged` says what the caller has
    charged the recipe's book for: nothing yet (`none`), these very runs (`runs`), or a whole of which they are parts
    and which notes its own release (`whole`).
    """

    out: Path = Path("results")
    resume: bool = False
    progress: Progress | None = None
    say: Logger = silence
    team: Team = field(default_factory=Team)
    save_models: bool = False
    charged: Literal["none", "runs", "whole"] = "none"


def plan_recipe(loaded: SettledRecipe) -> tuple[Plan | None, data.Outline]:
    """Return the plan (None for a method without privacy) and the outline of the data, before any value is used."""
    with interrupts.explained(list(loaded.own_code.values()), lambda: "nothing was written"):
        if loaded.recipe.runtime.track is not None:
            mlflow.check_installed()
        earlier_of(loaded)  # what cannot be started from is refused before anything is charged
        with loaded.locating_errors():
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


def is_finished(loaded: SettledRecipe, directory: Path, say: Logger = silence) -> bool:
    """Return True if `directory` holds the result of this recipe and of the files that it names.

    Raises RunError if the result was made from other data or code (the recipe's hash covers file names, not contents),
    and DataError if the result's files have changed since they were written.
    """
    if not store.is_complete(directory):
        return False
    charging.check_charged(loaded, directory)
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
    if options.team.first:
        store.roll_forward(options.out)
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
        charging.begin([member], [directory], use_open=True)
        trials = start([member], earlier)
        charging.check_read([member], trials.dataset.sha256)
        trials.restore(earlier, kept)
        why = None if trials.stopped is None else trials.method.unfinished(trials.done)
        if why is not None:
            told = f"method {loaded.recipe.method.kind} has no result after {count(trials.done, 'epoch')}: {why}"
            raise RunError(f"{kept}: {told}; continue it with --resume")
        evaluation.evaluate_last(trials)
        _write(trials, [directory], options)
    kept.unlink(missing_ok=True)
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
    with interrupts.explained(own_code, keeper.rescue):
        for directory in directories:
            store.prepare_place(directory)
        earlier = options.team.tell(lambda: _begin(members, directories, keeper, options))
        trials = start(members, earlier, options.team)
        charging.check_read(members, trials.dataset.sha256)
        for warning in trials.dataset.warnings:
            options.say(f"warning: {warning}")
        if earlier is not None:
            trials.restore(earlier, keeper.path)
            options.say(f"Continuing after epoch {trials.done} of {trials.method.epochs}.")
        _train(trials, keeper, options.progress)
        _write(trials, directories, options)
    keeper.path.unlink(missing_ok=True)
    return directories


def _begin(
    members: Sequence[Member], directories: Sequence[Path], keeper: _CheckpointWriter, options: Options
) -> dict[str, Any] | None:
    """Charge the book of the recipes, before any record is used, and return the checkpoint to continue from."""
    earlier = keeper.earlier(options)
    if options.charged != "whole":
        charging.begin(members, directories, use_open=earlier is not None or options.charged == "runs")
    return earlier


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


def _write(trials: Trials, directories: Sequence[Path], options: Options) -> None:
    """Write the results of all members to hidden places, note them in their book, then publish them together."""
    staged: list[store.Staged] = []
    try:
        results = evaluation.results_of(trials)
        for (member, span), directory, result in zip(trials.spans(), directories, results, strict=True):
            loaded, wanted = member.loaded, member.loaded.recipe.save_model
            saved = options.save_models if wanted is None else wanted
            model = inference.bundle_of(trials, span).stating(reading.claim_of(result)).to_bytes() if saved else None
            if options.charged != "whole":
                result.privacy.update(charging.named(member, directory))
            result.provenance.update(provenance.recipe_folder(loaded, directory))
            text = dump_recipe(loaded.recipe)
            staged.append((store.stage_result(directory, replace(result, recipe=text, model=model)), directory))
        store.keep([hidden for hidden, _ in staged])
        if options.charged != "whole":
            charging.end(trials.members, directories)
    except BaseException:
        store.discard(staged)
        raise
    store.publish(staged)
    for (member, _), directory in zip(trials.spans(), directories, strict=True):
        if member.loaded.recipe.runtime.track is not None:
            mlflow.log(directory, resolved(member.loaded.recipe))


def checkpoint_place(members: Sequence[Member], out: Path) -> Path:
    """Return the checkpoint's path: beside the result of a single recipe, else named by a hash of all members."""
    if len(members) == 1:
        return checkpoint.place(result_directory(members[0].loaded, out))
    names = " ".join(member.hash for member in members)
    return checkpoint.place(out / f"pack-{hashlib.sha256(names.encode()).hexdigest()[:8]}")


class _CheckpointWriter:
    """Writer of a run's checkpoint, at intervals and when the run is stopped."""

    def __init__(self, path: Path, runtime: Runtime) -> None:
        self.path = path
        self._seconds = runtime.checkpoint_seconds
        self._last_saved = time.monotonic()
        self._trials: Trials | None = None
        self._snapshot: Snapshot | None = None
        self._on_disk = 0

    def earlier(self, options: Options) -> dict[str, Any] | None:
        """Return the checkpoint to continue from; None without `options.resume` or without a checkpoint."""
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
    for epoch in range(trials.done, 0 if trials.method.finished else total):
        begun = time.perf_counter()
        seen = trials.method.run_epoch(epoch)
        if trials.context.pack.values.device.type == "cuda":
            torch.cuda.synchronize(trials.context.pack.values.device)
        trials.train_seconds += time.perf_counter() - begun
        last = epoch + 1 == total or trials.method.finished
        wanted = (epoch + 1) % runtime.evaluate_every == 0 or last
        trials.history.append(evaluation.record(trials, epoch, seen, wanted))
        trials.done = epoch + 1
        keeper.note(trials)
        if not last:
            keeper.save_if_due()
        if progress is not None:
            progress(trials.done, total)
        if last:
            break
