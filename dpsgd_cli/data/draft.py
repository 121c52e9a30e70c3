"""Draft of a recipe for a file of your own: the only place that guesses. Training reads a file as its recipe says.

The draft holds what was read from the first `ROWS` rows: how the file is written, column names, categories, classes,
and which columns have gaps. If you train with it, you publish them with the result and declare them public; each such
line says so. Bounds are never read, because the least and the largest value are those of single records. You fill them
in, and `recipe/check.py` refuses a recipe that lacks them.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from dpsgd_cli.accounting.budget import usual_delta
from dpsgd_cli.common.sections import TO_FILL_IN, WHOSE, composed
from dpsgd_cli.common.text_format import count, quoted, suggested
from dpsgd_cli.common.yaml_tree import CoreDumper
from dpsgd_cli.data import opening, own_arrays, table_files
from dpsgd_cli.data.cells import MISSING, PLAIN, Cells, TableRows, below_limit, number_of, numbers_in
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.labels import found_classes, read_labels
from dpsgd_cli.data.settings import Data, positive_last
from dpsgd_cli.data.table import to_numbers
from dpsgd_cli.data.table_files import TITLES, known_columns
from dpsgd_cli.errors import DataError

Task = Literal["classification", "regression"]
Role = Literal["number", "category", "hash", "text", "date", "unit", "drop"]
ROWS = 200_000
MOST_CATEGORIES, BUCKETS, WORD_BUCKETS, MOST_CLASSES, MOST_ROWS_OF_A_USER = 50, 64, 128, 20, 10
MOST_CELLS = 1 << 25
"""Most cells of a table whose rows are held in memory, unless the recipe says so."""
READ = "read from the file: keep it only if it is public knowledge"
_OPEN = f"[{', '.join(TO_FILL_IN)}]"
_LINES = 200
_TEXTS_TRIED = 5000
_MOST_SHARE = 0.9
"""Share of a column's different texts that have to look alike before the others count as faults."""
_MARKS = ("unknown", "Unknown", "unbekannt", "-", "--", "---", "\u2013", ".", "..", "*", "n/a", "na", "n.a.", "N.A.",
          "k.A.", "#N/A", "#NV", "none", "NONE")  # fmt: skip
_WRITTEN = ((".", None), (".", ","), (",", None), (",", "."), (",", " "), (".", " "), (".", "'"), (",", "'"))
_DAYS_OF_EXCEL = range(20_000, 60_000)
"""Days since 1900, as Excel counts them: 1954 to 2064."""
_SHORT_YEARS = ("%d.%m.%y", "%d/%m/%y", "%m/%d/%y")
_PERSON = (
    r"user|customer|client|patient|person|member|subject|household|employee|student|driver|visitor|kunde|patientin"
    r"|cust|emp|account|acct"
)
_ID = re.compile(
    rf"(^|.*[^a-z])(id|ids|uid|uuid|guid|ssn|iban|mrn|e-?mail)$"
    rf"|({_PERSON})([^a-z]*(no|nr|number|nummer|code|key|id|name))?$"
)
LEAST_REPEATED, LEAST_DIFFERENT = 1.1, 20
"""A column may name persons if it has more rows per value, on average, and more different values than this."""
ONE_ROW = ""
"""The answer that no person has several rows, in place of the column that tells persons apart."""
_OF_A_DAY = re.compile(r"date|day|datum|tag|jour|fecha|born|since|when|time")
_AFFIX = re.compile(r"[\d.,'\u2019+\-\u2212()]+")
_A_NUMBER = re.compile(r"[^\w]{0,3}\d[\d.,'\u2019\s]*\D{0,8}")
_AN_ADDRESS = re.compile(r"\d{1,3}(\.\d{1,3}){3}|[0-9a-f]{0,4}(:[0-9a-f]{0,4}){2,7}", re.IGNORECASE)


@dataclass(frozen=True)
class Use:
    """A column's apparent content (`kind`), its use in the draft (`role`), and what a person has to confirm.

    `repeated`: rows per value, on average and at most, of a column that may tell persons apart. `odd`: which cells do
    not fit the use, and what may be said of them. Both are private, and are printed only.
    """

    kind: str
    role: Role
    confirm: str
    values: tuple[str, ...] = ()
    form: str = ""
    gaps: bool = False
    whole: bool = False
    repeated: tuple[float, int] | None = None
    odd: str = ""


@dataclass(frozen=True)
class Drafted:
    """The apparent content of a file.

    `uses` are those of its columns but the target (none for an array). `classes` is None if the targets are numbers.
    `units` is the number of records, or of users if a column names them. `open_units` are the columns that may name
    them, until that is answered; `one_row`: the answer is that no person has several rows.
    """

    records: int
    units: int
    uses: dict[str, Use]
    classes: list[Any] | None
    written: TableFormat = PLAIN
    is_array: bool = False
    bytes_only: bool = False
    integers: bool = False
    private: bool = False
    on_disk: bool = False
    odd: tuple[str, ...] = ()
    open_units: tuple[str, ...] = ()
    one_row: bool = False

    def named(self, *roles: str) -> dict[str, Use]:
        """Return the columns of some roles."""
        return {name: use for name, use in self.uses.items() if use.role in roles}


