"""A user's own table: columns by name, declared in the recipe or read from the rows and declared public.

The recipe gives a rule for the missing values of each column. It fills each record by itself, from public constants, so
neighbouring files stay neighbouring, and it costs no privacy.

With `data.on_disk`, a CSV or parquet file is converted in parts to a file of numbers, which stays on disk. Rows are
never all in memory: a part of the file is read at a time, and training reads the rows of a batch, or a piece of all
rows (`on_disk.py`). If a test part is cut, memory holds ten bytes for each row. The numbers are kept in the cache
folder of the user, readable by nobody else, under the hash of the file and of all that decides how it is read; delete
the folder `tables` there to forget them. Classes and categories must be declared, because they would otherwise be
known only after all rows.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpsgd_cli.common.free_memory import refuse_beyond_memory
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.text_format import quoted, similar
from dpsgd_cli.common.whole_files import writing
from dpsgd_cli.data import fingerprint, table
from dpsgd_cli.data.cells import PLAIN, TableRows, text_of
from dpsgd_cli.data.column_settings import Missing
from dpsgd_cli.data.computed_columns import columns_of
from dpsgd_cli.data.dataset import Column, Layout, Part, RawDataset
from dpsgd_cli.data.labels import labelled, read_labels
from dpsgd_cli.data.on_disk import DiskPart, DiskRows, stored
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import IN_PARTS, is_record, known_columns, names_of, parts, read_table, size_of
from dpsgd_cli.data.users import owners_of
from dpsgd_cli.discovery.run import codes
from dpsgd_cli.discovery.settings import Private
from dpsgd_cli.errors import DataError

VERSION = 5
LayoutCheck = Callable[[Layout], object]
"""Function that raises DataError for a layout that cannot be used."""


def read(
    data: Data, paths: list[Path], kinds: list[str], hashes: dict[str, str], check_layout: LayoutCheck
) -> RawDataset:
    """Read the table, and the test table if there is a second path; both have the same columns.

    Raises one DataError for all problems: with the names in the recipe, the cells of each column, the labels, and what
    `check_layout` refuses in the layout.
    """
    if data.on_disk:
        if reasons := _unfit(data, kinds):
            raise DataError("\n".join(f"data.on_disk: {problem}" for problem in reasons))
        return _in_parts(data, paths[0], kinds[0], hashes, check_layout)
    _refuse_too_large(data, paths, kinds)
    owner, written = data.owner_column, data.format or PLAIN
    frames = [labelled(read_table(path, kind, data.format), data) for path, kind in zip(paths, kinds, strict=True)]
    problems = _Problems()
    for frame, path in zip(frames, paths, strict=True):
        problems.found += _wrong_names(path, frame, data)
    if problems.found and any(is_record(frame.names) for frame in frames):
        problems.refuse()
    owners: list[np.ndarray | None] = [None] * len(frames)
    if owner is not None and all(owner in frame for frame in frames):
        with problems.kept():
            owners = [owners_of(frame[owner], path.name) for frame, path in zip(frames, paths, strict=True)]
    # a column that a wrong name probably meant is not checked: its declarations are missing
    left_out = {*data.drop, *_likely_columns(frames[0].names, data)} | (set() if owner is None else {owner})
    frames = [frame.without(left_out) for frame in frames]
    columns, found = _declare(data, frames, problems.found)
    if not columns and left_out == {*data.drop}:
        problems.found.append(f"{paths[0]} has no feature columns left besides the target {data.target!r}")
    matrices, unusable = [], set[str]()
    for frame, path in zip(frames, paths, strict=True):
        missing = {column.source for column in columns} - {*frame.names}
        problems.found += [
            f"{path} has no column {quoted(name)}, which {paths[0].name} has" for name in sorted(missing)
        ]
        with problems.kept():
            try:
                usable = [column for column in columns if column.source not in missing]
                matrices.append(table.to_matrix(frame, usable, path.name, written))
                problems.found += table.WithinBounds(usable).with_part(matrices[-1]).problems(path.name)
            except table.BadColumns as error:
                unusable |= error.no_numbers
                raise
    sound = tuple(column for column in columns if column.name not in unusable)
    with problems.kept():
        check_layout(Layout((len(sound),), sound))
    labels: list[np.ndarray] = []
    classes: tuple[Any, ...] | None = None
    target = str(data.target)
    if all(target in frame for frame in frames):
        with problems.kept():
            labels, classes = read_labels(data, [frame[target] for frame in frames], paths, data.classes)
    texts = {}
    for column in columns:
        if column.private == "categories":
            with problems.kept():
                texts[column.name] = codes(found_values(frames, column.name), column.name)
    problems.refuse()
    layout = Layout((len(columns),), tuple(columns))
    parts = [Part(x, y, owners=whose) for x, y, whose in zip(matrices, labels, owners, strict=True)]
    said, told = table.declarations(data, columns, classes), table.read_warnings(data, classes, found)
    return RawDataset(
        paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, told, hashes, texts=texts
    )


def _in_parts(data: Data, path: Path, kind: str, hashes: dict[str, str], check_layout: LayoutCheck) -> RawDataset:
    """Read a large table in parts; its rows stay on disk. Raises DataError for wrong names, then for the first part."""
    names = names_of(path, kind, data.format)
    problems = _Problems()
    problems.found += _wrong_names(path, TableRows.of({name: [] for name in names}), data)
    head = TableRows.of({name: [] for name in names if name not in {*data.drop, *_likely_columns(names, data)}})
    columns, _ = _declare(data, [head], problems.found)
    layout = Layout((len(columns),), tuple(columns))
    with problems.kept():
        check_layout(layout)
    problems.refuse()
    told = data.model_dump(mode="json", exclude={"preprocess", "features", "split", "validation", "augment"})
    key = json.dumps([VERSION, told, hashes, layout.plain()], sort_keys=True, default=str)
    place = cache_folder() / "tables" / hashlib.sha256(key.encode()).hexdigest()[:32]
    kept = place.with_suffix(".x.npy"), place.with_suffix(".y.npy")
    if not all(one.is_file() for one in kept):
        _convert(data, path, kind, layout, kept, hashes)
    x, y = (stored(one) for one in kept)
    classes = None if data.task == "regression" else tuple(data.classes or ())
    said = table.declarations(data, columns, classes)
    return RawDataset(path.name, DiskPart(DiskRows(x), DiskRows(y)), None, layout, classes, said, (), hashes)


class _Problems:
    """The problems of a table, which are reported together."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep a DataError that is raised inside, and go on."""
        try:
            yield
        except DataError as error:
            self.found += str(error).splitlines()

    def refuse(self) -> None:
        """Raise DataError if there is any problem."""
        if self.found:
            raise DataError("\n".join(dict.fromkeys(self.found)))


