"""All trials of a pack while they train: how they start, where they stand, how they are continued.

A pack is one recipe's trials, or those of several recipes that may train together (`sweep/planning.py` says which).

What a checkpoint may drop, and why a resumed run is as private as an uninterrupted one. A process that is stopped
after its last checkpoint may have trained further epochs. Nothing of them left the process: results are written at
the end, progress is a count of epochs (data-independent), weights and metrics live in memory only, and TensorBoard's
files have no epoch that the checkpoint lacks. So they are no releases, their charges die with the process, and
training them again is the first time that they are released. A run that ends with its checkpoint (`train --finish`)
is charged for the epochs of the checkpoint, and for the whole plan where metrics by epoch could be watched, because the
moment may then have been chosen by them (`Plan.rest`).
With seeded streams the repetition draws the same numbers; with secure streams it draws fresh ones.
What did leave the process, into the checkpoint, stays: the ledgers are charged again for every release up to it
(through the budget's filter), and what private preprocessing released is taken from it and not released anew; a
second projection would be a second release, and would not be the one that the weights were trained on.

Not here: models and devices (`packs.py`), the loop over epochs and what becomes of a finished run (`experiment.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.core import models, precision
from dpsgd_cli.core.memory import keep_freed_memory
from dpsgd_cli.core.noise import gaussian
from dpsgd_cli.core.packing import Placement
from dpsgd_cli.core.processes import Team
from dpsgd_cli.core.streamed import StreamedTable
from dpsgd_cli.core.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.core.units import UnitTable
from dpsgd_cli.data.splits import SECOND_FILE, Keys, places_of_a_fold
from dpsgd_cli.data.units import members_of
from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.joint import feature_bound
from dpsgd_cli.methods import Context, Method, create
from dpsgd_cli.methods.base import Watcher
from dpsgd_cli.packs import checked, loss_of, make_pack, outputs_of, placement
from dpsgd_cli.privacy.ledger import Ledger, charged_by_epoch, entries_from_lines, to_lines
from dpsgd_cli.privacy.mechanism import GaussianSum
from dpsgd_cli.privacy.plan import Plan, adjacency_of
from dpsgd_cli.recipe.loading import LoadedRecipe, dump_recipe, recipe_hash
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.unit import PERSON, Unit
from dpsgd_cli.results import origin
from dpsgd_cli.results.assemble import EpochRecord
from dpsgd_cli.results.result import Stopped


@dataclass(frozen=True)
class Snapshot:
    """Where all trials stood after an epoch. Ledgers and history only grow, so their lengths say enough."""

    done: int
    train_seconds: float
    method: dict[str, Any]
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One recipe of a pack, with its plan (None for a method without privacy)."""

    loaded: LoadedRecipe
    plan: Plan | None

    @property
    def hash(self) -> str:
        return recipe_hash(self.loaded.recipe)


@dataclass
class Trials:
    """All trials of a pack while they train; those of each member lie side by side, in the members' order.

    `watched`: metrics by epoch can be seen while the trials train, or could before a resume (`runtime.tensorboard`).
    """

    members: tuple[Member, ...]
    context: Context
    method: Method
    test: Table
    dataset: data.Dataset
    init_seeds: list[int]
    watched: bool
    done: int = 0
    train_seconds: float = 0.0
    history: list[EpochRecord] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        """The first member's recipe, for everything that a pack shares."""
        return self.members[0].loaded.recipe

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each trial; None where randomness comes from the operating system."""
        return [seed for member in self.members for seed in member.loaded.recipe.seeds]

    @property
    def stopped(self) -> Stopped | None:
        """Where the trials stand, if they are not over."""
        if self.done >= self.method.epochs or self.method.finished:
            return None
        return Stopped(self.done, self.method.epochs, self.watched)

    def spans(self) -> list[tuple[Member, slice]]:
        """Each member with the place of its trials."""
        found, begin = [], 0
        for member in self.members:
            end = begin + member.loaded.recipe.trials
            found.append((member, slice(begin, end)))
            begin = end
        return found

    def snapshot(self) -> Snapshot:
        """Where the trials stand now; cheap, and untouched by further training."""
        entries = tuple(len(ledger.entries) for ledger in self.context.ledgers)
        return Snapshot(self.done, self.train_seconds, self.method.state(), entries)

    def checkpoint(self, at: Snapshot) -> dict[str, Any]:
        """What `restore` needs to continue from `at`."""
        made = [one.entries[:end] for one, end in zip(self.context.ledgers, at.entries, strict=True)]
        plans = self.context.plans
        rest = [
            [] if plan is None else plan.rest(own, at.done, self.watched) for plan, own in zip(plans, made, strict=True)
        ]
        return {
            "hash": [member.hash for member in self.members],
            "recipes": [dump_recipe(member.loaded.recipe) for member in self.members],
            "deltas": [None if member.plan is None else member.plan.delta for member in self.members],
            "trials": [member.loaded.recipe.trials for member in self.members],
            "data": dict(self.dataset.sha256),
            "code": self._code(),
            "uncovered_steps": list(self.dataset.nonprivate),
            "done": at.done,
            "epochs": self.method.epochs,
            "watched": self.watched,
            "ledgers": [to_lines(own, i, seed) for i, (own, seed) in enumerate(zip(made, self.seeds, strict=True))],
            "rest": [to_lines(own, i, seed) for i, (own, seed) in enumerate(zip(rest, self.seeds, strict=True))],
            "released": {key: torch.from_numpy(value) for key, value in self.dataset.released.items()},
            "init_seeds": self.init_seeds,
            "train_seconds": at.train_seconds,
            "method": at.method,
            "history": [(r.epoch, r.metrics, r.counts, r.ended) for r in self.history[: at.done]],
        }

    def restore(self, content: dict[str, Any], saved: Path) -> None:
        """Stand where `checkpoint` left off; `saved` is its name. Raises RunError when it belongs to something else.

        The ledgers are charged for what the checkpoint's were, through the filter of the budget. That must be what its
        finished epochs release: by the plan, or, where a method chooses, by the method's own state.
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
        return {k: v for one in loaded for k, v in (origin.code_sha256(one) | origin.weights_sha256(one)).items()}


