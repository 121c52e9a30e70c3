"""New rows for a trained model, in the layout of its training records and without declarations.

`source_of` chooses once what the rows are: a table, arrays, or texts. `Source.rows` and `Source.labelled` read rows
that must all be usable. In `Source.one_by_one` a row that cannot be used does not stop the others, and says why.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np

from dpsgd_cli.common.sections import composed
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import listed, quoted
from dpsgd_cli.data import card_readers, cards, memory, on_disk, own_arrays, table, texts
from dpsgd_cli.data.cells import PLAIN, Cells, TableRows
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.dataset import Column, Layout, Part
from dpsgd_cli.data.labels import labelled, read_labels
from dpsgd_cli.data.opening import ARRAYS, ROWS, existing, kind_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import KINDS, is_record, known_columns, read_table, with_header
from dpsgd_cli.errors import DataError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Records: TypeAlias = "Path | str | TableRows | pd.DataFrame | np.ndarray | Any"
"""A file, or what `memory.records_of` takes."""
Held: TypeAlias = Path | TableRows | np.ndarray | dict[str, np.ndarray]
Read: TypeAlias = tuple[np.ndarray, Cells | np.ndarray | None]
"""Rows, and their labels: as stored, or an array of several for each row; None if none were asked for."""
Unknown = Literal["error", "ignore"]
NO_CATEGORY = -1
"""Code of a cell whose category is not known and is ignored: it is none of the column's values."""


@dataclass(frozen=True)
class NewRows:
    """The N rows of a table: `x` (n, D) of those that can be used, and for each row why it cannot be, or None.

    `kept` are the columns that go beside the predictions.
    """

    x: np.ndarray
    reasons: Sequence[str | None]
    kept: Mapping[str, Sequence[str | None]]


class Source(ABC):
    """New records of one kind for a model of `layout`, which `data` names; a user's own card is relative to `base`."""

    usual_target: ClassVar[str]
    """Name of the labels where neither recipe nor card has one."""
    wanted: str
    """What the model takes, as text for a message."""

    def __init__(self, data: Data, layout: Layout, base: Path) -> None:
        self.data, self.layout, self.base = data, layout, base
        self.card = None if data.name is None else cards.card_of(data, base)
        named = data.target if self.card is None else self.card.target
        self.target = named if named and not named.endswith(ROWS) else self.usual_target

    @abstractmethod
    def read(self, records: Held, target: str | None) -> Read:
        """Return the rows, and their labels `target` if that is not None."""

    @np.errstate(**SILENT)
    def rows(self, records: Records) -> np.ndarray:
        """Return new rows (N, *shape) of a file, a table or an array in memory, before any preprocessing.

        A table has the layout's columns, by name and in any order; other columns (labels too) are ignored. The recipe
        gives the meaning of missing values. A npz file holds the rows as `x`, a npy file holds nothing else. Raises
        DataError for other missing values, cells that are not numbers, and categories that are not listed.
        """
        return self.read(self._held(records), None)[0]

    @np.errstate(**SILENT)
    def labelled(self, records: Records, classes: Sequence[Any] | None) -> Part:
        """Return new rows with labels: indices into `classes`, or targets if that is None.

        Labels are read from the column or array `data.target`, or from the target column of the card, as in training.
        Targets are in the unit of training (`table.py`).
        """
        x, labels = self.read(self._held(records), self.target)
        if not isinstance(labels, Cells):
            assert labels is not None
            return Part(x, labels)
        if self.card is not None and isinstance(self.card.classes, dict):
            return Part(x, card_readers.labels_of(self.card, labels))
        where = Path(records) if isinstance(records, Path | str) else Path("the table")
        return Part(x, read_labels(self.data, [labels], [where], classes)[0][0])

    def one_by_one(self, path: Path, keep: Sequence[str] = (), unknown: Unknown = "error") -> NewRows:
        """Return the rows of a file, some of which may not be usable. Columns `keep` of a table keep their text.

        With `unknown` ignore, an unknown category counts as none of the column's values. Raises DataError if the file
        cannot be read, lacks a column, or has no row that can be used; UsageError if `keep` names no column.
        """
        del unknown
        if keep:
            raise UsageError("--keep: is for the columns of a table, and the model takes an array")
        x = self.rows(path)
        return NewRows(x, [None] * len(x), {})

    def _held(self, records: Records) -> Held:
        """Return records as a table or arrays, labels beside them left out, and a file by its path."""
        if isinstance(records, str | Path):
            return Path(records)
        found = memory.records_of(records)[0]
        if found is None:
            raise DataError(f"the model takes {self.wanted}, not {type(records).__name__}")
        return found

    def _kind(self, path: Path, known: Sequence[str], wanted: str) -> str:
        """Return the ending of a file of new rows. Raises DataError if it is not there, or of another kind."""
        kind = kind_of(existing(path, "it is looked for in the current folder"))
        if kind not in known:
            raise DataError(f"{path}: {kind or 'an unknown kind of file'}, but the model takes {wanted}")
        return kind

    def _in_units(self, x: np.ndarray) -> np.ndarray:
        """Return rows as a card's own records are read: pixels in [0, 1], columns clamped to the recipe's bounds."""
        return x if self.card is None else card_readers.in_units(self.card, x)


