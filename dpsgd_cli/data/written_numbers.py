"""Numbers in the text of cells, read as `TableFormat` says they are written, and not otherwise; cells as text."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import numpy as np

from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.table_files import MISSING

if TYPE_CHECKING:
    import pandas as pd

_SPACES = " \u00a0\u2009\u202f"


def plain_text(value: object) -> str:
    """Return the text by which values are compared: 3.0 and 3 are the same category, all else is its own text."""
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value):
        return str(int(value))
    return str(value)


def number_form(written: TableFormat) -> re.Pattern[str]:
    """Return the form of a number as `written`: groups are a sign, a sign after a symbol, and the digits.

    >>> form = number_form(TableFormat(decimal=",", thousands=".", symbols=["€"]))
    >>> [bool(form.fullmatch(text)) for text in ("1.234,50", "-€ 7", "12.34", "1,2,3")]
    [True, True, False, False]
    """
    decimal = re.escape(written.decimal)
    groups = (
        ""
        if written.thousands is None
        else f"[{_SPACES}]"
        if written.thousands in _SPACES
        else re.escape(written.thousands)
    )
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

    if pd.api.types.is_numeric_dtype(cells):
        return cells.to_numpy(dtype=np.float64, na_value=np.nan), np.zeros(len(cells), bool)
    values = cells.astype("category")
    form, blank = number_form(written), {*MISSING, *written.marks}
    unwanted = str.maketrans(dict.fromkeys((written.thousands or "") + _SPACES) | {written.decimal: "."})
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
