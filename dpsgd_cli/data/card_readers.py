"""Decoders of a card's files into arrays: one function per file format, registered in `READERS`.

Pixels are scaled from their public range to [0, 1] (0 to 255 becomes 0 to 1). `card_files.py` finds and checks the
files; `opening.py` opens a user's own files.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from dpsgd_cli.data import card_files, cards, table
from dpsgd_cli.data.cards import BundledReader, Card, File, TableReader
from dpsgd_cli.data.cells import PLAIN, Cells, TableRows
from dpsgd_cli.data.dataset import Part, RawDataset
from dpsgd_cli.data.table_files import parse_csv
from dpsgd_cli.data.users import owners_of
from dpsgd_cli.errors import DataError

Which = Literal["train", "test"]


def read(card: Card, owner: str | None = None) -> RawDataset:
    """Read all of a card's data; `owner` is the column of a table that names the user of each row.

    Raises DataError for files that are missing, damaged or of other content.
    """
    hashes: dict[str, str] = {}
    reader = READERS[card.reader.kind] if owner is None else partial(_read_table, owner=owner)
    train = _of_classes(card, "train", reader(card, "train", hashes))
    tests = any(file.part == "test" for file in card.files)
    test = _of_classes(card, "test", reader(card, "test", hashes)) if tests else None
    for part in (train, test):
        if part is not None:
            cards.clamp(card, part.x)
    return RawDataset(card.name, train, test, card.layout, card.labels, declarations(card), (), hashes)


def declarations(card: Card) -> tuple[str, ...]:
    """Return the declarations of a card's public facts."""
    said = [f"The class labels of {card.name} are public: {', '.join(map(str, card.labels))}."]
    if card.part_of is not None:
        said.append(f"The records of {card.name} are those of these classes in {card.part_of}; how many is public.")
    if card.shape is not None:
        said.append(f"The range of a pixel of {card.name} is public (data set card).")
        return tuple(said)
    if card.instead is not None:
        return (*said, *card.instead.declarations)
    own = cards.declared(card)
    if any(column.bounds and name not in own for name, column in card.features.items()):
        other = "other " if own else ""
        said.append(f"The bounds of the {other}numeric columns of {card.name} are public (data set card).")
    for name, (low, high) in own.items():
        said.append(
            f"The bounds of {name} of {card.name} are public (recipe): {low:g} to {high:g}; values outside are clamped."
        )
    said += [table.used(name, column.use) for name, column in card.features.items() if column.use is not None]
    if any(column.values for column in card.features.values()):
        said.append(f"The values of the categorical columns of {card.name} are public (data set card).")
    return tuple(said)


def _read_idx(card: Card, which: Which, hashes: dict[str, str]) -> Part:
    images = [_decode_idx(card, file, hashes) for file in card.part(which, "images")]
    labels = [_decode_idx(card, file, hashes) for file in card.part(which, "labels")]
    x = _to_unit(np.concatenate(images), card)
    return Part(x, np.concatenate(labels).astype(np.int64))


def _decode_idx(card: Card, file: File, hashes: dict[str, str]) -> np.ndarray:
    """Read LeCun's idx format: two zero bytes, a type code (8: bytes), the number of axes, their sizes, the values."""
    content = _content(card, file, hashes)
    axes = content.data[3]
    sizes = struct.unpack(f">{axes}I", content.data[4 : 4 + 4 * axes])
    return np.frombuffer(content.data, np.uint8, offset=4 + 4 * axes).reshape(sizes)


def _content(card: Card, file: File, hashes: dict[str, str]) -> card_files.Content:
    content = card_files.read_content(card, file)
    hashes[file.name] = content.sha256
    return content


def _read_cifar(card: Card, which: Which, hashes: dict[str, str]) -> Part:
    """Read CIFAR's binary format: per record one label byte, then the pixels, channel by channel."""
    rows = []
    for file in card.part(which):
        content = _content(card, file, hashes)
        rows.append(np.frombuffer(content.data, np.uint8).reshape(content.records, -1))
    data = np.concatenate(rows)
    return Part(_to_unit(data[:, 1:], card), data[:, 0].astype(np.int64))


