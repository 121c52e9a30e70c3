"""Conversion of a pandas table with declared columns to a matrix and labels; undeclared content is refused.

The module also writes the declarations of a user's own file. Card tables (`card_readers.py`) and a user's own files
(`own_table.py`, `own_arrays.py`) share it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.common.text_format import count, listed, quoted, shortened
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.settings import Data, Missing
from dpsgd_cli.data.table_files import MISSING
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_MOST_PROBLEMS = 20


def to_matrix(frame: pd.DataFrame, columns: Sequence[Column], where: str) -> np.ndarray:
    """Return a float64 matrix (N, D), one column per declared column: numbers, or indices into the public values.

    Raises DataError naming `where`, the column, the first bad row (data rows count from 1) and what to do.
    """
    matrix = np.empty((len(frame), len(columns)), order="F")
    problems: list[str] = []
    no_numbers = set()
    for index, column in enumerate(columns):
        try:
            series = frame[column.marks or column.name]
            refuse_nested(series)
            if column.marks is not None:
                matrix[:, index] = gaps(series)
            else:
                matrix[:, index] = to_codes(series, column) if column.values else to_numbers(series, column.filling)
        except DataError as error:
            problems.append(f"{where}: {error}")
            if isinstance(error, NoNumbers):
                no_numbers.add(column.name)
        if len(problems) == _MOST_PROBLEMS:
            problems.append(f"{where}: columns after {quoted(column.name)} were not looked at")
            break
    if problems:
        raise BadColumns(problems, no_numbers)
    return matrix


class BadColumns(DataError):
    """Problems with the cells of some columns; the columns `no_numbers` hold text or dates."""

    def __init__(self, problems: Sequence[str], no_numbers: Set[str]) -> None:
        super().__init__("\n".join(problems))
        self.no_numbers = no_numbers


class NoNumbers(DataError):
    """A column that must be numeric holds text or dates."""


def refuse_nested(series: pd.Series) -> None:
    """Raise DataError for a column with lists, arrays or objects as cells."""
    import pandas as pd

    if series.dtype == object and any(pd.api.types.is_list_like(cell) for cell in series):
        raise DataError(f"column {quoted(series.name)} holds lists or objects; write plain values, a column for each")


def gaps(series: pd.Series, listed: Sequence[str] = ()) -> np.ndarray:
    """Return a mask (N,) of the cells without a value: empty, or a word of `MISSING` that is not in `listed`."""
    cells = series.astype("category")
    blank = {"", *MISSING} - set(listed)
    empty = [plain_text(value) in blank for value in cells.cat.categories]
    return np.array([*empty, True])[cells.cat.codes.to_numpy()]


def to_numbers(series: pd.Series, filling: float | str | None = None, is_target: bool = False) -> np.ndarray:
    """Return the column as finite float64 (N,), with `filling` for missing values.

    Raises DataError for text and infinite values, and for missing ones without a filling.
    """
    import pandas as pd

    refuse_nested(series)
    drop = "" if is_target else ", or put the column under data.drop"
    if pd.api.types.is_datetime64_any_dtype(series) or pd.api.types.is_timedelta64_dtype(series):
        raise NoNumbers(f"column {quoted(series.name)} holds dates; turn it into numbers{drop}")
    numbers = pd.to_numeric(series, errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isfinite(numbers).all():
        return numbers
    text = np.isnan(numbers) & series.notna().to_numpy() & ~series.astype(str).str.strip().isin(MISSING).to_numpy()
    if text.any():
        row = int(text.argmax())
        advice = (
            ", as targets of data.task: regression must be; for classes, leave data.task out"
            if is_target
            else "; name the column under data.categorical, or leave it out with data.drop"
        )
        raise NoNumbers(
            f"column {quoted(series.name)} holds {quoted(str(series.iloc[row]))} in data row {row + 1}, which is not"
            f" a number{advice}"
        )
    if filling is not None:
        numbers = np.where(np.isnan(numbers), float(filling), numbers)
    bad = ~np.isfinite(numbers)
    if not bad.any():
        return numbers
    number, infinite = int(bad.sum()), not np.isnan(numbers[bad]).all()
    what = "missing or infinite value" if infinite else "missing value"
    advice = f"say what they mean, data.missing: {{{series.name}: VALUE}}, or leave those rows out"
    raise DataError(
        f"column {quoted(series.name)} has {count(number, what)}, first in data row"
        f" {int(bad.argmax()) + 1}; {'mend them' if infinite else advice}{drop}"
    )


def to_codes(series: pd.Series, column: Column) -> np.ndarray:
    """Return each cell's index (N,) among the column's public values. Raises DataError for a value that is not listed.

    An empty cell, or an unlisted word of `MISSING`, counts as the column's filling.
    """
    import pandas as pd

    cells = series.astype("category")
    known = pd.Index(column.values or ())
    texts = [plain_text(value) for value in cells.cat.categories]
    codes_of = known.get_indexer(pd.Index(texts, dtype=object))
    filling = -1 if column.filling is None else int(known.get_indexer([column.filling])[0])
    codes_of[(codes_of < 0) & np.isin(texts, MISSING)] = filling
    codes = np.append(codes_of, filling)[cells.cat.codes.to_numpy()]
    if (codes >= 0).all():
        return np.asarray(codes)
    row = int((codes < 0).argmax())
    value = series.iloc[row]
    if pd.isna(value) or value == "":
        raise DataError(
            f"categorical column {quoted(column.name)} has {count(int((codes < 0).sum()), 'cell')} without a listed"
            f" value, the first (data row {row + 1}) is empty; fill it, or list '' among the values"
        )
    raise DataError(
        f"categorical column {quoted(column.name)} holds {quoted(str(value))} in data row {row + 1}, which is not among"
        f" its public values {listed(column.values or ())}; add it there{_yaml_hint(column.values or ())}"
    )


def to_labels(series: pd.Series, classes: Sequence[Any] | None) -> tuple[np.ndarray, tuple[Any, ...]]:
    """Return class indices (N,), int64, and the classes: those given, or those found, sorted.

    Raises DataError for missing labels, labels that are not listed, and columns that are not classes
    (fractions, a single value, nearly as many values as rows).
    """
    refuse_nested(series)
    cells = series.astype("category")
    texts = [plain_text(value) for value in cells.cat.categories]
    codes = cells.cat.codes.to_numpy()
    blank = set(MISSING) - {plain_text(label) for label in classes or ()}
    missing = (codes < 0) | np.isin(codes, [index for index, text in enumerate(texts) if text in blank])
    where = f"label column {quoted(series.name)}"
    if missing.any():
        raise DataError(
            f"{where} has {count(int(missing.sum()), 'missing label')}, first in data row {int(missing.argmax()) + 1};"
            " leave those rows out"
        )
    texts = _whole(_as_answers(texts) if classes is None else texts, where)
    found = _found_classes(texts, len(series), where) if classes is None else tuple(classes)
    order = _whole([plain_text(label) for label in found], where)
    answers = [_ANSWERS.get(text.casefold()) for text in order]
    if answers in ([False, True], [True, False]):
        order, texts = list(map(str, answers)), [str(_ANSWERS.get(text.casefold(), text)) for text in texts]
    lookup = {text: index for index, text in enumerate(order)}
    unlisted = [text for text in texts if text not in lookup]
    if unlisted:
        row = int((np.array(texts)[codes] == unlisted[0]).argmax()) + 1
        raise DataError(
            f"{where} holds {quoted(unlisted[0])} in data row {row}, which is not among the classes {listed(found)};"
            " add it to data.classes"
        )
    return np.array([lookup[text] for text in texts], np.int64)[codes], found


_ANSWERS = dict.fromkeys(("true", "yes", "t", "y", "1"), True) | dict.fromkeys(("false", "no", "f", "n", "0"), False)
"""Words for yes and no. If the two classes are such words, labels may be any of these words, in upper or lower case.
(YAML has true and false, spreadsheets TRUE and FALSE, people yes and no.)"""


def _as_answers(texts: list[str]) -> list[str]:
    """Return the texts in lower case if all are words for yes and no, else as they are."""
    folded = [text.casefold() for text in texts]
    return folded if all(text in _ANSWERS for text in folded) else texts


def plain_text(value: object) -> str:
    """Return the text by which values are compared: 3.0 and 3 are the same category, all else is its own text."""
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def _numbers(texts: Sequence[str]) -> list[float] | None:
    try:
        return [float(text) for text in texts]
    except ValueError:
        return None


def _whole(texts: list[str], where: str) -> list[str]:
    """Return labels that are all numbers as whole numbers, others as they are. Raises DataError for a fraction."""
    numbers = _numbers(texts)
    if numbers is None:
        return texts
    odd = next((text for text, number in zip(texts, numbers, strict=True) if not float(number).is_integer()), None)
    if odd is not None:
        raise DataError(
            f"{where} holds {shortened(odd)}, which is not a class; for numeric targets set data.task: regression"
        )
    return [str(int(number)) for number in numbers]


def _found_classes(texts: list[str], rows: int, where: str) -> tuple[Any, ...]:
    distinct = sorted(set(texts))
    if len(distinct) < 2:
        raise DataError(
            f"{where} holds only {listed(distinct)}; training needs at least two classes (or list data.classes)"
        )
    if len(distinct) > max(20, rows // 2):
        raise DataError(
            f"{where} holds {len(distinct)} different values in {rows} rows: these are not classes; choose another"
            " data.target, or set data.task: regression"
        )
    numbers = _numbers(distinct)
    return tuple(distinct) if numbers is None else tuple(sorted(int(number) for number in numbers))


def _yaml_hint(values: Sequence[str]) -> str:
    if {"True", "False"} & set(values):
        return " (YAML reads yes, no, on and off as true and false: put quotes around them)"
    return ""


def read_labels(
    data: Data, columns: Sequence[pd.Series], paths: Sequence[Path], classes: Sequence[Any] | None
) -> tuple[list[np.ndarray], tuple[Any, ...] | None]:
    """Return the labels of each part, and the classes that all parts share; the classes are None for regression.

    `columns` hold the labels as stored, under the name of the target. Without `classes`, they are read from the labels.
    Targets are in the unit of training (`target_scale`).
    """
    import pandas as pd

    target = pd.concat([column.astype(object) for column in columns], ignore_index=True)
    filling = data.fillings.get(str(columns[0].name), Missing()).value
    if filling is not None:
        target = target.where(~gaps(target, [plain_text(label) for label in classes or ()]), filling)
    found: tuple[Any, ...] | None = None
    try:
        if data.task == "regression":
            y = target_scale(data).inward(to_numbers(target, is_target=True)).astype(np.float32)
        else:
            y, found = to_labels(target, classes)
    except DataError as error:
        raise DataError(f"{' and '.join(path.name for path in paths)}: {error}") from None
    return np.split(y, np.cumsum([len(column) for column in columns])[:-1]), found


@dataclass(frozen=True)
class TargetScale:
    """A scale of regression targets, on which public bounds become -1 and 1; without bounds it changes nothing.

    Clipped gradients bound the length of a step, so a model needs many steps to reach large outputs: thousands for
    targets of some hundreds. Training therefore scales the recipe's public target bounds to [-1, 1], whatever the data
    are. Metrics and predictions are in the targets' own unit. `engine/losses.py` clamps targets out of bounds in
    training. `log_unit` u, if not 0, scales log(1 + d / u) of the distance d from the lower bound, and below it
    -log(1 + |d| / u), so that every target has its place.

    >>> scale = TargetScale(100.0, 200.0)
    >>> scale.inward(np.array([100.0, 175.0])).tolist(), scale.outward(np.array([-1.0, 0.5])).tolist()
    ([-1.0, 0.5], [100.0, 175.0])
    >>> log = TargetScale(100.0, 400.0, log_unit=100.0)
    >>> log.inward(np.array([200.0])).tolist(), log.outward(np.array([-1.0, 0.0, 1.0])).round(9).tolist()
    ([0.0], [100.0, 200.0, 400.0])
    """

    low: float = -1.0
    high: float = 1.0
    log_unit: float = 0.0

    @property
    def _straight(self) -> tuple[float, float]:
        """What becomes 0, and the distance that becomes 1."""
        if not self.log_unit:
            return (self.low + self.high) / 2, (self.high - self.low) / 2
        half = math.log1p((self.high - self.low) / self.log_unit) / 2
        return half, half

    def inward(self, targets: np.ndarray) -> np.ndarray:
        """Return targets (N,) in the unit of training."""
        middle, unit = self._straight
        if self.log_unit:
            far = targets - self.low
            targets = np.sign(far) * np.log1p(np.abs(far) / self.log_unit)
        return (targets - middle) / unit

    def outward(self, targets: np.ndarray) -> np.ndarray:
        """Return targets of training in their own unit."""
        middle, unit = self._straight
        found = targets * unit + middle
        if self.log_unit:
            found = self.low + np.sign(found) * np.expm1(np.abs(found)) * self.log_unit
        return found


def target_scale(data: Data) -> TargetScale:
    """Return the scale of the recipe's public target bounds; without bounds, one that changes nothing."""
    if data.target_bounds is None:
        return TargetScale()
    low, high = data.target_bounds
    unit = 0.0 if data.target_transform is None else low if low > 0 else (high - low) / 1000
    return TargetScale(low, high, unit)


