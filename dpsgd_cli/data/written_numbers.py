"""Numbers in the text of cells, read as `TableFormat` says they are written, and not otherwise."""

from __future__ import annotations

import contextlib
import functools
import re

import numpy as np

from dpsgd_cli.data.cells import MISSING, Cells, is_gap, text_of
from dpsgd_cli.data.column_settings import TableFormat

_SPACES = " \u00a0\u2009\u202f"
_APOSTROPHES = "'\u2019"
_TRUTHS = {"true": 1.0, "false": 0.0}


@functools.lru_cache(maxsize=64)
def _number_form(decimal: str, thousands: str | None, symbols: tuple[str, ...]) -> re.Pattern[str]:
    """Return the form of a number: groups are a sign, a sign after a symbol, and the digits.

    >>> form = _number_form(",", ".", ("€",))
    >>> [bool(form.fullmatch(text)) for text in ("1.234,50", "-€ 7", "12.34", "1,2,3")]
    [True, True, False, False]
    """
    mark, groups = re.escape(decimal), re.escape(thousands or "")
    for alike in (_SPACES, _APOSTROPHES):
        groups = f"[{alike}]" if thousands and thousands in alike else groups
    whole = rf"[1-9]\d{{0,2}}(?:{groups}\d{{3}})+|\d+" if groups else r"\d+"
    sign, blank = r"([+\-\u2212]?)", f"[{_SPACES}]*"
    symbol = f"(?:{'|'.join(map(re.escape, symbols))})?" if symbols else ""
    digits = rf"((?:{whole})(?:{mark}\d*)?(?:[eE][+-]?\d+)?|{mark}\d+(?:[eE][+-]?\d+)?|inf(?:inity)?)"
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


def number_of(text: str | None, written: TableFormat) -> float | None:
    """Return the number that a text is, NaN for a gap, and None for something else; -0 is 0, and true is 1.

    Text is a number only if it is `written` so as a whole: groups have three digits, and there is one decimal mark.
    """
    if text is None or is_gap(text, written):
        return np.nan
    read = _number_form(written.decimal, written.thousands, tuple(written.symbols)).fullmatch(_sign_first(text.strip()))
    if read is None:
        return _TRUTHS.get(text.strip().casefold())
    signs = (read[1] + read[2]).replace("\u2212", "-")
    if len(signs) > 1:
        return None
    unwanted = dict.fromkeys((written.thousands or "") + _SPACES + _APOSTROPHES) | {written.decimal: "."}
    return float(signs + read[3].translate(str.maketrans(unwanted))) + 0.0


def numbers_in(cells: Cells, written: TableFormat) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers in cells, float64 (N,), NaN where there is none; and a mask (N,) of cells with something else.

    Each is `number_of` its text. A column that is stored as numbers, or whose texts are all plain numbers, is converted
    as a whole to the same numbers, which is faster.
    """
    if (found := _at_once(cells, written)) is None:
        made = cells.mapped(lambda text: number_of(text, written), object)
        bad = made == None  # noqa: E711, each cell
        made[bad] = np.nan
        return made.astype(np.float64), bad
    return found, np.zeros(len(cells), bool)


def _at_once(cells: Cells, written: TableFormat) -> np.ndarray | None:
    """Return the numbers of a column if all cells are plain numbers, or stored as numbers; None otherwise."""
    import pyarrow as pa
    from pyarrow import compute, types

    plain = {mark: number for mark in written.marks if (number := number_of(mark, TableFormat())) is not None}
    array = cells.array
    if cells.is_typed:
        stored = (
            array.to_numpy()
            if types.is_floating(array.type)
            else compute.cast(array, pa.float64(), safe=False).to_numpy()
        )
        values = stored.astype(np.float64) + 0.0
        values[np.isin(stored, np.array([n for mark, n in plain.items() if text_of(n) == mark], stored.dtype))] = np.nan
        return values
    if not (types.is_string(array.type) or types.is_large_string(array.type)) or written.decimal != ".":
        return None
    blank = compute.is_in(array, value_set=pa.array([*MISSING, *written.marks], array.type))
    with contextlib.suppress(pa.ArrowInvalid):
        values = compute.cast(compute.if_else(blank, None, array), pa.float64())
        if compute.all(compute.is_finite(values)).as_py():
            return values.to_numpy().astype(np.float64) + 0.0
    return None