@dataclass(frozen=True)
class Draft:
    """The text of a recipe, and lines that say how the file was read and what each column is used for."""

    recipe: str
    told: list[str] = field(default_factory=list)


def draft(
    path: Path,
    target: str,
    task: Task | None,
    shown: str,
    text: Sequence[str] = (),
    private: Sequence[str] | None = None,
    unit: str | None = None,
) -> Draft:
    """Return a recipe for the file at `path`, which the recipe calls `shown`; the columns `text` hold no numbers.

    `unit` is the column that tells persons apart, or `ONE_ROW`. Without an answer, the recipe of a table that has
    candidates (`_asked`) holds the question, and is refused until it is answered.

    With `private`, the names of the categorical columns, bounds and categories are private: the recipe depends on the
    names of the columns, the number of records and the target, and on no value of any other column.

    Raises DataError with every reason why the file cannot be trained on. No message holds the content of a cell.
    """
    kind = opening.kind_of(path)
    if kind == opening.ARRAYS:
        return Draft(_text(_answered(_of_arrays(path, target, task), unit, ()), target, shown))
    if kind not in table_files.KINDS:
        raise DataError(
            f"{path}: a recipe is drafted for {', '.join((*table_files.KINDS, opening.ARRAYS))}, not {kind}"
        )
    target, unit, text = composed(target), unit and composed(unit), [*map(composed, text)]
    private = private and [*map(composed, private)]
    written = PLAIN if private is not None else format_of(path, kind, target)
    rows, labels = _rows(path, kind, written, target)
    told = [unit] if unit else []
    wrong = [
        f"{path}: --{option} names {quoted(name)}, which is no column{known_columns(name, rows.names)}"
        for option, given in {"target": [target], "text": text, "categorical": private or (), "unit": told}.items()
        for name in given
        if name not in rows or (name == target and option in ("categorical", "unit"))
    ]
    if wrong:
        raise DataError("\n".join(wrong))
    if private is not None:
        uses = {name: Use("", "category" if name in (*private, *text) else "number", "") for name in rows.names}
        del uses[target]
        drafted = Drafted(len(labels), len(labels), uses, _classes(labels, task, path, PLAIN), private=True)
        drafted = _answered(drafted, unit, [name for name in uses if _ID.match(name.lower())])
        return Draft(_text(drafted, target, shown), _question(drafted))
    drafted = _of_table(path, kind, rows, labels, with_numbers(rows, written), task, text)
    drafted = _answered(drafted, unit, [name for name, use in drafted.uses.items() if use.repeated], rows)
    return Draft(_text(drafted, target, shown), _told(drafted, path, target))


def _rows(path: Path, kind: str, written: TableFormat, target: str) -> tuple[TableRows, Cells]:
    """Return the first `ROWS` rows of a table, and the cells of all targets. A target that is no column has none."""
    import pyarrow as pa

    found, labels, done = list[TableRows](), list[pa.Array](), 0
    for part in table_files.parts(path, kind, written):
        if done < ROWS:
            found.append(part)
        done += len(part)
        if target in part:
            labels += part[target].array.chunks
    rows = TableRows(pa.concat_tables([part.arrow for part in found]).slice(0, ROWS))
    held = pa.chunked_array(labels, rows.arrow.column(target).type) if target in rows else pa.chunked_array([[]])
    return rows, Cells(target, held)


def _of_table(
    path: Path, kind: str, rows: TableRows, labels: Cells, written: TableFormat, task: Task | None, text: Sequence[str]
) -> Drafted:
    spelled = [] if task == "regression" else _spelled(labels, written)
    empty, odd = labels.gaps(written, spelled), list[str]()
    if empty.any():
        where = f"{count(int(empty.sum()), 'row')} without a label, first data row {labels.row(empty.argmax())}"
        odd = [f"{labels.name}: {where}; data.rows: labelled leaves such rows out"]
        rows = rows.take(~rows[labels.name].gaps(written, spelled))
    if spelled:
        word, remedy = ", ".join(map(quoted, spelled)), "take it out of data.classes, and say data.rows: labelled"
        odd += [f"{labels.name}: {word} is taken for a class; if it means no label, {remedy}"]
    classes, uses = _classes(labels.take(~empty), task, path, written, spelled), dict[str, Use]()
    for name in rows.names:
        if name == labels.name:
            continue
        uses[name] = use_of(rows[name], written, name in text)
        if uses[name].role == "number" and not uses[name].odd:
            try:
                to_numbers(rows[name], 0.0, written)
            except DataError as error:
                uses[name] = replace(uses[name], odd=str(error))
    if all(use.role == "drop" for use in uses.values()):
        reasons = ", ".join(f"{quoted(name)} ({use.kind})" for name, use in uses.items())
        raise DataError(f"{path.name} has no column to learn from; its others are {reasons}")
    on_disk = len(labels) * len(rows.names) > MOST_CELLS and kind.startswith(table_files.IN_PARTS)
    odd += [use.odd for use in uses.values() if use.odd]
    return Drafted(len(labels), len(labels), uses, classes, written, on_disk=on_disk, odd=tuple(odd))


