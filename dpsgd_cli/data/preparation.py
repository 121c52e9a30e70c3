"""Preparation of the training data that a recipe's `data:` section describes: read, split, preprocess.

`outline` and `private_releases` give a plan its public facts before any value is used (a user's own files are read to
count their records). `prepare` does the work. Its caller charges the private releases before it calls `prepare`.

`preprocess.py` applies the steps to rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import quoted, suggested
from dpsgd_cli.data import card_files, card_readers, cards, preprocess
from dpsgd_cli.data.dataset import UNKNOWN, Dataset, Layout, Outline, Part, RawDataset, Step, refuse_codes
from dpsgd_cli.data.discover import Discover
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.on_disk import DiskPart, Rows, stored_keys
from dpsgd_cli.data.opening import let_go_of_large, load_raw
from dpsgd_cli.data.preprocess import Pipeline, Released
from dpsgd_cli.data.settings import Data, Split
from dpsgd_cli.data.splits import Keys, content_keys, cut_sizes, places_of_a_fold
from dpsgd_cli.data.step_settings import OWN_FILE_STEPS, PreprocessStep
from dpsgd_cli.data.users import by_user, in_memory, members_of, shares_of_rows
from dpsgd_cli.discovery.settings import Discovery
from dpsgd_cli.errors import DataError
from dpsgd_cli.evaluation.groups import Grouping
from dpsgd_cli.preconditioning.marginals import Columns


def outline(data: Data, base: Path) -> Outline:
    """Return the public facts of the data: sizes, shapes and declarations.

    A card states them. A user's own file (relative to `base`) is read and counted. Raises DataError or UsageError for
    whatever `prepare` would refuse for the same reason.
    """
    steps = _steps(data, "add-remove", base)
    if data.name is None or data.unit is not None:
        source = _opened(data, base, steps)
        files = tuple(part.units for part in (source.train, source.test) if part is not None)
        label = tuple(source.train.y.shape[1:])
        layout, classes, said = source.layout, source.classes, source.declarations
        name = source.name
    else:
        card = cards.card_of(data, base)
        counted = {
            part: sum(card_files.records(card, f) for f in card.files if f.part == part and f.holds != "labels")
            for part in ("train", "test")
        }
        files = tuple(rows for rows in counted.values() if rows)
        label = ()
        layout, classes, said = card.layout, card.labels, card_readers.declarations(card)
        name = card.name
    sizes = _sizes(files, data, layout, base)
    layouts = _plan(steps, layout)
    _group_columns(layout, data, name)
    said = (*said, *_declarations(steps, data, sizes))
    # how many tokens there are is known by the model
    outputs = 2 if data.task == "next-token" else 1 if classes is None else len(classes)
    bound = preprocess.norm_bound(steps, layouts)
    shape, columns = layouts[-1].shape, _columns(steps, layouts)
    return Outline(
        name,
        files,
        sizes.train,
        sizes.test,
        shape,
        outputs,
        said,
        bound,
        sizes.public,
        columns,
        layouts[-1].integers,
        label,
    )


def _columns(steps: Sequence[Step], layouts: Sequence[Layout]) -> Callable[[], Columns]:
    """Return a function that computes the columns that the last step's features consist of."""
    return partial(steps[-1].columns, layouts[-2]) if steps else Columns


def _opened(data: Data, base: Path, steps: Sequence[Step]) -> RawDataset:
    """Open what `data` names. Raises DataError if it stays on disk and a step needs all rows in memory."""
    source = load_raw(data, base, partial(_plan, steps))
    if data.public is not None and data.public.path is not None:
        source = dataclasses.replace(source, public=_public_file(data, source.layout, base))
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
        if step.release is not None:
            raise DataError(
                f"{source.name}: a {step.release.label} with noise makes rows of each trial's own, which do not stay on"
                " disk; declare it public, take it of public records, or read rows into memory (.npz)"
            )
    return source


def _with_keys(source: RawDataset, data: Data, base: Path) -> RawDataset:
    """Return the source with the keys of its rows if anything is cut; rows of users have their keys already.

    Identical records are numbered across files that are pooled, and within each file otherwise.
    """
    train, test = source.train, source.test
    if data.unit is not None or not (data.cuts or _split(data, test is not None, base)):
        return source
    parts = [train, *([] if test is None else [test])]
    if data.by_place:
        keys = Keys.of_places([len(part) for part in parts])
    elif data.pooled and isinstance(train, Part) and isinstance(test, Part):
        keys = content_keys(np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y]))
    else:
        made = [dataclasses.replace(part, keys=_keys_of(part)) for part in parts]
        return dataclasses.replace(source, train=made[0], test=made[1] if made[1:] else None)
    first = dataclasses.replace(train, keys=keys[: len(train)])
    rest = None if test is None else dataclasses.replace(test, keys=keys[len(train) :])
    return dataclasses.replace(source, train=first, test=rest)


