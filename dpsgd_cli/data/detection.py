"""Detection of how a table is written and of what its columns seem to hold, for drafts (`recipe_template.py`).

The whole file is looked at, on the machine where `dpsgd recipe new` runs. No guarantee covers that. What is found
goes into the recipe, where a person confirms it; training reads what the recipe says and detects nothing.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpsgd_cli.common.text_format import count, quoted
from dpsgd_cli.data import table_files
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.computed_columns import moments
from dpsgd_cli.data.condensed import MOST_HASHES, Condensed
from dpsgd_cli.data.table import gaps
from dpsgd_cli.data.table_files import MISSING, PLAIN
from dpsgd_cli.data.written_numbers import numbers_in, plain_cells, plain_text, row_of
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

MOST_CATEGORIES = 50
BUCKETS = 64
WORD_BUCKETS = 128
_ROWS_LOOKED_AT = 200
_TITLES = 30
"""Lines in which the header is looked for."""
_BLOCK = 1 << 22
_OF_WINDOWS = bytes(range(0x80, 0xA0))
_TEXTS_TRIED = 5000
_SYMBOLS = ("$", "€", "£", "¥", "₹", "₽", "₺", "₩", "%", "USD", "EUR", "GBP", "CHF")
_MARKS = (
    "-",
    "--",
    "---",
    "\u2013",
    ".",
    "..",
    "*",
    "n/a",
    "na",
    "n.a.",
    "N.A.",
    "k.A.",
    "#N/A",
    "#NV",
    "none",
    "NONE",
)
_WRITTEN = ((".", None), (".", ","), (",", None), (",", "."), (",", " "), (".", " "), (".", "'"), (",", "'"))
_DAYS_OF_EXCEL = range(20_000, 60_000)
"""Days since 1900, as Excel counts them: 1954 to 2064."""
_DAYS: tuple[str, ...] = (
    "%Y-%m-%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%Y/%m/%d",
    "%Y%m%d",
    "%d.%m.%y",
)
_DAYS = (*_DAYS, "%d/%m/%y", "%m/%d/%y", "%d %b %Y", "%d %B %Y", "%d-%b-%Y", "%b %d, %Y", "%B %d, %Y", "%Y.%m.%d")
_TIMES: tuple[str, ...] = (
    "",
    " %H:%M:%S",
    " %H:%M",
    "T%H:%M:%S",
    "T%H:%M",
    "T%H:%M:%SZ",
    " %H:%M:%S.%f",
    "T%H:%M:%S.%f",
    " %I:%M %p",
)
_TIMES = (*_TIMES, "T%H:%M:%S%z", " %H:%M:%S%z", " %H:%M:%S %z", "T%H:%M:%S.%f%z", " %H:%M:%S.%f%z")
_PERSON = (
    r"user|customer|client|patient|person|member|subject|household|employee|student|driver|visitor|kunde|patientin"
)
_ID = re.compile(
    rf"(^|.*[^a-z])(id|ids|uid|uuid|guid|ssn|iban|e-?mail)$|({_PERSON})([^a-z]*(no|nr|number|nummer|code|key|id|name))?$"
)
_OF_A_DAY = re.compile(r"date|day|datum|tag|jour|fecha|born|since|when|time")
_OF_A_PERSON = re.compile(_PERSON)
_SYMBOL = "|".join(map(re.escape, _SYMBOLS))
_DIGITS = r"\d[\d.,'\u2019\s]*"
_A_NUMBER = re.compile(rf"\(?(?:[\s+\-\u2212]|{_SYMBOL})*{_DIGITS}(?:\s|{_SYMBOL})*[\-\u2212)]?")
_WITH_UNIT = re.compile(rf"[\-\u2212+]?{_DIGITS}(?:(?<=\s)([^\W\d_]\D{{0,7}})|(°\D?))")
_FEWEST_WITH_UNIT = 5
_MOST_SHARE = 0.9
"""Share of a column's different texts that have to look like numbers before the others count as faults."""
_AN_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}|[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7}", re.IGNORECASE)

Role = Literal["number", "category", "hash", "text", "date", "unit", "drop"]


@dataclass(frozen=True)
class Use:
    """A column's apparent content (`kind`), its use in the draft (`role`), and what a person has to confirm."""

    kind: str
    role: Role
    confirm: str
    values: tuple[str, ...] = ()
    form: str = ""
    gaps: bool = False
    whole: bool = False


