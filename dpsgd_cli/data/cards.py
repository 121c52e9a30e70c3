"""Data set cards (`datasets/NAME.yaml`, or a user's own): their schema, and how they are found.

A card holds public knowledge only: where the files are, their hashes, what the columns mean and what values they can
take. `card_files.py` finds, checks and downloads the files; `card_readers.py` decodes them.

A recipe's public bounds replace those of a card. The accuracy of a private method depends on the scale of its features,
and a card's bounds are generous: scaling by a narrower interval makes the feature larger. If you know better bounds
from outside the data, declare them in `data.bounds`. Values outside are clamped when the table is read, record by
record, so that the bounds hold whatever the records are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from dpsgd_cli.common.package_files import irregularity, shipped
from dpsgd_cli.common.sections import Count, Interval, Section
from dpsgd_cli.common.text_format import shortened, suggested
from dpsgd_cli.data import texts
from dpsgd_cli.data.column_settings import MOST_UNPACKED, ColumnUse, TableFormat, TextColumn
from dpsgd_cli.data.computed_columns import columns_of
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.settings import Data, Split
from dpsgd_cli.data.step_settings import PreprocessStep
from dpsgd_cli.errors import DataError, UsageError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$", max_length=200)]
"""A plain file name, without folder or leading dot: nothing is written or deleted outside a data set's folder."""
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$", max_length=2000)]


class Variant(Section):
    """Other content that is accepted under the same file name."""

    sha256: Sha256
    records: Count
    bytes: Count
    replace: dict[str, str] = Field(
        default_factory=dict, description="Texts that turn it back into the canonical content, which is then checked."
    )
    note: str = Field(description="Where it comes from, and how it differs.")


class File(Section):
    """One file, identified by its CONTENT: `name` and `sha256` are those of the uncompressed bytes.

    On disk it is `name` or, compressed, `name.gz`. Only the content is hashed, because gzip output is not canonical.
    """

    name: FileName = Field(description="File name inside the data set's folder, without .gz.")
    part: Literal["train", "test"] = "train"
    holds: Literal["records", "images", "labels"] = "records"
    records: Count = Field(description="Usable records in it.")
    sha256: Sha256
    bytes: Annotated[int, Field(gt=0, le=MOST_UNPACKED)] | None = Field(
        None, description="Uncompressed; nothing is unpacked beyond it. A file with addresses or in an archive says it."
    )
    variants: list[Variant] = Field(default_factory=list)
    urls: list[Url] = Field(default_factory=list, description="http(s) addresses, tried in order; plain or gzip.")
    member: str | None = Field(None, description="Its path inside the card's archive.")

    @property
    def most_bytes(self) -> int:
        """The most uncompressed bytes that the file, or a variant of it, may have. Bundled readers read no file."""
        return max([self.bytes or MOST_UNPACKED, *(variant.bytes for variant in self.variants)])


class Archive(Section):
    """One zip or tar file that holds several of the card's files."""

    name: FileName
    urls: Annotated[list[Url], Field(min_length=1)]
    sha256: Sha256


class IdxReader(Section):
    kind: Literal["idx"] = "idx"


class CifarReader(Section):
    kind: Literal["cifar"] = "cifar"


class BundledReader(Section):
    kind: Literal["bundled"] = "bundled"
    file: Literal["digits.csv.gz", "breast_cancer.csv"]
    skip: int = Field(0, ge=0, description="Lines before the first record.")


class TableReader(TableFormat):
    """Text tables, written as `TableFormat` says; a row with a cell of `missing` is left out as a whole."""

    kind: Literal["table"] = "table"


Reader = Annotated[IdxReader | CifarReader | BundledReader | TableReader, Field(discriminator="kind")]


