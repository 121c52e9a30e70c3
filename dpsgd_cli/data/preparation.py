"""From a recipe's `data:` section to what training gets: read, split, preprocess.

`outline` and `private_releases` tell a plan what it needs before any value is read (own files are read to be counted);
`prepare` does the work. Steps before the first private one are shared by all trials; from there on each trial has
its own rows, because it has its own noise.

Not here: charging what is released (the caller does, before it calls `prepare`), or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from dpsgd_cli.data import catalog, preprocess, readers
from dpsgd_cli.data.dataset import (
    UNTOLD,
    Dataset,
    Draw,
    Layout,
    Outline,
    Part,
    PrivateStep,
    Rows,
    Source,
    Step,
    Transform,
    refuse_codes,
)
from dpsgd_cli.data.on_disk import DiskPart, DiskRows, TrialRows
from dpsgd_cli.data.opening import let_go_of_large, open_source
from dpsgd_cli.data.splits import cut_places, most_trained_on, places_of
from dpsgd_cli.errors import DataError
from dpsgd_cli.privacy.mechanism import Release
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.data import OWN_FILE_STEPS, Data, PreprocessStep, Split

Normal = Callable[[int, str, tuple[int, ...]], np.ndarray]
Released = dict[str, np.ndarray]


def outline(data: Data, base: Path) -> Outline:
    """Sizes, shapes and declarations; a card knows its own, an own file (relative to `base`) is read and counted.

    Raises DataError or UsageError for what `prepare` would refuse for the same reason.
    """
    steps = _steps(data, "add-remove", base)
    on_disk = False
    if data.name is None:
        source = _opened(data, base, steps)
        files = tuple(len(part) for part in (source.train, source.test) if part is not None)
        layout, classes, said = source.layout, source.classes, source.declarations
        name, on_disk = source.name, isinstance(source.train, DiskPart)
    else:
        card = catalog.card_of(data, base)
        counted = {
            part: sum(catalog.records(card, f) for f in card.files if f.part == part and f.holds != "labels")
            for part in ("train", "test")
        }
        files = tuple(rows for rows in counted.values() if rows)
        layout, classes, said = card.layout, card.labels, readers.declarations(card)
        name = card.name
    train, test, validation = tuple(map(_length, _parts(source, data, base))) if on_disk else _sizes(files, data, base)
    layouts = _plan(steps, layout)
    said = (*said, *_declarations(steps, data, train, test, validation))
    outputs, bound = len(classes) if classes is not None else 1, preprocess.norm_bound(steps, layouts)
    return Outline(name, files, train, test, layouts[-1].shape, outputs, said, bound)


def _opened(data: Data, base: Path, steps: Sequence[Step]) -> Source:
    """What `data` names, unless it stays on disk and a step needs all rows in memory."""
    source = open_source(data, base, partial(_plan, steps))
    if not isinstance(source.train, DiskPart):
        return source
    if data.features is not None:
        raise DataError(
            f"{source.name}: data.features keeps all it extracts; extract first, and save that as a npy file"
        )
    for step in steps:
        if step.nonprivate is not None:
            raise DataError(
                f"{source.name}: {step.nonprivate.split(' was ')[0]} reads all rows at once; scale by bounds"
            )
    return source


def _length(part: Part | DiskPart | None) -> int:
    return 0 if part is None else len(part)


def _sizes(files: tuple[int, ...], data: Data, base: Path) -> tuple[int, int, int]:
    """Rows of the training, the test and the validation part of `files`, given by their numbers of rows."""
    split, validation = _split(data, len(files) > 1, base), 0
    places, test = places_of(files[:1]), sum(files[1:])
    if split is not None:
        places, held = cut_places(places_of(files), split)
        test = len(held)
    if data.validation is not None:
        places, held = cut_places(places, data.validation)
        validation = len(held)
    return len(places), test, validation


def private_releases(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[Release]:
    """What preprocessing will release, in order; known from the recipe (and card) alone."""
    return [Release(step.release) for step in _steps(data, adjacency, base) if step.release is not None]


def uncovered_steps(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[str]:
    """Which steps read training rows without noise, in words: no statement covers them. From recipe and card alone."""
    return [step.nonprivate for step in _steps(data, adjacency, base) if step.nonprivate is not None]


@np.errstate(**UNTOLD)
def prepare(
    data: Data, base: Path, trials: int, normal: Normal, adjacency: Adjacency, released: Released | None = None
) -> Dataset:
    """Read, split and preprocess. `normal(trial, purpose, shape)` gives float64 standard normal draws of that
    trial's own stream; it is called only for the steps that `private_releases` lists, once per trial and step.

    `released` is `Dataset.released` of an earlier call for the same rows: what is in it is used, not released anew.
    Raises DataError naming the file, column or step that is at fault.
    """
    steps = _steps(data, adjacency, base)
    source = _opened(data, base, steps)
    let_go_of_large()
    layouts = _plan(steps, source.layout)
    train, test, validation = _parts(source, data, base)
    pipeline = Pipeline(steps, layouts, dict(released or {}), normal)
    parts = [part.x for part in (train, test, validation) if part is not None]
    (train_x, test_x, *others), per_trial = pipeline.run(parts, trials)
    nonprivate = tuple(step.nonprivate for step in steps if step.nonprivate is not None)
    said = _declarations(steps, data, *map(_length, (train, test, validation)))
    on_disk = isinstance(train, DiskPart)
    return Dataset(
        name=source.name,
        train_x=train_x,
        train_y=_own(train.y),
        test_x=test_x,
        test_y=_own(test.y),
        per_trial=per_trial,
        classes=source.classes,
        declarations=(*source.declarations, *said),
        nonprivate=nonprivate,
        sha256=source.sha256 | {name: found for step in steps for name, found in step.made_from.items()},
        warnings=(*source.warnings, *nonprivate),
        released=pipeline.released,
        validation_x=others[0] if others else None,
        validation_y=None if validation is None else _own(validation.y),
        places=None if on_disk else np.concatenate([part.places for part in (train, test) if isinstance(part, Part)]),
        norm_bound=preprocess.norm_bound(steps, layouts),
    )


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, what private ones released, and where their draws come from."""

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released
    normal: Normal

    def run(self, parts: Sequence[Rows], trials: int) -> tuple[list[Rows], bool]:
        """Transform all parts, the first being the training rows; the last value says whether each trial has its own.

        Rows that stay on disk are told what to do when they are read.
        """
        private = [index for index, step in enumerate(self.steps) if step.release is not None]
        first = private[0] if private else len(self.steps)
        for index in range(first):
            parts = self._public(index, parts)
        if not private:
            return [_through(_float32, part) for part in parts], False
        learn_shared = cache(lambda: self._learn(first, parts[0]))
        shape = self.layouts[-1].shape
        rooms: list[Any] = [
            [] if isinstance(part, DiskRows) else np.empty((trials, len(part), *shape), np.float32) for part in parts
        ]
        for trial in range(trials):
            own = list(parts)
            for index in range(first, len(self.steps)):
                if self.steps[index].release is None:
                    own = self._public(index, own)
                    continue
                learn = learn_shared if index == first else partial(self._learn, index, own[0])
                transform = self._private(learn, trial, index)
                own = [_through(transform, part) for part in own]
            for room, rows in zip(rooms, own, strict=True):
                if isinstance(rows, DiskRows):
                    room.append(rows.then(_float32))
                else:
                    room[trial] = _float32(cast(np.ndarray, rows))
        pairs = zip(parts, rooms, strict=True)
        return [TrialRows(part, room) if isinstance(part, DiskRows) else room for part, room in pairs], True

    def _public(self, index: int, parts: Sequence[Rows]) -> list[Rows]:
        """All parts after a step that draws nothing, fitted on the training rows."""
        # rows on disk are as much of an array as steps that `_opened` lets pass need
        transform = self.steps[index].fit(cast(np.ndarray, parts[0]), self.layouts[index])
        return [_through(transform, part) for part in parts]

    def _learn(self, index: int, rows: Rows) -> Callable[[Draw], np.ndarray]:
        step = self.steps[index]
        assert isinstance(step, PrivateStep)
        return step.learn(cast(np.ndarray, rows), self.layouts[index])

    def _private(self, learn: Callable[[], Callable[[Draw], np.ndarray]], trial: int, index: int) -> Transform:
        """The transform of a private step; `learn` reads the rows, and only where nothing was released before.

        The purpose of its draws names the step's place, so that no two steps of a trial share any.
        """
        step, key = self.steps[index], f"{trial}/{index}"
        assert isinstance(step, PrivateStep)
        if key not in self.released:
            self.released[key] = learn()(partial(self.normal, trial, f"preprocess-{index}"))
        return step.apply(self.released[key])