_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)


def _alike(found: Any, like: Any) -> bool:
    """Whether a loaded state has the parts of a method's own, each of its type, and tensors of its shape.

    What is empty or None in the method's own state may hold anything: it grows as trials train.
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
class Stage:
    """What takes the place of a recipe's own data, for a rehearsal or an audit: rows that are no records.

    An audit also says which of them a trial trains on (`share` makes a table of trials' own), puts canaries' parameters
    into the model (`instrument` turns what builds one into what builds the other), and watches.
    """

    dataset: data.Dataset
    share: Callable[[Table], Table] = lambda table: table
    instrument: Callable[[models.Builder], models.Builder] = lambda build: build
    watcher: Watcher | None = None


def start(
    members: Sequence[Member],
    earlier: dict[str, Any] | None = None,
    team: Team | None = None,
    stage: Stage | None = None,
) -> Trials:
    """Everything ready for the first epoch; private preprocessing is charged, then done.

    `members` may train together. `earlier` is a checkpoint's content: its initial weights and preprocessing are
    taken, none are drawn. What private preprocessing releases is released once, on process 0 of `team`. On a `stage`
    nothing of the data that the recipe names is read.
    """
    team = team or Team()
    loaded, plan = members[0].loaded, members[0].plan
    recipe = loaded.recipe
    place = placement(recipe, team)
    precision.keep_sums_exact()
    # a seed gives seeded streams; none gives the operating system's
    alone: list[tuple[Member, Streams]] = [
        (member, SecureStreams() if seed is None else SeededStreams(seed))
        for member in members
        for seed in member.loaded.recipe.seeds
    ]
    streams = team.streams([stream for _, stream in alone])
    ledgers = tuple(_ledger(member) for member, _ in alone)
    dataset = _dataset(members[0], streams, earlier, team) if stage is None else stage.dataset
    train, test = _tables(members, dataset, place)
    if stage is not None:
        train = stage.share(train)
    if plan is not None and len(train) != plan.sampling.records:
        what = "rows" if recipe.data.unit is None else "users"
        raise RunError(
            f"{dataset.name} has places for {len(train)} training {what}, but {plan.sampling.records} were planned"
        )
    keep_freed_memory()
    outputs = outputs_of(recipe, dataset.name, None if dataset.classes is None else len(dataset.classes))
    init_seeds = earlier["init_seeds"] if earlier else [stream.integer("init") for stream in streams]
    instrument = None if stage is None else stage.instrument
    pack = make_pack(loaded, train.input_shape, outputs, init_seeds, place, instrument)
    rows = checked(pack, loaded, train, outputs, init_seeds[:1])
    recipes, plans = tuple(m.loaded.recipe for m, _ in alone), tuple(m.plan for m, _ in alone)
    context = Context(
        recipes,
        plans,
        ledgers,
        streams,
        pack,
        train,
        loss_of(recipe),
        rows,
        loaded.base,
        feature_bound(recipe, dataset),
        validation=_held_out(dataset.validation_x, dataset.validation_y, dataset.per_trial, place),
        public=_held_out(dataset.public_x, dataset.public_y, dataset.per_trial, place),
        keys=None if dataset.keys is None else dataset.keys[: len(dataset.train_y)],
        cells=dataset.cells,
        team=team,
        watcher=None if stage is None else stage.watcher,
    )
    shown = any(member.loaded.recipe.runtime.tensorboard for member in members)
    watched = shown or bool(earlier and earlier["watched"])
    return Trials(tuple(members), context, create(context), test, dataset, init_seeds, watched)


def _dataset(member: Member, streams: Sequence[Streams], earlier: dict[str, Any] | None, team: Team) -> data.Dataset:
    """What a recipe names, prepared for each stream's trial; what was released `earlier` is not released again."""
    recipe, base = member.loaded.recipe, member.loaded.base
    released = {key: value.numpy() for key, value in earlier["released"].items()} if earlier else None
    adjacency = adjacency_of(recipe)

    def noised(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
        return gaussian(streams[trial], purpose, 0, exact, mechanism, records)

    def prepare(released: dict[str, np.ndarray] | None) -> data.Dataset:
        return data.prepare(recipe.data, base, len(streams), noised, adjacency, released)

    charged = member.plan is not None and member.plan.before
    try:
        return _prepared(prepare, released, team) if charged else prepare(released)
    except _UNFIT as error:
        if not released:
            raise
        raise RunError("the preprocessing in the checkpoint does not fit; remove it and train again") from error


def _prepared(
    prepare: Callable[[dict[str, np.ndarray] | None], data.Dataset], released: dict[str, np.ndarray] | None, team: Team
) -> data.Dataset:
    """Process 0 releases; the others take what it released, and transform their rows by it."""
    dataset = None

    def first() -> dict[str, np.ndarray]:
        nonlocal dataset
        dataset = prepare(released)
        return dataset.released

    made = team.tell(first)
    return prepare(made) if dataset is None else dataset


def _tables(members: Sequence[Member], dataset: data.Dataset, place: Placement) -> tuple[Table, Table]:
    """What trials train on and are tested on; with folds, both are parts of one table of all rows."""
    recipes = [member.loaded.recipe for member in members]
    unit, keys = recipes[0].data.unit, dataset.keys
    if recipes[0].folds is None:
        own = ((dataset.train_x, dataset.train_y), (dataset.test_x, dataset.test_y))
        train, test = (_table(x, y, dataset.per_trial, place) for x, y in own)
        if unit is not None:
            assert keys is not None
            train = _by_user(train, keys.values[: len(dataset.train_y)], unit)
        return train if dataset.train_records is None else train.with_places(dataset.train_records), test
    x, y = _all_rows(dataset)
    assert keys is not None
    train = _table(x, y, dataset.per_trial, place)
    out = own_folds(recipes, keys)
    most = places_of_a_fold(_files(keys), recipes[0].folds, keys.by_place)
    if unit is None:
        return train.with_folds(out, most), train.with_folds(~out)
    # a row is in the fold of its user
    users = replace(keys, values=np.unique(keys.values))
    return _by_user(train, keys.values, unit).with_folds(own_folds(recipes, users), most), train.with_folds(~out)


def _by_user(rows: Table, keys: np.ndarray, unit: Unit) -> Table:
    """The users of a table of rows with these users' keys."""
    return UnitTable.of(rows, torch.from_numpy(members_of(keys, unit.most_rows)[1]))


def own_folds(recipes: Sequence[Recipe], keys: Keys) -> torch.Tensor:
    """Which of the rows (N,) each trial of the recipes (R) is tested on, and does not train on: bool (N, R)."""
    held = [keys.folds(r.folds or 1, r.repeats, r.seed or 0) for r in recipes]
    return torch.from_numpy(np.concatenate(held, axis=1))


def _files(keys: Keys) -> tuple[int, ...]:
    """Numbers of records, or of users, in each file; of all files where keys are no places."""
    if not keys.by_place:
        return (len(np.unique(keys.values)) if keys.of_users else len(keys),)
    return tuple(np.bincount(np.unique(keys.values) // SECOND_FILE).tolist())


def _all_rows(dataset: data.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels, training rows first."""
    held = (dataset.train_x, dataset.test_x, dataset.train_y, dataset.test_y)
    arrays = [rows for rows in held if isinstance(rows, np.ndarray)]
    if len(arrays) < len(held):
        raise UsageError("folds hold all rows in memory; save features and labels as one npz file, or leave folds out")
    return np.concatenate(arrays[:2]), np.concatenate(arrays[2:])


def _table(x: data.Rows, y: data.Rows, per_trial: bool, place: Placement) -> Table:
    """Rows in memory on the training device, or rows that stay on disk."""
    if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
        return Table.load(np.asarray(x), np.asarray(y), per_trial, place.device, place.dtype)
    return StreamedTable.open(x, y, per_trial, place.device, place.dtype)


def _held_out(x: Any, y: Any, per_trial: bool, place: Placement) -> Table | None:
    """Validation or public rows, where there are any."""
    return None if x is None or y is None else _table(x, y, per_trial, place)


def _ledger(member: Member) -> Ledger:
    """A trial's ledger, charged for private preprocessing."""
    plan = member.plan
    if plan is None:
        return Ledger()
    ledger = plan.ledger()
    ledger.unit = None if member.loaded.recipe.data.unit is None else PERSON
    for release in plan.before:
        ledger.spend(release, phase="before")
    return ledger
