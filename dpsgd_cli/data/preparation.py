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

import numpy as np

from dpsgd_cli.data import catalog, own_file, preprocess, readers
from dpsgd_cli.data.dataset import Dataset, Layout, Outline, Part, Source
from dpsgd_cli.data.features import Extract, extractor
from dpsgd_cli.data.recipe_bounds import card_of
from dpsgd_cli.data.splits import count_test, cut, pool, validation_split
from dpsgd_cli.data.step import Draw, PrivateStep, Step, Transform, refuse_codes
from dpsgd_cli.errors import DataError
from dpsgd_cli.privacy.mechanism import Adjacency, Release
from dpsgd_cli.recipe import schema

DEFAULT_STEPS = (schema.PreprocessStep(scale=schema.Scale()), schema.PreprocessStep(one_hot=schema.OneHot()))

Normal = Callable[[int, str, tuple[int, ...]], np.ndarray]
Released = dict[str, np.ndarray]


def outline(data: schema.Data, base: Path) -> Outline:
    """Sizes, shapes and declarations; a card knows its own, an own file (relative to `base`) is read and counted.

    Raises DataError or UsageError for what `prepare` would refuse for the same reason.
    """
    steps = _steps(data, "add-remove", base)
    if data.name is None:
        source = own_file.read(data, base)
        train, test = len(source.train), len(source.test) if source.test else 0
        layout, classes, said = source.layout, source.classes, source.declarations
        name = source.name
    else:
        card = card_of(data)
        sizes = {
            part: sum(catalog.records(card, f) for f in card.files if f.part == part and f.holds != "labels")
            for part in ("train", "test")
        }
        train, test = sizes["train"], sizes["test"]
        layout, classes, said = card.layout, card.labels, readers.declarations(card)
        name = card.name
    split = _split(data, test > 0)
    if split is not None:
        held_out = count_test(train + test, split)
        train, test = train + test - held_out, held_out
    validation = 0 if data.validation is None else count_test(train, validation_split(data.validation))
    shape = _plan(steps, layout)[-1].shape
    said = (*said, *_declarations(steps, train - validation, test), *_validation_declarations(data, validation))
    return Outline(name, train - validation, test, shape, len(classes) if classes is not None else 1, said)


def private_releases(data: schema.Data, adjacency: Adjacency) -> list[Release]:
    """What preprocessing will release, in order; known from the recipe (and card) alone."""
    return [Release(step.release) for step in _steps(data, adjacency) if step.release is not None]


