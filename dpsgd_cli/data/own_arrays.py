"""A user's own npz arrays: `x` (N, ...) and labels `y` (or `data.target`), with `x_test` and `y_test` for testing.

Not here: tables (`own_table.py`), labels (`declare.py`).
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from dpsgd_cli.data import declare
from dpsgd_cli.data.dataset import Layout, Part, Source, flatten
from dpsgd_cli.data.on_disk import UNREADABLE
from dpsgd_cli.data.step import suggest
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.wording import count, shortened


def read(data: Data, paths: list[Path], hashes: dict[str, str]) -> Source:
    """Read the arrays; a second path holds the test rows as its own `x` and labels."""
    import pandas as pd

    unusable = [key for key in ("categorical", "drop") if getattr(data, key)]
    if unusable or isinstance(data.bounds, dict):
        raise DataError(
            f"{paths[0]}: an npz file has no column names; leave out {', '.join(unusable) or 'the names in bounds'},"
            " and give data.bounds as one [low, high]"
        )
    target = data.target or "y"
    stored = _load_npz(paths[0])
    pairs = [(_array(stored, "x", paths[0]), _array(stored, target, paths[0]))]
    if paths[1:]:
        other = _load_npz(paths[1])
        pairs.append((_array(other, "x", paths[1]), _array(other, target, paths[1])))
    elif "x_test" in stored:
        pairs.append((_array(stored, "x_test", paths[0]), _array(stored, f"{target}_test", paths[0])))
    _check_arrays(pairs, paths[0])
    labels, classes = declare.read_labels(data, [pd.Series(y, name=target) for _, y in pairs], paths[:1])
    pair = data.bounds
    if pair is None and pairs[0][0].dtype == np.uint8:
        pair = (0.0, 255.0)
    parts = [Part(_floating(x), y) for (x, _), y in zip(pairs, labels, strict=True)]
    said, told = declare.declarations(data, [], classes), tuple(declare.label_warnings(data, classes))
    layout = Layout(pairs[0][0].shape[1:], bounds=pair)
    return Source(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, told, hashes)


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz arrays: {shortened(str(error), 200)}") from None
    return {name: held for name, held in found.items() if isinstance(held, np.ndarray)}


def _array(stored: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in stored:
        raise DataError(f"{path} has no array {name!r}{suggest(name, stored)}")
    return stored[name]


def _check_arrays(pairs: list[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    for x, y in pairs:
        if x.ndim < 2 or x.size == 0:
            raise DataError(f"{path}: x has shape {x.shape}, but must be (N, ...) with at least one row and feature")
        if y.shape != (len(x),):
            raise DataError(f"{path}: the labels have shape {y.shape}, but must be ({len(x)},), one for each row of x")
        if x.shape[1:] != pairs[0][0].shape[1:]:
            raise DataError(f"{path}: test rows have shape {x.shape[1:]}, training rows {pairs[0][0].shape[1:]}")
        if x.dtype.kind not in "biuf":
            raise DataError(f"{path}: x holds {x.dtype}, but must hold numbers")
        finite = np.isfinite(flatten(x)).all(axis=1)
        if not finite.all():
            raise DataError(
                f"{path}: NaN or infinite values in {count(int((~finite).sum()), 'row')} of x, the first is row"
                f" {int((~finite).argmax()) + 1}; fill them or leave those rows out"
            )


def _floating(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32, copy=False)