def _through(transform: Transform, rows: Rows) -> Any:
    return rows.then(transform) if isinstance(rows, DiskRows) else transform(cast(np.ndarray, rows))


def _float32(x: np.ndarray) -> np.ndarray:
    # what is kept of a file is read-only: whoever trains gets rows of their own
    return np.require(x, np.float32, ["C", "W"])


def _own(labels: Rows) -> Rows:
    return np.require(labels, None, ["W"]) if isinstance(labels, np.ndarray) else labels


def _steps(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[Step]:
    chosen: Sequence[PreprocessStep] | None = data.preprocess
    if chosen is None:
        chosen = OWN_FILE_STEPS if data.name is None else catalog.plain_card(data, base).preprocess
    steps = [preprocess.STEPS[entry.kind](entry.step, adjacency) for entry in chosen]
    if data.features is None:
        return steps
    from dpsgd_cli.data.features import EXTRACTORS

    return [EXTRACTORS[data.features.kind](data.features, base), *steps]


def _plan(steps: Sequence[Step], layout: Layout) -> list[Layout]:
    """The layout before each step, and after the last."""
    layouts = [layout]
    for step in steps:
        layouts.append(step.plan(layouts[-1]))
    refuse_codes("training", layouts[-1])
    return layouts


def _split(data: Data, has_test: bool, base: Path) -> Split | None:
    """How a test set is cut; None where the files have one and the recipe does not ask for another."""
    if data.split is not None:
        return data.split
    if has_test:
        return None
    return Split() if data.name is None else catalog.plain_card(data, base).split


def _parts(source: Source, data: Data, base: Path) -> tuple[Part | DiskPart, Part | DiskPart, Part | DiskPart | None]:
    """The training, the test and the validation part; the last is cut from what the test part leaves.

    A split named in the recipe is cut from ALL rows, the files' own test rows included.
    """
    train, test, split = source.train, source.test, _split(data, source.test is not None, base)
    if isinstance(train, Part) and not isinstance(test, DiskPart):
        test = None if test is None else test.of_second_file()
        train = train if split is None else train.pooled(test)
    elif split is not None and test is not None:
        raise DataError(f"{source.name}: files that stay on disk are not pooled; give test_path or split, not both")
    if split is not None:
        train, test = train.cut(split)
    if test is None:
        raise DataError(f"{source.name} has no test rows; give data.split")
    if data.validation is None:
        return train, test, None
    train, validation = train.cut(data.validation)
    return train, test, validation


def _declarations(steps: Sequence[Step], data: Data, train: int, test: int, validation: int) -> tuple[str, ...]:
    """What is said of the sizes of the parts, and by the steps."""
    said = [*_sizes_declared(train, test), *(step.declaration for step in steps if step.declaration is not None)]
    if data.validation is not None and data.validation.public:
        said.append(
            f"The {validation} validation records, cut from the training data, are declared public: the statement does"
            " not protect whoever is in them."
        )
    elif data.validation is not None:
        said.append(f"The number of validation records is public: {validation}; each look at them is charged.")
    return tuple(said)


def _sizes_declared(train_records: int, test_records: int) -> tuple[str, ...]:
    """What is said of the numbers of records."""
    return (
        f"The number of training records is public: {train_records}.",
        f"The {test_records} test records are public: what is measured on them is reported without noise.",
    )


def folds_declared(said: Sequence[str], sizes: tuple[int, int], files: Sequence[int], folds: int) -> tuple[str, ...]:
    """What was `said` of a split into parts of `sizes`, with `folds` instead, of `files` of so many rows."""
    records, train = sum(files), most_trained_on(files, folds)
    return (
        *(one for one in said if one not in _sizes_declared(*sizes)),
        f"The number of records is public: {records}; each trial trains on at most {train} of them, and on none of its"
        " own fold.",
        "The records of a trial's own fold are public to it: what is measured on them is reported without noise.",
        "Each trial's own statement covers the records that it trained on.",
    )
