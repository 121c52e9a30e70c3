"""Opening, once, of the data that a recipe names: a card's files, or a user's own table, npz or npy file.

Class labels and category values that the recipe does not declare are read from a user's own file and declared public,
with a warning. A file is refused if it has a missing cell whose meaning the recipe does not give, a value that is not a
number, or a label or category that is not declared. A refusal reveals something about single records to the person who
runs the command, before anything is released and instead of a result. No privacy statement covers it. Fix the file by a
rule that applies to every record (or leave such records out) before training.

Rows for a trained model (`open_unlabelled`, `open_labelled`) are read in the layout that it was trained on, without
declarations.

`card_readers.py`, `own_table.py` and `own_arrays.py` read each kind of file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.common.text_format import listed, quoted
from dpsgd_cli.data import (
    card_files,
    card_readers,
    cards,
    memory,
    named_arrays,
    own_arrays,
    own_table,
    table_files,
    texts,
    users,
)  # fmt: skip
from dpsgd_cli.data.cells import Cells, Table
from dpsgd_cli.data.dataset import Layout, Part, RawDataset
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.labels import read_labels
from dpsgd_cli.data.own_table import LayoutCheck
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Records: TypeAlias = "Path | Table | pd.DataFrame | np.ndarray"
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
        path = _existing(base / data.unit.column)
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
    if data.text is not None:
        paths, kinds = _paths_of_texts(data, base)
        names = [name for name in (data.path, data.test_path) if name is not None]
        hashes = {
            name: sha256(path) if kind else texts.hash_of_folder(path)
            for name, path, kind in zip(names, paths, kinds, strict=True)
        }
        how = data.model_dump(mode="json", exclude={"preprocess", "split", "evaluation", "validation"})
        asked = [how, _rows_by(data, base), hashes, [str(path) for path in paths], owner, data.by_place]
        return _read_once(asked, partial(texts.read, data, paths, kinds, hashes, base))
    paths, kinds = _paths(data, base)
    names = [name for name in (data.path, data.test_path) if name is not None]
    labels = [name for name in (data.target, data.test_target) if name is not None] if kinds[0] == ROWS else []
    hashes = {name: sha256(_existing(base / name)) for name in (*names, *labels)}
    how = data.model_dump(
        mode="json", exclude={"preprocess", "features", "split", "evaluation", "validation", "augment"}
    )
    asked = [how, hashes, [str(path) for path in paths], owner]
    if kinds[0] == ROWS:
        pairs = list(zip(paths, [base / name for name in labels] or paths, strict=True))
        return _read_once(asked, partial(own_arrays.read_npy, data, pairs, hashes))
    if kinds[0] == ARRAYS:
        return _read_once(asked, partial(own_arrays.read_npz, data, paths, hashes))
    return _read_once(asked, partial(own_table.read, data, paths, kinds, hashes, check_layout))


def _rows_by(data: Data, base: Path) -> list[Any]:
    """Return what rows in place of columns depend on: for tokens, settings and the content of the tokenizer."""
    if data.text is None:
        return []
    told = data.text.model_dump(mode="json")
    return [told, None if data.text.folder is None else texts.hash_of_tokenizer(base / data.text.folder)]


@np.errstate(**SILENT)
def open_unlabelled(records: Records, data: Data, layout: Layout, base: Path = Path()) -> np.ndarray:
    """Return new rows (N, *shape) in the `layout` of the records that `data` names, before any preprocessing.

    `records` is a file, or a table or an array in memory. A table has the layout's columns, by name and in any order;
    other columns (labels too) are ignored. The recipe gives the meaning of missing values. A npz file holds the rows as
    `x`, a npy file holds nothing else. A user's own card is relative to `base`. Raises DataError for other missing
    values, cells that are not numbers, and categories that are not listed.
    """
    return _new(records, data, layout, None, base)[0]


@np.errstate(**SILENT)
def open_labelled(
    records: Records, data: Data, layout: Layout, classes: Sequence[Any] | None, base: Path = Path()
) -> Part:
    """Return new rows as `open_unlabelled` does, with labels: indices into `classes`, or targets if that is None.

    Labels are read from the column or array `data.target`, or from the target column of the card, as in training.
    Targets are in the unit of training (`table.py`).
    """
    card = None if data.name is None else cards.card_of(data, base)
    named = data.target if card is None else card.target
    usual = "class" if data.text is not None else "target" if layout.columns else "y"
    where = records if isinstance(records, Path) else Path("the table")
    target = named if named and not named.endswith(ROWS) else usual
    x, held = _new(records, data, layout, target, base)
    if data.labels_are_arrays:
        return Part(x, held)
    labels = held[target] if isinstance(held, Table) else Cells.of(target, held)
    if card is not None and isinstance(card.classes, dict):
        return Part(x, card_readers.labels_of(card, labels))
    return Part(x, read_labels(data, [labels], [where], classes)[0][0])


def _new(records: Records, data: Data, layout: Layout, target: str | None, base: Path) -> tuple[np.ndarray, Any]:
    """Return new rows, and what holds their labels `target`: the table, or an array; None if none are asked for."""
    if not isinstance(records, Path | np.ndarray | Table):
        found = memory.table_of(records)
        if found is None:
            raise DataError(f"the model takes {_wanted(layout)}, not {type(records).__name__}")
        records = found
    if data.text is not None:
        return _new_texts(records, data, target, base)
    if isinstance(records, Path):
        return _new_of_file(records, data, layout, target, base)
    if isinstance(records, np.ndarray) != (layout.columns is None) or (isinstance(records, np.ndarray) and target):
        wanted = "a npz file with labels" if layout.columns is None and target else _wanted(layout)
        raise DataError(f"the model takes {wanted}, not {'an array' if isinstance(records, np.ndarray) else 'a table'}")
    if isinstance(records, np.ndarray):
        return in_units(own_arrays.rows_of(records, layout, "the array"), data, base), None
    return in_units(own_table.rows_of(records, layout, target, "the table", data.format), data, base), records


def _new_texts(
    records: Path | Table | np.ndarray, data: Data, target: str | None, base: Path
) -> tuple[np.ndarray, Any]:
    """Return the tokens of new texts (N, L), and the table of their labels; for next-token the labels themselves."""
    if isinstance(records, np.ndarray):
        raise DataError("the model takes a table with a column of texts, not an array")
    where = str(records) if isinstance(records, Path) else "the table"
    if isinstance(records, Path):
        kind = "" if records.is_dir() else kind_of(_existing(records, "it is looked for in the current folder"))
        if kind and kind not in table_files.KINDS:
            raise DataError(f"{records}: the model takes a table with a column of texts, or a folder of .txt files")
        records = texts.new_table(records, kind, data)
    x = texts.rows_of(records, data, where, base)
    if target is None or data.task == "next-token":
        return x, None if target is None else named_arrays.next_tokens(x)
    if target not in records:
        raise DataError(f"{where} has no column {quoted(target)} of labels")
    return x, records


def kind_for(path: Path, layout: Layout, target: str | None = None) -> str:
    """Return the ending of a file of new rows. Raises DataError if it is not there, or of no kind for `layout`."""
    kind = kind_of(_existing(path, "it is looked for in the current folder"))
    if (kind in table_files.KINDS) != (layout.columns is not None) or (kind == ROWS and target is not None):
        unlabelled = kind == ROWS and target is not None and layout.columns is None
        wanted = f"{ARRAYS} file with the labels {target!r}" if unlabelled else _wanted(layout)
        raise DataError(f"{path}: {kind or 'an unknown kind of file'}, but the model takes {wanted}")
    return kind


def _new_of_file(path: Path, data: Data, layout: Layout, target: str | None, base: Path) -> tuple[np.ndarray, Any]:
    kind = kind_for(path, layout, target)
    if layout.columns is None:
        x, labels = own_arrays.read_new(path, layout, data, target)
        return in_units(x, data, base), labels
    rows = table_files.read_table(path, kind, data.format)
    return in_units(own_table.rows_of(rows, layout, target, str(path), data.format), data, base), rows


def _wanted(layout: Layout) -> str:
    if layout.columns is not None:
        return f"a table ({', '.join(table_files.KINDS)}) with the columns {listed(layout.sources)}"
    return f"an array ({ARRAYS} with x, or {ROWS}) of shape {own_arrays.shape_of(layout)}"


def in_units(x: np.ndarray, data: Data, base: Path) -> np.ndarray:
    """Return the rows as a card's own records are read: pixels in [0, 1], columns clamped to the recipe's bounds."""
    return x if data.name is None else card_readers.in_units(cards.card_of(data, base), x)


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
    """Return the files of features and their endings. Raises DataError if they are unknown, or of different kinds."""
    known = (*table_files.KINDS, ARRAYS, ROWS)
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


def _paths_of_texts(data: Data, base: Path) -> tuple[list[Path], list[str]]:
    """Return the files of texts, or folders, and their endings: "" for a folder."""
    assert data.text is not None
    names = [name for name in (data.path, data.test_path) if name is not None]
    paths = [base / name if (base / name).is_dir() else _existing(base / name) for name in names]
    kinds = ["" if path.is_dir() else kind_of(path) for path in paths]
    for path, kind in zip(paths, kinds, strict=True):
        if (kind == "") != (data.text.column is None):
            told = (
                "a folder of files has no columns; leave column out" if kind == "" else "give the column of the texts"
            )
            raise DataError(f"data.text.column: {path}: {told}")
        if kind and kind not in table_files.KINDS:
            raise DataError(
                f"{path}: unknown kind of file; data.text takes {', '.join(table_files.KINDS)}, or a folder"
            )
    return paths, kinds


def _existing(path: Path, where: str = _OF_A_RECIPE) -> Path:
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
