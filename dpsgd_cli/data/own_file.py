"""Reading a user's own csv, parquet or npz file as the recipe's `data:` section describes it.

Whatever is read from the file for want of a declaration (class labels, category values) is declared public, with
a warning. Not here: what is done with each kind of file (`own_table.py`, `own_arrays.py`).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from dpsgd_cli.data import own_arrays, own_table
from dpsgd_cli.data.dataset import Source
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema import Data

ARRAYS = ".npz"


def read(data: Data, base: Path) -> Source:
    """Read `data.path` (and `data.test_path`), relative to `base`. Raises DataError for anything unusable."""
    assert data.path is not None
    given = [name for name in (data.path, data.test_path) if name is not None]
    paths = [_existing(base / name) for name in given]
    kinds = [_kind_of(path) for path in paths]
    if len({kind == ARRAYS for kind in kinds}) > 1:
        raise DataError(
            f"data.path and data.test_path must both be {ARRAYS} or both be tables, not {' and '.join(kinds)}"
        )
    hashes = {name: _sha256(path) for name, path in zip(given, paths, strict=True)}
    if kinds[0] == ARRAYS:
        return own_arrays.read(data, paths, hashes)
    return own_table.read(data, paths, kinds, hashes)


def _kind_of(path: Path) -> str:
    """The ending that says how to read `path`."""
    kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    known = (*own_table.KINDS, ARRAYS)
    if kind.lower() not in known:
        raise DataError(f"{path}: unknown kind of file; data.path takes {', '.join(known)}")
    return kind.lower()


def _sha256(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no such file: {path.resolve()}; data.path is relative to the recipe's own folder")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return path