def _spelled(labels: Cells, written: TableFormat) -> list[str]:
    """Return the words for missing values that are classes: those in labels of which any other is a word, too."""
    texts = {text for text in labels.distinct[0] if text is not None and text.strip()}
    return sorted(texts & {*MISSING}) if any(number_of(text, written) is None for text in texts) else []


def _answered(drafted: Drafted, unit: str | None, asked: Sequence[str], rows: TableRows | None = None) -> Drafted:
    """Return a draft with the column `unit` as unit of privacy, or with the question about the columns `asked`.

    Until it is answered, identifiers are left out, so that either answer is an edit of one line.
    """
    uses = dict(drafted.uses)
    if unit is None:
        for name in asked:
            if drafted.private or uses[name].kind.startswith("identifier"):
                uses[name] = replace(uses[name], role="drop", confirm="whether it names persons")
        asked = sorted(asked, key=lambda name: (not re.search(_PERSON, name.lower()), not _ID.match(name.lower())))
        return replace(drafted, uses=uses, open_units=tuple(asked))
    if unit == ONE_ROW:
        return replace(drafted, one_row=True)
    found = uses.get(unit, Use("", "unit", ""))
    uses[unit] = replace(found, kind="identifier", role="unit", confirm="that it names whose rows these are")
    known = rows is not None and len(rows) == drafted.records
    units = len({*rows[unit].distinct[0]} - {None}) if rows is not None and known else drafted.units
    return replace(drafted, uses=uses, units=units, on_disk=False)


def format_of(path: Path, kind: str, target: str) -> TableFormat:
    """Return how a table is written, but for its numbers; a header is a line of several cells, one of them `target`."""
    if kind == ".xlsx":
        sheets = table_files.sheets_of(path)
        for name in sheets:
            for skip, first in enumerate(table_files.rows_of_sheet(path, name, rows=TITLES)):
                if target in table_files.named(first):
                    return TableFormat(sheet=name if len(sheets) > 1 else None, skip=skip)
        return TableFormat(sheet=sheets[0]) if len(sheets) > 1 else PLAIN
    if not kind.startswith((".csv", ".tsv")):
        return PLAIN
    encoding = _encoding(path)
    with table_files.opened(path, encoding) as stream:
        lines = [line for line, _ in zip(stream, range(_LINES), strict=False)]
    told = re.fullmatch(r'\ufeff?"?sep=(.)"?\s*', lines[0]) if lines else None  # a line that Excel writes
    lines, found = lines[int(told is not None) :], []
    for separator in told[1] if told else ",;\t|":
        reader, rows = csv.reader(lines, delimiter=separator), []
        with contextlib.suppress(csv.Error):  # a cell of more than 131,072 characters
            before = 0
            for cells in reader:
                rows.append((before, cells))
                before = reader.line_num
        heads = [at for at, (_, cells) in enumerate(rows[:TITLES]) if len(cells) > 1 and _holds(cells, target)]
        at = heads[0] if heads else 0
        body = [cells for _, cells in rows[at + 1 : len(rows) - (len(lines) == _LINES)] if cells]
        if rows and len(rows[at][1]) > 1:
            alike = all(len(cells) == len(rows[at][1]) for cells in body)
            found.append((bool(heads), alike, len(rows[at][1]), separator, *rows[at], body))
    if not found:
        separator = told[1] if told else table_files.separator_of(PLAIN, next(filter(str.strip, lines), ""))
        return TableFormat(encoding=encoding, separator=separator, skip=int(told is not None))
    is_head, _, _, separator, before, cells, body = max(found, key=lambda one: one[:3])
    header = is_head or not target.isdecimal() or int(target) > len(cells)
    blank = any(name.startswith(" ") for name in cells) or not any(
        cell.startswith(" ") and cell.strip() for row in body for cell in row
    )
    skip, extra = before * is_head + int(told is not None), None
    if is_head and body and all(len(row) == len(cells) + 1 for row in body):
        extra = "first" if any(row[-1].strip() for row in body) else "last"
    return TableFormat(encoding=encoding, separator=separator, header=header, trim=blank, skip=skip, extra=extra)


def _holds(cells: Sequence[str], target: str) -> bool:
    return target in (name.strip() for name in table_files.named(cells))


def _encoding(path: Path) -> str:
    """Return the encoding of a file: UTF-8 if all of it is, else by the bytes that only Windows uses for letters."""
    with table_files.opened(path, "latin-1") as stream:
        block = stream.buffer.read(1 << 22)
        if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        reader, is_utf8, windows = codecs.getincrementaldecoder("utf-8")(), True, False
        while block:
            if is_utf8:
                try:
                    reader.decode(block)
                except UnicodeDecodeError:
                    is_utf8 = False
            windows = windows or len(block.translate(None, bytes(range(0x80, 0xA0)))) < len(block)
            block = stream.buffer.read(1 << 22)
    return "utf-8-sig" if is_utf8 else "cp1252" if windows else "latin-1"


