"""What data pass through: what was read, how its features are laid out, steps of preprocessing, what training gets.

A step first plans (layout in, layout out: every mistake is found before a value is read) and then is fitted on the
training rows, which yields the transform of any rows.

Not here: reading (`readers.py`, `opening.py`), transforming (`preprocess.py`), joining it all (`preparation.py`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from dpsgd_cli.core.marginals import Cells
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.errors import DataError
from dpsgd_cli.privacy.mechanism import GaussianSum
from dpsgd_cli.recipe.batching import Adjacency
from dpsgd_cli.recipe.schema.data import Cut

if TYPE_CHECKING:
    from dpsgd_cli.data.on_disk import DiskPart, DiskRows, TrialRows


Noised = Callable[[np.ndarray], np.ndarray]
"""Gives a vector, whose sensitivity is that of a step's release, back with the noise of that release."""
Transform = Callable[[np.ndarray], np.ndarray]

UNTOLD: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
"""For `np.errstate` where private rows are read and transformed: a warning would tell of single records."""
UNKNOWN = -1
"""In the place of a label that nobody gave."""

Rows: TypeAlias = "np.ndarray | DiskRows | TrialRows"


@dataclass(frozen=True)
class Column:
    """One feature of a table: numeric with or without public bounds, or categorical with public values.

    A categorical column's matrix entries are indices into `values` until it is expanded. An `indicator` is a
    0/1 or constant column (one-hot, bias), which scaling leaves alone; of those of one `category` one is 1 at most.
    `filling` stands where a value is missing: a number, or one of `values`; None: nothing does. A column that `marks`
    another is 1 where that one's value is missing.
    """

    name: str
    bounds: tuple[float, float] | None = None
    values: tuple[str, ...] | None = None
    indicator: bool = False
    category: str | None = None
    filling: float | str | None = None
    marks: str | None = None

    @property
    def numeric(self) -> bool:
        """Whether its entries are numbers that somebody measured."""
        return self.values is None and not self.indicator


@dataclass(frozen=True)
class Layout:
    """What one record looks like, known without reading any value.

    `columns` describes the features of a table; None for arrays (images, projections), whose entries
    all share `bounds`.
    """

    shape: tuple[int, ...]
    columns: tuple[Column, ...] | None = None
    bounds: tuple[float, float] | None = None

    @property
    def features(self) -> int:
        return math.prod(self.shape)

    @property
    def categorical(self) -> list[str]:
        return [column.name for column in self.columns or () if column.values is not None]

    def plain(self) -> dict[str, Any]:
        """The same as plain data, for a file."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, found: dict[str, Any]) -> Layout:
        """Inverse of `plain`, of what was read from JSON; ValueError for what `plain` never gives.

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
            if values is None and isinstance(column.filling, str):
                raise ValueError(f"column {column.name!r} is of numbers, but its filling is text")
        return made


@dataclass(frozen=True)
class Part:
    """Rows and labels that belong together: x (N, ...), y (N,) class indices (int64) or targets (float32).

    Public records of a file without labels have UNKNOWN ones. `keys` (`splits.py`) are what coins are drawn from; None
    where nothing is cut. Rows of users are grouped by user and share their user's key (`units.py`); until then `owners`
    (N,) names each row's user.
    """

    x: np.ndarray
    y: np.ndarray
    keys: Keys | None = None
    owners: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)

    def cut(self, cut: Cut) -> tuple[Part, Part]:
        """The rows that stay, and those that `cut` holds out, each in their order; users stay whole."""
        held = self.known_keys.held_out(cut)
        rest, chosen = (self.only(one) for one in (~held, held))
        return rest, chosen

    def only(self, rows: np.ndarray) -> Part:
        """The `rows` (a mask, or numbers), with their keys and owners."""
        keys = None if self.keys is None else self.keys[rows]
        return Part(self.x[rows], self.y[rows], keys, None if self.owners is None else self.owners[rows])

    @property
    def known_keys(self) -> Keys:
        """The keys; AssertionError where the rows have none."""
        assert self.keys is not None, "these rows have no keys, so nothing can be cut from them"
        return self.keys

    @property
    def units(self) -> int:
        """Number of users, or else of records."""
        return len(self) if self.keys is None else len(self.keys.different)

    def pooled(self, test: Part | None) -> Part:
        """All rows, these first."""
        if test is None:
            return self
        x, y = (np.concatenate([getattr(self, own), getattr(test, own)]) for own in ("x", "y"))
        return Part(x, y, self.known_keys.then(test.known_keys))