def format_of(path: Path, kind: str, target: str) -> TableFormat:
    """Return the encoding, separator and blanks of a text file, or the sheet of an Excel file with several."""
    if kind == ".xlsx":
        return _of_sheets(path, target)
    if not kind.startswith((".csv", ".tsv")):
        return PLAIN
    encoding = _encoding(path)
    with table_files.opened(path, encoding) as lines:
        rows = [line for _, line in zip(range(_ROWS_LOOKED_AT), lines, strict=False)]
    told = re.fullmatch(r'\ufeff?"?sep=(.)"?\s*', rows[0]) if rows else None  # a line that Excel writes
    above = int(told is not None) or _titles(rows, target)
    rows = rows[above:]
    first = next((row for row in rows if row.strip()), "")
    separator = told[1] if told else max(",;\t|", key=lambda mark: len((_cells(rows, mark) or [[]])[0]))
    cells = _cells(rows, separator)
    if len((cells or [[]])[0]) < 2:
        separator = table_files.separator_of(PLAIN, first)
        cells = _cells([first], separator)
    head, body = (cells or [[]])[0], cells[1:]
    header = target in (name.strip() for name in head) or not target.isdecimal() or int(target) > len(head)
    blanks_in_header = any(name.startswith(" ") for name in head)
    blanks = any(cell.startswith(" ") for row in body for cell in row)
    return TableFormat(
        encoding=encoding,
        separator=separator,
        header=header,
        trim=blanks_in_header or not blanks,
        skip=above,
    )


def _titles(rows: Sequence[str], target: str) -> int:
    """Return the lines of titles above the first row that holds `target`; 0 if there is none such, or no other line."""
    for mark in ",;\t|":
        reader, before = csv.reader(rows[:_TITLES], delimiter=mark), 0
        try:
            for cells in reader:
                if target in map(str.strip, table_files.named(cells)) and len(cells) > 1:
                    return before
                before = reader.line_num
        except csv.Error:
            continue
    return 0


def _of_sheets(path: Path, target: str) -> TableFormat:
    """Return the first sheet that has a column `target`, and the rows of titles above its header."""
    names = table_files.sheets_of(path)
    for name in names:
        heads = table_files.first_rows(path, name, _TITLES)
        found = next((number for number, cells in enumerate(heads) if target in table_files.named(cells)), None)
        if found is not None:
            return TableFormat(sheet=name if len(names) > 1 else None, skip=found)
    return TableFormat(sheet=str(names[0])) if len(names) > 1 else PLAIN


def _encoding(path: Path) -> str:
    """Return the encoding of a file: UTF-8 if all of it is, else by the bytes that only Windows uses for letters."""
    with table_files.opened(path, "latin-1") as stream:
        block = stream.buffer.read(_BLOCK)
        if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        reader, is_utf8, windows = codecs.getincrementaldecoder("utf-8")(), True, False
        while block:
            if not block.isascii() or reader.getstate()[0]:  # ASCII, after a whole letter, is alike in all of them
                if is_utf8:
                    try:
                        reader.decode(block)
                    except UnicodeDecodeError:
                        is_utf8 = False
                windows = windows or len(block.translate(None, _OF_WINDOWS)) < len(block)
            block = stream.buffer.read(_BLOCK)
    return "utf-8-sig" if is_utf8 else "cp1252" if windows else "latin-1"


def _cells(rows: Sequence[str], mark: str) -> list[list[str]]:
    """Return the cells that a separator makes of rows if all rows have as many, else none."""
    try:
        found = [row for row in csv.reader(rows, delimiter=mark) if row]
    except csv.Error:  # a cell of more than 131,072 characters
        return []
    whole = found[:-1] if len(rows) == _ROWS_LOOKED_AT else found  # the last one may go on
    return whole if len({len(row) for row in whole}) == 1 else []