def _keys_of(part: Part | DiskPart) -> Keys:
    return stored_keys(part.x, part.y) if isinstance(part, DiskPart) else content_keys(part.x, part.y)


@dataclass(frozen=True)
class Sizes:
    """Numbers of rows in each part, or of users where users are the unit of privacy. All are public.

    Unless `exact`, a fraction was cut under add-remove: `train` is then a public number of places (an upper bound), and
    the others are means. `files` are the numbers of records (or users) in each file.
    """

    files: tuple[int, ...]
    exact: bool
    train: int
    test: int
    validation: int = 0
    public: int = 0


@dataclass(frozen=True)
class Parts:
    """The parts that the rows are cut into; None for parts that the recipe does not ask for."""

    train: Part | DiskPart
    test: Part | DiskPart
    validation: Part | DiskPart | None = None
    public: Part | DiskPart | None = None


def _sizes(files: Sequence[int], data: Data, layout: Layout, base: Path) -> Sizes:
    """Return the sizes of the parts of `files`, given their numbers of records (or users). No record is read."""
    split = _split(data, len(files) > 1, base)
    whole = files if split is not None else files[:1]
    left: Keys | int = Keys.of_places(whole) if data.by_place else sum(whole)
    test = sum(files[1:])
    if split is not None and split.test == 0:
        test = 0
    elif split is not None:
        left, test = cut_sizes(left, split)
    validation, public = 0, 0
    if data.validation is not None:
        left, validation = cut_sizes(left, data.validation)
    if data.public is not None and data.public.cut_from == "train":
        left, public = cut_sizes(left, data.public)
    elif data.public is not None and data.public.cut_from == "test":
        _, public = cut_sizes(test, data.public)
        test -= public
    elif data.public is not None:
        public = len(_public_file(data, layout, base))
    train = len(left) if isinstance(left, Keys) else left
    exact = data.by_place or all(isinstance(cut.asked, int) for cut in (split, data.validation) if cut is not None)
    return Sizes(tuple(files), exact, train, test, validation, public)


