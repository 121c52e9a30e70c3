"""Settings for the cells of a table (`format`), and for columns of dates, codes and text (`columns`).

Cards and a user's own files share `TableFormat`; `data/table_files.py` reads by it. `data/computed_columns.py` computes
the features of `ColumnUse`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue, model_validator

from dpsgd_cli.common.sections import Section

Mark = Annotated[str, Field(min_length=1, max_length=1)]
Cycle = Literal["year", "week", "day"]
MOST_UNPACKED = 1 << 32
"""Most bytes that a packed file may unpack to, unless a card declares its `bytes`."""
_A_MOMENT = datetime(2001, 12, 28, 23, 58, 59, 123456, UTC)


def _known_encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        raise ValueError(f"{name!r} is no encoding of text; try utf-8 or latin-1") from None
    return name


class TableFormat(Section):
    """Format of a table file, for cards and for a user's own files alike. Files with typed cells use part of it."""

    encoding: Annotated[str, AfterValidator(_known_encoding)] = Field(
        "utf-8-sig", description="Of the text: utf-8-sig (UTF-8, with or without a byte order mark), cp1252, ..."
    )
    separator: Mark | None = Field(
        None, description="Between two cells; left out, the most frequent of , ; | and tab in the header."
    )
    decimal: Mark = Field(".", description="The decimal mark.")
    thousands: Mark | None = Field(
        None, description="Between groups of three digits; a space stands for every kind of space, ' for \u2019 too."
    )
    symbols: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="Signs before or after a number, such as $ or %; 12% is read as 12.",
        examples=[["$", "%"]],
    )
    missing: list[str] | str | None = Field(
        None, description="Cells that hold no value, beside empty ones and the usual words (NA, null, ?, ...)."
    )
    below: Literal["limit", "half"] | None = Field(
        None, description="A cell as <0.2, below a detection limit, is read as the limit, or as half of it."
    )
    parts: bool = Field(
        False, description="22:20 and 2h 50m are numbers of hours (22.33, 2.83), and 5'11 of feet (5.92)."
    )
    header: bool = Field(True, description="The first line holds the column names; else they are 1, 2, 3, ...")
    skip: Annotated[int, Field(ge=0, le=1000)] = Field(0, description="Lines above the header, or the first record.")
    extra: Literal["first", "last"] | None = Field(
        None,
        description="Rows have one cell more than the header: the first (row names, as R writes them), or the last (a"
        " separator at the end of each line).",
    )
    comment: Mark | None = Field(None, description="What follows this character in a line is skipped.", examples=["#"])
    trim: bool = Field(True, description="Blanks before a cell are no part of it.")
    sheet: str | None = Field(None, description="Of an Excel file; left out, the first.", examples=["2024"])

    @model_validator(mode="after")
    def _no_record_decides_how_the_file_is_read(self) -> TableFormat:
        """Require a separator if the first line is a record: neighbours could otherwise be read in different ways."""
        if not self.header and self.separator is None:
            raise ValueError("separator: is needed with header: false, where the first line is a record; give it")
        if self.decimal == self.thousands:
            raise ValueError(f"thousands: is {self.thousands!r}, which is the decimal mark")
        return self

    @property
    def marks(self) -> list[str]:
        """Return the cells that hold no value by `missing`."""
        return [self.missing] if isinstance(self.missing, str) else list(self.missing or ())


class Missing(Section):
    """Value for missing cells. It is public and fills each record on its own, so it costs no privacy."""

    value: float | str | None = Field(
        None, description="Stands in its place; left out, the middle of the column's bounds, or the category ''."
    )
    indicator: bool = Field(False, description="Add a column that is 1 where the value was missing (numeric columns).")


def _known_form(form: str) -> str:
    """Return a form of dates. Raises ValueError unless it tells a day from any other."""
    try:
        read = datetime.strptime(_A_MOMENT.strftime(form), form)
    except ValueError:
        read = None
    if read is None or read.date() != _A_MOMENT.date():
        raise ValueError(f"{form!r} does not say year, month and day of a date, as %Y-%m-%d or %d.%m.%Y do")
    return form


_OF_A_DAY: dict[str, JsonValue] = {"x-form": "a day such as 2020-12-31", "examples": ["0001-01-01", "9999-12-31"]}
Day = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$", json_schema_extra=_OF_A_DAY)]


class DateColumn(Section):
    """A column of dates: days within public bounds, and what repeats each year, month, week and day, as categories."""

    date: Annotated[str, AfterValidator(_known_form)] = Field(
        description="Form of a cell in the signs of strftime, as %d.%m.%Y; cells that are dates in the file need none."
    )
    bounds: tuple[Day, Day] = Field(description="Public first and last day, as 2020-12-31; dates outside are clamped.")

    @model_validator(mode="after")
    def _ascending(self) -> DateColumn:
        first, last = self.ends
        if not first < last:
            raise ValueError(f"bounds: {list(self.bounds)} must be [first, last] with the first day before the last")
        return self

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """Return the bounds as times; the last day is whole. Raises ValueError for a day that no calendar has."""
        try:
            first, last = (datetime.fromisoformat(day) for day in self.bounds)
        except ValueError:
            raise ValueError(f"bounds: {list(self.bounds)} holds a day that no calendar has") from None
        return first, last

    @property
    def told_cycles(self) -> list[Cycle]:
        """Return the cycles that the form tells: year (12 months), week (7 days) and, with hours, day (24 hours)."""
        hours = any(sign in self.date for sign in ("%H", "%I", "%T", "%X", "%c"))
        return ["year", "week", "day"] if hours else ["year", "week"]


class HashedColumn(Section):
    """A column of many categories: each goes to one of a number of buckets, by a public hash of its text."""

    hash: Annotated[int, Field(ge=2, le=10_000)] = Field(
        description="How many buckets. Categories that share one are alike; no list of them is needed or published."
    )


class TextColumn(Section):
    """A column of free text: its words and runs of words, counted in buckets by a public hash, at length 1."""

    text: Annotated[int, Field(ge=2, le=10_000)] = Field(description="How many buckets.")
    words: Annotated[int, Field(ge=1, le=5)] = Field(2, description="Longest run of words that is counted.")
    rarity: str | None = Field(
        None, description="A language, as en: its rare words count more, by wordfreq's public list; needs dpsgd[text]."
    )
    lexicon: Literal["vader"] | None = Field(
        None, description="Add the sentiment of English words, by VADER's public list; needs dpsgd[text]."
    )


ColumnUse = DateColumn | HashedColumn | TextColumn


@dataclass(frozen=True)
class Computed:
    """Rule by which a column follows from the cells of a file's column `of`, each by itself (`computed_columns.py`).

    `kind` is `days` since the day `first`; the month, weekday or hour of a date (`year`, `week`, `day`);
    `hash`, one of `buckets` buckets; or `text`, the feature number `bucket` of runs of up to `words` words, weighted by
    `rarity` and followed by sentiments of a `lexicon` (`computed_columns.py`). `form` is that of dates.
    """

    of: str
    kind: Literal["days", "year", "week", "day", "hash", "text"]
    form: str = ""
    first: str = ""
    buckets: int = 0
    bucket: int = 0
    words: int = 0
    rarity: str | None = None
    lexicon: str | None = None

    @property
    def features(self) -> int:
        """The number of features of the text."""
        return self.buckets + 2 * (self.lexicon is not None)