def with_numbers(rows: TableRows, written: TableFormat) -> TableFormat:
    """Return the format with the decimal mark, groups, symbols and marks of missing values of most number columns."""
    fit = {name: _are_numbers(texts, written, 1.0) for name in rows.names if (texts := _texts(rows[name]))}
    odd = [_texts(rows[name]) for name, fits in fit.items() if not fits]
    marked = [_texts(rows[name])[:_LINES] for name, fits in fit.items() if fits]
    columns = odd + [texts for texts in marked if any(written.decimal in one for one in texts)]
    signs = sorted({sign for texts in odd for sign in _signs(texts)})
    best, most = written, _fit(columns, written)
    for decimal, thousands in sorted(_WRITTEN, key=lambda pair: (pair[0] == ",") != (written.separator == ";")):
        tried = written.changed(decimal=decimal, thousands=thousands, symbols=signs, missing=list(_MARKS), parts=True)
        if odd and (found := _fit(columns, tried)) > most:
            fitting = [texts for texts in columns if _are_numbers(texts, tried)]
            seen = {text for texts in fitting for text in texts}
            symbols = [one for one in signs if any(text.startswith(one) or text.endswith(one) for text in seen)]
            marks = [one for one in _MARKS if one in seen]
            plain = tried.changed(symbols=symbols, missing=marks or None, parts=False)
            best, most = plain if _fit(columns, plain) == found else plain.changed(parts=True), found
    dated = {one for texts in odd if date_form([t for t in texts if t not in _MARKS]) for one in texts if one in _MARKS}
    return best.changed(missing=[one for one in _MARKS if one in {*best.marks, *dated}] or None)


def _fit(columns: Sequence[Sequence[str]], written: TableFormat) -> tuple[int, int, int]:
    """Return how well a format fits: columns of numbers, texts read there, and (below 0) decimals that are all 0.

    So 1,000 and 10,000 are thousands, and 1,00 is 1.
    """
    fitting = [texts for texts in columns if _are_numbers(texts, written)]
    read = [[number for one in texts if (number := number_of(one, written)) is not None] for texts in fitting]
    marked = [any(written.decimal in one for one in texts) for texts in fitting]
    whole = [all(number != number or number == int(number) for number in numbers) for numbers in read]
    return len(fitting), sum(map(len, read)), -sum(map(all, zip(marked, whole, strict=True)))


def _texts(cells: Cells) -> list[str]:
    """Return the first different texts of a column, without the usual words for missing values; none of numbers."""
    if cells.is_typed or cells.is_temporal or cells.is_nested:
        return []
    found = (text.strip() for text in cells.distinct[0][:_TEXTS_TRIED] if text is not None)
    return list(dict.fromkeys(one for one in found if one not in MISSING))


def _signs(texts: Sequence[str]) -> set[str]:
    """Return the one sign or unit beside nearly all numbers, as $, %, kg or the + of 10,000+; none of codes.

    >>> _signs(["70 kg", "80 kg"]), _signs(["70M", "80M"]), _signs(["$70", "$8"]), _signs(["A007", "A070"])
    ({'kg'}, {'M'}, {'$'}, set())
    """
    numbers = [one for one in texts if any(map(str.isdigit, one))]
    beside = [_AFFIX.sub("", one).strip() or one[-1:].strip("0123456789.,'") for one in numbers]
    sign, times = Counter(beside).most_common(1)[0] if beside else ("", 0)
    some = [one for one in numbers[:_TEXTS_TRIED] if sign in one]
    behind = all(re.search(rf"\d\s*{re.escape(sign)}$", one) for one in some)
    codes = any(re.search(r"(^|[^\d.,])0\d", one) for one in some)
    is_sign = not sign.isalpha() or (not codes and (behind or re.fullmatch("[A-Z]{3}", sign) is not None))  # as EUR
    return {sign} if 0 < len(sign) <= 8 and is_sign and times >= _MOST_SHARE * len(beside) else set()


def _are_numbers(texts: Sequence[str], written: TableFormat, least: float = _MOST_SHARE) -> bool:
    """Return True if at least that share of texts are numbers or gaps, and at least one is a number."""
    numbers = [number_of(text, written) for text in texts]
    told = [number for number in numbers if number is not None]
    return len(told) >= least * len(texts) and any(number == number for number in told)


def date_form(texts: Sequence[str]) -> str:
    """Return the form, for strftime, in which all texts are days or moments, "" if there is none. Days come first."""
    import pandas as pd

    if len(texts) < 2 or not all(any(map(str.isdigit, one)) for one in texts[:20]):
        return ""
    series = pd.Series(list(texts), dtype=object)
    for form in _forms(texts[0]):
        plain_year = form == "%Y%m%d" and not all(re.fullmatch(r"(19|20)\d{6}", one) for one in texts)
        if not plain_year and pd.to_datetime(series, format=form, errors="coerce", utc=True).notna().all():
            return form
    return ""


def _forms(text: str) -> list[str]:
    """Return the forms of dates, with a day each, that a text may have."""
    from pandas.tseries.api import guess_datetime_format

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        guessed = [guess_datetime_format(text, dayfirst=first) for first in (True, False)]
    forms = dict.fromkeys([*filter(None, guessed), *_SHORT_YEARS, "%b %d, %Y", "%B %d, %Y"])
    return [form for form in forms if "%d" in form and "%Y-%d" not in form]


