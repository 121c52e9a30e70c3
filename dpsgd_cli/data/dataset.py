"""Types of data: the source as read, the layout of features, preprocessing steps, the data set for training.

A step first plans: layout in, layout out, so that every mistake is found before a value is read. Then it is fitted on
the training rows, which yields the transform of any rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism
from dpsgd_cli.data.column_settings import Computed
from dpsgd_cli.data.on_disk import DiskPart, Transform
from dpsgd_cli.data.settings import Cut
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.errors import DataError
from dpsgd_cli.evaluation.groups import Grouping
from dpsgd_cli.preconditioning.marginals import Columns

Noised = Callable[[np.ndarray], np.ndarray]
"""A function that adds the noise of a step's release to a vector with the sensitivity of that release."""
UNKNOWN = -1
"""The label of a record without one."""


@dataclass(frozen=True)
class Column:
    """One feature of a table: numeric with or without public bounds, or categorical with public values.

    A categorical column's matrix entries are indices into `values` until it is expanded. An `indicator` is a part of a
    one-hot or of a text, or a constant, which scaling leaves unchanged; the squares of the indicators of one `category`
    sum to at most 1. `filling` replaces missing values: a number, or one of `values`; None if values are not replaced.
    A column that `marks` another column is 1 where the other's value is missing. A `private` column gets its bounds or
    categories from a release (`discover.py`). Until then its missing values are NaN, and its categories are codes
    of their texts.
    """

    name: str
    bounds: tuple[float, float] | None = None
    values: tuple[str, ...] | None = None
    indicator: bool = False
    category: str | None = None
    filling: float | str | None = None
    marks: str | None = None
    computed: Computed | None = None
    private: Literal["bounds", "categories"] | None = None

    @property
    def source(self) -> str:
        """The file's column that the entries are read from."""
        return self.computed.of if self.computed is not None else self.marks or self.name

    @property
    def numeric(self) -> bool:
        """True if the entries are measured numbers, not codes or indicators."""
        return self.values is None and not self.indicator and self.private != "categories"


@dataclass(frozen=True)
class Layout:
    """The shape and the columns of one record, known without reading any value.

    `columns` describes the features of a table. It is None for arrays (images, projections), whose entries all share
    `bounds`. The entries are `integers` (tokens, masks) that no step may turn into other numbers.
    """

    shape: tuple[int, ...]
    columns: tuple[Column, ...] | None = None
    bounds: tuple[float, float] | None = None
    integers: bool = False

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    @property
    def categorical(self) -> list[str]:
        return [one.name for one in self.columns or () if one.values is not None or one.private == "categories"]

    @property
    def sources(self) -> list[str]:
        """The columns that a file needs."""
        return list(dict.fromkeys(column.source for column in self.columns or ()))

    def plain(self) -> dict[str, Any]:
        """Return the layout as plain data, for a file; what only private columns say is left out of others."""
        made = dataclasses.asdict(self)
        if not self.integers:
            del made["integers"]
        for column in made["columns"] or ():
            if column["private"] is None:
                del column["private"]
        return made

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> Layout:
        """Return the layout of plain data read from JSON: the inverse of `plain`. Raises ValueError if it is invalid.

        >>> layout = Layout((1,), (Column("age", bounds=(0, 99)),))
        >>> Layout.from_plain({"shape": [1], "columns": [{"name": "age", "bounds": [0, 99]}]}) == layout
        True
        """
        from pydantic import TypeAdapter

        made: Layout = TypeAdapter(cls).validate_json(json.dumps(found), strict=True)
        names = [column.name for column in made.columns or ()]
        if len(set(names)) < len(names) or min(made.shape, default=0) < 1:
            raise ValueError("two columns have one name, or there are none")
        for column in made.columns or ():
            values = column.values
            if values is not None and (len(set(values)) < len(values) or column.filling not in (None, *values)):
                raise ValueError(f"column {column.name!r} has a value twice, or a filling that is none of them")
            if values is None and isinstance(column.filling, str) and column.private != "categories":
                raise ValueError(f"column {column.name!r} is of numbers, but its filling is text")
        return made


