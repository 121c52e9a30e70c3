"""Tables and arrays in memory that stand for a file, so that a recipe trains on them as on that file.

A recipe names its data by a path. While `holding` is open, the functions that read, hash and look for files use the
records in memory for that path. Nothing is written to disk. All else (splits, ledger, result) is as from the shell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common import plugins
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data.cells import Cells, TableRows
from dpsgd_cli.errors import DataError

TABLE, ARRAYS = ".parquet", ".npz"
"""Endings of the files that a table and named arrays stand for."""


@dataclass(frozen=True)
class Held:
    """Records in memory, private: a `table`, or `arrays` by name; neither for a model. `sha256` is of the content."""

    sha256: str
    table: TableRows | None = None
    arrays: Mapping[str, np.ndarray] | None = None


_held: ContextVar[Mapping[Path, Held]] = ContextVar("held", default={})  # noqa: B039, never changed in place


def table_of(records: Any) -> TableRows | None:
    """Return a table in memory (pandas, or anything with an Arrow stream); None for other types.

    Column names become text. Raises DataError for a table that cannot be converted, without showing a cell.
    """
    import pandas as pd
    import pyarrow as pa

    if isinstance(records, TableRows):
        return records
    if not isinstance(records, pd.DataFrame):
        if not hasattr(records, "__arrow_c_stream__"):
            return None
        try:
            arrow = pa.table(records)
            columns, names = dict(zip(arrow.column_names, arrow.columns, strict=True)), arrow.column_names
        except (ValueError, TypeError, NotImplementedError) as error:
            raise DataError(f"the Arrow table cannot be read ({type(error).__name__}); give a data frame") from None
    elif records.columns.nlevels > 1:
        raise DataError("the columns have names of several levels; give each one name")
    else:
        names = list(map(str, records.columns))
        columns = {name: records.iloc[:, at] for at, name in enumerate(names)}
    if len(columns) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"two columns are called {quoted(twice)}")
    return TableRows.of(
        {name: Cells(name, one) if isinstance(one, pa.ChunkedArray) else one for name, one in columns.items()}
    )


def array_of(values: Any) -> np.ndarray:
    """Return a tensor, a list or an array as an array."""
    values = values.detach().cpu() if hasattr(values, "detach") else values
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"lists of different lengths, or of no plain numbers ({type(error).__name__})") from None


def records_of(records: Any) -> tuple[TableRows | np.ndarray | dict[str, np.ndarray] | None, Any]:
    """Return records in memory as a table, an array or arrays by name; and labels that came with them, or None.

    A pair (X, y), or a TensorDataset of two tensors, is features and labels. Columns, of a dict or of a Hugging Face
    dataset, are a table; if one holds several numbers for each record, all are arrays by name. Returns None for other
    types.
    """
    import pandas as pd

    labels = None
    parts = getattr(records, "tensors", records)  # of a TensorDataset
    if isinstance(parts, tuple | list) and len(parts) in (1, 2) and all(hasattr(part, "shape") for part in parts):
        records, labels = (*parts, None)[:2]
    if hasattr(records, "with_format") and hasattr(records, "column_names"):
        records = records.with_format(None)[:]
    if isinstance(records, np.ndarray) or hasattr(records, "detach"):
        return array_of(records), labels
    if not are_columns(records):
        return table_of(records), labels
    arrays = {str(name): array_of(column) for name, column in records.items()}
    if any(one.ndim > 1 for one in arrays.values()):
        return arrays, labels
    columns = {
        str(name): pd.Series(arrays[str(name)]).infer_objects()
        if _is_of_one_kind(column)
        else pd.Series(column, dtype=object)
        for name, column in records.items()
    }
    return table_of(pd.DataFrame(columns)), labels


def _is_of_one_kind(column: Any) -> bool:
    """Return True unless `column` holds values of several types, of which NumPy or pandas would change some for others.

    A list has no type that is public, so each of its values keeps its own. Whole numbers may stand among fractions,
    which hold all of them up to 2^53.
    """
    if not isinstance(column, list | tuple) and getattr(column, "dtype", None) not in (None, np.dtype(object)):
        return True
    kinds = {*map(type, column)} - {type(None)}
    return len(kinds) < 2 or (
        kinds == {int, float} and all(type(one) is not int or abs(one) <= 1 << 53 for one in column)
    )


def are_columns(records: Any) -> bool:
    """Return True for a dict of columns, which a dictionary that is a recipe is not."""
    held = list(records.values()) if isinstance(records, Mapping) else []
    return bool(held) and all(isinstance(one, list | tuple) or hasattr(one, "shape") for one in held)


def labels_of(labels: Any) -> np.ndarray | None:
    """Return labels (N, ...) in memory as an array; None unless they are numbers, answers or one row of texts."""
    if labels is None or isinstance(labels, str):
        return None
    array = array_of(labels)
    array = array.astype(str) if array.dtype == object and all(isinstance(one, str) for one in array.flat) else array
    return array if array.ndim and array.dtype.kind in ("biuf" if array.ndim > 1 else "biufU") else None


@contextmanager
def holding(path: Path, records: TableRows | Mapping[str, np.ndarray]) -> Iterator[None]:
    """Let `records` stand for the file `path`, in this thread, until the block ends."""
    held = (
        Held(_digest_of_table(records), records)
        if isinstance(records, TableRows)
        else Held(_digest_of_arrays(records), None, records)
    )
    token = _held.set({**_held.get(), path.absolute(): held})
    try:
        yield
    finally:
        _held.reset(token)


def at(path: Path) -> Held | None:
    """Return what stands for the file `path`, be it records or a model; None if it is a file."""
    code = plugins.in_memory(path)
    return _held.get().get(path.absolute()) if code is None else Held(code.sha256)


def is_there(path: Path) -> bool:
    """Return True if `path` is a file, or if records in memory stand for it."""
    return at(path) is not None or path.is_file()


def _digest_of_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _digest_of_table(table: TableRows) -> str:
    """Return the SHA-256 of the columns' names, types and cells, as an Arrow stream."""
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.arrow.schema) as stream:
        stream.write_table(table.arrow.combine_chunks())
    return hashlib.sha256(sink.getvalue()).hexdigest()