def use_of(cells: Cells, written: TableFormat, told_text: bool = False) -> Use:
    """Return the apparent use of a column. `told_text`: its cells are codes, whatever they look like."""
    if cells.is_nested:
        return Use("lists or objects", "drop", "write plain values, a column for each")
    empty = cells.gaps(written)
    texts = list(dict.fromkeys(text for text in cells.take(~empty).distinct[0] if text is not None))
    rows, different, with_gaps = int((~empty).sum()), len(texts), bool(empty.any())
    if not rows or (different < 2 and not with_gaps):
        return Use("one value throughout" if rows else "empty throughout", "drop", "it tells nothing")
    # the time of a day is midnight where a typed file or a frame tells days as moments
    form = "" if told_text else date_form([text.removesuffix("+00:00").removesuffix(" 00:00:00") for text in texts])
    if form:
        return Use("dates", "date", _to_confirm(form, texts), form=form, gaps=with_gaps)
    coded = told_text or any(re.fullmatch(r"0\d+", one) for one in texts)
    if not coded and not {*map(str.casefold, texts)} <= {"true", "false"}:
        numbers, bad = numbers_in(cells, written)
        odd = [one for one in texts if number_of(one, written) is None] if bad.any() else []
        if np.isfinite(numbers).any() and (not odd or _are_numbers(texts[:_TEXTS_TRIED], written)):
            use = _of_numbers(cells.name, numbers[~empty & ~bad], different)
            if use is not None and use.role == "number" and not cells.is_typed:
                use = replace(use, confirm=use.confirm + _read_as(texts, written))
            if use is not None:
                told = _offers(cells, odd, "number") if odd else ""
                return replace(_asked(use, cells, empty), gaps=with_gaps or bool(odd), odd=told)
        elif odd and (use := _mixed(cells, texts, written)) is not None:
            return use
    return _asked(_of_texts(cells.name, texts, rows, coded), cells, empty)


def _read_as(texts: Sequence[str], written: TableFormat) -> str:
    """Return how the first number with a unit, a mark or several parts is read, "" if none has."""
    found = ((one, number_of(one, written)) for one in texts if number_of(one, PLAIN) is None)
    return next((f" ({quoted(one.strip())} is read as {number:g})" for one, number in found if number is not None), "")


def _asked(use: Use, cells: Cells, empty: np.ndarray) -> Use:
    """Return a use with the rows per value, if the column may tell persons apart: see `LEAST_REPEATED`.

    Not asked about are numbers that are measured, few categories, and dates: `_of_numbers` and `_of_texts` take what
    may name persons for an identifier, a hash or text.
    """
    times = np.bincount(cells.take(~empty).distinct[1])
    times = times[times > 0]
    named = use.role in ("hash", "text") and len(times) > LEAST_DIFFERENT and times.mean() > LEAST_REPEATED
    return replace(use, repeated=(float(times.mean()), int(times.max()))) if named else use


def _to_confirm(form: str, texts: Sequence[str]) -> str:
    """Return what to confirm of a form: also if days and months could be taken for each other."""
    import pandas as pd

    other = form.replace("%d", "%\0").replace("%m", "%d").replace("%\0", "%m")
    if other != form and not form.startswith("%Y") and "%m" in form:
        read = pd.to_datetime(pd.Series(list(texts), dtype=object), format=other, errors="coerce")
        if read.notna().all():
            return f"first and last day, and that {form} is right: {other} would fit too"
    return "first and last day"


def _of_numbers(name: str, numbers: np.ndarray, different: int) -> Use | None:
    """Return the use of a column of numbers, as they follow each other; None for two different ones."""
    whole = bool((numbers == np.floor(numbers)).all())
    if whole and len(numbers) > 2 and (np.diff(numbers) == 1).all():
        return Use("row numbers", "drop", "they tell nothing")
    numbered = len(numbers) > LEAST_REPEATED * different and _numbered(numbers)
    if whole and (_ID.match(name.lower()) or numbered) and (use := _of_names(different, len(numbers))) is not None:
        return use
    if different <= 2:
        return None
    dated = numbers.min() in _DAYS_OF_EXCEL and numbers.max() in _DAYS_OF_EXCEL
    if whole and dated and _OF_A_DAY.search(name.lower()):
        told = "least and largest value; if Excel counted these days from 1900, write them as dates"
        return Use("whole numbers", "number", told, whole=True)
    return Use("whole numbers" if whole else "numbers", "number", "least and largest value", whole=whole)


def _numbered(numbers: np.ndarray) -> bool:
    """Return True if whole numbers look given, not measured: nearly all have as many digits, at least four.

    Numbers of four or five digits also have to lie evenly between the least and the largest, and no year is one. If
    half of the different numbers end in one digit, they are prices or rounded.
    """
    every = np.unique(numbers)
    digits = np.array([len(str(abs(int(one)))) for one in every])
    common = int(np.bincount(digits).argmax())
    different = every[digits == common]
    if common < 4 or len(different) < max(2, _MOST_SHARE * len(every)) or 1900 <= different[0] <= different[-1] <= 2100:
        return False
    places = (different - different[0]) / (different[-1] - different[0])
    even = np.abs(places - np.linspace(0, 1, len(different))).max() < 0.1
    return bool(2 * np.bincount((different % 10).astype(int)).max() < len(different) and (even or common > 5))


