"""Catalog of cards, shipped or a user's own, and of the files on this computer, checked against their card.

A recipe's public bounds replace those of a card. The accuracy of a private method depends on the scale of its features,
and a card's bounds are generous: scaling by a narrower interval makes the feature larger. If you know better bounds
from outside the data, declare them in `data.bounds`. Values outside are clamped when the table is read, record by
record, so that the bounds hold whatever the records are.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from dpsgd_cli.common.package_files import irregularity, shipped
from dpsgd_cli.common.text_format import suggested
from dpsgd_cli.data.card import Card, CardColumn, File, read_card
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError, UsageError

_BLOCK = 1 << 20
_SOURCE = "declared in the recipe"


@dataclass(frozen=True)
class Content:
    """The uncompressed bytes of one file, their SHA-256 and the number of usable records in them."""

    data: bytes
    sha256: str
    records: int


def names() -> list[str]:
    """Return the names of all shipped cards, sorted."""
    return sorted(path.stem for path in shipped("datasets").glob("*.yaml"))


@functools.lru_cache(maxsize=32)
def load_card(name: str) -> Card:
    """Return the shipped card called `name`. Raises UsageError with a suggestion if there is none."""
    if name not in names():
        near = suggested(name, names())
        raise UsageError(
            f"unknown data set {name!r}{near}; your own file goes under data.path, a card under data.cards"
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
        return load_card(data.name)
    path = base / data.card_file
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    if not path.is_file():
        there = [one.stem if data.cards else one.name for one in sorted(path.parent.glob("*.yaml"))]
        raise DataError(f"no such card: {path}{suggested(data.name.rpartition('/')[2], there)}")
    return read_card(path)


def card_of(data: Data, base: Path) -> Card:
    """Return the card that a recipe names, with the recipe's bounds and without the column of `privacy.unit`.

    Raises DataError for bounds on a column that cannot have any.
    """
    card = _without_owners(plain_card(data, base), data)
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
    return card.changed(columns={**(card.columns or {}), **own})


def _without_owners(card: Card, data: Data) -> Card:
    """Return the card with the column of `privacy.unit` dropped. Raises DataError if it has no such column."""
    if data.unit is None or data.unit.in_a_file:
        return card
    name, columns = data.unit.column, card.columns or {}
    if card.reader.kind != "table" or name not in columns or name == card.target:
        named = suggested(name, [one for one in columns if one != card.target])
        raise DataError(
            f"privacy.unit.column names {name!r}, which is no column of {card.name} that can say whose a row is{named};"
            " a .npy file with an entry for each row can"
        )
    return card.changed(columns=columns | {name: CardColumn(drop=True)})


def declared(card: Card) -> dict[str, tuple[float, float]]:
    """Return the bounds that a recipe gave, by column, in the card's order."""
    found = {name: column.bounds for name, column in card.features.items() if column.source == _SOURCE}
    return {name: pair for name, pair in found.items() if pair is not None}


def clamp(card: Card, x: np.ndarray) -> None:
    """Move every value of a declared column of rows x (N, D) inside its bounds, in place."""
    names = list(card.features)
    for name, (low, high) in declared(card).items():
        column = x[:, names.index(name)]
        np.clip(column, low, high, out=column)


def folder() -> Path:
    """Return the folder of all data sets: $DPSGD_DATA, else one in this user's cache directory."""
    given = os.environ.get("DPSGD_DATA")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("dpsgd")) / "data"


def locate(card: Card, file: File) -> Path | None:
    """Return the path of the file on disk, plain or gzip-compressed; None if it is missing."""
    plain = folder() / card.folder / file.name
    return next((path for path in (plain, plain.with_name(f"{file.name}.gz")) if path.is_file()), None)


def records(card: Card, file: File) -> int:
    """Return the number of records in `file` by the card, or by the variant that has the size of the file on disk."""
    path = locate(card, file) if file.variants else None
    size = path.stat().st_size if path is not None else None
    return card.records(file, next((n for n, variant in enumerate(file.variants, 1) if variant.bytes == size), 0))


def read_content(card: Card, file: File) -> Content:
    """Read `file`, uncompressed, and check its hash.

    Raises DataError naming the path and the remedy if the file is missing or damaged, or its content is not the card's.
    """
    path = locate(card, file)
    if path is None:
        raise DataError(
            f"data set {card.name}: {folder() / card.folder / file.name} (or .gz) is missing;"
            f" run `dpsgd data fetch {card.name}`, or set DPSGD_DATA to the folder that holds {card.folder}/"
        )
    try:
        return identify(file, path)
    except DataError as error:
        raise DataError(
            f"data set {card.name}: {path} does not hold what its card says\n{error}\n"
            f"run `dpsgd data fetch {card.name}` to replace it"
        ) from None


def identify(file: File, path: Path) -> Content:
    """Return the content of `path` as that of `file`, with a known variant corrected. Raises DataError on other hashes.

    The hash is computed piece by piece first, so that a file of other content never fills the memory.
    """
    found, size = _hash_unpacked(path, file.most_bytes)
    variant = next((variant for variant in file.variants if variant.sha256 == found), None)
    if variant is None and found != file.sha256:
        raise DataError(f"expected SHA-256 {file.sha256}\nfound SHA-256    {found} ({size} bytes, uncompressed)")
    with _unpacked(path) as stream:
        data = stream.read(size)
    if variant is not None and variant.replace:
        for old, new in variant.replace.items():
            data = data.replace(old.encode(), new.encode())
        found, variant = hashlib.sha256(data).hexdigest(), None
        if found != file.sha256:
            raise DataError(f"a variant that its replacements do not put right: expected SHA-256 {file.sha256}")
    return Content(data, found, file.records if variant is None else variant.records)


def _hash_unpacked(path: Path, most: int) -> tuple[str, int]:
    """Return the SHA-256 and the number of the uncompressed bytes of `path`, in constant memory.

    Raises DataError if the file is damaged, or unpacks to more than `most` bytes.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with _unpacked(path) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
                size += len(block)
                if size > most:
                    raise DataError(f"holds more than the {most} bytes, uncompressed, that its card allows")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"damaged gzip data ({error})") from None
    return digest.hexdigest(), size


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for its bytes, through gzip if they are compressed."""
    with path.open("rb") as raw:
        is_compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if is_compressed else contextlib.nullcontext(raw) as stream:
            yield cast(BinaryIO, stream)
