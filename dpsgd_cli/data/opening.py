"""Opening what a recipe's `data:` section names, once: a card's files, or a user's own table, npz or npy file.

Whatever is read from a user's own file for want of a declaration (class labels, category values) is declared public,
with a warning. A file is refused where a cell is missing and the recipe does not say what that means, a value is no
number, or a label or category is not declared: that tells whoever runs the command of single records, before anything
is released and instead of a result. It is covered by no statement; mend the file by a rule for every record (or leave
such records out) before training.

Not here: what is done with each kind of file (`readers.py`, `own_table.py`, `own_arrays.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dpsgd_cli.data import catalog, own_arrays, own_table, readers
from dpsgd_cli.data.dataset import UNTOLD, Layout, Part, Source
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.own_table import Judge
from dpsgd_cli.errors import DataError
from dpsgd_cli.files import irregularity
from dpsgd_cli.recipe.schema.data import Data

ARRAYS = ".npz"
ROWS = ".npy"
MOST_KEPT_BYTES = 1 << 28
_kept: dict[str, Source] = {}


def _accept(layout: Layout) -> None:
    del layout


@np.errstate(**UNTOLD)
def open_source(data: Data, base: Path, judge: Judge = _accept) -> Source:
    """Read what `data` names, own files relative to `base`; a npy file is opened and stays on disk.

    A plan and a training ask for the same files, and so do the recipes of a comparison and the cells of a sweep: what
    was read is kept, and given again for the same content under the same names. Nobody may write into it, so its
    arrays are read-only. Raises DataError for anything unusable, for a table together with what `judge` refuses.
    """
    if data.name is not None:
        card = catalog.card_of(data, base)
        places = [catalog.locate(card, file) for file in card.files]
        content = [None if path is None else sha256(path) for path in places]
        source = _read_once([card.model_dump_json(), content], partial(readers.read, card))
        if data.card_file is None:
            return source
        return replace(source, sha256=source.sha256 | {data.card_file: sha256(base / data.card_file)})
    paths, kinds = _paths(data, base)
    if kinds[0] == ROWS:
        labels = [_existing(base / name) for name in (data.target, data.test_target) if name is not None]
        return own_arrays.read_npy(data, list(zip(paths, labels, strict=True)))
    hashes = {name: sha256(path) for name, path in zip(data.files, paths, strict=True)}
    how = data.model_copy(update=dict.fromkeys(("preprocess", "features", "split", "validation", "augment")))
    asked = [how.model_dump(mode="json"), hashes, [str(path) for path in paths]]
    if kinds[0] == ARRAYS:
        return _read_once(asked, partial(own_arrays.read_npz, data, paths, hashes))
    return _read_once(asked, partial(own_table.read, data, paths, kinds, hashes, judge))


def _read_once(asked: object, read: Callable[[], Source]) -> Source:
    """What is kept for the question `asked`, else what `read` gives; the least recently used makes room."""
    key = json.dumps(asked, sort_keys=True)
    source = _kept.pop(key, None)
    if source is None:
        source = read()
        for array in _arrays(source):
            array.flags.writeable = False
    while _kept and _bytes(source, *_kept.values()) > MOST_KEPT_BYTES:
        del _kept[next(iter(_kept))]
    _kept[key] = source
    return source


def let_go_of_large() -> None:
    """Forget what is too large to be kept through a training."""
    for key in [key for key, source in _kept.items() if _bytes(source) > MOST_KEPT_BYTES]:
        del _kept[key]


def _bytes(*sources: Source) -> int:
    return sum(array.nbytes for source in sources for array in _arrays(source))


def _arrays(source: Source) -> list[np.ndarray]:
    parts = [part for part in (source.train, source.test) if isinstance(part, Part)]
    return [array for part in parts for array in (part.x, part.y, part.places)]


def kind_of(path: Path) -> str:
    """The ending that says how a file is read.

    >>> kind_of(Path("a.b.CSV.gz")), kind_of(Path("a.npz"))
    ('.csv.gz', '.npz')
    """
    return "".join(path.suffixes[-2:] if path.suffix == ".gz" else [path.suffix]).lower()


def _paths(data: Data, base: Path) -> tuple[list[Path], list[str]]:
    """The files of features, and the endings that say how to read them, which go together."""
    known = (*own_table.KINDS, ARRAYS, ROWS)
    paths = [_existing(base / name) for name in (data.path, data.test_path) if name is not None]
    kinds = [kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if kind not in known:
            raise DataError(f"{path}: unknown kind of file; data.path takes {', '.join(known)}")
    if len({kind if kind in (ARRAYS, ROWS) else "table" for kind in kinds}) > 1:
        raise DataError(
            f"data.path and data.test_path must both be {ARRAYS}, both {ROWS} or both tables, not {' and '.join(kinds)}"
        )
    return paths, kinds


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
