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
from typing import cast

import numpy as np

from dpsgd_cli.data import catalog, preprocess, readers
from dpsgd_cli.data.dataset import Dataset, Layout, Outline, Part, Rows, Source
from dpsgd_cli.data.features import Extract, extractor
from dpsgd_cli.data.on_disk import DiskPart, DiskRows, DiskSource, TrialRows
from dpsgd_cli.data.opening import let_go_of_large, open_source
from dpsgd_cli.data.splits import cut_part, cut_places, most_trained_on, of_second_file, places_of, pool
from dpsgd_cli.data.step import UNTOLD, Draw, PrivateStep, Step, Transform, refuse_codes
from dpsgd_cli.errors import DataError
from dpsgd_cli.privacy.mechanism import Release
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.data import OWN_FILE_STEPS, Data, PreprocessStep, Split, ValidationSet

Normal = Callable[[int, str, tuple[int, ...]], np.ndarray]
Released = dict[str, np.ndarray]


def outline(data: Data, base: Path) -> Outline:
    """Sizes, shapes and declarations; a card knows its own, an own file (relative to `base`) is read and counted.

    Raises DataError or UsageError for what `prepare` would refuse for the same reason.
    """
    steps = _steps(data, "add-remove", base)
    if data.name is None:
        source = open_source(data, base)
        if isinstance(source, DiskSource):
            _check_on_disk(source, data, steps)
        files = tuple(len(part) for part in (source.train, source.test) if part is not None)
        sizes = _sizes_on_disk(source, data) if isinstance(source, DiskSource) else _sizes(files, data)
        layout, classes, said = source.layout, source.classes, source.declarations
        name = source.name
    else:
        card = catalog.card_of(data)
        counted = {
            part: sum(catalog.records(card, f) for f in card.files if f.part == part and f.holds != "labels")
            for part in ("train", "test")
        }
        files = tuple(rows for rows in counted.values() if rows)
        sizes = _sizes(files, data)
        layout, classes, said = card.layout, card.labels, readers.declarations(card)
        name = card.name
    train, test, validation = sizes
    layouts = _plan(steps, layout)
    said = (*said, *_declarations(steps, train, test), *_validation_declarations(data, validation))
    outputs, bound = len(classes) if classes is not None else 1, preprocess.norm_bound(steps, layouts)
    return Outline(name, files, train, test, layouts[-1].shape, outputs, said, bound)


def _sizes(files: tuple[int, ...], data: Data) -> tuple[int, int, int]:
    """Rows of the training, the test and the validation part of `files`, given by their numbers of rows."""
    split, validation = _split(data, len(files) > 1), 0
    places, test = places_of(files[:1]), sum(files[1:])
    if split is not None:
        places, held = cut_places(places_of(files), split)
        test = len(held)
    if data.validation is not None:
        places, held = cut_places(places, data.validation)
        validation = len(held)
    return len(places), test, validation


def _sizes_on_disk(source: DiskSource, data: Data) -> tuple[int, int, int]:
    train, test, validation = _parts(source, data)
    return len(train), len(test), 0 if validation is None else len(validation)


def private_releases(data: Data, adjacency: Adjacency) -> list[Release]:
    """What preprocessing will release, in order; known from the recipe (and card) alone."""
    return [Release(step.release) for step in _steps(data, adjacency) if step.release is not None]


def uncovered_steps(data: Data, adjacency: Adjacency) -> list[str]:
    """Which steps read training rows without noise, in words: no statement covers them. From recipe and card alone."""
    return [step.nonprivate for step in _steps(data, adjacency) if step.nonprivate is not None]


@np.errstate(**UNTOLD)
def prepare(
    data: Data, base: Path, trials: int, normal: Normal, adjacency: Adjacency, released: Released | None = None
) -> Dataset:
    """Read, split and preprocess. `normal(trial, purpose, shape)` gives float64 standard normal draws of that
    trial's own stream; it is called only for the steps that `private_releases` lists, once per trial and step.

    `released` is `Dataset.released` of an earlier call for the same rows: what is in it is used, not released anew.
    Raises DataError naming the file, column or step that is at fault.
    """
    source = open_source(data, base)
    steps = _steps(data, adjacency, base)
    if isinstance(source, DiskSource):
        _check_on_disk(source, data, steps)
    let_go_of_large()
    layouts = _plan(steps, source.layout)
    train, test, validation = _parts(source, data)
    pipeline = Pipeline(steps, layouts, dict(released or {}))
    parts = [part.x for part in (train, test, validation) if part is not None]
    (train_x, test_x, *others), per_trial = pipeline.run(parts, trials, normal)
    nonprivate = tuple(step.nonprivate for step in steps if step.nonprivate is not None)
    return Dataset(
        name=source.name,
        train_x=train_x,
        train_y=_own(train.y),
        test_x=test_x,
        test_y=_own(test.y),
        per_trial=per_trial,
        classes=source.classes,
        declarations=(
            *source.declarations,
            *_declarations(steps, len(train), len(test)),
            *_validation_declarations(data, 0 if validation is None else len(validation)),
        ),
        nonprivate=nonprivate,
        sha256=source.sha256 | _weights(steps),
        warnings=(*source.warnings, *nonprivate),
        released=pipeline.released,
        validation_x=others[0] if others else None,
        validation_y=None if validation is None else _own(validation.y),
        places=_places(train, test),
        norm_bound=preprocess.norm_bound(steps, layouts),
    )


