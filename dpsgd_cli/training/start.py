"""The trials of a pack while they train: start, state, checkpoint and restore.

A pack holds one recipe's trials, or those of several recipes that may train together (see `sweep/planning.py`).

A resumed run is as private as an uninterrupted one. A process that is stopped after its last checkpoint may have
trained further epochs. Nothing of these epochs left the process:

- results are written at the end;
- progress is a count of epochs, which is data-independent;
- weights and metrics are in memory only.

So these epochs are not releases, their charges end with the process, and the repeated training releases them for the
first time. With seeded streams the repetition draws the same numbers; with secure streams it draws fresh ones.

Everything that did leave the process, into the checkpoint, stays charged. The ledgers are charged again for every
release up to the checkpoint, through the budget's filter. The output of private preprocessing is taken from the
checkpoint and not released again: a second projection would be a second release, on which the weights were not trained.

A run that ends with its checkpoint (`train --finish`) is charged for the epochs of the checkpoint (`Plan.rest`).

Not here: models, tables and devices (`training/build_models.py`), the loop over epochs (`training/loop.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import Ledger, charged_by_epoch, entries_from_lines, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.batching.memory import keep_freed_memory
from dpsgd_cli.data.preparation import steps_of
from dpsgd_cli.engine import bundle, models, precision
from dpsgd_cli.engine.context import AuditHook
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.engine.settings import PythonModel
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.engine.weights import load
from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.methods.base import Method, create
from dpsgd_cli.methods.context import Context
from dpsgd_cli.noise.run import gaussian
from dpsgd_cli.recipe.loading import SettledRecipe, dump_recipe, plain, recipe_hash
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import provenance, reading
from dpsgd_cli.results.earlier import Earlier, earlier_of
from dpsgd_cli.results.result import Stopped
from dpsgd_cli.training import build_models
from dpsgd_cli.training.assemble import EpochRecord
from dpsgd_cli.training.plans import feature_bound
from dpsgd_cli.users.settings import PERSON


@dataclass(frozen=True)
class Snapshot:
    """The state of all trials after an epoch. Ledgers and history only grow, so their lengths are enough."""

    done: int
    train_seconds: float
    method: dict[str, Any]
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One recipe of a pack, with its plan (None for a method without privacy)."""

    loaded: SettledRecipe
    plan: Plan | None

    @property
    def hash(self) -> str:
        return recipe_hash(self.loaded.recipe)