def _of_names(different: int, rows: int) -> Use | None:
    """Return the use of a column that names something; None if its values are too few to name persons."""
    if different == rows:
        return Use("identifier", "drop", "different in each row, so nothing can be learnt from it")
    if different <= LEAST_DIFFERENT:
        return None
    return Use("identifier, repeated", "hash", "that it names no person; if it does, privacy.unit should name it")


def _of_texts(name: str, texts: list[str], rows: int, coded: bool) -> Use:
    different, some = len(texts), texts[:_TEXTS_TRIED]
    words = float(np.mean([len(re.findall(r"\w+", one)) for one in some])) if texts else 0.0
    addresses = all(_AN_ADDRESS.fullmatch(one) for one in some)
    if words >= 3 and not addresses and (different > MOST_CATEGORIES or (different == rows and rows >= 10)):
        return Use("free text", "text", "nothing: no word of it is in the recipe or the model")
    shapes = Counter(re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "0", one)) for one in some)
    shape, times = shapes.most_common(1)[0] if shapes else ("", 0)
    numbered = shape.count("0") >= 3 and times >= _MOST_SHARE * len(some)
    if (
        rows >= 10
        and (different == rows or _ID.match(name.lower()) or numbered)
        and (use := _of_names(different, rows)) is not None
    ):
        return use
    kind = "codes" if coded else "category"
    if different <= MOST_CATEGORIES:
        spelt = Counter(one.strip().casefold() for one in texts)
        alike = sorted(repr(one) for one in texts if spelt[one.strip().casefold()] > 1)
        apart = f"; told apart, though they look alike: {', '.join(alike)}" if alike else ""
        return Use(kind, "category", f"its values, read from the file{apart}", values=tuple(sorted(texts)))
    near = "that it names no person: nearly each row has its own" if rows < 1.5 * different else ""
    told = near or "nothing: no value of it is in the recipe or the model"
    return Use(f"{kind}, {different} different", "hash", told)


def _mixed(cells: Cells, texts: Sequence[str], written: TableFormat) -> Use | None:
    """Return the use of a column most of whose cells are numbers or dates of one form, with what is odd; else None."""
    import pandas as pd

    few = texts[:_TEXTS_TRIED]
    if len(few) < 5:
        return None
    if sum(_A_NUMBER.fullmatch(one) is not None for one in few) >= _MOST_SHARE * len(few):
        every = {"symbols": sorted({*written.symbols, *_signs(few)}), "missing": list(_MARKS)}
        forms = [written, *(written.changed(decimal=mark, thousands=group, **every) for mark, group in _WRITTEN)]
        fits = [sum(number_of(one, form) is not None for one in few) for form in forms]
        form = forms[int(np.argmax(fits))]
        if 2 * max(fits) > len(few):
            odd = [one for one in few if number_of(one, form) is None]
            kind = f"numbers in another form (decimal {quoted(form.decimal)}, thousands {quoted(form.thousands)})"
            told = _offers(cells, odd, "number of that form") if odd else ""
            return Use(kind, "drop", "write them as those of other columns, to use them", odd=told)
    for day in dict.fromkeys(form for one in few[:20] for form in _forms(one) if "%Y" in form):
        fit = pd.to_datetime(pd.Series(few, dtype=object), format=day, errors="coerce", utc=True).notna()
        if 0.5 <= fit.mean() < 1:
            odd = [one for one, fits in zip(few, fit, strict=True) if not fits]
            told = _offers(cells, odd, f"date of the form {day}")
            if not any(map(str.isdigit, "".join(odd))):
                return Use("dates", "date", "first and last day", form=day, gaps=True, odd=told)
            return Use("dates in several forms", "drop", "write them in one form, to use them", odd=told)
    return None


def _offers(cells: Cells, odd: Sequence[str], wanted: str) -> str:
    """Return which cells are no number (or date), and each remedy that fits one, in the words of the file."""
    known = {*odd}
    which = cells.mapped(lambda text: text is not None and (text in known or text.strip() in known), bool)
    limits = [one for one in odd if below_limit(one) is not None]
    marks = [one for one in odd if one in limits or not _A_NUMBER.match(one)]
    offers = [f"data.format.below: limit reads {quoted(limits[0])} as {below_limit(limits[0])}"] if limits else []
    offers += [f"data.format.missing: [{', '.join(map(quoted, marks[:3]))}] as a missing value"] if marks else []
    if len(marks) < len(odd):
        what = "mend the others" if offers else "mend it"
        offers += [f"{what}, or say that these are codes: --text {quoted(cells.name)}"]
    shown = ", ".join(map(quoted, odd[:3])) + ", ..." * (len(odd) > 3)
    number = f"{count(int(which.sum()), 'cell')} {'is' if which.sum() == 1 else 'are'} no {wanted}"
    return f"{cells.name}: {number}, first in data row {cells.row(which.argmax())}: {shown}; {', '.join(offers)}"