def private_releases(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[Release]:
    """Return the releases of preprocessing, in order. Reads only the recipe (and card), no record."""
    return [Release(own) for step in _steps(data, adjacency, base) for own in step.releases]


def uncovered_steps(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[str]:
    """Return a sentence for each step that reads training rows without noise, which no privacy statement covers.

    Reads only the recipe (and card), no record.
    """
    before = data.fitted_before or ()
    said = [f"{name} was fitted to the records, without noise, before they were given" for name in before]
    return [*said, *(step.nonprivate for step in _steps(data, adjacency, base) if step.nonprivate is not None)]


NoisingOf = Callable[[int, str, np.ndarray, GaussianSum, int], np.ndarray]
"""Function of (trial, purpose, exact sum, mechanism, records) that returns the sum with the mechanism's noise.

The sum is over at most `records` records, a public number.
"""


@np.errstate(**SILENT)
def prepare(
    data: Data,
    base: Path,
    trials: int,
    noised: NoisingOf,
    adjacency: Adjacency,
    released: Released | None = None,
    held_out: Callable[[Keys], np.ndarray] | None = None,
) -> Dataset:
    """Read, split and preprocess the data.

    `noised(trial, purpose, exact, mechanism, records)` returns `exact`, a sum over at most `records` records (a public
    number), with noise from that trial's own stream. It is called once per trial for each step that `private_releases`
    lists. `released` is `Dataset.released` of an earlier call for the same rows: its entries are used, not released
    anew. With folds, `held_out` returns a mask (N, R) of the rows that each trial does not train on. Raises DataError
    naming the file, column or step that is at fault.
    """
    steps = _steps(data, adjacency, base)
    source = _with_keys(_opened(data, base, steps), data, base)
    let_go_of_large()
    layouts = _plan(steps, source.layout)
    files = [part.units for part in (source.train, source.test) if part is not None]
    sizes = _sizes(files, data, source.layout, base)

    def in_places(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        records = sizes.train if data.folds is None else sum(files)
        return noised(trial, purpose, exact, mechanism, records * (1 if data.unit is None else data.unit.most_rows))

    for step in steps:
        if isinstance(step, Discover):
            step.texts = source.texts
    groupings = _groupings(source, data, base)
    cut = _parts(source, data, base)
    train, test = cut.train, cut.test
    _check_places(train.units, sizes.train, data, source.name)
    given = {name: part for name, part in vars(cut).items() if part is not None}
    weights = _weights(train, test, data, held_out)
    pipeline = Pipeline(steps, layouts, dict(released or {}), in_places, weights=weights)
    # folds and users select rows of arrays
    coded = data.folds is None and data.unit is None
    rows, per_trial = pipeline.run([part.x for part in given.values()], trials, "public" in given, coded)
    made = dict(zip(given, rows, strict=True))
    nonprivate = tuple(uncovered_steps(data, adjacency, base))
    said = _declarations(steps, data, sizes)
    return Dataset(
        name=source.name,
        train_x=made["train"],
        train_y=_own(train.y),
        test_x=made["test"],
        test_y=_own(test.y),
        per_trial=per_trial,
        classes=source.classes,
        declarations=(*source.declarations, *said),
        nonprivate=nonprivate,
        sha256=source.sha256 | _hashes(steps, data, base),
        warnings=(*source.warnings, *nonprivate),
        released=pipeline.released,
        fitted=pipeline.kept(noiselessly=False),
        unreleased=pipeline.kept(noiselessly=True),
        layout=source.layout,
        validation_x=made.get("validation"),
        validation_y=None if cut.validation is None else _own(cut.validation.y),
        public_x=made.get("public"),
        public_y=None if cut.public is None else _own(cut.public.y),
        keys=_all_keys(train, test),
        groupings=groupings,
        train_records=sizes.train,
        norm_bound=preprocess.norm_bound(steps, layouts),
        columns=_columns(steps, layouts),
    )


def _weights(
    train: Part | DiskPart, test: Part | DiskPart, data: Data, held_out: Callable[[Keys], np.ndarray] | None
) -> Callable[[int], np.ndarray] | None:
    """Return, by trial, what each row counts in a private step; None if each training row counts as 1.

    With folds, rows of both parts count, but for those that the trial does not train on. A user's used rows count as 1
    together.
    """
    if (data.folds is None and data.unit is None) or not data.private_columns:
        return None
    keys = _all_keys(train, test) if data.folds is not None else train.keys
    assert keys is not None
    weights = np.ones(len(keys)) if data.unit is None else shares_of(keys.values, data.unit.most_rows)
    if data.folds is None:
        return lambda _: weights
    assert held_out is not None
    out = held_out(keys)
    return lambda trial: np.where(out[:, trial], 0.0, weights)


def shares_of(keys: np.ndarray, most_rows: int) -> np.ndarray:
    """Return the weight (N,) of each row, given the key (N,) of its user: 1 / n for n used rows, 0 for others.

    >>> shares_of(np.array([7, 7, 7, 4]), most_rows=2).tolist()
    [0.5, 0.5, 0.0, 1.0]
    """
    members, weights = members_of(keys, most_rows)[1], np.zeros(len(keys))
    there = members >= 0
    weights[members[there]] = shares_of_rows(members)[there]
    return weights


def _groupings(source: RawDataset, data: Data, base: Path) -> tuple[Grouping, ...]:
    """Return the groups of the held-out records, from their columns as read, in the order of the test rows."""
    places = _group_columns(source.layout, data, source.name)
    if not places:
        return ()
    rows = in_memory(_parts(source, data, base).test).x
    return tuple(Grouping(name, values, rows[:, place].astype(np.int64)) for name, (place, values) in places.items())


def _group_columns(layout: Layout, data: Data, name: str) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return the place and the values of each column of `data.evaluation.by`.

    Raises DataError for a column that is not there, or whose values are not public.
    """
    known = {
        column.name: (place, column.values)
        for place, column in enumerate(layout.columns or ())
        if column.values is not None and column.private is None
    }
    for column in data.groups:
        if column not in known:
            raise DataError(
                f"data.evaluation.by: {name} has no column {quoted(column)} with public categories"
                f"{suggested(column, list(known))}; list its values under data.categorical"
            )
    return {column: known[column] for column in data.groups}


def _all_keys(train: Part | DiskPart, test: Part | DiskPart) -> Keys | None:
    """Return the keys of the training rows, then of the test rows; None if rows have none, or stay on disk."""
    if isinstance(train, DiskPart) or train.keys is None:
        return None
    return train.keys if test.keys is None else train.keys.then(test.keys)


def _check_places(records: int, places: int, data: Data, name: str) -> None:
    """Raise DataError if the training part has more records than places (see `splits.py`)."""
    if records > places:
        what = "records" if data.unit is None else "users"
        raise DataError(
            f"{name}: the cut leaves more training {what} than the {places} places that were planned, which happens"
            " once in a billion files by chance; give data.split another seed, or a count"
        )


def _hashes(steps: Sequence[Step], data: Data, base: Path) -> dict[str, str]:
    """Return the SHA-256, by name, of each file that is read beside the records themselves."""
    found = {name: own for step in steps for name, own in step.made_from.items()}
    if data.public is not None and data.public.path is not None:
        found[data.public.path] = sha256(base / data.public.path)
    return found


def held_out_of(data: Data, base: Path, folds: bool) -> Part:
    """Return the records that a recipe tests on, before preprocessing; with `folds` all records, training rows first.

    Raises DataError as `prepare` does, and if rows stay on disk.
    """
    cut = _parts(_with_keys(load_raw(data, base), data, base), data, base)
    train, test = cut.train, cut.test
    if not isinstance(train, Part) or not isinstance(test, Part):
        raise DataError("records that stay on disk are not read as a whole; save some of them as a npz file")
    return train.pooled(test) if folds else test


def training_rows(source: RawDataset, data: Data, base: Path) -> Part:
    """Return the training part of records as read, with its keys; with folds all records. Not for rows on disk."""
    keyed = _with_keys(source, data, base) if data.unit is None else by_user(source, data)
    if data.folds is not None and isinstance(keyed.train, Part) and not isinstance(keyed.test, DiskPart):
        return keyed.train.pooled(keyed.test)
    train = _parts(keyed, data, base).train
    assert isinstance(train, Part)
    return train


def held_out_rows(source: RawDataset, data: Data, base: Path) -> Part:
    """Return the held-out part of records as read, with its keys. Not for rows on disk, or folds."""
    keyed = _with_keys(source, data, base) if data.unit is None else by_user(source, data)
    test = _parts(keyed, data, base).test
    assert isinstance(test, Part)
    return test


def steps_of(data: Data, base: Path) -> list[PreprocessStep]:
    """Return the preprocessing that `data` asks for, else the default of its card or of a user's own file."""
    if data.preprocess is not None:
        return data.preprocess
    if data.text is not None or data.inputs is not None:
        return []
    return list(OWN_FILE_STEPS if data.name is None else cards.plain_card(data, base).preprocess)


def pipeline_of(data: Data, base: Path, layout: Layout, kept: Released) -> Pipeline:
    """Return the preprocessing of records in `layout` from the state that training `kept`. It reads no data.

    The keys of `kept` are "step" or "trial/step". Raises DataError if `kept` lacks the state of a step.
    """
    steps = _steps(data, "add-remove", base)
    known = {int(key.rpartition("/")[2]) for key in kept}
    for index, step in enumerate(steps):
        if step.fitted_on in ("training", "public") and index not in known:
            raise DataError(f"the model's file lacks what step {index} of preprocessing kept of the training rows")
    return Pipeline(steps, _plan(steps, layout), kept, _no_noise, dict(kept))


def _no_noise(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
    raise AssertionError(f"{purpose} of trial {trial} was released, and is not drawn again")


def _own(labels: Rows) -> Rows:
    return np.require(labels, None, ["W"]) if isinstance(labels, np.ndarray) else labels


def _steps(data: Data, adjacency: Adjacency, base: Path = Path()) -> list[Step]:
    steps = [preprocess.STEPS[entry.kind](entry.step, adjacency) for entry in steps_of(data, base)]
    if data.unit is not None and any(step.release is not None for step in steps):
        raise DataError(
            "data.preprocess: a private step is charged for one record, and privacy.unit protects all rows of a user;"
            " use steps that release nothing"
        )
    if data.private_columns:
        rows = 1 if data.unit is None else data.unit.most_rows
        steps.insert(0, Discover(data.discovery or Discovery(), adjacency, data.private_columns, rows))
    if data.features is None:
        return steps
    from dpsgd_cli.data.features import step_of

    return [step_of(data.features, base), *steps]


def _plan(steps: Sequence[Step], layout: Layout) -> list[Layout]:
    """Return the layout before each step, and after the last."""
    layouts = [layout]
    for step in steps:
        layouts.append(step.plan(layouts[-1]))
    refuse_codes("training", layouts[-1])
    return layouts


def _split(data: Data, has_test: bool, base: Path) -> Split | None:
    """Return the split that makes the test set; None if the files have one and the recipe asks for no other.

    A card's own split counts rows, so it is not used where users are the unit.
    """
    if data.split is not None:
        return data.split
    if has_test:
        return None
    if data.expects_test:
        raise DataError(
            f"{data.path} has no x_test, whose records would be the test records; give data.split, say {{test: 0.2}}"
        )
    return Split() if data.name is None or data.unit is not None else cards.plain_card(data, base).split


def _parts(source: RawDataset, data: Data, base: Path) -> Parts:
    """Cut the rows of `source` into parts.

    A split named in the recipe is cut from ALL rows, including the files' own test rows. Validation rows are cut from
    the rows outside the test part; public rows from the test part, or from the rows that then still train.
    """
    train, test, split = source.train, source.test, _split(data, source.test is not None, base)
    if split is not None and test is not None:
        if not isinstance(train, Part) or not isinstance(test, Part):
            raise DataError(f"{source.name}: files that stay on disk are not pooled; give test_path or split, not both")
        train = train.pooled(test)
    if split is not None and split.test == 0:
        if isinstance(train, DiskPart):
            raise DataError(f"{source.name}: rows that stay on disk need test rows; give data.test_path, or a split")
        test = train.only(np.arange(0))
    elif split is not None:
        train, test = train.cut(split)
    if test is None:
        raise DataError(f"{source.name} has no test rows; give data.split")
    validation: Part | DiskPart | None = None
    public: Part | DiskPart | None = None
    if data.validation is not None:
        train, validation = train.cut(data.validation)
    if data.public is not None and data.public.cut_from == "train":
        train, public = train.cut(data.public)
    elif data.public is not None and data.public.cut_from == "test":
        test, public = test.cut(data.public)
    else:
        public = source.public
    return Parts(train, test, validation, public)


def _public_file(data: Data, layout: Layout, base: Path) -> Part:
    """Return all records of the file that `data.public` names; their labels are UNKNOWN, whatever the file holds."""
    assert data.public is not None and data.public.path is not None
    x = source_of(data, layout, base).rows(base / data.public.path)
    if not len(x):
        raise DataError(f"data.public: {data.public.path} holds no record")
    return Part(x, np.full(len(x), UNKNOWN))


def _declarations(steps: Sequence[Step], data: Data, sizes: Sizes) -> tuple[str, ...]:
    """Return the declarations of public facts: sizes of the parts, and those of each step."""
    of_steps = (step.declaration for step in steps if step.declaration is not None)
    said = [*_sizes_declared(sizes, data), *of_steps]
    about = "" if sizes.exact else "about "
    if data.validation is not None and data.validation.public:
        said.append(
            f"The {about}{sizes.validation} validation records, cut from the training data, are declared public: the"
            " statement does not protect whoever is in them."
        )
    elif data.validation is not None:
        said.append(f"The number of validation records is public: {sizes.validation}; each look at them is charged.")
    if data.public is not None:
        where = f"of {data.public.path}" if data.public.path else f"cut from the {data.public.cut_from} records"
        said.append(
            f"The {sizes.public} public records, {where}, are public: the statement does not protect whoever is in"
            " them."
        )
    return tuple(said)


def _sizes_declared(sizes: Sizes, data: Data) -> tuple[str, ...]:
    """Return the declarations of the numbers of records, or of users."""
    what, records = "records" if data.unit is None else "users", sum(sizes.files)
    private = data.measured_privately
    measured = "what is measured on them is reported without noise."
    if data.folds is not None:
        train = places_of_a_fold(sizes.files, data.folds, data.by_place)
        return (
            f"The number of {what} is public: {records}; each trial trains on at most {train} of them, and on"
            " none of its own fold.",
            f"The records of a trial's own fold are public to it: {measured}",
            f"Each trial's own statement covers the {what} that it trained on.",
        )
    if sizes.exact:
        said = (f"The number of training {what} is public: {sizes.train}.",)
        tested = [f"The {sizes.test} test {what} are public: {measured}"] if sizes.test else []
        return said if private else (*said, *tested)
    said = (f"The number of {what} is public: {records}; at most {sizes.train} of them train.",)
    return said if private else (*said, f"The test {what}, about {sizes.test}, are public: {measured}")