def _places(train: Part | DiskPart, test: Part | DiskPart) -> np.ndarray | None:
    if isinstance(train, DiskPart) or isinstance(test, DiskPart):
        return None
    return np.concatenate([train.places, test.places])


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, and what private ones released."""

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released

    def run(self, parts: Sequence[Rows], trials: int, normal: Normal) -> tuple[list[Rows], bool]:
        """Transform all parts, the first being the training rows; the last value says whether each trial has its own.

        Rows that stay on disk are told what to do when they are read.
        """
        first = next((i for i, step in enumerate(self.steps) if step.release is not None), None)
        for index in range(len(self.steps) if first is None else first):
            transform = self.steps[index].fit(_fitted(parts[0]), self.layouts[index])(_no_draw)
            parts = [_through(transform, part) for part in parts]
        if first is None:
            return [_through(_float32, part) for part in parts], False
        train = _fitted(parts[0])
        learn_shared = cache(lambda: self._learn(first, train))
        rooms = [Room(part, trials, self.layouts[-1].shape) for part in parts]
        for trial in range(trials):
            own = list(parts)
            for index in range(first, len(self.steps)):
                if self.steps[index].release is None:
                    transform = self.steps[index].fit(_fitted(own[0]), self.layouts[index])(_no_draw)
                else:
                    learn = learn_shared if index == first else partial(self._learn, index, _fitted(own[0]))
                    transform = self._private(learn, trial, index, normal)
                own = [_through(transform, part) for part in own]
            for room, part in zip(rooms, own, strict=True):
                room.put(trial, _through(_float32, part))
        return [room.filled for room in rooms], True

    def _learn(self, index: int, rows: np.ndarray) -> Callable[[Draw], np.ndarray]:
        step = self.steps[index]
        assert isinstance(step, PrivateStep)
        return step.learn(rows, self.layouts[index])

    def _private(
        self, learn: Callable[[], Callable[[Draw], np.ndarray]], trial: int, index: int, normal: Normal
    ) -> Transform:
        """The transform of a private step; `learn` reads the rows, and only where nothing was released before."""
        step, key = self.steps[index], f"{trial}/{index}"
        assert isinstance(step, PrivateStep)
        if key not in self.released:
            self.released[key] = learn()(_drawing(normal, trial, index))
        return step.apply(self.released[key])


class Room:
    """The rows of every trial: filled in, or where they stay on disk told apart by their transforms."""

    def __init__(self, part: Rows, trials: int, shape: tuple[int, ...]) -> None:
        self._part = part
        self._trials: list[DiskRows] = []
        on_disk = isinstance(part, DiskRows)
        self._room = None if on_disk else np.empty((trials, len(part), *shape), np.float32)

    def put(self, trial: int, rows: Rows) -> None:
        if isinstance(rows, DiskRows):
            self._trials.append(rows)
        else:
            assert self._room is not None and isinstance(rows, np.ndarray)
            self._room[trial] = rows

    @property
    def filled(self) -> Rows:
        if self._room is not None:
            return self._room
        assert isinstance(self._part, DiskRows)
        return TrialRows(self._part, self._trials)


def _fitted(rows: Rows) -> np.ndarray:
    """What a step may be fitted on; rows on disk are as much of an array as steps that pass `_check_on_disk` need."""
    return cast(np.ndarray, rows)


def _through(transform: Transform, rows: Rows) -> Rows:
    if isinstance(rows, DiskRows):
        return rows.then(transform)
    assert isinstance(rows, np.ndarray)
    return transform(rows)


def _drawing(normal: Normal, trial: int, index: int) -> Draw:
    """The purpose names the step's place, so that no two steps of a trial share draws."""
    return lambda shape: normal(trial, f"preprocess-{index}", shape)


def _no_draw(shape: tuple[int, ...]) -> np.ndarray:
    raise AssertionError("a step without a release asked for noise")