def prepare(
    data: schema.Data, base: Path, trials: int, normal: Normal, adjacency: Adjacency, released: Released | None = None
) -> Dataset:
    """Read, split and preprocess. `normal(trial, purpose, shape)` gives float64 standard normal draws of that
    trial's own stream; it is called only for the steps that `private_releases` lists, once per trial and step.

    `released` is `Dataset.released` of an earlier call for the same rows: what is in it is used, not released anew.
    Raises DataError naming the file, column or step that is at fault.
    """
    source = own_file.read(data, base) if data.name is None else readers.read(card_of(data))
    steps = _steps(data, adjacency, base)
    layouts = _plan(steps, source.layout)
    train, test = _parts(source, data)
    train, validation = (train, None) if data.validation is None else cut(train, validation_split(data.validation))
    beside = test.x if validation is None else np.concatenate([test.x, validation.x])
    pipeline = Pipeline(steps, layouts, dict(released or {}))
    train_x, beside_x, per_trial = pipeline.run(train.x, beside, trials, normal)
    test_x, validation_x = np.split(beside_x, [len(test)], axis=1 if per_trial else 0)
    nonprivate = tuple(step.nonprivate for step in steps if step.nonprivate is not None)
    return Dataset(
        name=source.name,
        train_x=train_x,
        train_y=train.y,
        test_x=test_x,
        test_y=test.y,
        per_trial=per_trial,
        classes=source.classes,
        declarations=(
            *source.declarations,
            *_declarations(steps, len(train), len(test)),
            *_validation_declarations(data, len(beside) - len(test)),
        ),
        nonprivate=nonprivate,
        sha256=source.sha256 | _weights(steps),
        warnings=(*source.warnings, *nonprivate),
        released=pipeline.released,
        validation_x=None if validation is None else validation_x,
        validation_y=None if validation is None else validation.y,
    )


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, and what private ones released."""

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released

    def run(
        self, train: np.ndarray, test: np.ndarray, trials: int, normal: Normal
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Transform both parts; the last value says whether each trial has its own rows."""
        first = next((i for i, step in enumerate(self.steps) if step.release is not None), None)
        for index in range(len(self.steps) if first is None else first):
            transform = self.steps[index].fit(train, self.layouts[index])(_no_draw)
            train, test = transform(train), transform(test)
        if first is None:
            return _float32(train), _float32(test), False
        learn_shared = cache(lambda: self._learn(first, train))
        shape = self.layouts[-1].shape
        train_all = np.empty((trials, len(train), *shape), np.float32)
        test_all = np.empty((trials, len(test), *shape), np.float32)
        for trial in range(trials):
            x, held_out = train, test
            for index in range(first, len(self.steps)):
                if self.steps[index].release is None:
                    transform = self.steps[index].fit(x, self.layouts[index])(_no_draw)
                else:
                    learn = learn_shared if index == first else partial(self._learn, index, x)
                    transform = self._private(learn, trial, index, normal)
                x, held_out = transform(x), transform(held_out)
            train_all[trial], test_all[trial] = x, held_out
        return train_all, test_all, True

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


def _drawing(normal: Normal, trial: int, index: int) -> Draw:
    """The purpose names the step's place, so that no two steps of a trial share draws."""
    return lambda shape: normal(trial, f"preprocess-{index}", shape)


def _no_draw(shape: tuple[int, ...]) -> np.ndarray:
    raise AssertionError("a step without a release asked for noise")


def _float32(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32)


def _steps(data: schema.Data, adjacency: Adjacency, base: Path = Path()) -> list[Step]:
    chosen: Sequence[schema.PreprocessStep] | None = data.preprocess
    if chosen is None:
        chosen = DEFAULT_STEPS if data.name is None else catalog.load_card(data.name).preprocess
    first: list[Step] = [] if data.features is None else [extractor(data.features, base)]
    return [*first, *preprocess.build(chosen, adjacency)]


def _plan(steps: Sequence[Step], layout: Layout) -> list[Layout]:
    """The layout before each step, and after the last."""
    layouts = [layout]
    for step in steps:
        layouts.append(step.plan(layouts[-1]))
    refuse_codes("training", layouts[-1])
    return layouts


def _split(data: schema.Data, has_test: bool) -> schema.Split | None:
    """How a test set is cut; None where the files have one and the recipe does not ask for another."""
    if data.split is not None:
        return data.split
    if has_test:
        return None
    return schema.Split() if data.name is None else catalog.load_card(data.name).split


def _parts(source: Source, data: schema.Data) -> tuple[Part, Part]:
    """A split named in the recipe is cut from ALL rows, the files' own test rows included."""
    split = _split(data, source.test is not None)
    if split is not None:
        return cut(pool(source.train, source.test), split)
    if source.test is None:
        raise DataError(f"{source.name} has no test rows; give data.split")
    return source.train, source.test


def _declarations(steps: Sequence[Step], train_records: int, test_records: int) -> tuple[str, ...]:
    said = sizes_declared(train_records, test_records)
    return (*said, *(step.declaration for step in steps if step.declaration is not None))


def sizes_declared(train_records: int, test_records: int) -> tuple[str, ...]:
    """What is said of the numbers of records."""
    return (
        f"The number of training records is public: {train_records}.",
        f"The {test_records} test records are public: what is measured on them is reported without noise.",
    )


def _validation_declarations(data: schema.Data, records: int) -> tuple[str, ...]:
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