def source_of(data: Data, layout: Layout, base: Path = Path()) -> Source:
    """Return the source of new rows for a model that `data` trained on records of `layout`."""
    kind = Texts if data.text is not None else Arrays if layout.columns is None else Tables
    return kind(data, layout, base)


class Texts(Source):
    """Texts, in a column of a table or in a folder of files, which become tokens (N, L)."""

    usual_target = "class"
    wanted = "a table with a column of texts"

    def read(self, records: Held, target: str | None) -> Read:
        if isinstance(records, np.ndarray | dict):
            raise DataError(f"the model takes {self.wanted}, not an array")
        where = "the table" if isinstance(records, TableRows) else str(records)
        if isinstance(records, Path):
            kind = (
                "" if records.is_dir() else self._kind(records, (*KINDS,), f"{self.wanted}, or a folder of .txt files")
            )
            records = texts.new_table(records, kind, self.data)
        x = texts.rows_of(records, self.data, where, self.base)
        if target is None or self.data.task == "next-token":
            return x, None if target is None else own_arrays.next_tokens(x)
        if target not in records:
            raise DataError(f"{where} has no column {quoted(target)} of labels")
        return x, records[target]


class Arrays(Source):
    """Arrays: those of a npz file, which may hold labels, a npy file, or one in memory."""

    usual_target = "y"

    @property
    def wanted(self) -> str:  # type: ignore[override]
        return f"an array ({ARRAYS} with x, or {ROWS}) of shape {self._shape}"

    @property
    def _shape(self) -> str:
        return f"(N, {', '.join(map(str, self.layout.shape))})"

    def read(self, records: Held, target: str | None) -> Read:
        if isinstance(records, np.ndarray) and target is None:
            return self._in_units(self._checked(records, "the array")), None
        if isinstance(records, dict) and target is None:
            joined = own_arrays.stored_inputs(self.data, records, "", Path("the records"))
            return self._checked(joined, "the records"), None
        wanted = self.wanted if target is None else f"a {ARRAYS} file with the labels {target!r}"
        if not isinstance(records, Path):
            what = "a table" if isinstance(records, TableRows) else "an array"
            raise DataError(f"the model takes {wanted}, not {what}")
        kind = self._kind(records, (ARRAYS, ROWS) if target is None else (ARRAYS,), wanted)
        stored = own_arrays.load(records) if kind == ARRAYS else {"x": np.array(on_disk.stored(records))}
        x = self._checked(own_arrays.stored_inputs(self.data, stored, "", records), f"{records}: x")
        if target is None:
            return self._in_units(x), None
        labels = own_arrays.stored_labels(self.data, stored, x, target, records)
        if not own_arrays.fits(self.data, labels.shape, len(x)) and self.data.task != "next-token":
            raise DataError(
                f"{records}: the labels have shape {labels.shape}, but must be {own_arrays.label_shape(self.data)},"
                f" one for each of {len(x)} rows"
            )
        several = self.data.labels_are_arrays
        return self._in_units(x), own_arrays.coder(self.data)(labels) if several else Cells.of(target, labels)

    def _checked(self, x: np.ndarray, where: str) -> np.ndarray:
        """Return rows (N, *shape), as floats unless the layout is of integers. Raises DataError if they do not fit."""
        if x.shape[1:] != self.layout.shape or not len(x) or x.dtype.kind not in "biuf":
            raise DataError(f"{where} has shape {x.shape} of {x.dtype}, but the model needs numbers {self._shape}")
        if self.layout.integers and x.dtype.kind == "f":
            raise DataError(f"{where} holds {x.dtype}, but the model was trained on integers")
        own_arrays.check_values(x, where)
        return x.astype(np.int64) if self.layout.integers else own_arrays.floating(x)


