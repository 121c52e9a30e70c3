"""A user's own arrays: `.npz` files, which are held in memory, and `.npy` files, which may be larger than memory.

A npz file holds `x` (N, ...) and labels `y` (or `data.target`), and may hold `x_test` and `y_test` for testing. A pair
of npy files holds features and labels. They are read from end to end, in pieces, to hash and check them. Then only the
rows of a batch are read (`on_disk.py`).

Named arrays (`data.inputs`) of a record are kept as one row of numbers, in the order of the recipe; the model gets them
back under their names (`engine/named_inputs.py`). All are integers, or the row is float32, which holds integers up to
2^24 exactly; larger ones are refused. So no token is ever rounded.

Labels of a record may be an array: tokens, or a class at each place. They are int64 (N, ...), and a negative label at a
place does not count. Each row depends on its own record alone.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, shortened, suggested
from dpsgd_cli.data import memory, on_disk, table
from dpsgd_cli.data.cells import Cells
from dpsgd_cli.data.dataset import Layout, Part, RawDataset
from dpsgd_cli.data.labels import read_labels
from dpsgd_cli.data.on_disk import UNREADABLE, DiskPart, DiskRows, flatten
from dpsgd_cli.data.settings import SEVERAL, Data
from dpsgd_cli.data.table import target_scale
from dpsgd_cli.data.users import owners_in_array
from dpsgd_cli.engine.settings import InputArray
from dpsgd_cli.errors import DataError

_MOST_VALUES = 1000


def read_npz(data: Data, paths: list[Path], hashes: dict[str, str]) -> RawDataset:
    """Read the arrays of a npz file; a second path holds the test rows as its own `x` and labels.

    Raises DataError for missing arrays, wrong shapes and types, values that are not finite, and invalid labels.
    """
    _refuse_names(data, paths[0], "an npz file")
    target = data.target or "y"
    stored = load(paths[0])
    owner = data.owner_column
    where = [(stored, "", paths[0])]
    if paths[1:]:
        where.append((load(paths[1]), "", paths[1]))
    elif f"{next(iter(data.inputs or ('x',)))}_test" in stored:
        where.append((stored, "_test", paths[0]))
    pairs = []
    for held, end, path in where:
        x = stored_inputs(data, held, end, path)
        pairs.append((x, stored_labels(data, held, x, f"{target}{end}", path)))
    for x, y in pairs:
        check_shapes(x, y, pairs[0][0], f"{paths[0]}: x", f"{paths[0]}: the labels", data)
        check_values(x, f"{paths[0]}: x", data if x is pairs[0][0] else None)
    classes: tuple[Any, ...] | None = None
    if data.labels_are_arrays:
        labels = [coder(data)(y) for _, y in pairs]
        classes = None if data.classes is None else tuple(data.classes)
    else:
        labels, classes = read_labels(data, [Cells.of(target, y) for _, y in pairs], paths[:1], data.classes)
    parts = [Part(_numbers(data)(x), y) for (x, _), y in zip(pairs, labels, strict=True)]
    if owner is not None:
        whose = [_array(held, f"{owner}{end}", path) for held, end, path in where]
        parts = [
            replace(part, owners=owners_in_array(own, len(part), f"{path}: {owner}{end}"))
            for part, own, (_, end, path) in zip(parts, whose, where, strict=True)
        ]
    said, told = table.declarations(data, [], classes), table.read_warnings(data, classes)
    layout = _layout(data, pairs[0][0])
    return RawDataset(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, told, hashes)


def stored_inputs(data: Data, stored: dict[str, np.ndarray], end: str, path: Path) -> np.ndarray:
    """Return the inputs (N, ...) of a file: `x`, or the named arrays that the recipe lists."""
    if data.inputs is not None:
        return joined(stored, data.inputs, end, path)
    if f"x{end}" not in stored and "input_ids" in stored:
        raise DataError(
            f"{path} has no array 'x{end}'; name its arrays in data.inputs: {{input_ids: {{shape: [...]}}}}"
        )
    return _array(stored, f"x{end}", path)


def stored_labels(data: Data, stored: dict[str, np.ndarray], x: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Return the labels as stored; for next-token, the tokens themselves."""
    return tokens_in(data, x, f"{path}: x") if data.task == "next-token" else _array(stored, name, path)


