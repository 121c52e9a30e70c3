"""Features of records from a file, made outside by a producer that is public: sentence embeddings, say.

A record of the training is then the pair of its features and its label; its own columns are not used.

Guarantee: let F be the producer, fixed before the records were looked at (the recipe declares it with `public: true`),
and let row i of the file be F of record i alone (`aligned`). If a record is removed, added or replaced, its row is
removed, added or replaced with it, and no other row changes. So neighbouring data sets have neighbouring pairs, and
joining costs no privacy. Both conditions count: if row i belonged to another record, one that is removed would pair
every later label with other features, and all of them would change.

Checked: the file has as many rows as there are records. With `aligned: {column: C}` it repeats C of each record, or its
SHA-256. With `decides: true` rows with equal C have equal features, which features that depend on a batch often have
not. A refusal reveals something of the records to the person who runs the command, as in `opening.py`. The rest is
declared, and in the result.

The SHA-256 of a file of features is a function of all records. It is in a recipe, which is published, only beside a
shipped card, whose records are public in the same way.

To make such a file: `np.savez("features.npz", x=rows, producer="...", sentence=texts)`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.text_format import count, quoted, shortened, suggested
from dpsgd_cli.data import own_arrays, table_files, texts
from dpsgd_cli.data.dataset import Layout, Part, RawDataset
from dpsgd_cli.data.extractor_settings import FileFeatures
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.on_disk import DiskPart
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

KINDS = (".npz", ".npy", ".safetensors", ".parquet")
ROWS, PRODUCER, DIGEST = "x", "producer", "_sha256"
NEAR = 1e-3
"""Most that features of equal cells may differ, over their own norm: what rounding and padding make of them."""


@dataclass(frozen=True)
class _File:
    """One file: its `arrays` by name, and the producer that it names, if any."""

    path: Path
    arrays: Mapping[str, np.ndarray]
    producer: str | None

    def rows(self, end: str, key: str) -> np.ndarray:
        """Return the features (N, D), float32. Raises DataError, naming `key`, if they are not finite numbers."""
        name = ROWS + end
        if name not in self.arrays:
            raise DataError(f"{key}: {self.path} has no array {name!r}{suggested(name, self.arrays)}")
        x = self.arrays[name]
        if x.ndim != 2 or x.dtype.kind not in "biuf" or not x.shape[1]:
            raise DataError(f"{key}: {self.path}: {name} has shape {x.shape} of {x.dtype}; give numbers (N, D)")
        finite = np.isfinite(x).all(axis=1)
        if not finite.all():
            raise DataError(
                f"{key}: {self.path}: NaN or infinite values in {count(int((~finite).sum()), 'row')}, the first is row"
                f" {int((~finite).argmax()) + 1}"
            )
        return x.astype(np.float32)


def read_labels_of(data: Data, paths: Sequence[Path], kinds: Sequence[str]) -> RawDataset:
    """Read the labels of a user's own tables, with the cells of the column that `aligned` names as inputs (N,).

    Raises DataError for arrays, whose features are their inputs, and for a missing column.
    """
    told = data.features_file
    assert told is not None
    if kinds[0] not in table_files.KINDS:
        raise DataError(
            f"data.features.file: goes with a table, and {paths[0]} holds arrays; give the features as data.path"
            " itself: np.savez(file, x=features, y=labels)"
        )
    text = {str(told.column)} | (set() if data.task == "regression" else {*data.target_names})
    frames = [
        table_files.read_table(path, kind, data.format, text, data.owner_column)
        for path, kind in zip(paths, kinds, strict=True)
    ]
    rows = [cells(frame, data, str(path)) for frame, path in zip(frames, paths, strict=True)]
    names = [name for name in (data.path, data.test_path) if name is not None]
    hashes = {name: sha256(path) for name, path in zip(names, paths, strict=True)}
    return texts.with_labels(data, frames, rows, Layout((1,)), (), paths, hashes)


def cells(frame: pd.DataFrame, data: Data, where: str) -> np.ndarray:
    """Return the cells (N,) as text of the column that `aligned` names, or zeros where the order is declared.

    Raises DataError for a missing column or cell.
    """
    column = None if data.features_file is None else data.features_file.column
    if column is None:
        return np.zeros(len(frame))
    if column not in frame.columns:
        raise DataError(
            f"{where} has no column {quoted(column)}{suggested(column, list(frame.columns))}; data.features.aligned"
            " names it"
        )
    own = frame[column].astype(object)
    if own.isna().any():
        raise DataError(f"{where}: column {quoted(column)} has no cell in data row {int(own.isna().argmax()) + 1}")
    return np.array([str(cell) for cell in own], dtype=object)


def joined(source: RawDataset, data: Data, base: Path) -> RawDataset:
    """Return the records of `source` with the features of the file that `data` names in place of their own inputs.

    With `aligned` by a column, `source` holds its cells as inputs. Raises DataError, naming the file and the key, for
    a file that cannot be read, is another than the recipe says, or does not fit the records.
    """
    told = data.features_file
    assert told is not None
    given = [("file", told.file, told.sha256)]
    if told.test_file is not None:
        given.append(("test_file", told.test_file, told.test_sha256))
    files = [_opened(base / name, f"data.features.{key}", told, digest) for key, name, digest in given]
    parts = [_joined(source.train, files[0], "", told, "data.features.file")]
    if source.test is not None:
        inside = told.test_file is None
        key, file = ("file", files[0]) if inside else ("test_file", files[1])
        if inside and f"{ROWS}_test" not in file.arrays:
            raise DataError(
                f"data.features.test_file: missing; {source.name} has test records, and {file.path} has no"
                f" {ROWS}_test with their features"
            )
        parts.append(_joined(source.test, file, "_test" if inside else "", told, f"data.features.{key}"))
    elif told.test_file is not None:
        raise DataError(f"data.features.test_file: {source.name} has no test records of its own; leave it out")
    widths = {part.x.shape[1] for part in parts}
    if len(widths) > 1:
        raise DataError(f"data.features.test_file: {files[-1].path} has another number of features than {told.file}")
    hashes = {name: sha256(base / name) for _, name, _ in given}
    return replace(
        source,
        train=parts[0],
        test=parts[1] if parts[1:] else None,
        layout=Layout((widths.pop(),)),
        declarations=(*source.declarations, told.declaration),
        sha256=source.sha256 | hashes,
        texts={},
    )


def _joined(part: Part | DiskPart, file: _File, end: str, told: FileFeatures, key: str) -> Part:
    """Return the records of one part with their features."""
    if isinstance(part, DiskPart):
        raise DataError(
            "data.features: rows that stay on disk are not joined; give the features themselves as data.path"
        )
    x = file.rows(end, key)
    if len(x) != len(part):
        raise DataError(
            f"{key}: {file.path} has {count(len(x), 'row')} for {count(len(part), 'record')}; row i has to belong to"
            " record i"
        )
    if told.column is not None:
        if part.x.dtype != object:
            raise DataError("data.features.aligned: the card's records have no columns; state aligned: order")
        _check_aligned(part.x, x, file, end, told, key)
    return replace(part, x=x)


def _check_aligned(cells: np.ndarray, x: np.ndarray, file: _File, end: str, told: FileFeatures, key: str) -> None:
    """Raise DataError unless the file repeats the cells (N,) of the column that `told` names, row by row."""
    column = str(told.column)
    plain, digests = column + end, column + DIGEST + end
    own = [str(cell) for cell in cells]
    if plain in file.arrays:
        there = [str(cell) for cell in file.arrays[plain].tolist()]
    elif digests in file.arrays:
        there = [_hex(row) for row in file.arrays[digests]]
        own = [hashlib.sha256(cell.encode()).hexdigest() for cell in own]
    else:
        raise DataError(
            f"data.features.aligned: {file.path} has neither {plain!r} nor {digests!r}{suggested(plain, file.arrays)};"
            f" save the column {quoted(column)} beside the features, or state aligned: order"
        )
    wrong = [row for row, pair in enumerate(zip(own, there, strict=False)) if pair[0] != pair[1]]
    if wrong or len(there) != len(own):
        first = f"; row {wrong[0] + 1} is the first" if wrong else ""
        raise DataError(
            f"{key}: {file.path} is not in the order of the records: {quoted(column)} differs in"
            f" {count(len(wrong), 'row')}{first}"
        )
    if told.decides:
        _check_decided(own, x, file, column, key)


def _hex(row: Any) -> str:
    return bytes(row).hex() if isinstance(row, np.ndarray) else str(row)


def _check_decided(cells: Sequence[str], x: np.ndarray, file: _File, column: str, key: str) -> None:
    """Raise DataError if two rows with equal cells have different features."""
    _, first, groups = np.unique(np.array(cells), return_index=True, return_inverse=True)
    like = x[first[groups]]
    apart = np.linalg.norm(x - like, axis=1) > NEAR * np.linalg.norm(like, axis=1)
    if apart.any():
        row = int(apart.argmax())
        raise DataError(
            f"{key}: {file.path}: rows {int(first[groups[row]]) + 1} and {row + 1} have one {quoted(column)} and"
            " different features, so something else decides them, say the other records of a batch; compute each record"
            " alone, or state decides: false"
        )


def new_rows(path: Path, data: Data, layout: Layout) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """Return the features (N, D) of new records, and all arrays of their file, which must name the same producer."""
    told = data.features_file
    assert told is not None
    file = _opened(path, "NEW", told, None)
    if file.producer is None:
        raise DataError(
            f"{path} names no producer; the model takes features by {quoted(told.producer)}: save them with"
            f" np.savez({path.stem + '.npz'!r}, x=..., producer=...)"
        )
    return own_arrays.rows_of(file.rows("", "NEW"), layout, f"{path}: x"), file.arrays


def _opened(path: Path, key: str, told: FileFeatures, digest: str | None) -> _File:
    """Return a file after checking that it is the one of the recipe. Raises DataError, naming `key`, if it is not."""
    why = irregularity(path) or (None if path.is_file() else "there is no such file")
    if why is None and path.suffix.lower() not in KINDS:
        why = f"unknown kind of file; features are {', '.join(KINDS)}"
    if why is not None:
        raise DataError(f"{key}: {path}: {why}")
    found = sha256(path)
    if digest is not None and found != digest:
        raise DataError(f"{key}: {path} has SHA-256 {found}, and the recipe says {digest}: it is another file")
    arrays, producer = _READERS[path.suffix.lower()](path)
    if producer is not None and producer != told.producer:
        raise DataError(
            f"data.features.producer: {path} was made by {quoted(producer)}, and the recipe says"
            f" {quoted(told.producer)}; features of different producers do not go together"
        )
    return _File(path, arrays, producer)


def _npz(path: Path) -> tuple[dict[str, np.ndarray], str | None]:
    arrays = own_arrays.load(path)
    named = arrays.pop(PRODUCER, None)
    return arrays, None if named is None else str(named)


def _npy(path: Path) -> tuple[dict[str, np.ndarray], None]:
    try:
        return {ROWS: np.load(path, allow_pickle=False)}, None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a npy array: {shortened(str(error), 200)}") from None


def _safetensors(path: Path) -> tuple[dict[str, np.ndarray], str | None]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get(PRODUCER)  # noqa: SIM118
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read as safetensors: {shortened(str(error), 200)}") from None


def _parquet(path: Path) -> tuple[dict[str, np.ndarray], str | None]:
    """Return the columns of a parquet file: lists of equal length as rows of numbers, others as they are."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    try:
        table = pyarrow.parquet.read_table(path)
        named = (table.schema.metadata or {}).get(PRODUCER.encode())
        arrays = {name: _column(table.column(name)) for name in table.column_names}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({type(error).__name__}); is it damaged?") from None
    return arrays, None if named is None else named.decode()


def _column(column: Any) -> np.ndarray:
    cells = column.to_pylist()
    if not any(isinstance(cell, list) for cell in cells):
        return np.array(cells, dtype=object) if any(isinstance(cell, str) for cell in cells) else np.array(cells)
    if len({len(cell or ()) for cell in cells}) > 1:
        raise DataError("a parquet column holds lists of different lengths; features of all records have one length")
    return np.array(cells)


_READERS = {".npz": _npz, ".npy": _npy, ".safetensors": _safetensors, ".parquet": _parquet}