def with_numbers(frame: pd.DataFrame, written: TableFormat) -> TableFormat:
    """Return the format with decimal mark, groups, symbols and marks of missing values of its number columns.

    Those that make numbers of the most columns are taken; such a column holds nothing else but marks of missing values.
    """
    columns = [_texts(frame[name]) for name in frame.columns if _is_text(frame[name])]
    units = {unit for texts in columns if (unit := _unit(texts))}
    columns = [texts for texts in columns if _unit(texts) or any(_A_NUMBER.fullmatch(text) for text in texts)]
    every = [*_SYMBOLS, *sorted(units - {*_SYMBOLS})]
    pairs = list(_WRITTEN)
    if written.separator == ";":
        pairs.sort(key=lambda pair: pair[0] != ",")
    best, most = written, 0
    for decimal, thousands in pairs:
        tried = written.changed(decimal=decimal, thousands=thousands, symbols=every, missing=list(_MARKS))
        fitting = [texts for texts in columns if _all_numbers(texts, tried)]
        if len(fitting) > most:
            seen = [text for texts in fitting for text in texts]
            symbols = [one for one in every if any(one in text for text in seen)]
            marks = [one for one in _MARKS if one in seen]
            best, most = tried.changed(symbols=symbols, missing=marks or None), len(fitting)
    dated = {text for name in frame.columns if _is_text(frame[name]) for text in _texts(frame[name]) if text in _MARKS}
    if dated and any(form_of(frame[name], _marks_too(best)) for name in frame.columns if _is_text(frame[name])):
        best = best.changed(missing=[one for one in _MARKS if one in dated])
    return best


def _unit(texts: Sequence[str]) -> str:
    """Return the unit that nearly all texts have behind a number, as kg in 70,5 kg; "" if there is none.

    >>> _unit([f"{number} kg" for number in range(9)]), _unit([f"{number}B" for number in range(9)])
    ('kg', '')
    """
    found = [_WITH_UNIT.fullmatch(text) for text in texts] if len(texts) >= _FEWEST_WITH_UNIT else []
    units = Counter((one[1] or one[2]).strip() for one in found if one is not None)
    unit, times = units.most_common(1)[0] if units else ("", 0)
    return unit if times >= _MOST_SHARE * len(texts) else ""


def _marks_too(written: TableFormat) -> TableFormat:
    return written.changed(missing=list(_MARKS))


def _all_numbers(texts: list[str], written: TableFormat) -> bool:
    import pandas as pd

    numbers, bad = numbers_in(pd.Series(texts, dtype=object), written)
    return not bad.any() and bool(np.isfinite(numbers).any())


def _is_text(series: pd.Series) -> bool:
    """Return True if a column holds text, at least in part, and no lists or objects."""
    import pandas as pd

    if series.dtype == object and any(pd.api.types.is_list_like(cell) for cell in series):
        return False
    return not pd.api.types.is_numeric_dtype(series) and not pd.api.types.is_datetime64_any_dtype(series)


def _texts(series: pd.Series) -> list[str]:
    """Return the first different texts of a column, without the usual words for missing values."""
    values = series.dropna().astype("category").cat.categories[:_TEXTS_TRIED]
    return [text for value in values if isinstance(value, str) and (text := value.strip()) not in MISSING]


def form_of(series: pd.Series, written: TableFormat) -> str:
    """Return the form of dates that all texts of a column have, "" if there is none. Days come before months."""
    import pandas as pd

    found = [text for text in _texts(series) if text not in written.marks]
    if len(found) < 2 or not all(any(letter.isdigit() for letter in text) for text in found[:20]):
        return ""
    first = re.sub(r"\s", " ", found[0]).lower()
    for day in _DAYS:
        for time in _TIMES:
            if not set(re.sub("%.", "", day + time).lower()) <= set(first):
                continue  # a mark between its numbers is missing, and trying it takes far longer
            few, all_ = pd.Series(found[:5], dtype=object), pd.Series(found, dtype=object)
            if all(
                pd.to_datetime(one, format=day + time, errors="coerce", utc=True).notna().all() for one in (few, all_)
            ):
                return day + time
    return ""