def _of_arrays(path: Path, target: str, task: Task | None) -> Drafted:
    stored = own_arrays.load(path)
    wrong = [f"{path} has no array {name!r}{suggested(name, stored)}" for name in ("x", target) if name not in stored]
    if wrong:
        raise DataError("\n".join(wrong))
    x, y = stored["x"], stored[target]
    own_arrays.check_shapes(x, y, x, f"{path}: x", f"{path}: the labels")
    own_arrays.check_values(x, f"{path}: x")
    classes = _classes(Cells.of(target, y), task, path, PLAIN)
    whole, pixels = own_arrays.whole(x), x.dtype == np.uint8
    return Drafted(len(x), len(x), {}, classes, is_array=True, bytes_only=pixels, integers=whole)


def _classes(
    labels: Cells, task: Task | None, path: Path, written: TableFormat, spelled: Sequence[str] = ()
) -> list[Any] | None:
    """Return the classes, spelled as in the file; None if the targets are numbers. `spelled`: see `_spelled`.

    Without `task`, targets are numbers if they have over `MOST_CLASSES` values or any fraction.
    """
    try:
        numbers = to_numbers(labels, 0.0, written, is_target=True)
        many = len(np.unique(numbers)) > MOST_CLASSES or not np.all(numbers == np.floor(numbers))
    except DataError:
        many = False
    asked: Task = task or ("regression" if many else "classification")
    if asked == "regression":
        read_labels(Data(path=path.name, target=labels.name, task=asked, format=written), [labels], [path], None)
        return None
    return positive_last([*found_classes([labels], written, listed=spelled)])


def _text(drafted: Drafted, target: str, shown: str) -> str:
    """Return the recipe, with a comment beside everything that a person has to judge."""
    told = drafted.written.model_dump(mode="json", exclude_defaults=True)
    told = {key: value for key, value in told.items() if value not in (None, [])}
    stem = Path(shown).name.partition(".")[0]
    name = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem).strip("-") or "mine"
    lines = [
        f"# How well can {target} be learnt from {Path(shown).name} in private?   dpsgd train FILE, once filled in",
        "# yaml-language-server: $schema=recipe.schema.json",
        *_about(drafted),
        f"name: {name[:80]}",
        "data:",
        f"  path: {_yaml(shown)}",
        *[f"  format: {_yaml(told)}     # how the file is written: training reads it so, not otherwise"] * bool(told),
        *["  on_disk: true     # a large table: it is read in parts, and its rows stay on disk"] * drafted.on_disk,
        f"  target: {_yaml(target)}",
        *_target_lines(drafted),
        *_column_lines(drafted),
    ]
    binned = "  preprocess: [{bin: {}}]     # each column as cosine features over its bounds; data-independent"
    steps = [] if drafted.is_array else [binned]
    whole = [name for name, use in drafted.named("number").items() if use.whole]
    if whole:
        steps = [f"  preprocess: [{{bin: {{integers: {_yaml(whole)}}}}}]     # whole numbers: {READ}"]
    unit = [
        f"  unit: {{column: {_yaml(name)}, most_rows: {MOST_ROWS_OF_A_USER}}}     # all rows of one together"
        for name in drafted.named("unit")
    ]
    if drafted.open_units:
        unit = [f"  unit: {_yaml([WHOSE, *drafted.open_units])}     # open: say whose rows these are"]
    if drafted.one_row:
        unit = ["  unit: null     # you said: one row a person"]
    of = "users" if drafted.named("unit") and not drafted.private else "rows" if drafted.named("unit") else "records"
    delta = f"{usual_delta(drafted.units):g}".replace("e-0", "e-")
    return "\n".join(
        [
            *lines,
            "  split: {test: 0.2}",
            "  evaluation: private     # a noisy measurement of the held-out fifth, which costs nothing more",
            *steps,
            "model: {kind: linear}",
            "method: {kind: dp-sgd, batching: full}     # its settings by rule: --dry-run shows them",
            "privacy:",
            *unit,
            f"  budget: {{epsilon: 1, delta: {delta}}}     # at most 1e-5, and a tenth of 1 / {drafted.units} {of}",
            "",
        ]
    )


def _about(drafted: Drafted) -> list[str]:
    """Return the comment on where the recipe's facts are from."""
    if drafted.private:
        of_target = [f"# Fill in {_OPEN} of the target from public knowledge."] * (drafted.classes is None)
        return [
            "# Of the columns beside the target only names were used; which hold categories is what you said. Their",
            "# bounds and categories are released with noise for a share of the budget (data.discovery); public bounds",
            "# in place of `private` cost nothing. Columns that are no features (row numbers) belong under data.drop.",
            *of_target,
        ]
    return [
        f"# Fill in each {_OPEN} from public knowledge: never from this file, whose least and largest values are those",
        "# of single records. What was read from the file says so: it is published with the result and protected by",
        "# nothing, so leave out what nobody could know without the file.",
    ]


def _target_lines(drafted: Drafted) -> list[str]:
    if drafted.classes is None:
        return [
            "  task: regression",
            f"  target_bounds: {_OPEN}     # what the target can be, in its own unit",
            "  target_transform: auto     # log if these bounds span orders of magnitude, as prices do; else null",
        ]
    found = ["  task: classification", f"  classes: {_yaml(drafted.classes)}     # {READ}"]
    which = f"  positive: {_yaml(drafted.classes[-1])}     # to confirm: sensitivity and costs are of this class"
    return found + [which] * (len(drafted.classes) == 2)