@dataclass
class Trials:
    """The trials of a pack while they train, grouped by member, in the members' order."""

    members: tuple[Member, ...]
    context: Context
    method: Method
    test: Table
    dataset: data.Dataset
    init_seeds: list[int]
    start: Earlier | None = None
    done: int = 0
    train_seconds: float = 0.0
    history: list[EpochRecord] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """The first member's recipe, for the settings that all members share."""
        return self.members[0].loaded.recipe

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each trial; None if its randomness comes from the operating system."""
        return [seed for member in self.members for seed in member.loaded.recipe.seeds]

    @property
    def stopped(self) -> Stopped | None:
        """The number of finished epochs of an incomplete training; None if the training is complete."""
        if self.done >= self.method.epochs or self.method.finished:
            return None
        return Stopped(self.done, self.method.epochs)

    def spans(self) -> list[tuple[Member, slice]]:
        """Return each member with the slice of its trials on the trials axis."""
        found, begin = [], 0
        for member in self.members:
            end = begin + member.loaded.recipe.trials
            found.append((member, slice(begin, end)))
            begin = end
        return found

    def snapshot(self) -> Snapshot:
        """Return the current state. This is cheap, and further training does not change it."""
        entries = tuple(len(ledger.entries) for ledger in self.context.ledgers)
        return Snapshot(self.done, self.train_seconds, self.method.state(), entries)

    def checkpoint(self, at: Snapshot) -> dict[str, Any]:
        """Return the content from which `restore` continues at the snapshot `at`."""
        made = [one.entries[:end] for one, end in zip(self.context.ledgers, at.entries, strict=True)]
        return {
            "hash": [member.hash for member in self.members],
            "recipes": [dump_recipe(member.loaded.recipe) for member in self.members],
            "trials": [member.loaded.recipe.trials for member in self.members],
            "data": dict(self.dataset.sha256),
            "code": self._code(),
            "done": at.done,
            "epochs": self.method.epochs,
            "ledgers": [to_lines(own, i, seed) for i, (own, seed) in enumerate(zip(made, self.seeds, strict=True))],
            "released": {key: torch.from_numpy(value) for key, value in self.dataset.released.items()},
            "init_seeds": self.init_seeds,
            "train_seconds": at.train_seconds,
            "method": at.method,
            "history": [(r.epoch, r.metrics, r.counts) for r in self.history[: at.done]],
        }

    def restore(self, content: dict[str, Any], saved: Path) -> None:
        """Take over the state of a checkpoint; `saved` is its file name, for messages.

        The ledgers are charged for the checkpoint's releases, through the filter of the budget. These must be the
        releases of its finished epochs, according to the plan or, if the method chooses, to the method's own state.
        Raises RunError if they are not, or if the checkpoint is damaged or belongs to another run.
        """
        came_from = (content["hash"], content["data"], content["code"])
        hashes = [member.hash for member in self.members]
        if came_from != (hashes, dict(self.dataset.sha256), self._code()):
            raise RunError(f"{saved}: belongs to another recipe, other data or other code; remove it and train again")
        done = content["done"]
        disagree = f"{saved}: its {done} finished epochs were not charged as they are; remove it and train again"
        for ledger, lines, plan in zip(self.context.ledgers, content["ledgers"], self.context.plans, strict=True):
            entries = next(iter(entries_from_lines(lines, str(saved)).values()), [])
            known = len(ledger.entries)
            if entries[:known] != ledger.entries:
                raise RunError(f"{saved}: another preprocessing was charged there; remove it and train again")
            planned = None if plan is None else plan.released_by(done)
            if planned is not None and charged_by_epoch(entries[known:]) != planned:
                raise RunError(disagree)
            for entry in entries[known:]:
                ledger.spend(entry.release, entry.epoch, entry.phase)
        damaged = f"{saved}: damaged checkpoint (its state is not that of this method); remove it and train again"
        if not _alike(content["method"], self.method.state()):
            raise RunError(damaged)
        try:
            self.method.load_state(content["method"])
            charged = self.method.charged_for(done)
        except _UNFIT as error:
            raise RunError(damaged) from error
        if not charged:
            raise RunError(disagree)
        self.done, self.train_seconds = done, content["train_seconds"]
        self.history = [EpochRecord(*record) for record in content["history"]]

    def _code(self) -> dict[str, str]:
        loaded = [member.loaded for member in self.members]
        return {
            k: v for one in loaded for k, v in (provenance.code_sha256(one) | provenance.weights_sha256(one)).items()
        }


_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


def _alike(found: Any, like: Any) -> bool:
    """Return True if a loaded state has the same parts, types and tensor shapes as a method's own state.

    A part that is empty or None in the method's own state may hold anything, because it grows as trials train.
    """
    if like is None or (isinstance(like, list | tuple | dict) and not like):
        return True
    if isinstance(like, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == like.dtype
        return same and (not like.numel() or found.shape == like.shape)
    if type(found) is not type(like):
        return isinstance(like, float) and type(found) is int
    if isinstance(like, dict):
        return found.keys() == like.keys() and all(_alike(found[key], like[key]) for key in like)
    if isinstance(like, list | tuple):
        return len(found) != len(like) or all(map(_alike, found, like))
    return True


@dataclass(frozen=True)
class DataOverride:
    """Synthetic rows that replace a recipe's own data in a rehearsal or an audit.

    In an audit, `share` also selects the rows that each trial trains on, `instrument` wraps the model's builder to add
    the canaries' parameters, and `watcher` observes the training.
    """

    dataset: data.Dataset
    share: Callable[[Table], Table] = lambda table: table
    instrument: Callable[[models.Builder], models.Builder] = lambda build: build
    watcher: AuditHook | None = None


def start(
    members: Sequence[Member],
    earlier: dict[str, Any] | None = None,
    team: Team | None = None,
    override: DataOverride | None = None,
) -> Trials:
    """Prepare the trials for the first epoch; private preprocessing is charged, then done.

    The caller ensures that `members` may train together. `earlier` is a checkpoint's content: its initial weights and
    preprocessing are used, none are drawn. Private preprocessing releases once, on process 0 of `team`. With an
    `override` the data that the recipe names is not read. Raises RunError if the number of training records differs
    from the plan.
    """
    team = team or Team()
    loaded, plan = members[0].loaded, members[0].plan
    recipe = loaded.recipe
    place = build_models.placement(recipe, team)
    precision.keep_sums_exact()
    # without a seed, randomness comes from the operating system
    alone: list[tuple[Member, Streams]] = [
        (member, SecureStreams() if seed is None else SeededStreams(seed))
        for member in members
        for seed in member.loaded.recipe.seeds
    ]
    streams = team.streams([stream for _, stream in alone])
    ledgers = tuple(_ledger(member) for member, _ in alone)
    begun = earlier_of(loaded)
    dataset = _dataset(members, streams, earlier, team) if override is None else override.dataset
    for rows in (dataset.train_x, dataset.test_x):
        build_models.refuse_unknown_tokens(loaded, rows)
    train, test = build_models.tables([member.loaded.recipe for member in members], dataset, place)
    if override is not None:
        train = override.share(train)
    if plan is not None and len(train) != plan.sampling.records:
        what = "rows" if recipe.data.unit is None else "users"
        raise RunError(
            f"{dataset.name} has places for {len(train)} training {what}, but {plan.sampling.records} were planned"
        )
    keep_freed_memory()
    outputs = build_models.outputs_of(recipe, dataset.name, None if dataset.classes is None else len(dataset.classes))
    init_seeds = earlier["init_seeds"] if earlier else [stream.integer("init") for stream in streams]
    instrument = None if override is None else override.instrument
    if begun is not None:
        begun.check_records(loaded, dataset.sha256)
        instrument = _from(begun, loaded, dataset)
    pack = build_models.make_pack(loaded, train.input_shape, outputs, init_seeds, place, instrument)
    rows = build_models.checked(pack, loaded, train, outputs, init_seeds[:1])
    recipes, plans = tuple(m.loaded.recipe for m, _ in alone), tuple(m.plan for m, _ in alone)
    context = Context(
        recipes=recipes,
        plans=plans,
        ledgers=ledgers,
        streams=streams,
        pack=pack,
        table=train,
        loss=build_models.loss_of(recipe, loaded.base),
        most_rows=rows,
        base=loaded.base,
        feature_bound=feature_bound(recipe, dataset),
        validation=build_models.held_out(recipe, dataset.validation_x, dataset.validation_y, dataset.per_trial, place),
        public=build_models.held_out(recipe, dataset.public_x, dataset.public_y, dataset.per_trial, place),
        keys=None if dataset.keys is None else dataset.keys[: len(dataset.train_y)],
        columns=dataset.columns,
        team=team,
        watcher=None if override is None else override.watcher,
    )
    return Trials(tuple(members), context, create(context), test, dataset, init_seeds, begun)


def _from(earlier: Earlier, loaded: SettledRecipe, dataset: data.Dataset) -> Callable[[models.Builder], models.Builder]:
    """Return what makes builders of modules with the weights of an earlier result, which was checked.

    Raises UsageError unless the recipe has the same model, and gives it the same inputs. Of code of one's own, the
    weights must fit; the statement does not depend on it.
    """
    held = bundle.read(reading.checked(earlier.folder, earlier.document, bundle.NAME))
    assert dataset.layout is not None
    recipe = loaded.recipe
    ours: dict[str, Any] = {"preprocess": steps_of(recipe.data, loaded.base)}
    ours |= {} if isinstance(recipe.model, PythonModel) else {"architecture": recipe.model}
    ours |= {"layout": dataset.layout.plain(), "classes": dataset.classes}
    other = [name for name, own in ours.items() if held.about.get(name) != json.loads(json.dumps(plain(own)))]
    if held.cuts or dataset.released:
        other.append("released preprocessing")
    if other:
        raise UsageError(
            f"privacy.start: {earlier.folder} has another {' and '.join(other)} than the recipe, so its weights do not"
            " fit; take the model, the columns and the classes from its recipe.yaml, without released preprocessing"
        )
    tensors = held.untrained | held.weights[0]

    def instrument(build: models.Builder) -> models.Builder:
        def built() -> nn.Module:
            made = build()
            load(made, tensors, str(earlier.folder), "privacy.start")
            return made

        return built

    return instrument


def _dataset(
    members: Sequence[Member], streams: Sequence[Streams], earlier: dict[str, Any] | None, team: Team
) -> data.Dataset:
    """Prepare the members' data for the trial of each stream; use the preprocessing released `earlier`, if any."""
    member, recipes = members[0], [one.loaded.recipe for one in members]
    recipe, base = member.loaded.recipe, member.loaded.base
    released = {key: value.numpy() for key, value in earlier["released"].items()} if earlier else None
    adjacency = recipe.adjacency

    def noised(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
        return gaussian(streams[trial], purpose, 0, exact, mechanism, records)

    def prepare(released: dict[str, np.ndarray] | None) -> data.Dataset:
        out = None if recipe.folds is None else lambda keys: build_models.own_folds(recipes, keys).numpy()
        return data.prepare(recipe.data, base, len(streams), noised, adjacency, released, out)

    charged = member.plan is not None and member.plan.preprocessing_releases
    try:
        return _prepared(prepare, released, team) if charged else prepare(released)
    except _UNFIT as error:
        if not released:
            raise
        raise RunError("the preprocessing in the checkpoint does not fit; remove it and train again") from error


def _prepared(
    prepare: Callable[[dict[str, np.ndarray] | None], data.Dataset], released: dict[str, np.ndarray] | None, team: Team
) -> data.Dataset:
    """Release preprocessing on process 0; all other processes transform their rows by its released output."""
    dataset = None

    def first() -> dict[str, np.ndarray]:
        nonlocal dataset
        dataset = prepare(released)
        return dataset.released

    made = team.tell(first)
    return prepare(made) if dataset is None else dataset


def _ledger(member: Member) -> Ledger:
    """Return a trial's new ledger, charged for private preprocessing."""
    plan = member.plan
    if plan is None:
        return Ledger()
    ledger = plan.ledger()
    ledger.unit = None if member.loaded.recipe.data.unit is None else PERSON
    for release in plan.preprocessing_releases:
        ledger.spend(release, phase="before")
    return ledger