def predicted(data: Data, outputs: np.ndarray) -> np.ndarray:
    """Return outputs of a model as predictions in the target's own unit, within its public bounds."""
    return target_scale(data).outward(outputs if data.target_bounds is None else outputs.clip(-1.0, 1.0))


def declarations(data: Data, columns: Sequence[Column], classes: tuple[Any, ...] | None) -> tuple[str, ...]:
    """Return the declarations of public facts of a user's own file, each with its origin (recipe or data)."""
    said = []
    if classes is not None:
        how = "recipe" if data.classes is not None else "read from the data"
        said.append(f"The class labels are public ({how}): {', '.join(map(str, classes))}.")
    if data.bounds is not None:
        said.append("The bounds of the numeric features are public (recipe).")
    if data.target_bounds is not None:
        low, high = data.target_bounds
        said.append(
            f"The bounds of the target are public (recipe): {low:g} to {high:g}; in training values outside are"
            " clamped, predictions lie within, and metrics of test records are of their targets as they are."
        )
    if any(column.values is not None for column in columns):
        how = "recipe" if isinstance(data.categorical, dict) else "read from the data"
        said.append(f"The values of the categorical columns are public ({how}).")
    if data.missing:
        told = {column.name: column.filling for column in columns if column.name in data.missing}
        told |= {name: one.value for name, one in data.fillings.items() if name == data.target}
        what = ", ".join(f"{name} {quoted(value)}" for name, value in told.items())
        said.append(f"What a missing value means is public (recipe), a rule for each record by itself: {what}.")
    return tuple(said)


def read_warnings(data: Data, classes: tuple[Any, ...] | None, columns: Sequence[str] = ()) -> tuple[str, ...]:
    """Return one warning that lists what was read from the data: the classes, and the values of `columns`."""
    found, lists = [], []
    if columns:
        found.append(f"the values of categorical column{'s' * (len(columns) > 1)} {', '.join(map(quoted, columns))}")
        lists.append(f"data.categorical: {{{', '.join(f'{name}: [...]' for name in columns)}}}")
    if classes is not None and data.classes is None:
        found.append("the class labels")
        lists.append(f"data.classes: {list(classes)}")
    if not found:
        return ()
    return (
        f"{' and '.join(found)} were read from the data and are declared public; if they are not, list them:"
        f" {' and '.join(lists)}",
    )
