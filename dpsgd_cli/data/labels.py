"""Class labels and targets of a table or an array: read, compared with the classes, and spelled as in the file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, listed, quoted
from dpsgd_cli.data.cells import PLAIN, Cells, TableRows, is_gap, text_of
from dpsgd_cli.data.column_settings import Missing, TableFormat
from dpsgd_cli.data.settings import Data, positive_last
from dpsgd_cli.data.table import target_scale, to_numbers
from dpsgd_cli.errors import DataError


def read_labels(
    data: Data, columns: Sequence[Cells], paths: Sequence[Path], classes: Sequence[Any] | None
) -> tuple[list[np.ndarray], tuple[Any, ...] | None]:
    """Return the labels of each part, and the classes that all parts share; the classes are None for regression.

    `columns` hold the labels as stored, under the name of the target. Without `classes`, they are read from the labels.
    Targets are in the unit of training (`target_scale`).
    """
    filling = data.fillings.get(columns[0].name, Missing()).value
    found = None if classes is None else tuple(classes)
    parts = []
    try:
        if data.task != "regression" and found is None:
            for cells in columns:
                _refuse_gaps(cells, cells.gaps(data.format or PLAIN) & (filling is None))
            found = tuple(positive_last([*found_classes(columns, data.format or PLAIN, filling)], data.positive))
            if data.positive is not None and str(data.positive) not in map(str, found[1:]):
                raise DataError(f"data.positive: is {data.positive!r}, but must be one of two classes, {listed(found)}")
        for cells in columns:
            if data.task == "regression":
                numbers = to_numbers(cells, filling, data.format or PLAIN, is_target=True)
                parts.append(target_scale(data).inward(numbers).astype(np.float32))
            else:
                parts.append(to_labels(cells, found or (), data.format or PLAIN, filling))
    except DataError as error:
        raise DataError(f"{' and '.join(path.name for path in paths)}: {error}") from None
    return parts, None if data.task == "regression" else found


def to_labels(
    cells: Cells, classes: Sequence[Any], written: TableFormat = PLAIN, filling: float | str | None = None
) -> np.ndarray:
    """Return class indices (N,), int64. A missing label is `filling`, if that is given.

    The text of a label is a class if it is spelled so. Otherwise it is the class that is the same whole number, if all
    classes are different whole numbers, or the same answer, if the two classes are words for yes and no (`_ANSWERS`).

    Raises DataError for missing labels, and for labels that are no class.
    """
    known = [str(text_of(label)) for label in classes]
    lookups: list[dict[Any, int]] = [{text: index for index, text in reversed([*enumerate(known)])}]
    for read in (_whole_number, _answer):
        read_known = [read(text) for text in known]
        if None not in read_known and len(set(read_known)) == len(known):
            lookups.append({(read, value): index for index, value in enumerate(read_known)})

    def index_of(text: str | None) -> int:
        if is_gap(text, written, known):
            if filling is None:
                return -2
            text = text_of(filling)
        keys = [text, *((read, read(text or "")) for read in (_whole_number, _answer))]
        return next((lookup[key] for key in keys for lookup in lookups if key in lookup), -1)

    codes = cells.mapped(index_of, np.int64)
    if (codes >= 0).all():
        return codes
    _refuse_gaps(cells, codes == -2)
    unlisted = codes < 0
    raise DataError(
        f"label column {quoted(cells.name)}: {count(int(unlisted.sum()), 'label')}, first in data row"
        f" {cells.row(unlisted.argmax())}, not among the classes {listed(classes)}; add what is missing to data.classes"
    )


def _refuse_gaps(cells: Cells, missing: np.ndarray) -> None:
    if missing.any():
        raise DataError(
            f"label column {quoted(cells.name)} has {count(int(missing.sum()), 'missing label')}, first in data row"
            f" {cells.row(missing.argmax())}; leave those rows out (data.rows:"
            " labelled), or list their label in data.classes if it is a class"
        )


_ANSWERS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)
"""Words for yes and no. If the two classes are such words, labels may be any of these words, in upper or lower case.
(YAML has true and false, spreadsheets TRUE and FALSE, people yes and no.)"""


def _answer(text: str) -> bool | None:
    return _ANSWERS.get(text.casefold())


def _whole_number(text: str) -> int | None:
    """Return the whole number that a text is, as 1.0 is 1; None for other texts."""
    numbers = _numbers([text])
    return int(numbers[0]) if numbers and numbers[0].is_integer() else None


def _numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def labelled(rows: TableRows, data: Data) -> TableRows:
    """Return the rows that have a label, if `data.rows` says so.

    Whether a row is left out follows from that row alone. So under add-remove neighbouring files stay neighbouring, and
    the public number of records is that of rows with a label. By place (replace-one, zero-out) a row that loses its
    label would move all others, so that is refused (`agreement.py`).
    """
    if data.rows is None or str(data.target) not in rows:
        return rows
    known = [str(text_of(one)) for one in data.classes or ()]
    return rows.take(~rows[str(data.target)].gaps(data.format or PLAIN, known))


def found_classes(
    columns: Sequence[Cells],
    written: TableFormat = PLAIN,
    filling: float | str | None = None,
    listed: Sequence[str] = (),
) -> tuple[Any, ...]:
    """Return the classes in columns of labels, sorted, one for each set of texts that are compared as equal.

    Raises DataError for columns that are not classes: fractions, a single value, nearly as many values as rows.
    """
    where, rows = f"label column {quoted(columns[0].name)}", sum(map(len, columns))
    held = {str(text) for cells in columns for text in cells.distinct[0] if not is_gap(text, written, listed)}
    spelled = sorted(held if filling is None else {*held, str(text_of(filling))})
    numbers, groups = _numbers(spelled), dict[Any, str]()
    folded = [text.casefold() for text in spelled]
    if any(not number.is_integer() for number in numbers or ()):
        for cells in columns:
            odd = cells.mapped(lambda text: not is_gap(text, written) and not float(text or 0).is_integer(), bool)
            if odd.any():
                raise DataError(
                    f"{where} holds a fraction in data row {cells.row(odd.argmax())}, which is not a class; for numeric"
                    " targets set data.task: regression"
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
    if len(groups) > max(20, rows // 2):
        raise DataError(
            f"{where} holds {len(groups)} different values in {rows} rows: these are not classes; choose another"
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