class Tables(Source):
    """A table with the columns of the layout, in a file or in memory."""

    usual_target = "target"

    def __init__(self, data: Data, layout: Layout, base: Path) -> None:
        super().__init__(data, layout, base)
        self.wanted = f"a table ({', '.join(KINDS)}) with the columns {listed(layout.sources)}"
        self.columns, self.written = layout.columns or (), data.format or PLAIN

    def read(self, records: Held, target: str | None) -> Read:
        if isinstance(records, np.ndarray | dict):
            raise DataError(f"the model takes {self.wanted}, not an array")
        rows, where = (self._opened(records), str(records)) if isinstance(records, Path) else (records, "the table")
        self._check_names(rows, target, where)
        rows = rows if target is None else labelled(rows, self.data)
        try:
            x = table.to_matrix(rows, self.columns, where, self.written)
        except table.BadColumns as error:
            # a model that is trained takes no advice about its recipe
            told = [line.rpartition("; ")[0] or line for line in str(error).splitlines()]
            raise DataError("\n".join(f"{line}; fix such rows, or leave them out" for line in told)) from None
        return self._in_units(x), None if target is None else rows[target]

    def _opened(self, path: Path) -> TableRows:
        kind = self._kind(path, (*KINDS,), self.wanted)
        return read_table(path, kind, with_header(path, kind, self.data.format or PLAIN, self.layout.sources))

    def _check_names(self, rows: TableRows, target: str | None, where: str) -> None:
        """Raise DataError if a table is empty, or lacks a column of the layout or the `target`."""
        wanted = dict.fromkeys(self.layout.sources, "which the model needs")
        if target is not None:
            wanted[target] = "which holds the labels"
        absent = {name: why for name, why in wanted.items() if name not in rows}
        if len(absent) > 1 and len(rows.names) == 1 and {*",;|\t"} & {*rows.names[0]}:
            mark = quoted((self.data.format or PLAIN).separator or ",")
            raise DataError(f"{where}: its first line is one cell; the recipe separates cells by {mark}")
        if len(absent) > 1 and is_record(rows.names):  # said once, not of each
            absent = {next(iter(absent)): f"nor {len(absent) - 1} more that the model or the labels need"}
        if absent:
            told = (f"{quoted(name)}, {why}{known_columns(name, rows.names)}" for name, why in absent.items())
            raise DataError("\n".join(f"{where}: there is no column {problem}" for problem in told))
        if not len(rows):
            raise DataError(f"{where} has no rows")

    def one_by_one(self, path: Path, keep: Sequence[str] = (), unknown: Unknown = "error") -> NewRows:
        rows, columns, keep = self._opened(path), self.columns, [*map(composed, keep)]
        absent = [name for name in keep if name not in rows]
        if absent:
            raise UsageError(f"--keep: {path} has no column {quoted(absent[0])}{known_columns(absent[0], rows.names)}")
        self._check_names(rows, None, str(path))
        reasons: list[str | None] = [None] * len(rows)
        ignored: dict[int, list[int]] = {}
        for at, together in _looked_at(columns).items():
            for row, reason in _unusable(rows, together, self.written).items():
                if unknown == "ignore" and columns[at].values is not None and columns[at].computed is None:
                    ignored.setdefault(at, []).append(row)
                else:
                    reasons[row] = reasons[row] or reason
        usable = np.array([reason is None for reason in reasons])
        if not usable.any():
            raise DataError(f"{path}: no row can be used; the first says: {reasons[0]}")
        told = dict.fromkeys(rows.names)
        for at, which in ignored.items():
            cells = rows[columns[at].name].texts()
            for row in which:
                cells[row] = (columns[at].values or ("",))[0]
            told[columns[at].name] = Cells.of(columns[at].name, cells)
        known = TableRows.of({name: cells or rows[name] for name, cells in told.items()})
        x = self._in_units(table.to_matrix(known.take(usable), columns, str(path), self.written))
        place = usable.cumsum() - 1
        for at, which in ignored.items():
            x[[place[row] for row in which if usable[row]], at] = NO_CATEGORY
        return NewRows(x, reasons, {name: rows[name].texts() for name in keep})


def _looked_at(columns: Sequence[Column]) -> dict[int, list[Column]]:
    """Return columns that are looked at together by the place of the first.

    A category is alone, because it may be ignored. All numbers of one source, such as the buckets of a text, are one.
    """
    first: dict[str, int] = {}
    found: dict[int, list[Column]] = {}
    for at, column in enumerate(columns):
        place = at if column.values is not None else first.setdefault(column.source, at)
        found.setdefault(place, []).append(column)
    return found


def _unusable(rows: TableRows, columns: Sequence[Column], written: TableFormat) -> dict[int, str]:
    """Return the rows whose cell of one source a model cannot use, each with what `table.to_matrix` says of it.

    Equal cells are looked at once. Halves of the others are searched, so a few bad cells among many are found fast.
    """
    name = columns[0].source
    codes = rows[name].distinct[1]
    _, first, which = np.unique(codes, return_index=True, return_inverse=True)
    found: dict[int, str] = {}
    left = [np.arange(len(first))]
    while left:
        cells = left.pop()
        try:
            table.to_matrix(TableRows.of({name: rows[name].take(first[cells])}), columns, "", written)
        except DataError as error:
            if len(cells) > 1:
                left += np.array_split(cells, 2)
            else:
                found[int(cells[0])] = _reason(str(error))
    return {row: found[code] for row, code in enumerate(which.tolist()) if code in found} if found else {}


def _reason(problem: str) -> str:
    """Return a problem with the only row of a table, without a place and without advice about a recipe."""
    told = problem.removeprefix(": ").rpartition("; ")[0] or problem
    return re.sub(r"(, first)? in data row \d+| \(data row \d+\)", "", told)