def _wrong_names(path: Path, rows: TableRows, data: Data) -> list[str]:
    """Return the problems with the columns that the recipe names: each must exist, and have one role.

    A file without a header has no other columns: whether a column is there would depend on single records.
    """
    names = rows.names
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    problems = [
        f"{path}: data.{key} names {quoted(name)}, which is no column{known_columns(name, names)}"
        for key, wanted in _named(data).items()
        for name in wanted
        if name not in names
    ]
    known = {*(name for wanted in _named(data).values() for name in wanted), data.owner_column}
    problems += [
        f"{path}: records have a key {quoted(name)} that the recipe does not name; give its data.bounds (or"
        " categorical, columns), or list it under data.drop"
        for name in names
        if rows.open_names and name not in known
    ]
    if data.target in bounds and data.task == "regression":
        problems.append(f"data.bounds names the target {data.target!r}; give data.target_bounds")
    categorical, computed = {*(data.categorical or ())}, {*(data.columns or ())}
    problems += [
        f"data.columns names {quoted(name)}, which data.categorical names too; keep one"
        for name in sorted(categorical & computed)
    ]
    problems += [
        f"data.{key} names the target {data.target!r}"
        for key in ("drop", "columns")
        if data.target in (getattr(data, key) or ())
    ]
    unusable = categorical | computed | {*data.drop, data.target}
    problems += [f"data.bounds names {name!r}, which is not a numeric feature" for name in bounds if name in unusable]
    owner = data.owner_column
    if owner is not None and owner not in names:
        problems.append(
            f"{path}: privacy.unit.column names {quoted(owner)}, which is no column{known_columns(owner, names)}"
        )
    elif owner is not None and owner in categorical | computed | {*bounds, *(data.missing or ())}:
        problems.append(
            f"data.categorical, columns, bounds and missing are of features, and {quoted(owner)} is none:"
            " privacy.unit.column names it; leave it out there"
        )
    return problems