def _float32(x: np.ndarray) -> np.ndarray:
    # what is kept of a file is read-only: whoever trains gets rows of their own
    return np.require(x, np.float32, ["C", "W"])


def _own(labels: Rows) -> Rows:
    return np.require(labels, None, ["W"]) if isinstance(labels, np.ndarray) else labels


def _steps(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[Step]:
    chosen: Sequence[PreprocessStep] | None = data.preprocess
    if chosen is None:
        chosen = OWN_FILE_STEPS if data.name is None else catalog.load_card(data.name).preprocess
    first: list[Step] = [] if data.features is None else [extractor(data.features, base)]
    return [*first, *preprocess.build(chosen, adjacency)]


def _plan(steps: Sequence[Step], layout: Layout) -> list[Layout]:
    """The layout before each step, and after the last."""
    layouts = [layout]
    for step in steps:
        layouts.append(step.plan(layouts[-1]))
    refuse_codes("training", layouts[-1])
    return layouts


def _split(data: Data, has_test: bool) -> Split | None:
    """How a test set is cut; None where the files have one and the recipe does not ask for another."""
    if data.split is not None:
        return data.split
    if has_test:
        return None
    return Split() if data.name is None else catalog.load_card(data.name).split


def _parts(source: Source | DiskSource, data: Data) -> tuple[Part | DiskPart, Part | DiskPart, Part | DiskPart | None]:
    """The training, the test and the validation part; the last is cut from what the test part leaves.

    A split named in the recipe is cut from ALL rows, the files' own test rows included.
    """
    train, test = _tested_apart(source, _split(data, source.test is not None))
    if test is None:
        raise DataError(f"{source.name} has no test rows; give data.split")
    if data.validation is None:
        return train, test, None
    train, validation = _cut(train, data.validation)
    return train, test, validation


def _tested_apart(source: Source | DiskSource, split: Split | None) -> tuple[Part | DiskPart, Part | DiskPart | None]:
    if isinstance(source, DiskSource):
        if split is None:
            return source.train, source.test
        if source.test is None:
            return source.train.cut(split)
        raise DataError(f"{source.name}: files that stay on disk are not pooled; give test_path or split, not both")
    test = None if source.test is None else of_second_file(source.test)
    return (source.train, test) if split is None else cut_part(pool(source.train, test), split)


def _cut(part: Part | DiskPart, cut: Split | ValidationSet) -> tuple[Part | DiskPart, Part | DiskPart]:
    return part.cut(cut) if isinstance(part, DiskPart) else cut_part(part, cut)


def _check_on_disk(source: DiskSource, data: Data, steps: Sequence[Step]) -> None:
    """Refuse what would need all rows in memory."""
    if data.features is not None:
        raise DataError(
            f"{source.name}: data.features keeps all it extracts; extract first, and save that as a npy file"
        )
    for step in steps:
        if step.nonprivate is not None:
            raise DataError(
                f"{source.name}: {step.nonprivate.split(' was ')[0]} reads all rows at once; scale by bounds"
            )


def _declarations(steps: Sequence[Step], train_records: int, test_records: int) -> tuple[str, ...]:
    said = sizes_declared(train_records, test_records)
    return (*said, *(step.declaration for step in steps if step.declaration is not None))


def sizes_declared(train_records: int, test_records: int) -> tuple[str, ...]:
    """What is said of the numbers of records."""
    return (
        f"The number of training records is public: {train_records}.",
        f"The {test_records} test records are public: what is measured on them is reported without noise.",
    )


def folds_declared(files: Sequence[int], folds: int) -> tuple[str, ...]:
    """The same with `folds`, of `files` of so many rows."""
    records, train = sum(files), most_trained_on(files, folds)
    return (
        f"The number of records is public: {records}; each trial trains on at most {train} of them, and on none of its"
        " own fold.",
        "The records of a trial's own fold are public to it: what is measured on them is reported without noise.",
        "Each trial's own statement covers the records that it trained on.",
    )


def _validation_declarations(data: Data, records: int) -> tuple[str, ...]:
    if data.validation is None:
        return ()
    if not data.validation.public:
        return (f"The number of validation records is public: {records}; each look at them is charged.",)
    return (
        f"The {records} validation records, cut from the training data, are declared public: the statement does not"
        " protect whoever is in them.",
    )


def _weights(steps: Sequence[Step]) -> dict[str, str]:
    """SHA-256 of what frozen extractors were loaded from."""
    loaded = [step for step in steps if isinstance(step, Extract) and step.declaration is not None]
    return {"features": loaded[0].identity} if loaded else {}