def use_of(typed: pd.Series, column: Condensed, written: TableFormat, told_text: bool) -> Use:
    """Return the use of a column, from its kept cells as the reader types them and as text. `told_text`: it is text.

    Raises DataError, naming the first row, for a column of numbers or dates in several forms.
    """
    import pandas as pd

    try:
        typed = plain_cells(typed)
    except DataError:
        return Use("lists or objects", "drop", "write plain values, a column for each")
    name, text = str(typed.name), column.kept
    if typed.dtype == np.float64 and not told_text and not names_something(name):
        cells = typed.to_numpy()
        empty = np.isnan(cells)
        numbers = cells[~empty]
        if (
            np.isfinite(numbers).all()
            and ((numbers > numbers.min(initial=np.inf)) & (numbers < numbers.max(initial=-np.inf))).any()
        ):
            return replace(_number(name, numbers, bool((numbers == np.floor(numbers)).all())), gaps=column.gaps)
    empty = gaps(text, written)
    there = text[~empty]
    different, cells = column.different, column.cells
    if pd.api.types.is_timedelta64_dtype(typed):
        return Use("durations", "drop", "write them as numbers")
    if not cells:
        return Use("empty throughout", "drop", "it tells nothing")
    if different < 2 and not column.gaps:
        return Use("one value throughout", "drop", "it tells nothing")
    if pd.api.types.is_datetime64_any_dtype(typed) or (len(there) and hasattr(there.iloc[0], "year")):
        return Use("dates", "date", "first and last day", form=_typed_form(there), gaps=column.gaps)
    texts = [plain_text(value) for value in there.astype("category").cat.remove_unused_categories().cat.categories]
    form = "" if told_text else form_of(pd.Series(texts, dtype=object), written)
    if form and (_is_text(typed) or _is_a_year(form, texts)):
        return Use("dates", "date", _told_form(form, texts), form=form, gaps=column.gaps)
    coded = told_text or any(re.fullmatch(r"0\d+", one) for one in texts)
    if not coded and not pd.api.types.is_bool_dtype(typed):
        numbers, bad = numbers_in(typed, written)
        if not bad.any() and np.isfinite(numbers).any():
            return replace(_of_numbers(name, numbers[~empty], texts, column), gaps=column.gaps)
        _refuse_mixed(name, typed, texts, written)
    return _of_texts(name, texts, column, coded)


def _is_a_year(form: str, texts: Sequence[str]) -> bool:
    """Return True if whole numbers are all days such as 20201231."""
    return form == "%Y%m%d" and all(re.fullmatch(r"(19|20)\d{6}", one) for one in texts)


def _typed_form(there: pd.Series) -> str:
    times = moments(there, np.zeros(len(there), bool), "%Y-%m-%d")
    return "%Y-%m-%d" if (times == times.astype("datetime64[D]")).all() else "%Y-%m-%d %H:%M:%S"


def _told_form(form: str, texts: Sequence[str]) -> str:
    """Return what to confirm of a form: also if days and months could be taken for each other."""
    import pandas as pd

    other = form.replace("%d", "%\0").replace("%m", "%d").replace("%\0", "%m")
    if other != form and not form.startswith("%Y") and "%m" in form:
        read = pd.to_datetime(pd.Series(list(texts), dtype=object), format=other, errors="coerce")
        if read.notna().all():
            return f"first and last day, and that {form} is right: {other} would fit too"
    return "first and last day"


def _of_numbers(name: str, numbers: np.ndarray, texts: Sequence[str], column: Condensed) -> Use:
    whole = bool((numbers == np.floor(numbers)).all())
    if whole and len(numbers) > 2 and (np.diff(numbers) == 1).all():
        return Use("row numbers", "drop", "they tell nothing")
    if whole and names_something(name) and column.different > 2:
        named = _of_names(name, column)
        if named is not None:
            return named
    if len(np.unique(numbers)) <= 2:
        return Use("category", "category", "its values, read from the file", values=tuple(sorted(texts)))
    return _number(name, numbers, whole)


def _number(name: str, numbers: np.ndarray, whole: bool) -> Use:
    dated = len(numbers) > 0 and numbers.min() in _DAYS_OF_EXCEL and numbers.max() in _DAYS_OF_EXCEL
    if whole and dated and _OF_A_DAY.search(name.lower()):
        told = "least and largest value; if Excel counted these days from 1900, write them as dates"
        return Use("whole numbers", "number", told, whole=True)
    return Use("whole numbers" if whole else "numbers", "number", "least and largest value", whole=whole)


def _of_names(name: str, column: Condensed) -> Use | None:
    """Return the use of a column that names something; None if it repeats too often to name persons."""
    different, cells = column.different, column.cells
    if different == cells:
        return Use("identifier", "drop", "different in each row, so nothing can be learnt from it")
    if different < 10 or cells > MOST_CATEGORIES * different:
        return None
    return Use("identifier, repeated", "unit", "that it names whose rows these are")


def _of_texts(name: str, texts: list[str], column: Condensed, coded: bool) -> Use:
    different, cells = max(len(texts), column.different), column.cells
    words = float(np.mean([len(re.findall(r"\w+", one)) for one in texts[:_TEXTS_TRIED]])) if texts else 0.0
    addresses = all(_AN_ADDRESS.fullmatch(one) for one in texts[:_TEXTS_TRIED])
    if words >= 3 and not addresses and (different > MOST_CATEGORIES or (different == cells and cells >= 10)):
        return Use("free text", "text", "nothing: no word of it is in the recipe or the model")
    if cells >= 10 and (different == cells or names_something(name)):
        named = _of_names(name, column)
        if named is not None:
            return named
    kind = "codes" if coded or any(re.fullmatch(r"0\d+", one) for one in texts) else "category"
    if different <= MOST_CATEGORIES:
        return Use(kind, "category", "its values, read from the file", values=tuple(sorted(texts)))
    near = "that it names no person: nearly each row has its own" if cells < 1.5 * different else ""
    return Use(
        f"{kind}, {'about ' * (different >= MOST_HASHES)}{different} different",
        "hash",
        near or "nothing: no value of it is in the recipe or the model",
    )


