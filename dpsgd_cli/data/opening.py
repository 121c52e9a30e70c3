"""Opening what a recipe's `data:` section names, once: a card's files, or a user's own table, npz or npy file.

Whatever is read from a user's own file for want of a declaration (class labels, category values) is declared public,
with a warning. A file is refused where a cell is missing and the recipe does not say what that means, a value is no
number, or a label or category is not declared: that tells whoever runs the command of single records, before anything
is released and instead of a result. It is covered by no statement; mend the file by a rule for every record (or leave
such records out) before training.

Rows for a model that is there already (`open_unlabelled`, `open_labelled`) are read in the layout that it was trained
on, and nothing is declared of them.

Not here: what is done with each kind of file (`readers.py`, `own_table.py`, `own_arrays.py`).
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
from dpsgd_cli.common.text_format import listed
from dpsgd_cli.data import catalog, own_arrays, own_table, readers, table, users
from dpsgd_cli.data.dataset import Layout, Part, Source
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.own_table import Judge
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.tensors import UNTOLD
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

Records: TypeAlias = "Path | pd.DataFrame | np.ndarray"
ARRAYS = ".npz"
ROWS = ".npy"
MOST_KEPT_BYTES = 1 << 28
_OF_A_RECIPE = (
    "data.path is relative to the recipe's own folder (of a result's recipe.yaml: to the folder that it was trained"
    " from)"
)
_kept: dict[str, Source] = {}


def _accept(layout: Layout) -> None:
    del layout


@np.errstate(**UNTOLD)
def open_source(data: Data, base: Path, judge: Judge = _accept) -> Source:
    """Read what `data` names, own files relative to `base`; a npy file is opened and stays on disk.

    A plan and a training ask for the same files, and so do the recipes of a comparison and the cells of a sweep: what
    was read is kept, and given again for the same content under the same names. Nobody may write into it, so its
    arrays are read-only. Where a user is the unit, rows are in memory, user by user (`units.py`).
    Raises DataError for anything unusable, for a table together with what `judge` refuses.
    """
    if data.unit is None:
        return _open(data, base, judge)
    source = _open(data, base, judge)
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


def _open(data: Data, base: Path, judge: Judge) -> Source:
    """The rows as the files have them."""
    owner = None if data.unit is None or data.unit.in_a_file else data.unit.column
    if data.name is not None:
        card = catalog.card_of(data, base)
        places = [catalog.locate(card, file) for file in card.files]
        content = [None if path is None else sha256(path) for path in places]
        source = _read_once([card.model_dump_json(), content, owner], partial(readers.read, card, owner))
        if data.card_file is None:
            return source
        return replace(source, sha256=source.sha256 | {data.card_file: sha256(base / data.card_file)})
    paths, kinds = _paths(data, base)
    if kinds[0] == ROWS:
        labels = [_existing(base / name) for name in (data.target, data.test_target) if name is not None]
        return own_arrays.read_npy(data, list(zip(paths, labels, strict=True)))
    names = [name for name in (data.path, data.test_path) if name is not None]
    hashes = {name: sha256(path) for name, path in zip(names, paths, strict=True)}
    how = data.model_copy(update=dict.fromkeys(("preprocess", "features", "split", "validation", "augment")))
    asked = [how.model_dump(mode="json"), hashes, [str(path) for path in paths], owner]
    if kinds[0] == ARRAYS:
        return _read_once(asked, partial(own_arrays.read_npz, data, paths, hashes))
    return _read_once(asked, partial(own_table.read, data, paths, kinds, hashes, judge))


@np.errstate(**UNTOLD)
def open_unlabelled(records: Records, data: Data, layout: Layout, base: Path = Path()) -> np.ndarray:
    """New rows (N, *shape) in the `layout` of the records that `data` names, before any preprocessing.

    Of a file, or of a table or an array in memory. A table has the layout's columns, by name and in any order; others
    (the labels, too) are left alone. A missing value means what the recipe says. A npz file holds `x`, and a npy file
    is all of it. A card of the user's own is relative to `base`. Raises DataError for what is missing otherwise, no
    number, or no listed category.
    """
    return _new(records, data, layout, None, base)[0]


@np.errstate(**UNTOLD)
def open_labelled(
    records: Records, data: Data, layout: Layout, classes: Sequence[Any] | None, base: Path = Path()
) -> Part:
    """The same with labels: one of `classes` each, or targets where that is None.

    They stand where the training records have them: in the column or array `data.target`, of a card in the card's.
    Targets are those of training (`targets.py`).
    """
    import pandas as pd

    card = None if data.name is None else catalog.card_of(data, base)
    named = data.target if card is None else card.target
    target = named if named and not named.endswith(ROWS) else "target" if layout.columns else "y"
    x, labels = _new(records, data, layout, target, base)
    if card is not None and isinstance(card.classes, dict):
        return Part(x, readers.labels_of(card, labels))
    how = data.model_copy(update={"target": target, "classes": None if classes is None else list(classes)})
    where = records if isinstance(records, Path) else Path("the table")
    return Part(x, table.read_labels(how, [pd.Series(labels, name=target)], [where])[0][0])


def _new(records: Records, data: Data, layout: Layout, target: str | None, base: Path) -> tuple[np.ndarray, Any]:
    """Rows, and the labels called `target` as they stand there (None: none are asked for)."""
    if isinstance(records, Path):
        return _new_of_file(records, data, layout, target, base)
    if isinstance(records, np.ndarray) != (layout.columns is None) or (isinstance(records, np.ndarray) and target):
        wanted = "a npz file with labels" if layout.columns is None and target else _wanted(layout)
        raise DataError(f"the model takes {wanted}, not {type(records).__name__}")
    if isinstance(records, np.ndarray):
        return _in_units(own_arrays.rows_of(records, layout, "the array"), data, base), None
    x = own_table.rows_of(records, layout, target, "the table")
    return _in_units(x, data, base), None if target is None else records[target]


def _new_of_file(path: Path, data: Data, layout: Layout, target: str | None, base: Path) -> tuple[np.ndarray, Any]:
    kind = kind_of(_existing(path, "it is looked for in the current folder"))
    if (kind in own_table.KINDS) != (layout.columns is not None) or (kind == ROWS and target is not None):
        wanted = f"{ARRAYS} file with the labels {target!r}" if kind == ROWS else _wanted(layout)
        raise DataError(f"{path}: {kind or 'an unknown kind of file'}, but the model takes {wanted}")
    if layout.columns is None:
        x, labels = own_arrays.read_new(path, layout, target)
        return _in_units(x, data, base), labels
    x, frame = own_table.read_new(path, kind, layout, target, data.task == "classification")
    return _in_units(x, data, base), None if target is None else frame[target]


def _wanted(layout: Layout) -> str:
    if layout.columns is not None:
        return f"a table ({', '.join(own_table.KINDS)}) with the columns {listed(own_table.columns_of(layout))}"
    return f"an array ({ARRAYS} with x, or {ROWS}) of shape {own_arrays.shape_of(layout)}"


def _in_units(x: np.ndarray, data: Data, base: Path) -> np.ndarray:
    """What a card does to its own records: pixels in units of their range, columns inside bounds that a recipe says."""
    return x if data.name is None else readers.in_units(catalog.card_of(data, base), x)


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
    keys = [part.keys.values for part in parts if part.keys is not None]
    return [*(array for part in parts for array in (part.x, part.y)), *keys]


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


def _existing(path: Path, where: str = _OF_A_RECIPE) -> Path:
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    if not path.is_file():
        looped = " (a link that leads nowhere)" if path.is_symlink() else ""
        raise DataError(f"no such file: {os.path.abspath(path)}{looped}; {where}")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return path