def _named(data: Data) -> dict[str, list[str]]:
    """Return the columns that the recipe names, by key."""
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    return {
        "target": [str(data.target)],
        "bounds": [*bounds],
        "categorical": [*(data.categorical or ())],
        "columns": [*(data.columns or ())],
        "missing": [*(data.missing or ())],
        "drop": data.drop,
    }


def _likely_columns(names: list[str], data: Data) -> set[str]:
    """Return the columns that the recipe's wrong names were probably meant to be."""
    wrong = [name for wanted in _named(data).values() for name in wanted if name not in names]
    return {near for name in wrong if (near := similar(name, names)) is not None and near != data.target}


def _declare(data: Data, frames: list[TableRows], problems: list[str]) -> tuple[list[Column], list[str]]:
    """Return the columns with their public facts, and the names of those whose values were read from the rows.

    They are in the order of the file's header; where it has none, in that of the recipe.
    """
    found, columns = [], []
    names = frames[0].names
    if frames[0].open_names:
        names = [name for name in dict.fromkeys(itertools.chain(*_named(data).values())) if name in names]
    for name in names:
        if name == data.target:
            continue
        filling = data.fillings.get(name)
        if data.columns is not None and name in data.columns:
            columns += columns_of(name, data.columns[name], filling, problems)
            continue
        if data.categorical is None or name not in data.categorical:
            pair = data.bounds.get(name) if isinstance(data.bounds, dict) else data.bounds
            columns += _numeric(name, pair, filling, problems)
            continue
        if name in data.private_columns:
            columns.append(_private_categories(name, filling or Missing(), problems))
            continue
        if isinstance(data.categorical, dict):
            values = tuple(str(text_of(value)) for value in data.categorical[name])
        else:
            try:
                values = found_values(frames, name)
            except DataError as error:
                problems.append(str(error))
                continue
            found.append(name)
        columns.append(_categorical(name, values, filling or Missing(), problems))
    twice = [name for name, times in Counter(column.name for column in columns).items() if times > 1]
    problems += [f"two features are called {quoted(name)}: rename the file's column of that name" for name in twice]
    return columns, found


def _numeric(
    name: str, told: tuple[float, float] | Private | None, filling: Missing | None, problems: list[str]
) -> list[Column]:
    """Return the column, and the column that marks its gaps if the recipe asks for one."""
    bounds = None if told == "private" else told
    column = Column(name, bounds, private=None if told != "private" else "bounds")
    if filling is None:
        return [column]
    value, here = filling.value, f"data.missing: {name}:"
    if value is None and bounds is not None:
        value = (bounds[0] + bounds[1]) / 2
    if value is None:
        if column.private is None:
            problems.append(f"{here} give a value, for the column has no bounds to take the middle of")
    elif isinstance(value, str):
        problems.append(f"{here} {quoted(value)} is no number; name the column under data.categorical if it holds text")
    elif bounds is not None and not bounds[0] <= value <= bounds[1]:
        problems.append(f"{here} {value:g} is not within the column's bounds {list(bounds)}")
    marks = f"{name} is missing"
    own = [replace(column, filling=0.0 if isinstance(value, str) else value)]
    return own + [Column(marks, (0.0, 1.0), indicator=True, category=marks, marks=name)] * filling.indicator