@dataclass(frozen=True)
class Source:
    """One data set as read, before splitting and preprocessing. `test` is None when there is no fixed test set.

    Both parts are in memory, or both on disk. `public` are records of a file of their own, which are not cut.
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


@dataclass(frozen=True)
class Outline:
    """What is known of a data set before (or without) reading its values. `outputs`: K classes, or 1.

    `files` are the numbers of records in each file, before any cut. `train_records` is public: the number of training
    records, or under add-remove an upper bound on it where a fraction is cut (`splits.py`). `norm_bound` is the largest
    L2 norm of a preprocessed record that public bounds allow, None where nothing bounds it. `cells` makes the columns
    of preprocessed records in cells, where the last step has made them of columns.
    """

    name: str
    files: tuple[int, ...]
    train_records: int
    test_records: int
    input_shape: tuple[int, ...] | None
    outputs: int
    declarations: tuple[str, ...]
    norm_bound: float | None = None
    public_records: int = 0
    cells: Callable[[], Sequence[Cells]] = field(default=tuple, compare=False)


@dataclass(frozen=True)
class Dataset:
    """What training gets.

    `train_x` is float32 (N, ...) shared by all trials, or (R, N, D) when `per_trial` (after a private step,
    whose noise is each trial's own); `test_x` likewise. Labels are int64 class indices, or float32 targets.
    `declarations` says what is taken to be public, `nonprivate` which steps read the training rows without
    noise, `warnings` what a user must be told; `sha256` identifies what was read. `released` is what private steps
    released, by "trial/step": noisy already, so keeping it costs nothing; `fitted` what other steps kept of rows
    that are declared public, by "step", or by "trial/step" after a private one, and `unreleased` what steps that are in
    `nonprivate` kept of the training rows. `layout` is that of records as read. `validation_x` and `validation_y` are
    rows cut from the training part, laid out as `test_x`; None where the recipe asks for none; `public_x` and
    `public_y` likewise, of records that are public without their labels. `keys` are those of the training rows, then
    of the test rows; None where nothing is cut, and where rows stay on disk. `train_records` is that of the
    outline; None for as many as there are rows. `norm_bound` and `cells` are those of the outline.
    All rows are arrays, or where they stay on disk `Rows`: whoever uses one as an array says which by doing so.
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
    train_records: int | None = None
    norm_bound: float | None = None
    cells: Callable[[], Sequence[Cells]] = tuple


def flatten(rows: np.ndarray) -> np.ndarray:
    """(N, ...) as (N, D), also for N = 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


FittedOn = Literal["nothing", "synthetic", "public", "training"]


@dataclass(frozen=True)
class Length:
    """A public bound on the L2 norm of a record: |record|^2 <= whole^2 + constants.

    `whole` bounds all but appended constants, whose squares add up to `constants`; None: as the layout bounds it, if it
    does.
    """

    whole: float | None
    constants: float


class Step(ABC):
    """One preprocessing step with its settings.

    Every class states `fitted_on`, in its own body: what `kept` is given. `nothing` states that the step acts on each
    record alone. A step that is fitted on `training` rows says besides how that is covered, by one of the next three.

    `release` is the mechanism that the step is (its draws are standard normal, of the trial's own stream);
    `nonprivate` says that it reads the training rows without noise; `declaration` what it takes to be public;
    `before_cut` that it acts on each record alone and is fitted on none, so that rows may be cut into parts after it.
    """

    settings: Any
    release: GaussianSum | None = None
    nonprivate: str | None = None
    declaration: str | None = None
    before_cut: bool = False

    def __init_subclass__(cls, stated: bool = True, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if stated and "fitted_on" not in vars(cls):
            raise TypeError(f"step {cls.__name__} must state fitted_on: what it is fitted on has no default")

    @property
    @abstractmethod
    def fitted_on(self) -> FittedOn:
        """The rows that `kept` is given."""

    def __init__(self, settings: Any, adjacency: Adjacency) -> None:
        """A private step is stated for `adjacency`."""
        del adjacency
        self.settings = settings

    @abstractmethod
    def plan(self, layout: Layout) -> Layout:
        """The layout after this step; raises DataError for what the step cannot do."""

    @abstractmethod
    def bounded(self, length: Length, before: Layout) -> Length:
        """How long a record is at most after this step, from how long it was; `before` is its layout. Prices rest on
        it."""

    @property
    def covered(self) -> bool:
        """Whether something covers what the step sees of the training rows: a release, a declaration or a warning."""
        said = (self.release, self.declaration, self.nonprivate)
        return self.fitted_on != "training" or any(one is not None for one in said)

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray | None:
        """What the step keeps of the rows that it is `fitted_on`; `layout` is theirs, before the step."""
        del rows, layout
        return None

    @abstractmethod
    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        """What the step does to rows of `layout`, by what it kept, or released; reads no other."""

    def cells(self, layout: Layout) -> Sequence[Cells]:
        """The columns of `layout` as what the step makes of them, in cells; none where it mixes columns."""
        del layout
        return ()

    def fit(self, rows: np.ndarray, layout: Layout) -> Transform:
        """The transform that follows from the training rows, without a release."""
        return self.transform(layout, self.kept(rows, layout))

    @property
    def made_from(self) -> dict[str, str]:
        """The SHA-256 of what the step was loaded from, by what a result calls it."""
        return {}


class PrivateStep(Step, stated=False):
    """A step whose only look at the training rows is a release: an array, of which the transform is post-processing.

    What was released may be kept and used again (after a resume) without a second release.
    """

    @abstractmethod
    def learn(self, rows: np.ndarray, layout: Layout) -> Callable[[Noised], np.ndarray]:
        """From what adds noise to the array that is released."""

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray:
        def no_draw(exact: np.ndarray) -> np.ndarray:
            raise AssertionError("a step without a release asked for noise")

        return self.learn(rows, layout)(no_draw)


def refuse_codes(step: str, layout: Layout) -> None:
    """Raise DataError while a categorical column is still a column of codes, which `step` cannot take for numbers."""
    if layout.categorical:
        names = ", ".join(layout.categorical)
        raise DataError(
            f"{step}: {names} would be used as numbers but hold categories; put one-hot before, or drop them"
        )