def _of_classes(card: Card, which: Which, whole: Part) -> Part:
    """Return the records of the card's classes if it is a part of another card, else `whole`.

    `whole` has labels as stored in the files. Each record is kept or dropped by its own label, so parts of neighbouring
    data sets are equal, or neighbours.
    """
    if card.part_of is None:
        return whole
    assert isinstance(card.classes, dict)
    own = np.isin(whole.y.astype(str), [raw for raws in card.classes.values() for raw in raws])
    said = sum(card_files.records(card, file) for file in card.files if file.part == which and file.holds != "labels")
    if own.sum() != said:
        raise DataError(f"{card.name}: {own.sum()} records for {which} have its classes, but its card says {said}")
    return Part(whole.x[own], labels_of(card, Cells.of("label", whole.y[own])))


def _to_unit(stored: np.ndarray, card: Card) -> np.ndarray:
    assert card.shape is not None and card.bounds is not None
    low, high = card.bounds
    x = stored.reshape(len(stored), *card.shape).astype(np.float32)
    x -= np.float32(low)
    x /= np.float32(high - low)
    return x


def _read_bundled(card: Card, which: Which, hashes: dict[str, str]) -> Part:
    """Read a file of numbers that scikit-learn carries, with the label last.

    The hash is of features as little-endian float64, then labels as int64.
    """
    assert isinstance(card.reader, BundledReader)
    installed = find_spec("sklearn")  # does not import it, which takes seconds
    if installed is None or installed.origin is None:
        raise DataError(f"data set {card.name} comes with scikit-learn, which is not installed")
    path = Path(installed.origin).parent / "datasets" / "data" / card.reader.file
    try:
        rows = np.loadtxt(path, delimiter=",", skiprows=card.reader.skip, ndmin=2)
    except (OSError, ValueError):
        rows = np.empty((0, 1))
    x, y = np.ascontiguousarray(rows[:, :-1], "<f8"), np.ascontiguousarray(rows[:, -1], "<i8")
    found = hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()
    file = card.files[0]
    if found != file.sha256:
        raise DataError(
            f"data set {card.name}: scikit-learn's {card.reader.file} holds other data than its card says"
            f" (SHA-256 {found}, expected {file.sha256}); install the scikit-learn of constraints.txt"
        )
    hashes[file.name] = found
    if card.shape is not None:
        return Part(_to_unit(x, card), y.astype(np.int64))
    keep = [list(card.columns or ()).index(name) for name in card.features]
    return Part(x[:, keep], y.astype(np.int64))


def _read_table(card: Card, which: Which, hashes: dict[str, str], owner: str | None = None) -> Part:
    reader = card.reader
    assert isinstance(reader, TableReader)
    names = list(card.columns or ())
    parts = []
    for file in card.part(which):
        content = _content(card, file, hashes)
        only = {name for name in names if name in (card.target, owner) or name in card.features}
        rows = parse_csv(content.data, Path(file.name), reader, names, only)
        if reader.missing is not None:
            rows = rows.take(~np.any([rows[name].mapped(lambda text: text in reader.marks) for name in rows.names], 0))
        if len(rows) != content.records:
            raise DataError(f"{file.name} holds {len(rows)} usable rows, but its card says {content.records}")
        part = part_of_table(card, rows)
        parts.append(part if owner is None else replace(part, owners=owners_of(rows[owner], file.name)))
    return reduce(Part.pooled, parts)


def part_of_table(card: Card, rows: TableRows) -> Part:
    """Return a table with the card's columns as numbers: features in the card's order, labels by its classes."""
    labels = labels_of(card, rows[str(card.target)])
    if card.instead is not None:
        return Part(card.instead.rows(rows), labels)
    written = card.reader if isinstance(card.reader, TableReader) else PLAIN
    return Part(table.to_matrix(rows, card.layout.columns or (), card.name, written), labels)


def labels_of(card: Card, column: Cells) -> np.ndarray:
    """Return class indices (N,), int64, of labels as the card's files have them."""
    assert isinstance(card.classes, dict)
    lookup = {raw: index for index, raws in enumerate(card.classes.values()) for raw in raws}
    y = column.mapped(lambda text: -1 if text is None else lookup.get(text, lookup.get("*", -1)), np.int64)
    if (y < 0).any():
        raise DataError(
            f"{card.name}: column {card.target!r} holds no class of the card in data row {int((y < 0).argmax()) + 1}"
        )
    return y


def in_units(card: Card, x: np.ndarray) -> np.ndarray:
    """Return rows of the card's files as training reads them: pixels in [0, 1], columns clamped (in place)."""
    if card.shape is not None:
        return _to_unit(x, card)
    cards.clamp(card, x)
    return x


READERS: dict[str, Callable[[Card, Which, dict[str, str]], Part]] = {
    "idx": _read_idx,
    "cifar": _read_cifar,
    "bundled": _read_bundled,
    "table": _read_table,
}
