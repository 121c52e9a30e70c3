"""Inputs of several named arrays, and labels that are arrays: tokens, masks, a class at each place.

Named arrays (`data.inputs`) of a record are kept as one row of numbers, in the order of the recipe; the model gets them
back under their names (`engine/named_inputs.py`). All are integers, or the row is float32, which holds integers up to
2^24 exactly; larger ones are refused. So no token is ever rounded.

Each row depends on its own record alone. Labels are int64 (N, ...), and a negative label at a place does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from dpsgd_cli.common.text_format import suggested
from dpsgd_cli.data.on_disk import flatten
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.settings import InputArray
from dpsgd_cli.errors import DataError

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