def _column_lines(drafted: Drafted) -> list[str]:
    """Return the recipe's lines about the features."""
    lines = []
    if drafted.named("category"):
        lines += ["  categorical:     # an empty cell is a category of its own"]
        lines += [
            f"    {_yaml(n)}: private" if drafted.private else f"    {_yaml(n)}: {_yaml(list(use.values))}     # {READ}"
            for n, use in drafted.named("category").items()
        ]
    if drafted.bytes_only:
        lines += ["  bounds: [0, 255]     # what a byte can be"]
    elif drafted.is_array and not drafted.integers:
        lines += [f"  bounds: {_OPEN}     # of every feature"]
    elif drafted.named("number"):
        lines += ["  bounds:"]
        lines += [f"    {_yaml(name)}: {'private' if drafted.private else _OPEN}" for name in drafted.named("number")]
    if drafted.named("date", "hash", "text"):
        lines += ["  columns:     # rules that look at no other record, and list no value"]
        lines += [f"    {_yaml(name)}: {_rule(use)}" for name, use in drafted.named("date", "hash", "text").items()]
    told = {name: use for name, use in drafted.named("number", "date").items() if use.gaps}
    if told:
        lines += ["  missing:     # the middle of the bounds, and a column that says so, unless you give a value"]
        lines += [f"    {_yaml(name)}: {{indicator: true}}     # {READ}" for name in told]
    if drafted.named("drop"):
        lines += ["  drop:"]
        lines += [f"    - {_yaml(name)}     # {use.kind}: {use.confirm}" for name, use in drafted.named("drop").items()]
    return lines


def _rule(use: Use) -> str:
    if use.role == "date":
        return f"{{date: {_yaml(use.form)}, bounds: {_OPEN}}}     # first and last day, as 2020-12-31"
    return f"{{hash: {BUCKETS}}}" if use.role == "hash" else f"{{text: {WORD_BUCKETS}}}"


_USES = {
    "number": "a curve within its bounds",
    "category": "one feature a value",
    "hash": f"a public hash into {BUCKETS} buckets",
    "text": f"hashed words and pairs of words, {WORD_BUCKETS} buckets",
    "date": "days, month, weekday (and hour)",
    "unit": "privacy.unit: protected with all rows",
    "drop": "left out",
}
"""How each role of a column is used, in the table that `recipe new` prints."""


def _told(drafted: Drafted, path: Path, target: str) -> list[str]:
    """Return the table of columns, below how the file is written."""
    kind = "numbers" if drafted.classes is None else f"{len(drafted.classes)} classes"
    confirm = "least and largest value" if drafted.classes is None else "its classes, read from the file"
    if drafted.classes is not None and len(drafted.classes) == 2:
        confirm += f", and that {drafted.classes[1]} is the positive one"
    rows = [("column", "kind", "use", "to confirm"), (target, kind, "the target", confirm)]
    for name, use in drafted.uses.items():
        rows.append((name, use.kind + ", with gaps" * use.gaps, _USES[use.role], use.confirm))
    widths = [max(len(row[at]) for row in rows) for at in range(3)]
    aligned = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip()
        for row in rows
    ]
    looked = "The whole file was" if drafted.records <= ROWS else f"Its targets and its first {ROWS} rows were"
    return [
        f"{path.name}: {count(drafted.records, 'row')}; {', '.join(_said(drafted.written)) or 'written as usual'}",
        f"{looked} looked at, on this machine and outside of any guarantee. Training guesses at most a separator.",
        "",
        *aligned,
        *(["", *drafted.odd] if drafted.odd else []),
        *_question(drafted),
    ]


def _question(drafted: Drafted) -> list[str]:
    """Return the rows per value of the columns that may tell persons apart, and the question that is open."""
    asked = {name: use.repeated for name, use in drafted.uses.items() if use.repeated}
    told = [f"rows per value of {name}: {mean:.2f}, at most {most}" for name, (mean, most) in asked.items()]
    if drafted.open_units:
        told += ["Whose rows are these? All rows of a person have to be protected together. Answer before you train:"]
        told += [f"--unit {drafted.open_units[0]} (or another), --one-row-a-person, or privacy.unit in the recipe."]
    return ["", *told] if told else []


def _said(written: TableFormat) -> list[str]:
    """Return how a table is written, by option of `data.format`."""
    told = written.model_dump(exclude_defaults=True, exclude_none=True)
    told |= {key: " ".join(one) for key, one in told.items() if isinstance(one, list)}
    shown = {"\t": "tab", False: "no", True: "yes"}
    return [f"{key} {shown.get(one) or quoted(one)}" for key, one in told.items() if one != ""]


def _yaml(value: Any) -> str:
    """Return one line of YAML that a recipe reads as `value`."""
    text = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10**9, allow_unicode=True)
    text = text.removesuffix("...\n").strip()
    return text if "\n" not in text else json.dumps(value)