class CardColumn(Section):
    """Public knowledge about one column: at most one of `bounds`, `values`, `use` and `drop`; none for the target."""

    bounds: Interval | None = Field(None, description="[low, high]; values outside are clamped.")
    values: list[str] | None = Field(None, description="Every value of a categorical column.")
    use: ColumnUse | None = Field(None, description="Dates, codes or text, as in data.columns, which may replace it.")
    drop: bool = False
    source: str = Field("", description="Why the bounds are public knowledge.")

    @model_validator(mode="after")
    def _one_kind(self) -> CardColumn:
        if sum([self.bounds is not None, self.values is not None, self.use is not None, self.drop]) > 1:
            raise ValueError("give only one of bounds, values, use and drop")
        return self


@dataclass(frozen=True)
class Instead:
    """Rows that a recipe takes in place of a card's columns: their layout, how a table gives them, what is declared."""

    layout: Layout
    rows: Callable[[Any], np.ndarray]
    declarations: tuple[str, ...] = ()


class Card(Section):
    """One data set: its description, its files, how they are read, and what is public about them."""

    name: Name
    description: str
    homepage: str = ""
    licence: str = ""
    citation: str = ""
    reader: Reader
    files: Annotated[list[File], Field(min_length=1)]
    archive: Archive | None = None
    shape: list[Count] | None = Field(None, description="Of one record, for images: channels, height, width.")
    bounds: Interval | None = Field(None, description="Of every pixel as stored; it is read as [0, 1].")
    columns: dict[str, CardColumn] | None = Field(None, description="Every column of the table, in file order.")
    target: str | None = Field(None, description="The label column of a table.")
    classes: list[Any] | dict[str, list[str]] = Field(
        description="Public class labels in index order; for a table, each with its raw values ('*': all others)."
    )
    split: Split | None = Field(None, description="How a test set is cut where the files have none.")
    preprocess: list[PreprocessStep] = Field(default_factory=list, description="Default steps.")
    bounds_source: str = Field("", description="Why the bounds and categories are public knowledge.")
    part_of: Name | None = Field(
        None, description="A shipped card of images, which says the rest: of its records those of `classes` are these."
    )
    kept: dict[str, Annotated[list[Count], Field(min_length=1)]] | None = Field(
        None, description="With part_of, how many records of `classes` each file holds, and then each of its variants."
    )
    _instead: Instead | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _consistent(self) -> Card:
        problems = []
        if (self.columns is None) == (self.shape is None):
            problems.append("give either columns (a table) or shape and bounds (images)")
        if self.shape is not None and self.bounds is None:
            problems.append("images need bounds")
        if self.columns is not None and self.reader.kind == "table" and self.target not in self.columns:
            problems.append(f"target {self.target!r} is not among the columns")
        if any(file.part == "test" for file in self.files) == (self.split is not None):
            problems.append("give split exactly when no file is a test part")
        problems += [
            f"file {file.name}: member needs an archive" for file in self.files if file.member and not self.archive
        ]
        problems += [
            f"file {file.name}: give bytes, its uncompressed size; nothing is unpacked beyond it"
            for file in self.files
            if file.bytes is None and (file.urls or file.member)
        ]
        taken = [file.name for file in self.files] + ([] if self.archive is None else [self.archive.name])
        problems += [f"two files are called {name}" for name in sorted({one for one in taken if taken.count(one) > 1})]
        problems += self._problems_of_a_part()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _problems_of_a_part(self) -> list[str]:
        """Return the problems of a part's `part_of` and `kept`, its public numbers of records."""
        if self.part_of is None:
            return [] if self.kept is None else ["kept: goes with part_of"]
        wanted = {file.name: 1 + len(file.variants) for file in self.files if file.holds != "labels"}
        found = {name: len(numbers) for name, numbers in (self.kept or {}).items()}
        problems = [] if found == wanted else [f"kept: give numbers of records, so many of each file: {wanted}"]
        if self.shape is None or not isinstance(self.classes, dict):
            problems.append("part_of: is for images, with classes as {name: [label in the files]}")
        return problems

    @property
    def folder(self) -> str:
        """The name of the folder of its files."""
        return self.part_of or self.name

    def records(self, file: File, variant: int = 0) -> int:
        """Return the number of the card's usable records in `file`, or in its variant number `variant` (from 1)."""
        if self.kept is not None and file.name in self.kept:
            return self.kept[file.name][variant]
        return file.variants[variant - 1].records if variant else file.records

    @property
    def labels(self) -> tuple[Any, ...]:
        """The class labels, in index order."""
        return tuple(self.classes)

    @property
    def features(self) -> dict[str, CardColumn]:
        """The columns of a table that reach training, in order."""
        return {k: v for k, v in (self.columns or {}).items() if k != self.target and not v.drop}

    @property
    def instead(self) -> Instead | None:
        """Return the rows that a recipe takes in place of the card's columns; None if it takes them."""
        return self._instead

    @functools.cached_property
    def layout(self) -> Layout:
        """The layout of one record as read; pixels are scaled from `bounds` to [0, 1]."""
        if self.shape is not None:
            return Layout(tuple(self.shape), bounds=(0.0, 1.0))
        if self._instead is not None:
            return self._instead.layout
        columns: list[Column] = []
        for name, column in self.features.items():
            values = None if column.values is None else tuple(column.values)
            plain = [Column(name, column.bounds, values)]
            columns += plain if column.use is None else columns_of(name, column.use, None, [])
        return Layout((len(columns),), tuple(columns))

    def part(self, which: Literal["train", "test"], holds: str = "records") -> list[File]:
        """Return the files of one part, in order."""
        return [file for file in self.files if file.part == which and file.holds == holds]


