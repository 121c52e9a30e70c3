"""Numbers in the text of cells, read as `TableFormat` says they are written, and not otherwise; cells as text."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.table_files import MISSING
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

_SPACES = " \u00a0\u2009\u202f"
_APOSTROPHES = "'\u2019"


def row_of(cells: pd.Series, place: int | np.integer) -> int:
    """Return the number, from 1, of the row of a file that the cell at `place` is from.

    The readers of tables index rows by their places in the file, also of a part of it.
    """
    return int(cells.index[place]) + 1


def plain_text(value: object) -> str:
    """Return the text by which values are compared: 3.0 and 3 are the same category, all else is its own text.

    Equal numbers have the same text, and so have equal times, which are told in UTC.

    >>> plain_text(3.0), plain_text(Decimal("1.50")), plain_text("3.0")
    ('3', '1.5', '3.0')
    """
    if isinstance(value, Decimal) and value.is_finite():
        value = float(value) if float(value) == value else format(value.normalize(), "f")
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def plain_cells(cells: pd.Series) -> pd.Series:
    """Return a column in which cells are equal only if their texts (`plain_text`) are.

    pandas takes True for 1. Of both in one column the first would stand for all, so one record would change others.
    True and False beside other cells therefore become text, which is no number. Raises DataError, naming the first row,
    for lists, arrays and objects.
    """
    import pandas as pd

    if cells.dtype != object or not pd.api.types.infer_dtype(cells).startswith("mixed"):
        return cells
    nested = next((at for at, cell in enumerate(cells) if pd.api.types.is_list_like(cell)), None)
    if nested is not None:
        raise DataError(
            f"column {quoted(cells.name)} holds lists or objects, first in data row {row_of(cells, nested)}; write"
            " plain values, a column for each"
        )
    return cells.map(lambda cell: str(cell) if isinstance(cell, bool | np.bool_ | complex) else cell)


def number_form(written: TableFormat) -> re.Pattern[str]:
    """Return the form of a number as `written`: groups are a sign, a sign after a symbol, and the digits.

    >>> form = number_form(TableFormat(decimal=",", thousands=".", symbols=["€"]))
    >>> [bool(form.fullmatch(text)) for text in ("1.234,50", "-€ 7", "12.34", "1,2,3")]
    [True, True, False, False]
    """
    decimal = re.escape(written.decimal)
    groups = re.escape(written.thousands or "")
    for alike in (_SPACES, _APOSTROPHES):
        groups = f"[{alike}]" if written.thousands and written.thousands in alike else groups
    whole = rf"[1-9]\d{{0,2}}(?:{groups}\d{{3}})+|\d+" if groups else r"\d+"
    sign, blank = r"([+\-\u2212]?)", f"[{_SPACES}]*"
    symbol = f"(?:{'|'.join(map(re.escape, written.symbols))})?" if written.symbols else ""
    digits = rf"((?:{whole})(?:{decimal}\d*)?(?:[eE][+-]?\d+)?|{decimal}\d+(?:[eE][+-]?\d+)?|inf(?:inity)?)"
    return re.compile(
        f"{blank}{sign}{blank}{symbol}{blank}{sign}{digits}{blank}{symbol}{blank}", re.ASCII | re.IGNORECASE
    )


def _sign_first(text: str) -> str:
    """Return text with the sign of accounts before it: the minus behind a number, or brackets around it.

    >>> _sign_first("12-"), _sign_first("(12)"), _sign_first("12"), _sign_first("(-12)")
    ('-12', '-12', '12', '--12')
    """
    if text[:1] == "(" and text[-1:] == ")":
        return f"-{text[1:-1]}"
    return f"-{text[:-1]}" if len(text) > 1 and text[-1] in "-\u2212" else text


def numbers_in(cells: pd.Series, written: TableFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers in cells, float64 (N,), NaN where there is none; and a mask (N,) of cells with something else.

    Text is a number only if it is `written` so as a whole: groups have three digits, and there is one decimal mark.
    """
    import pandas as pd

    if pd.api.types.is_numeric_dtype(cells) and not pd.api.types.is_complex_dtype(cells):
        return cells.to_numpy(dtype=np.float64, na_value=np.nan), np.zeros(len(cells), bool)
    values = cells.astype("category")
    form, blank = number_form(written), {*MISSING, *written.marks}
    unwanted = str.maketrans(dict.fromkeys((written.thousands or "") + _SPACES + _APOSTROPHES) | {written.decimal: "."})
    found, bad = np.full(len(values.cat.categories) + 1, np.nan), np.zeros(len(values.cat.categories) + 1, bool)
    for index, value in enumerate(values.cat.categories):
        if isinstance(value, str):
            text = value.strip()
            if text in blank:
                continue
            read = form.fullmatch(_sign_first(text))
            if read is None:
                bad[index] = True
            else:
                signs = (read[1] + read[2]).replace("\u2212", "-")
                bad[index] = len(signs) > 1
                found[index] = float(signs[:1] + read[3].translate(unwanted))
        else:
            try:
                found[index] = float(value)
            except (TypeError, ValueError, OverflowError):
                bad[index] = True
    codes = values.cat.codes.to_numpy()
    return found[codes], bad[codes]
