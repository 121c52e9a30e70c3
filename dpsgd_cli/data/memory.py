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
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

TABLE, ARRAYS = ".parquet", ".npz"
"""Endings of the files that a table and named arrays stand for."""


@dataclass(frozen=True)
class Held:
    """Records in memory, private: a `table`, or `arrays` by name; and the SHA-256 of their content."""

    sha256: str
    table: pd.DataFrame | None = None
    arrays: Mapping[str, np.ndarray] | None = None


_held: ContextVar[Mapping[Path, Held]] = ContextVar("held", default={})  # noqa: B039, never changed in place


def table_of(records: Any) -> pd.DataFrame | None:
    """Return a table in memory (pandas, or anything with an Arrow stream) as a data frame; None for other types.

    Column names become text. Raises DataError for a table that cannot be converted, without showing a cell.
    """
    import pandas as pd

    if not isinstance(records, pd.DataFrame):
        if not hasattr(records, "__arrow_c_stream__"):
            return None
        try:
            import pyarrow

            records = frame_of(pyarrow.table(records))
        except ImportError:
            raise DataError("an Arrow table needs pyarrow: pip install 'dpsgd[parquet]'") from None
        except (ValueError, TypeError, NotImplementedError) as error:
            raise DataError(f"the Arrow table cannot be read ({type(error).__name__}); give a data frame") from None
    named = records.rename(columns=str).reset_index(drop=True)
    twice = named.columns[named.columns.duplicated()]
    if len(twice):
        raise DataError(f"two columns are called {quoted(twice[0])}")
    if not isinstance(records.columns, pd.Index) or records.columns.nlevels > 1:
        raise DataError("the columns have names of several levels; give each one name")
    return named


def frame_of(arrow: Any, **how: Any) -> pd.DataFrame:
    """Return an Arrow table, or a batch of one, as a data frame whose integers stay integers beside cells without one.

    pandas would make all integers of a column float64 if one cell has none. From 2^53 on they would be rounded, so one
    record would change the texts, hashes and categories of others. `how` goes to `to_pandas`.
    """
    import pandas as pd
    import pyarrow

    whole = [column.null_count for column in arrow.columns if pyarrow.types.is_integer(column.type)]
    kinds = {
        getattr(pyarrow, f"{sign}int{bits}")(): getattr(pd, f"{sign.upper()}Int{bits}Dtype")()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    }
    found: pd.DataFrame = arrow.to_pandas(types_mapper=kinds.get if any(whole) else None, **how)
    return found


def labels_of(labels: Any) -> np.ndarray | None:
    """Return labels (N,) in memory as an array; None unless they are one row of numbers, answers or texts."""
    if labels is None or isinstance(labels, str):
        return None
    array = np.asarray(labels)
    array = array.astype(str) if array.dtype == object and all(isinstance(one, str) for one in array.flat) else array
    return array if array.ndim == 1 and array.dtype.kind in "biufU" else None


@contextmanager
def holding(path: Path, records: pd.DataFrame | Mapping[str, np.ndarray]) -> Iterator[None]:
    """Let `records` stand for the file `path`, in this thread, until the block ends.

    Raises DataError for a table whose cells are lists or objects, without showing any.
    """
    arrays = records if isinstance(records, Mapping) else None
    table = None if isinstance(records, Mapping) else records
    held = Held(_digest_of_arrays(arrays) if table is None else _digest_of_table(table), table, arrays)
    token = _held.set({**_held.get(), path.absolute(): held})
    try:
        yield
    finally:
        _held.reset(token)


def at(path: Path) -> Held | None:
    """Return what stands for the file `path`; None if it is a file."""
    return _held.get().get(path.absolute())


def is_there(path: Path) -> bool:
    """Return True if `path` is a file, or if records in memory stand for it."""
    return at(path) is not None or path.is_file()


def _digest_of_arrays(arrays: Mapping[str, np.ndarray] | None) -> str:
    found = hashlib.sha256()
    for name, array in (arrays or {}).items():
        found.update(f"{name} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _digest_of_table(table: pd.DataFrame) -> str:
    """Return the SHA-256 of the columns' names, types and rows (64 bits of hash a cell)."""
    import pandas as pd

    found = hashlib.sha256()
    for name in table.columns:
        found.update(f"{name} {table[name].dtype}\n".encode())
        try:
            found.update(pd.util.hash_array(table[name].to_numpy()).tobytes())
        except (TypeError, ValueError, NotImplementedError):
            # the error of pandas may show a cell
            raise DataError(
                f"column {quoted(name)} holds cells that are no plain values, or no text that UTF-8 can write"
            ) from None
    return found.hexdigest()