@dataclass(frozen=True)
class Part:
    """Rows and labels that belong together: x (N, ...), y (N,) class indices (int64) or targets (float32).

    Public records of a file without labels have the label UNKNOWN. `keys` (`splits.py`) are the input of the coins;
    None if nothing is cut. Rows of users are grouped by user and share their user's key (`users.py`). Before they are
    grouped, `owners` (N,) names each row's user.
    """

    x: np.ndarray
    y: np.ndarray
    keys: Keys | None = None
    owners: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def cut(self, cut: Cut) -> tuple[Part, Part]:
        """Return the rows that stay and the rows that `cut` holds out, in their order. Users are not divided."""
        held = self.known_keys.held_out(cut)
        rest, chosen = (self.only(one) for one in (~held, held))
        return rest, chosen

    def only(self, rows: np.ndarray) -> Part:
        """Return the `rows` (a mask, or indices), with their keys and owners."""
        keys = None if self.keys is None else self.keys[rows]
        return Part(self.x[rows], self.y[rows], keys, None if self.owners is None else self.owners[rows])

    @property
    def known_keys(self) -> Keys:
        """The keys. Raises AssertionError if the rows have none."""
        assert self.keys is not None, "these rows have no keys, so nothing can be cut from them"
        return self.keys

    @property
    def units(self) -> int:
        """The number of users, or of records if the rows are not grouped by user."""
        return len(self) if self.keys is None else len(self.keys.different)

    def pooled(self, test: Part | None) -> Part:
        """Return these rows, followed by those of `test`, with the keys and owners that both have."""
        if test is None:
            return self
        x, y = (np.concatenate([getattr(self, own), getattr(test, own)]) for own in ("x", "y"))
        keys = None if self.keys is None else self.keys.then(test.known_keys)
        whose = [part.owners for part in (self, test) if part.owners is not None]
        return Part(x, y, keys, np.concatenate(whose) if len(whose) == 2 else None)