def read_card(path: Path) -> Card:
    """Read and validate one card; raises DataError naming the file and every problem in it."""
    import yaml

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        card = Card.model_validate(_whole(content))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); save the card as UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{path} is not YAML: {shortened(str(error), 400)}") from None
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, entry['loc'])) or 'card'}: {entry['msg']}" for entry in error.errors()]
        raise DataError(f"{path} is not a data set card:\n" + "\n".join(lines)) from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        # a tag does not fit its value, as in !!int mine
        raise DataError(f"{path} has a YAML tag that does not fit its value: {shortened(str(error), 200)}") from None
    if card.name != path.stem:
        raise DataError(f"{path}: name is {card.name!r}, but must be {path.stem!r} as the file is called")
    return card


def _whole(content: Any) -> Any:
    """Return the content of a card's file, completed from the card that it is `part_of`, if any."""
    name = content.get("part_of") if isinstance(content, dict) else None
    if not isinstance(name, str):
        return content
    path = shipped("datasets") / f"{name}.yaml"
    whole = read_card(path) if path.is_file() else None
    if whole is None or whole.part_of is not None:
        raise DataError(
            f"part_of names {name!r}, which is no shipped card of a whole data set; `dpsgd data list` shows them"
        )
    return whole.model_dump(exclude_unset=True) | content


_SOURCE = "declared in the recipe"


def names() -> list[str]:
    """Return the names of all shipped cards, sorted."""
    return sorted(path.stem for path in shipped("datasets").glob("*.yaml"))


@functools.lru_cache(maxsize=32)
def load_card(name: str) -> Card:
    """Return the shipped card called `name`. Raises UsageError with a suggestion if there is none."""
    if name not in names():
        near = suggested(name, names())
        raise UsageError(
            f"unknown data set {name!r}{near}; your own file goes under data.path, and a card of your own is a .yaml"
        )
    return read_card(shipped("datasets") / f"{name}.yaml")


def own_cards(folder: Path) -> dict[str, Path]:
    """Return the cards in a user's own folder, by name. Raises UsageError if it has none."""
    found = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if not found:
        raise UsageError(f"{folder}: no cards (NAME.yaml) in this folder")
    return found