def _categorical(name: str, values: tuple[str, ...], filling: Missing, problems: list[str]) -> Column:
    """Return the column. Without a filling, "" is one of its values even if no value is missing."""
    if filling.indicator:
        problems.append(f"data.missing: {name}: a category needs no indicator; give it one of its own, or leave it out")
    if filling.value is None:
        return Column(name, values=values if "" in values else (*values, ""), filling="")
    value = str(text_of(filling.value))
    if value not in values:
        problems.append(f"data.missing: {name}: {quoted(value)} is not among the column's values; add it there")
    return Column(name, values=values, filling=value)


def _private_categories(name: str, filling: Missing, problems: list[str]) -> Column:
    """Return the column. A missing value is a category of its own, or the one that the recipe names."""
    if filling.indicator:
        problems.append(f"data.missing: {name}: a category needs no indicator; leave it out")
    value = "" if filling.value is None else str(text_of(filling.value))
    return Column(name, filling=value, private="categories")


def found_values(frames: list[TableRows], name: str) -> tuple[str, ...]:
    """Return the texts of a column's cells, sorted, without gaps."""
    found = {text for frame in frames if name in frame for text in frame[name].distinct[0]}
    return tuple(sorted(text for text in found if text is not None and text.strip()))


def _refuse_too_large(data: Data, paths: Sequence[Path], kinds: list[str]) -> None:
    """Raise DataError for tables that are known to be larger than memory, before they are read as a whole."""
    needed = sum(size_of(path, kind) for path, kind in zip(paths, kinds, strict=True))
    problems = _unfit(data, kinds)
    advice = "give data.on_disk: true, which reads them in parts"
    if problems:
        advice = f"use fewer rows or a larger machine, for data.on_disk: true, which reads in parts, {problems[0]}"
    refuse_beyond_memory(needed, f"{paths[0].name}: its rows", advice)


def _unfit(data: Data, kinds: list[str]) -> list[str]:
    """Return the reasons why tables cannot be read in parts."""
    problems = []
    if len(kinds) > 1 or not kinds[0].startswith(IN_PARTS):
        problems.append("is for one csv, tsv or parquet file, cut by data.split")
    if data.task == "classification" and data.classes is None:
        problems.append("needs data.classes: labels that stay on disk are not searched for them")
    if isinstance(data.categorical, list):
        problems.append("needs the values of data.categorical: rows that stay on disk are not searched for them")
    if data.private_columns:
        problems.append("needs stated bounds and categories: private ones are counted in memory; state them")
    if data.unit is not None:
        problems.append("keeps rows apart, and those of a user (privacy.unit) have to be together; leave it out")
    return problems


def _convert(
    data: Data, path: Path, kind: str, layout: Layout, kept: tuple[Path, Path], hashes: dict[str, str]
) -> None:
    """Write the features (N, D), float64, and the labels (N,) of all parts. Complete files or none are left.

    Raises DataError if the file is no longer the one that `hashes` name.
    """
    kept[0].parent.mkdir(parents=True, exist_ok=True)
    columns, written = layout.columns or (), data.format or PLAIN
    done, within = 0, table.WithinBounds(columns)
    dtype = np.dtype(np.float32 if data.task == "regression" else np.int64)
    with writing(kept[0], owner_only=True) as features, writing(kept[1], owner_only=True) as labels:
        _header(features, (0, layout.features), np.dtype(np.float64))
        _header(labels, (0,), dtype)
        for part in parts(path, kind, data.format, {*layout.sources, str(data.target)}):
            rows = labelled(part, data)
            x = table.to_matrix(rows, columns, path.name, written)
            (y,), _ = read_labels(data, [rows[str(data.target)]], [path], data.classes)
            within.with_part(x)
            features.write(np.ascontiguousarray(x).data)
            labels.write(y.astype(dtype).data)
            done += len(rows)
        _header(features, (done, layout.features), np.dtype(np.float64))
        _header(labels, (done,), dtype)
        if problems := within.problems(path.name):
            raise DataError("\n".join(problems))
        if fingerprint.sha256(path) not in hashes.values():
            raise DataError(f"{path} was changed while it was read; start again once nothing writes to it")


def _header(stream: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the header of a npy file, whose size leaves room for any number of rows."""
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": shape})
