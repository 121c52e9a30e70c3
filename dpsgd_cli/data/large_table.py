"""A user's own CSV or parquet file with `data.on_disk`: converted in parts to a file of numbers, which stays on disk.

Rows are never all in memory: a part of the file is read at a time, and training reads the rows of a batch, or a piece
of all rows (`on_disk.py`). If a test part is cut, memory holds ten bytes for each row. The
numbers are kept in the cache folder of the user, readable by nobody else, under the hash of the file and of all that
decides how it is read; delete the folder `tables` there to forget them.

Classes and categories must be declared, because they would otherwise be known only after all rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dpsgd_cli.common.free_memory import refuse_beyond_memory
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.whole_files import writing
from dpsgd_cli.data import fingerprint, table
from dpsgd_cli.data.cells import PLAIN, Table
from dpsgd_cli.data.dataset import Layout, RawDataset
from dpsgd_cli.data.labels import read_labels
from dpsgd_cli.data.on_disk import DiskPart, DiskRows, stored
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table_files import IN_PARTS, size_of
from dpsgd_cli.errors import DataError

Parts = Callable[[], Iterator[Table]]
VERSION = 5


def refuse_unfit(data: Data, kinds: list[str]) -> None:
    """Raise DataError for tables that cannot be read in parts."""
    if problems := unfit(data, kinds):
        raise DataError("\n".join(f"data.on_disk: {problem}" for problem in problems))


def refuse_too_large(data: Data, paths: Sequence[Path], kinds: list[str]) -> None:
    """Raise DataError for tables that are known to be larger than memory, before they are read as a whole."""
    needed = sum(size_of(path, kind) for path, kind in zip(paths, kinds, strict=True))
    problems = unfit(data, kinds)
    advice = "give data.on_disk: true, which reads them in parts"
    if problems:
        advice = f"use fewer rows or a larger machine, for data.on_disk: true, which reads in parts, {problems[0]}"
    refuse_beyond_memory(needed, f"{paths[0].name}: its rows", advice)


def unfit(data: Data, kinds: list[str]) -> list[str]:
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


def read(data: Data, path: Path, hashes: dict[str, str], layout: Layout, parts: Parts) -> RawDataset:
    """Return the rows of the table as they stay on disk. `parts` yields its columns, some rows at a time.

    Raises DataError as the reader of small tables does, for the first part that has a fault.
    """
    told = data.model_dump(mode="json", exclude={"preprocess", "features", "split", "validation", "augment"})
    key = json.dumps([VERSION, told, hashes, layout.plain()], sort_keys=True, default=str)
    place = cache_folder() / "tables" / hashlib.sha256(key.encode()).hexdigest()[:32]
    kept = place.with_suffix(".x.npy"), place.with_suffix(".y.npy")
    if not all(one.is_file() for one in kept):
        _convert(parts, data, layout, path, kept, hashes)
    x, y = (stored(one) for one in kept)
    classes = None if data.task == "regression" else tuple(data.classes or ())
    part = DiskPart(DiskRows(x), DiskRows(y))
    said = table.declarations(data, layout.columns or (), classes)
    return RawDataset(path.name, part, None, layout, classes, said, (), hashes)


def _convert(
    parts: Parts, data: Data, layout: Layout, path: Path, kept: tuple[Path, Path], hashes: dict[str, str]
) -> None:
    """Write the features (N, D), float64, and the labels (N,) of all parts. Complete files or none are left.

    Raises DataError if the file is no longer the one that `hashes` name.
    """
    kept[0].parent.mkdir(parents=True, exist_ok=True)
    columns, written = layout.columns or (), data.format or PLAIN
    done, kind, within = 0, np.dtype(np.float32 if data.task == "regression" else np.int64), table.WithinBounds(columns)
    with writing(kept[0], owner_only=True) as features, writing(kept[1], owner_only=True) as labels:
        _header(features, (0, layout.features), np.dtype(np.float64))
        _header(labels, (0,), kind)
        for rows in parts():
            x = table.to_matrix(rows, columns, path.name, written)
            (y,), _ = read_labels(data, [rows[str(data.target)]], [path], data.classes)
            within.with_part(x)
            features.write(np.ascontiguousarray(x).data)
            labels.write(y.astype(kind).data)
            done += len(rows)
        _header(features, (done, layout.features), np.dtype(np.float64))
        _header(labels, (done,), kind)
        if problems := within.problems(path.name):
            raise DataError("\n".join(problems))
        if fingerprint.sha256(path) not in hashes.values():
            raise DataError(f"{path} was changed while it was read; start again once nothing writes to it")


def _header(stream: BinaryIO, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Write the header of a npy file, whose size leaves room for any number of rows."""
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype.str, "fortran_order": False, "shape": shape})