def check_values(x: np.ndarray, where: str, data: Data | None = None) -> None:
    """Raise DataError for arrays (N, ...) with NaN or infinite values, naming the first row.

    With `data`, also if all values are on one side of its public bounds. About 16 MiB are read at once.
    """
    bad, first, least, most, step = 0, 0, np.inf, -np.inf, _rows_at_once(x)
    for start in range(0, len(x), step):
        piece = flatten(x[start : start + step])
        least, most = min(least, float(piece.min())), max(most, float(piece.max()))
        wrong = ~np.isfinite(piece).all(axis=1)
        first = first if bad or not wrong.any() else start + int(wrong.argmax()) + 1
        bad += int(wrong.sum())
    if bad:
        raise DataError(
            f"{where}: NaN or infinite values in {count(bad, 'row')}, the first is row {first}; fill them or leave"
            " those rows out"
        )
    bounds = None if data is None else data.bounds
    assert not isinstance(bounds, dict)
    if bounds is not None and (most < bounds[0] or least > bounds[1]):
        raise DataError(f"{where}: data.bounds hold none of its values, from row 1 on; are they in another unit?")


def load(path: Path) -> dict[str, np.ndarray]:
    held = memory.at(path)
    if held is not None:
        return {name: array.copy() for name, array in (held.arrays or {}).items()}  # a cached source is read-only
    try:
        with np.load(path, allow_pickle=False) as stored:
            found = {name: stored[name] for name in stored.files}
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz arrays: {shortened(str(error), 200)}") from None
    return {name: held for name, held in found.items() if isinstance(held, np.ndarray)}


