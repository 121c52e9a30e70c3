"""Reading a user's own csv, parquet, npz or npy file as the recipe's `data:` section describes it.

Whatever is read from the file for want of a declaration (class labels, category values) is declared public, with
a warning. A file is refused where a cell is missing, a value is no number, or a label or category is not declared: that
tells whoever runs the command of single records, before anything is released and instead of a result. It is covered by
no statement; mend the file by a rule for every record (or leave such records out) before training.

Not here: what is done with each kind of file (`own_table.py`, `own_arrays.py`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from dpsgd_cli.data import own_arrays, own_table
from dpsgd_cli.data.dataset import Source
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.on_disk import DiskSource
from dpsgd_cli.data.step import UNTOLD
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.folder import data_files
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.regular import irregularity

ARRAYS = ".npz"
ROWS = ".npy"
MOST_KEPT_BYTES = 1 << 28
_kept: dict[str, Source] = {}


def open_source(data: Data, base: Path) -> Source | DiskSource:
    """Read `data.path` (and `data.test_path`), relative to `base`, or open it where it is a npy file.

    Raises DataError for anything unusable.
    """
    paths, kinds = _paths(data, base)
    if kinds[0] != ROWS:
        return read(data, base)
    labels = [_existing(base / name) for name in (data.target, data.test_target) if name is not None]
    return own_arrays.read_npy(data, list(zip(paths, labels, strict=True)))


@np.errstate(**UNTOLD)
def read(data: Data, base: Path) -> Source:
    """What `open_source` does for files that are held in memory.

    A plan and a training ask for the same files, and so do the cells of a sweep: what was read is kept, and given again
    for the same content under the same names. Nobody may write into it, so its arrays are read-only.
    """
    paths, kinds = _paths(data, base)
    hashes = {name: sha256(path) for name, path in zip(names(data), paths, strict=True)}
    how = data.model_copy(update=dict.fromkeys(("preprocess", "features", "split", "validation", "augment")))
    key = json.dumps([how.model_dump(mode="json"), hashes, [str(path) for path in paths]], sort_keys=True)
    if key not in _kept:
        if kinds[0] == ARRAYS:
            source = own_arrays.read_npz(data, paths, hashes)
        else:
            source = own_table.read(data, paths, kinds, hashes)
        for array in _arrays(source):
            array.flags.writeable = False
        _kept[key] = source
    source = _kept.pop(key)
    while sum(map(_size, _kept.values())) + _size(source) > MOST_KEPT_BYTES and _kept:
        del _kept[next(iter(_kept))]
    _kept[key] = source
    return source


def let_go_of_large() -> None:
    """Forget what is too large to be kept through a training."""
    for key in [key for key, source in _kept.items() if _size(source) > MOST_KEPT_BYTES]:
        del _kept[key]


def _arrays(source: Source) -> list[np.ndarray]:
    parts = [part for part in (source.train, source.test) if part is not None]
    return [array for part in parts for array in (part.x, part.y, part.places)]


def _size(source: Source) -> int:
    return sum(array.nbytes for array in _arrays(source))


def _paths(data: Data, base: Path) -> tuple[list[Path], list[str]]:
    """The files of features, and their kinds, which go together."""
    assert data.path is not None
    paths = [_existing(base / name) for name in (data.path, data.test_path) if name is not None]
    kinds = [_kind_of(path) for path in paths]
    if len({kind if kind in (ARRAYS, ROWS) else "table" for kind in kinds}) > 1:
        raise DataError(
            f"data.path and data.test_path must both be {ARRAYS}, both {ROWS} or both tables, not {' and '.join(kinds)}"
        )
    return paths, kinds


def names(data: Data) -> list[str]:
    """The files that the recipe names, as it gives them."""
    return data_files(data)


def _kind_of(path: Path) -> str:
    """The ending that says how to read `path`."""
    kind = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    known = (*own_table.KINDS, ARRAYS, ROWS)
    if kind.lower() not in known:
        raise DataError(f"{path}: unknown kind of file; data.path takes {', '.join(known)}")
    return kind.lower()


def _existing(path: Path) -> Path:
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    if not path.is_file():
        looped = " (a link that leads nowhere)" if path.is_symlink() else ""
        raise DataError(
            f"no such file: {os.path.abspath(path)}{looped}; data.path is relative to the recipe's own folder (of a"
            " result's recipe.yaml: to the folder that it was trained from)"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return path