def _refuse_mixed(name: str, typed: pd.Series, texts: Sequence[str], written: TableFormat) -> None:
    """Raise DataError, naming the first odd row, for a column most of whose cells are numbers or dates of one form."""
    import pandas as pd

    few = texts[:_TEXTS_TRIED]
    if len(few) < 5:
        return
    here = f"column {quoted(name)}"
    advice = f"; mend those cells, or say that it holds codes: --text {quoted(name)}"
    looks = sum(any(form.fullmatch(one) for form in (_A_NUMBER, _WITH_UNIT)) for one in few)
    if looks >= _MOST_SHARE * len(few):
        every = {"symbols": [*_SYMBOLS, *filter(None, [_unit(few)])], "missing": list(_MARKS)}
        forms = [written, *(written.changed(decimal=mark, thousands=group, **every) for mark, group in _WRITTEN)]
        sample = pd.Series(few, dtype=object)
        form = max(forms, key=lambda one: np.isfinite(numbers_in(sample, one)[0]).sum())
        if 2 * np.isfinite(numbers_in(sample, form)[0]).sum() > len(few):
            bad = numbers_in(typed, form)[1]
            marks = f"decimal {quoted(form.decimal)}, thousands {quoted(form.thousands)}"
            if not bad.any():
                raise DataError(f"{here} holds numbers in another form ({marks}) than other columns do{advice}")
            row = row_of(typed, bad.argmax())
            raise DataError(f"{here} holds numbers in several forms: not so ({marks}) in data row {row}{advice}")
    for day in _forms_of_most(few[:20]):
        fits = pd.to_datetime(pd.Series(few, dtype=object), format=day, errors="coerce", utc=True).notna()
        if 0.5 <= fits.mean() < 1:
            odd = {one for one, fit in zip(few, fits, strict=True) if not fit}
            row = row_of(typed, typed.astype(str).str.strip().isin(odd).to_numpy().argmax())
            raise DataError(
                f"{here} holds dates in several forms, or cells that are none: not {day} in data row {row}{advice}"
            )


def _forms_of_most(texts: Sequence[str]) -> Iterator[str]:
    """Yield the forms of dates, with a year of four digits, whose marks between numbers are in half of the texts."""
    letters = [set(re.sub(r"\s", " ", one).lower()) for one in texts if re.search(r"\d", one)]
    for day, time in itertools.product((one for one in _DAYS if "%Y" in one), _TIMES):
        marks = set(re.sub("%.", "", day + time).lower())
        if marks and 2 * sum(marks <= own for own in letters) >= len(texts):
            yield day + time


def names_something(name: str) -> bool:
    """Return True if a column is called as one of identifiers is."""
    return _ID.match(name.lower()) is not None


def is_of_a_person(name: str) -> bool:
    """Return True if a column is called as the name of a person is."""
    return _OF_A_PERSON.search(name.lower()) is not None


def said(written: TableFormat, kind: str) -> list[str]:
    """Return in words how a table is written."""
    if kind == ".xlsx":
        told = [f"sheet {quoted(written.sheet)}, of several"] if written.sheet else ["its only sheet"]
        return told + [f"{count(written.skip, 'line')} above the header"] * (written.skip > 0)
    names = {"utf-8-sig": "UTF-8", "cp1252": "Windows-1252 (cp1252)", "latin-1": "Latin-1", "utf-16": "UTF-16"}
    told = [names.get(written.encoding, written.encoding)]
    told.append(f"separator {'tab' if written.separator == chr(9) else quoted(written.separator)}")
    told.append(f"decimal {quoted(written.decimal)}")
    if written.thousands:
        told.append(f"thousands {quoted(written.thousands)}")
    if written.symbols:
        told.append(f"symbols {' '.join(written.symbols)} beside numbers")
    if written.marks:
        told.append(f"missing values {' '.join(written.marks)}")
    told += ["no header"] * (not written.header) + [f"{count(written.skip, 'line')} above the header"] * (
        written.skip > 0
    )
    return told
