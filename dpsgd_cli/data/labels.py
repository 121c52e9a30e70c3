"""Class labels and targets of a table or an array: read, compared with the classes, and spelled as in the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.common.text_format import count, listed, quoted
from dpsgd_cli.data.column_settings import Missing, TableFormat
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table import gaps, target_scale, to_numbers
from dpsgd_cli.data.table_files import MISSING, PLAIN
from dpsgd_cli.data.written_numbers import plain_cells, plain_text, row_of
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def read_labels(
    data: Data, columns: Sequence[pd.Series], paths: Sequence[Path], classes: Sequence[Any] | None
) -> tuple[list[np.ndarray], tuple[Any, ...] | None]:
    """Return the labels of each part, and the classes that all parts share; the classes are None for regression.

    `columns` hold the labels as stored, under the name of the target. Without `classes`, they are read from the labels.
    Targets are in the unit of training (`target_scale`).
    """
    import pandas as pd

    target = columns[0]
    if len(columns) > 1:
        target = pd.concat([column.astype(object) for column in columns], ignore_index=True)
    filling, written = data.fillings.get(str(columns[0].name), Missing()).value, data.format or PLAIN
    if filling is not None:
        target = target.astype(object).where(
            ~gaps(target, written, [plain_text(label) for label in classes or ()]), filling
        )
    found: tuple[Any, ...] | None = None
    try:
        if data.task == "regression":
            y = target_scale(data).inward(to_numbers(target, None, written, is_target=True)).astype(np.float32)
        else:
            y, found = to_labels(target, classes, written)
    except DataError as error:
        raise DataError(f"{' and '.join(path.name for path in paths)}: {error}") from None
    return np.split(y, np.cumsum([len(column) for column in columns])[:-1]), found


def read_targets(
    data: Data, frames: Sequence[pd.DataFrame], paths: Sequence[Path]
) -> tuple[list[np.ndarray], tuple[Any, ...] | None]:
    """Return the labels of each table, (N,) or (N, K) of K columns, and the classes, as `read_labels` does.

    Several columns are numbers in the unit of training, or 0 and 1 for words of no and yes.
    """
    if not isinstance(data.target, list):
        return read_labels(data, [frame[data.target] for frame in frames], paths, data.classes)
    made = [
        read_labels(own, [frame[name] for frame in frames], paths, own.classes)[0]
        for name, own in ((name, data.of_target(name)) for name in data.target)
    ]
    classes = tuple(data.target) if data.task == "multi-label" else None
    return [np.stack(parts, axis=1) for parts in zip(*made, strict=True)], classes


def to_labels(
    series: pd.Series, classes: Sequence[Any] | None, written: TableFormat = PLAIN
) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Return class indices (N,), int64, and the classes: those given, or those found, spelled as in the file.

    Labels are compared as text; if some are no class, as whole numbers, or as words for yes and no (`_ANSWERS`).

    Raises DataError for missing labels, labels that are not listed, and columns that are not classes
    (fractions, a single value, nearly as many values as rows).
    """
    series = plain_cells(series)
    cells = series.astype("category")
    texts = [plain_text(value) for value in cells.cat.categories]
    codes = cells.cat.codes.to_numpy()
    blank = {*MISSING, *written.marks} - {plain_text(label) for label in classes or ()}
    missing = (codes < 0) | np.isin(codes, [index for index, text in enumerate(texts) if text in blank])
    where = f"label column {quoted(series.name)}"
    if missing.any():
        raise DataError(
            f"{where} has {count(int(missing.sum()), 'missing label')}, first in data row"
            f" {row_of(series, missing.argmax())}; leave those rows out"
        )
    found = _found_classes(cells, where) if classes is None else tuple(classes)
    keys, known = texts, [plain_text(label) for label in found]
    for compared in (_whole_numbers, _answers):
        if set(keys) <= set(known):
            break
        keys, known = compared(keys, known)
    lookup = {text: index for index, text in reversed(list(enumerate(known)))}
    unlisted = np.array([text not in lookup for text in keys], dtype=bool)[codes]
    if unlisted.any():
        raise DataError(
            f"{where}: {count(int(unlisted.sum()), 'label')}, first in data row {row_of(series, unlisted.argmax())},"
            f" not among the classes {listed(found)}; add what is missing to data.classes"
        )
    return np.array([lookup[text] for text in keys], np.int64)[codes], found


_ANSWERS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)
"""Words for yes and no. If the two classes are such words, labels may be any of these words, in upper or lower case.
(YAML has true and false, spreadsheets TRUE and FALSE, people yes and no.)"""


def _answers(texts: list[str], known: list[str]) -> tuple[list[str], list[str]]:
    """Return labels and classes as yes and no if the two classes are such words, else as they are."""
    answers = [_ANSWERS.get(text.casefold()) for text in known]
    if answers not in ([False, True], [True, False]):
        return texts, known
    return [str(_ANSWERS.get(text.casefold(), text)) for text in texts], list(map(str, answers))


def _whole_numbers(texts: list[str], known: list[str]) -> tuple[list[str], list[str]]:
    """Return labels and classes as whole numbers if all classes are such numbers, else as they are."""
    numbers = _numbers(known)
    if numbers is None or not all(number.is_integer() for number in numbers):
        return texts, known
    own = [_numbers([text]) for text in texts]
    read = [str(int(one[0])) if one and one[0].is_integer() else text for one, text in zip(own, texts, strict=True)]
    return read, [str(int(number)) for number in numbers]


def _numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def _found_classes(cells: pd.Series, where: str) -> tuple[Any, ...]:
    """Return the classes in a column of categories, sorted, one for each set of values that are compared as equal."""
    values, codes = list(cells.cat.categories), cells.cat.codes.to_numpy()
    spelled = [str(value.item() if isinstance(value, np.generic) else value) for value in values]
    numbers, groups = _numbers(spelled), dict[Any, str]()
    folded = [text.casefold() for text in spelled]
    fraction = np.array([not number.is_integer() for number in numbers or ()], dtype=bool)
    if fraction.any():
        raise DataError(
            f"{where} holds a fraction in data row {row_of(cells, fraction[codes].argmax())}, which is not a class; for"
            " numeric targets set data.task: regression"
        )
    for index, text in enumerate(spelled):
        key: Any = text
        if numbers is not None:
            key = numbers[index]
        elif all(one in _ANSWERS for one in folded):
            key = folded[index]
        groups[key] = min(groups.get(key, text), text, key=lambda one: (len(one), one))
    if len(groups) < 2:
        raise DataError(f"{where} holds one value only; training needs at least two classes (or list data.classes)")
    if len(groups) > max(20, len(codes) // 2):
        raise DataError(
            f"{where} holds {len(groups)} different values in {len(codes)} rows: these are not classes; choose another"
            " data.target, or set data.task: regression"
        )
    return _typed([groups[key] for key in sorted(groups)])


def _typed(texts: list[str]) -> tuple[Any, ...]:
    """Return classes as truth values or numbers if all of them are then written as they are in the file, else as text.

    >>> _typed(["False", "True"]), _typed(["1", "2"]), _typed(["1.0", "2.0"]), _typed(["01", "10"])
    ((False, True), (1, 2), (1.0, 2.0), ('01', '10'))
    """
    numbers = _numbers(texts) or [float("nan")] * len(texts)
    whole = [int(number) if number.is_integer() else number for number in numbers]
    for read in ([text == "True" for text in texts], whole, numbers):
        if list(map(str, read)) == texts:
            return tuple(read)
    return tuple(texts)