@dataclass(frozen=True)
class RawDataset:
    """One data set as read, before splitting and preprocessing. `test` is None when there is no fixed test set.

    Both parts are in memory, or both on disk. `public` are the records of a separate file, which are not cut. `texts`
    are those of the codes of each column with private categories; they are private.
    """

    name: str
    train: Part | DiskPart
    test: Part | DiskPart | None
    layout: Layout
    classes: tuple[Any, ...] | None
    declarations: tuple[str, ...]
    warnings: tuple[str, ...]
    sha256: dict[str, str]
    public: Part | None = None
    texts: Mapping[str, Mapping[float, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outline:
    """Public facts of a data set, known without reading its values.

    `files` are the numbers of records in each file, before any cut. `train_records` is public: the number of training
    records, or under add-remove an upper bound on it if a fraction is cut (`splits.py`). `outputs` is K classes, or 1.
    `norm_bound` is the largest L2 norm of a preprocessed record that public bounds allow, None without such a bound.
    `columns` returns the columns that the features of preprocessed records consist of (`preconditioning/marginals.py`).
    `integers`: preprocessed records are integers (tokens, masks). `label_shape` is that of one record's label.
    """

    name: str
    files: tuple[int, ...]
    train_records: int
    test_records: int
    input_shape: tuple[int, ...]
    outputs: int
    declarations: tuple[str, ...]
    norm_bound: float | None = None
    public_records: int = 0
    columns: Callable[[], Columns] = field(default=Columns, compare=False)
    integers: bool = False
    label_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """The prepared data of a training. All rows are arrays, or `Rows` if they stay on disk.

    `train_x` is float32 or int64 (N, ...) shared by all trials, or (R, N, D) if `per_trial` (after a private step,
    whose noise differs between trials); `test_x` likewise. Labels are int64 class indices, or float32 targets, (N,) or
    (N, ...). `validation_x` and `validation_y` are rows cut from the training part, with the layout of `test_x`; None
    if the recipe has none. `public_x` and `public_y` are the same for records that are public without their labels.
    `layout` is that of records as read.

    `declarations` lists what is taken to be public. `nonprivate` lists the steps that read the training rows without
    noise. `warnings` are for the user. `sha256` identifies the files.

    `released` holds the output of private steps, by "trial/step": it is noisy, so keeping it costs nothing. `fitted` is
    what other steps kept of rows that are declared public, by "step", or by "trial/step" after a private step.
    `unreleased` is what the steps in `nonprivate` kept of the training rows.

    `keys` are those of the training rows, then of the test rows; None if nothing is cut or rows stay on disk.
    `groupings` are the groups of the test rows that a private evaluation asks for (`data.evaluation.by`).
    `train_records` is that of the outline; None for the number of rows. `norm_bound` and `columns` are those of the
    outline.
    """

    name: str
    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any
    per_trial: bool
    classes: tuple[Any, ...] | None
    declarations: tuple[str, ...]
    nonprivate: tuple[str, ...]
    sha256: dict[str, str]
    warnings: tuple[str, ...] = ()
    released: dict[str, np.ndarray] = field(default_factory=dict)
    fitted: dict[str, np.ndarray] = field(default_factory=dict)
    unreleased: dict[str, np.ndarray] = field(default_factory=dict)
    layout: Layout | None = None
    validation_x: Any = None
    validation_y: Any = None
    public_x: Any = None
    public_y: Any = None
    keys: Keys | None = None
    groupings: tuple[Grouping, ...] = ()
    train_records: int | None = None
    norm_bound: float | None = None
    columns: Callable[[], Columns] = Columns


FittedOn = Literal["nothing", "public", "training"]


@dataclass(frozen=True)
class Length:
    """A public bound on the L2 norm of a record: |record|^2 <= whole^2 + constants.

    `whole` bounds the norm of all entries but appended constants, whose squares sum to `constants`. If it is None, the
    layout may give a bound.
    """

    whole: float | None
    constants: float


def length_of(length: Length, layout: Layout) -> float | None:
    """Return the bound on the norm of a record of `layout`; None if there is none."""
    square = length.whole**2 if length.whole is not None else _square(layout)
    return None if square is None else math.sqrt(square + length.constants)


def _square(layout: Layout) -> float | None:
    if layout.columns is None:
        pair = layout.bounds
        return None if pair is None else layout.features * max(abs(pair[0]), abs(pair[1])) ** 2
    numeric = [column for column in layout.columns if not column.indicator]
    if any(column.bounds is None for column in numeric):
        return None
    groups = {column.category for column in layout.columns if column.category is not None}
    sizes = [max(abs(c.bounds[0]), abs(c.bounds[1])) ** 2 for c in numeric if c.bounds is not None]
    return math.fsum(sizes) + len(groups)


class Step(ABC):
    """One preprocessing step with its settings.

    Every class defines `fitted_on` in its own body: the rows that `kept` reads. `nothing` means that the step acts on
    each record alone. A step that is fitted on `training` rows must set one of `release`, `nonprivate`, `declaration`:

    - `release` is the mechanism of the step; its draws are standard normal, from the trial's own stream;
    - `nonprivate` says that it reads the training rows without noise;
    - `declaration` says what it takes to be public.
    """

    settings: Any
    release: GaussianSum | None = None
    nonprivate: str | None = None
    declaration: str | None = None

    def __init_subclass__(cls, stated: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if stated and "fitted_on" not in vars(cls):
            raise TypeError(f"step {cls.__name__} must state fitted_on: what it is fitted on has no default")

    @property
    @abstractmethod
    def fitted_on(self) -> FittedOn:
        """The rows that `kept` reads."""

    def __init__(self, settings: Any, adjacency: Adjacency) -> None:
        """Store the settings; the guarantee of a private step is for `adjacency`."""
        del adjacency
        self.settings = settings

    @abstractmethod
    def plan(self, layout: Layout) -> Layout:
        """Return the layout after this step. Raises DataError if the step cannot be applied to `layout`."""

    @abstractmethod
    def bounded(self, length: Length, before: Layout) -> Length:
        """Return the bound on a record's norm after this step, given the bound and the layout before it.

        Privacy prices depend on this bound.
        """

    @property
    def releases(self) -> tuple[Mechanism, ...]:
        """All mechanisms that the step is charged, in order; empty without a release."""
        return () if self.release is None else (self.release,)

    @property
    def covered(self) -> bool:
        """True unless the step reads training rows without a release, a declaration or a `nonprivate` warning."""
        said = (self.release, self.declaration, self.nonprivate)
        return self.fitted_on != "training" or any(one is not None for one in said)

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray | None:
        """Return the state computed from the rows that the step is `fitted_on`; `layout` is theirs, before the step."""
        del rows, layout
        return None

    @abstractmethod
    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        """Return the transform of rows of `layout`, computed only from the step's kept or released state."""

    def columns(self, layout: Layout) -> Columns:
        """Return the columns of `layout` that the step's features consist of; none unless it is `bin` without pairs."""
        del layout
        return Columns()

    @property
    def made_from(self) -> dict[str, str]:
        """The SHA-256 of each file that the step was loaded from, by its name in a result."""
        return {}


class PrivateStep(Step, stated=False):
    """A step that uses the training rows only through a released array; its transform is post-processing of that.

    The released array may be kept and used again (after a resume) without a second release.
    """

    @abstractmethod
    def learn(
        self, rows: np.ndarray, layout: Layout, weights: np.ndarray | None = None
    ) -> Callable[[Noised], np.ndarray]:
        """Return a function that computes the released array, given the function that adds the noise.

        With `weights` (N,), rows count as parts of a user, or not at all. A step that has no proof for that raises
        TypeError.
        """

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray:
        def no_draw(exact: np.ndarray) -> np.ndarray:
            raise AssertionError("a step without a release asked for noise")

        return self.learn(rows, layout)(no_draw)


def refuse_codes(step: str, layout: Layout) -> None:
    """Raise DataError if a categorical column still holds codes, which `step` would use as numbers."""
    if layout.categorical:
        names = ", ".join(layout.categorical)
        raise DataError(
            f"{step}: {names} would be used as numbers but hold categories; put one-hot before, or drop them"
        )