def plain_card(data: Data, base: Path) -> Card:
    """Return the card that a recipe names, shipped or a user's own (relative to `base`), unchanged."""
    assert data.name is not None
    if data.card_file is None:
        try:
            return load_card(data.name)
        except UsageError as error:
            raise UsageError(f"data.name: {error}") from None
    path = base / data.card_file
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    if not path.is_file():
        there = [one.name for one in sorted(path.parent.glob("*.yaml"))]
        raise DataError(f"no such card: {path}{suggested(data.name.rpartition('/')[2], there)}")
    return read_card(path)


def card_of(data: Data, base: Path) -> Card:
    """Return the card that a recipe names, with the recipe's bounds and uses, without the column of `privacy.unit`.

    Raises DataError for bounds or uses of a column that cannot have any.
    """
    card = _with_uses(_without_owners(plain_card(data, base), data), data.columns or {})
    if data.text is not None:
        return _with_rows(card, _tokens(card, data, base))
    if not isinstance(data.bounds, dict):
        return card
    known = {name: column for name, column in card.features.items() if column.bounds is not None}
    problems = [
        f"data.bounds names {name!r}, which is no numeric column of {card.name}{suggested(name, known)}"
        for name in data.bounds
        if name not in known
    ]
    if problems:
        raise DataError("\n".join(problems))
    own = {name: CardColumn(bounds=pair, source=_SOURCE) for name, pair in data.bounds.items()}
    return _with_columns(card, own)


def _without_owners(card: Card, data: Data) -> Card:
    """Return the card with the column of `privacy.unit` dropped. Raises DataError if it has no such column."""
    name, columns = data.owner_column, card.columns or {}
    if name is None:
        return card
    if card.reader.kind != "table" or name not in columns or name == card.target:
        named = suggested(name, [one for one in columns if one != card.target])
        raise DataError(
            f"privacy.unit.column names {name!r}, which is no column of {card.name} that can say whose a row is{named};"
            " a .npy file with an entry for each row can"
        )
    return _with_columns(card, {name: CardColumn(drop=True)})


def _with_uses(card: Card, uses: dict[str, ColumnUse]) -> Card:
    """Return the card with a recipe's uses of columns that have one."""
    known = [name for name, column in card.features.items() if column.use is not None]
    problems = [
        f"data.columns names {name!r}, no column of dates, codes or text of {card.name}{suggested(name, known)}"
        for name in uses
        if name not in known
    ]
    if problems:
        raise DataError("\n".join(problems))
    return _with_columns(card, {name: CardColumn(use=use) for name, use in uses.items()}) if uses else card


def _tokens(card: Card, data: Data, base: Path) -> Instead:
    """Return the tokens of a column's texts. Raises DataError for a column without text."""
    told = data.text
    assert told is not None
    known = [name for name, column in card.features.items() if isinstance(column.use, TextColumn)]
    if told.column not in known:
        raise DataError(
            f"data.text.column names {told.column!r}, which is no column of text of {card.name}"
            f"{suggested(str(told.column), known)}"
        )
    rows = functools.partial(texts.rows_of, data=data, where=card.name, base=base)
    return Instead(texts.layout_of(told), rows, (texts.declared(told),))


def _with_rows(card: Card, own: Instead) -> Card:
    made = Card.model_validate(card.model_dump(exclude_unset=True))  # a copy would keep the layout of the card's rows
    made._instead = own
    return made


def _with_columns(card: Card, own: dict[str, CardColumn]) -> Card:
    return Card.model_validate(card.model_dump(exclude_unset=True) | {"columns": {**(card.columns or {}), **own}})


def declared(card: Card) -> dict[str, tuple[float, float]]:
    """Return the bounds that a recipe gave, by column, in the card's order."""
    found = {name: column.bounds for name, column in card.features.items() if column.source == _SOURCE}
    return {name: pair for name, pair in found.items() if pair is not None}


def clamp(card: Card, x: np.ndarray) -> None:
    """Move every value of a declared column of rows x (N, D) inside its bounds, in place."""
    names = [column.name for column in card.layout.columns or ()]
    for name, (low, high) in declared(card).items():
        column = x[:, names.index(name)]
        np.clip(column, low, high, out=column)
