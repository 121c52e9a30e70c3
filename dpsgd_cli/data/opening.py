"""Opening, once, of the data that a recipe names: a card's files, or a user's own table, npz or npy file.

Class labels and category values that the recipe does not declare are read from a user's own file and declared public,
with a warning. A file is refused if it has a missing cell whose meaning the recipe does not give, a value that is not a
number, or a label or category that is not declared. A refusal reveals something about single records to the person who
runs the command, before anything is released and instead of a result. No privacy statement covers it. Fix the file by a
rule that applies to every record (or leave such records out) before training.

`card_readers.py`, `own_table.py`, `own_arrays.py` and `texts.py` read each kind of file; `new_rows.py` reads rows for a
trained model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.data import (
    card_files,
    card_readers,
    cards,
    memory,
    own_arrays,
    own_table,
    table_files,
    texts,
    users,
)  # fmt: skip
from dpsgd_cli.data.dataset import Part, RawDataset
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.own_table import LayoutCheck
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

ARRAYS = ".npz"
ROWS = ".npy"
MOST_KEPT_BYTES = 1 << 28
_MOST_LEFT = 1 << 25
"""Bytes of a source beyond which what reading it has freed is returned to the system: as much again, or more."""
_OF_A_RECIPE = (
    "data.path is relative to the recipe's own folder (of a result's recipe.yaml: to the folder that it was trained"
    " from)"
)
_kept: dict[str, RawDataset] = {}


@np.errstate(**SILENT)
def load_raw(data: Data, base: Path, check_layout: LayoutCheck = lambda layout: None) -> RawDataset:
    """Read what `data` names, a user's own files relative to `base`. A npy file is opened and stays on disk.

    A plan and a training use the same files, and so do the recipes of a comparison and the cells of a sweep. So the
    source is cached, and returned again for the same content under the same names; its arrays are read-only. If users
    are the unit of privacy, rows are in memory, grouped by user (`users.py`). Raises DataError for anything unusable;
    for a table the message includes what `check_layout` refuses.
    """
    source = _open(data, base, check_layout)
    if data.text is not None and data.text.folder is not None:
        cut_by = {data.text.folder: texts.hash_of_tokenizer(base / data.text.folder)}
        source = replace(source, sha256=source.sha256 | cut_by)
    if data.unit is None:
        return source
    parts = [users.in_memory(part) for part in (source.train, source.test) if part is not None]
    if data.unit.in_a_file:
        path = existing(base / data.unit.column)
        whose = users.owners_in_file(path, [len(part) for part in parts])
        parts = [replace(part, owners=own) for part, own in zip(parts, whose, strict=True)]
        source = replace(source, sha256=source.sha256 | {data.unit.column: sha256(path)})
    elif any(part.owners is None for part in parts):
        raise DataError(
            f"privacy.unit.column: {source.name} has no columns; give a .npy file with an entry for each row, relative"
            " to the recipe"
        )
    return users.by_user(replace(source, train=parts[0], test=parts[1] if parts[1:] else None), data)


def _open(data: Data, base: Path, check_layout: LayoutCheck) -> RawDataset:
    """Return the rows as the files have them, not grouped by user."""
    owner = data.owner_column
    if data.name is not None:
        card = cards.card_of(data, base)
        places = [card_files.locate(card, file) for file in card.files]
        content = [None if path is None else sha256(path) for path in places]
        asked: list[Any] = [card.model_dump_json(), _rows_by(data, base), content, owner]
        source = _read_once(asked, partial(card_readers.read, card, owner))
        if data.card_file is None:
            return source
        return replace(source, sha256=source.sha256 | {data.card_file: sha256(base / data.card_file)})
    paths, kinds = _paths(data, base)
    names = [name for name in (data.path, data.test_path) if name is not None]
    labels = [name for name in (data.target, data.test_target) if name is not None] if kinds[0] == ROWS else []
    found = dict(zip(names, paths, strict=True)) | {name: existing(base / name) for name in labels}
    hashes = {name: texts.hash_of_folder(path) if path.is_dir() else sha256(path) for name, path in found.items()}
    how = data.model_dump(
        mode="json", exclude={"preprocess", "features", "split", "evaluation", "validation", "augment"}
    )
    asked = [how, _rows_by(data, base), hashes, [str(path) for path in paths], owner]
    if data.text is not None:
        read = partial(texts.read, data, paths, kinds, hashes, base)
    elif kinds[0] == ROWS:
        pairs = list(zip(paths, [base / name for name in labels] or paths, strict=True))
        read = partial(own_arrays.read_npy, data, pairs, hashes)
    elif kinds[0] == ARRAYS:
        read = partial(own_arrays.read_npz, data, paths, hashes)
    else:
        read = partial(own_table.read, data, paths, kinds, hashes, check_layout)
    return _read_once(asked, read)


def _rows_by(data: Data, base: Path) -> list[Any]:
    """Return what tokens depend on besides the file: settings, the tokenizer, and what decides the declarations."""
    if data.text is None:
        return []
    told = data.text.model_dump(mode="json")
    content = None if data.text.folder is None else texts.hash_of_tokenizer(base / data.text.folder)
    return [told, content, data.by_place]


def _read_once(asked: object, read: Callable[[], RawDataset]) -> RawDataset:
    """Return the cached source for the key `asked`, else that of `read`. The least recently used are dropped."""
    key = json.dumps(asked, sort_keys=True)
    source = _kept.pop(key, None)
    if source is None:
        source = read()
        for array in _arrays(source):
            array.flags.writeable = False
        if _bytes(source) > _MOST_LEFT:
            table_files.return_freed_memory()
    while _kept and _bytes(source, *_kept.values()) > MOST_KEPT_BYTES:
        del _kept[next(iter(_kept))]
    _kept[key] = source
    return source


def let_go_of_large() -> None:
    """Drop cached sources that are too large to keep during a training."""
    for key in [key for key, source in _kept.items() if _bytes(source) > MOST_KEPT_BYTES]:
        del _kept[key]


def _bytes(*sources: RawDataset) -> int:
    return sum(array.nbytes for source in sources for array in _arrays(source))


def _arrays(source: RawDataset) -> list[np.ndarray]:
    parts = [part for part in (source.train, source.test) if isinstance(part, Part)]
    keys = [part.keys.values for part in parts if part.keys is not None]
    return [*(array for part in parts for array in (part.x, part.y)), *keys]


def kind_of(path: Path) -> str:
    """Return the file name ending, in lower case, that decides how a file is read.

    >>> kind_of(Path("a.b.CSV.gz")), kind_of(Path("a.npz"))
    ('.csv.gz', '.npz')
    """
    return "".join(path.suffixes[-2:] if path.suffix.lower() in table_files.PACKED else [path.suffix]).lower()


def _paths(data: Data, base: Path) -> tuple[list[Path], list[str]]:
    """Return the files of features, or folders of texts, and their endings: "" for a folder.

    Raises DataError if they are unknown, or of different kinds.
    """
    paths, kinds = [], []
    known = list(table_files.KINDS) if data.text is not None else [*table_files.KINDS, ARRAYS, ROWS]
    for path in (base / name for name in (data.path, data.test_path) if name is not None):
        kind = "" if data.text is not None and path.is_dir() else kind_of(existing(path))
        if data.text is not None and (kind == "") != (data.text.column is None):
            told = "give the column of the texts" if kind else "a folder of files has no columns; leave column out"
            raise DataError(f"data.text.column: {path}: {told}")
        if kind not in known and (kind or data.text is None):
            takes = f"data.path takes {', '.join(known)}"
            if data.text is not None:
                takes = f"data.text takes {', '.join(known)}, or a folder"
            raise DataError(f"{path}: unknown kind of file; {takes}")
        paths.append(path)
        kinds.append(kind)
    if data.text is None and len({kind if kind in (ARRAYS, ROWS) else "table" for kind in kinds}) > 1:
        raise DataError(
            f"data.path and data.test_path must both be {ARRAYS}, both {ROWS} or both tables, not {' and '.join(kinds)}"
        )
    return paths, kinds


def existing(path: Path, where: str = _OF_A_RECIPE) -> Path:
    if memory.at(path) is not None:
        return path
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    if not path.is_file():
        looped = " (a link that leads nowhere)" if path.is_symlink() else ""
        raise DataError(f"no such file: {os.path.abspath(path)}{looped}; {where}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return path