def _array(stored: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in stored:
        raise DataError(f"{path} has no array {name!r}{suggested(name, stored)}")
    return stored[name]


def check_shapes(x: Any, y: Any, like: Any, of_x: str, of_y: str, data: Data | None = None) -> None:
    """Raise DataError unless features `x` and labels `y` fit together, and rows have the shape of those in `like`.

    All are arrays or files; messages call them `of_x` and `of_y`.
    """
    if len(x.shape) < 2 or 0 in x.shape:
        raise DataError(f"{of_x} has shape {x.shape}, but must be (N, ...) with at least one row and feature")
    several = data is not None and data.labels_are_arrays
    if data is not None and several:
        fitting = data.task == "next-token" or fits(data, y.shape, len(x))
    else:
        fitting = y.shape == (len(x),)
    if not fitting:
        told = label_shape(data) if data is not None and several else f"({len(x)},)"
        raise DataError(f"{of_y} have shape {y.shape}, but must be {told}, one for each row of x")
    if x.shape[1:] != like.shape[1:]:
        raise DataError(f"{of_x}: test rows have shape {x.shape[1:]}, training rows {like.shape[1:]}")
    if x.dtype.kind not in "biuf":
        raise DataError(f"{of_x} holds {x.dtype}, but must hold numbers")
    if y.dtype.kind not in "biufUS":
        raise DataError(f"{of_y} are {y.dtype}, but must be numbers or text")


def floating(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32, copy=False)


def _numbers(data: Data) -> Any:
    """Return the function that rows are read by: integers stay integers, unless bounds say that they are measured."""
    return floating if data.bounds is not None else lambda x: x.astype(np.int64) if whole(x) else floating(x)


def read_npy(data: Data, pairs: list[tuple[Path, Path]], hashes: dict[str, str]) -> RawDataset:
    """Read the training part, and the test part if a second pair of features and labels is given. Rows stay on disk.

    Raises DataError for undeclared classes, and for wrong shapes, types, values or labels.
    """
    _refuse_names(data, pairs[0][0], "a npy file")
    if data.task == "classification" and data.classes is None:
        raise DataError(
            f"{pairs[0][1]}: labels that stay on disk are not searched for classes; list them: data.classes: [0, 1]"
        )
    parts, first = [], on_disk.stored(pairs[0][0])
    for features, labels in pairs:
        x, y = on_disk.stored(features), on_disk.stored(labels)
        check_shapes(x, y, first, f"{features}", f"{labels}: the labels", data)
        check_values(x, f"{features}", data)
        if y.dtype.kind not in "biuf":
            raise DataError(f"{labels} holds {y.dtype}, but must hold numbers")
        if data.labels_are_arrays or data.task == "regression":
            check_values(y, f"{labels}")
        else:
            _check_classes(y, labels, data)
        parts.append(DiskPart(DiskRows(x, None, (_numbers(data),)), DiskRows(y, None, (coder(data),))))
    classes = None if data.classes is None or data.task == "regression" else tuple(data.classes)
    said = table.declarations(data, [], classes)
    layout = _layout(data, first)
    return RawDataset(pairs[0][0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, (), hashes)


def _check_classes(y: np.ndarray, path: Path, data: Data) -> None:
    """Raise DataError for labels that are not a public class."""
    if y.dtype.kind == "f":
        raise DataError(f"{path} holds {y.dtype}, but classes are whole numbers; for targets set data.task: regression")
    known, present = _whole_numbers(data), set[int]()
    for start in range(0, len(y), _rows_at_once(y)):
        present.update(np.unique(y[start : start + _rows_at_once(y)]).tolist())
        if len(present) > _MOST_VALUES:
            raise DataError(f"{path} holds more than {_MOST_VALUES} different values: these are no classes")
    unlisted = present - set(known)
    if unlisted:
        raise DataError(
            f"{path} holds {count(len(unlisted), 'kind')} of labels not among the classes {list(known)}; add what is"
            " missing to data.classes"
        )


def _rows_at_once(rows: np.ndarray) -> int:
    """Return how many rows of a file are about 16 MiB."""
    return max(1, (1 << 24) // rows[:1].nbytes)


def _whole_numbers(data: Data) -> tuple[int, ...]:
    try:
        numbers = tuple(int(str(label)) for label in data.classes or ())
    except ValueError:
        raise DataError(
            f"data.classes: {list(data.classes or ())} are not all whole numbers, which the labels of npy files are"
        ) from None
    if len(set(numbers)) < len(numbers) or len(numbers) < 2:
        raise DataError(f"data.classes: {list(numbers)} must be at least two different numbers")
    return numbers


def coder(data: Data) -> Any:
    """Return a function from labels as stored to class indices (int64), or to targets (float32)."""
    if data.task == "next-token":
        return next_tokens
    if data.task in SEVERAL:
        return labels_of(data)
    if data.task == "regression":
        scale = target_scale(data)
        return lambda labels: scale.inward(labels.astype(np.float64)).astype(np.float32)
    known = np.array(_whole_numbers(data), dtype=np.int64)
    order = np.argsort(known)
    return lambda labels: order[np.searchsorted(known, labels.astype(np.int64), sorter=order)].astype(np.int64)


def _refuse_names(data: Data, path: Path, what: str) -> None:
    unusable = [key for key in ("categorical", "drop", "missing", "format") if getattr(data, key)]
    if unusable or isinstance(data.bounds, dict):
        raise DataError(
            f"{path}: {what} has no column names; leave out {', '.join(unusable) or 'the names in bounds'},"
            " and give data.bounds as one [low, high]"
        )


def _layout(data: Data, x: np.ndarray) -> Layout:
    """Return the layout of one row; bytes without declared bounds are bounded by 0 and 255."""
    assert not isinstance(data.bounds, dict)
    whole = data.bounds is None and x.dtype.kind in "iu" and x.dtype.itemsize > 1
    return Layout(x.shape[1:], bounds=data.bounds or ((0.0, 255.0) if x.dtype == np.uint8 else None), integers=whole)


EXACT = 1 << 24
"""Integers of at most this size are exact in float32."""
NOT_COUNTED = -1


def whole(x: np.ndarray) -> bool:
    """Return True if an array holds integers that are kept as they are; bytes are pixels, and become fractions."""
    return x.dtype.kind in "iu" and x.dtype.itemsize > 1


def joined(stored: Mapping[str, np.ndarray], inputs: Mapping[str, InputArray], end: str, path: Path) -> np.ndarray:
    """Return the named arrays as rows (N, F), int64 if all are integers, else float32.

    The arrays in `stored` have the ending `end` ("_test", or none). Raises DataError for an array that is missing, or
    that has another shape or kind than the recipe says.
    """
    parts = []
    for name, told in inputs.items():
        if name + end not in stored:
            raise DataError(f"{path} has no array {name + end!r}{suggested(name + end, stored)}; data.inputs names it")
        own = stored[name + end]
        if own.shape[1:] != tuple(told.shape) or own.dtype.kind not in "biuf":
            raise DataError(
                f"{path}: {name + end} has shape {own.shape} of {own.dtype}, but data.inputs says (N,"
                f" {', '.join(map(str, told.shape))}) of numbers"
            )
        if told.kind == "integer" and own.dtype.kind == "f":
            raise DataError(f"{path}: {name + end} holds {own.dtype}; save integers, or say kind: real in data.inputs")
        parts.append(flatten(own))
    if len({len(part) for part in parts}) > 1:
        raise DataError(f"{path}: {', '.join(name + end for name in inputs)} have different numbers of rows")
    if all(told.kind == "integer" for told in inputs.values()):
        return np.concatenate([part.astype(np.int64) for part in parts], axis=1)
    for (name, told), part in zip(inputs.items(), parts, strict=True):
        if told.kind == "integer" and np.abs(part.astype(np.int64)).max(initial=0) > EXACT:
            raise DataError(f"{path}: {name + end} holds integers above 2^24, which pixels beside them would round")
    return np.concatenate([part.astype(np.float32) for part in parts], axis=1)


def next_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return the token that follows each place of `tokens` (N, L), int64; below 0 at the last place and at padding.

    Padding is below 0.

    >>> next_tokens(np.array([[5, 7, 9, -1]])).tolist()
    [[7, 9, -1, -1]]
    """
    after = np.full(tokens.shape, NOT_COUNTED, np.int64)
    after[:, :-1] = tokens[:, 1:]
    return np.maximum(after, NOT_COUNTED)


def tokens_in(data: Data, x: np.ndarray, where: str) -> np.ndarray:
    """Return the tokens (N, L) of rows `x`, with -1 where a mask is 0. Raises DataError if the rows are no tokens."""
    if data.inputs is None:
        if x.ndim != 2 or not whole(x):
            raise DataError(f"{where}: has shape {x.shape} of {x.dtype}; data.task: next-token needs integers (N, L)")
        return x
    sizes = {name: int(np.prod(told.shape)) for name, told in data.inputs.items()}
    ends = np.cumsum(list(sizes.values()))
    parts = dict(zip(sizes, np.split(x, ends[:-1], axis=1), strict=True))
    if "input_ids" not in parts:
        raise DataError(f"{where}: data.task: next-token needs data.inputs with input_ids")
    tokens = parts["input_ids"].astype(np.int64)
    mask = parts.get("attention_mask")
    return tokens if mask is None else np.where(mask > 0, tokens, NOT_COUNTED)


def label_shape(data: Data) -> str:
    """Return the shape of labels as text for a message."""
    return {"token-classification": "(N, L)", "multi-label": f"(N, {len(data.classes or ())})"}.get(data.task, "(N,)")


def fits(data: Data, shape: tuple[int, ...], rows: int) -> bool:
    """Return True if labels of `shape` are labels of `rows` records for the task of `data`."""
    if data.task == "token-classification":
        return len(shape) >= 2 and shape[0] == rows
    return shape == ((rows, len(data.classes or ())) if data.task == "multi-label" else (rows,))


def labels_of(data: Data) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function from labels (N, ...) as stored to int64, with -1 where a place does not count.

    It raises DataError for fractions, and for a number that is no class.
    """
    most = len(data.classes or ()) if data.task == "token-classification" else 2

    def coded(y: np.ndarray) -> np.ndarray:
        found = y.astype(np.int64)
        if y.dtype.kind == "f" and not np.array_equal(found, y):
            raise DataError(f"the labels hold fractions, but data.task: {data.task} takes whole numbers")
        if found.max(initial=0) >= most:
            raise DataError(
                f"the labels hold a number of {most} or more; data.task: {data.task} takes 0 to {most - 1}, and"
                " negative numbers where a place does not count"
            )
        return np.maximum(found, NOT_COUNTED)

    return coded
