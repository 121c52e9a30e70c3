"""The records that data passes through: what was read, how its features are laid out, what is handed to training.

Not here: reading (`readers.py`, `opening.py`), transforming (`preprocess.py`), joining it all (`preparation.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from dpsgd_cli.data.on_disk import DiskRows, TrialRows


_UNSAID = np.empty(0, np.int64)

Rows: TypeAlias = "np.ndarray | DiskRows | TrialRows"


@dataclass(frozen=True)
class Column:
    """One feature of a table: numeric with or without public bounds, or categorical with public values.

    A categorical column's matrix entries are indices into `values` until it is expanded. An `indicator` is a
    0/1 or constant column (one-hot, bias), which scaling leaves alone; of those of one `category` one is 1.
    """

    name: str
    bounds: tuple[float, float] | None = None
    values: tuple[str, ...] | None = None
    indicator: bool = False
    category: str | None = None


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


@dataclass(frozen=True)
class Part:
    """Rows and labels that belong together: x (N, ...), y (N,) class indices (int64) or targets (float32).

    `places` (N,), ascending, say where each row was read (`splits.py`); left out, the rows are all of one file.
    """

    x: np.ndarray
    y: np.ndarray
    places: np.ndarray = field(default_factory=lambda: _UNSAID)

    def __post_init__(self) -> None:
        if self.places is _UNSAID:
            object.__setattr__(self, "places", np.arange(len(self.y)))

    def __len__(self) -> int:
        return len(self.y)

    def where(self, chosen: np.ndarray) -> Part:
        """The rows that `chosen` (N,) marks."""
        return Part(self.x[chosen], self.y[chosen], self.places[chosen])


@dataclass(frozen=True)
class Source:
    """One data set as read, before splitting and preprocessing. `test` is None when there is no fixed test set."""

    name: str
    train: Part
    test: Part | None
    layout: Layout
    classes: tuple[Any, ...] | None
    declarations: tuple[str, ...]
    warnings: tuple[str, ...]
    sha256: dict[str, str]


@dataclass(frozen=True)
class Outline:
    """What is known of a data set before (or without) reading its values. `outputs`: K classes, or 1.

    `files` are the rows of each file, before any cut; `norm_bound` is the largest L2 norm of a preprocessed record that
    public bounds allow, None where nothing bounds it.
    """

    name: str
    files: tuple[int, ...]
    train_records: int
    test_records: int
    input_shape: tuple[int, ...] | None
    outputs: int
    declarations: tuple[str, ...]
    norm_bound: float | None = None


@dataclass(frozen=True)
class Dataset:
    """What training gets.

    `train_x` is float32 (N, ...) shared by all trials, or (R, N, D) when `per_trial` (after a private step,
    whose noise is each trial's own); `test_x` likewise. Labels are int64 class indices, or float32 targets.
    `declarations` says what is taken to be public, `nonprivate` which steps read the training rows without
    noise, `warnings` what a user must be told; `sha256` identifies what was read. `released` is what private steps
    released, by "trial/step": noisy already, so keeping it costs nothing. `validation_x` and `validation_y` are rows
    cut from the training part, laid out as `test_x`; None where the recipe asks for none. `places` are those of the
    training rows, then of the test rows; None where rows stay on disk. `norm_bound` is that of the outline.
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
    validation_x: Any = None
    validation_y: Any = None
    places: np.ndarray | None = None
    norm_bound: float | None = None


def flatten(rows: np.ndarray) -> np.ndarray:
    """(N, ...) as (N, D), also for N = 0."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))
