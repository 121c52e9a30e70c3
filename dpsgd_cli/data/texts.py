"""Texts as tokens: a column of a table or a card, a field of JSON lines, or a folder of files.

The tokens of a record depend on that record and on the tokenizer alone: it was fitted before and is declared public
with its SHA-256, or it is a public hash of words. A text is cut or padded to a public length, and no text sees another.
So neighbouring tables give neighbouring rows, and reading costs no privacy.

A row is int64 (L,): tokens, then -1 to the end. A model gets the mask of places that are not padding.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.data import table
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.data.computed_columns import hashed
from dpsgd_cli.data.dataset import Layout, Part, RawDataset
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.labels import read_labels
from dpsgd_cli.data.own_arrays import NOT_COUNTED, next_tokens
from dpsgd_cli.data.settings import Data, TextInput
from dpsgd_cli.data.table_files import known_columns, read_table
from dpsgd_cli.data.users import owners_of
from dpsgd_cli.errors import DataError, UsageError

_OF_FOLDER = "class"
"""Name of the labels of a folder of files, which are the folders that the files are in."""
MOST_BYTES = 1 << 24
"""Most bytes of one file of a folder of texts."""


def read(data: Data, paths: Sequence[Path], kinds: Sequence[str], hashes: dict[str, str], base: Path) -> RawDataset:
    """Read tables, or folders of files, as tokens and labels; a second path holds the test rows.

    Raises DataError for a missing column, a missing text or label, and a tokenizer that cannot be read.
    """
    told, owner = _told(data), data.owner_column
    frames = [new_table(path, kind, data) for path, kind in zip(paths, kinds, strict=True)]
    rows = [rows_of(frame, data, str(path), base) for frame, path in zip(frames, paths, strict=True)]
    said = [declared(told)]
    if data.by_place and not all(kinds):
        said.append(
            "The names of the files and of their folders, which are the classes, are public: a neighbouring folder has"
            " another text under the same name."
        )
    classes: tuple[Any, ...] | None = None
    if data.task == "next-token":
        labels = [next_tokens(x) for x in rows]
    else:
        known = data if data.target is not None else data.changed(target=_OF_FOLDER)
        target = str(known.target)
        for frame, path in zip(frames, paths, strict=True):
            if target not in frame:
                raise DataError(f"{path} has no column {quoted(target)}{known_columns(target, frame.names)}")
        labels, classes = read_labels(known, [frame[target] for frame in frames], paths, known.classes)
    parts = [
        Part(x, y, owners=None if owner is None else owners_of(frame[owner], path.name))
        for x, y, frame, path in zip(rows, labels, frames, paths, strict=True)
    ]
    said, warnings = [*table.declarations(data, [], classes), *said], table.read_warnings(data, classes)
    test, layout = parts[1] if parts[1:] else None, layout_of(told)
    return RawDataset(paths[0].name, parts[0], test, layout, classes, tuple(said), warnings, hashes)


def layout_of(told: TextInput) -> Layout:
    """Return the layout of one record: its tokens."""
    return Layout((told.length,), integers=True)


def declared(told: TextInput) -> str:
    """Return the declaration of what texts are cut by."""
    by = f"tokenizer in {told.folder}" if told.words is None else f"hash of words to {told.words} tokens"
    return f"The {by} and the length of {told.length} tokens, to which texts are cut, are public."


def _told(data: Data) -> TextInput:
    assert data.text is not None
    return data.text


def new_table(path: Path, kind: str, data: Data) -> TableRows:
    """Read a table, or a folder of files, with a column of texts."""
    return read_table(path, kind, data.format) if kind else _of_folder(path, data)


def rows_of(rows: TableRows, data: Data, where: str, base: Path) -> np.ndarray:
    """Return the tokens (N, L) of a table's texts. Raises DataError for a row without text, never showing one."""
    column = _told(data).column or "text"
    if column not in rows:
        raise DataError(
            f"{where} has no column {quoted(column)}{known_columns(column, rows.names)}; data.text names it"
        )
    texts = rows[column].texts()
    missing = np.array([text is None for text in texts], dtype=bool)
    if missing.any():
        raise DataError(
            f"{where}: column {quoted(column)} has no text in data row {int(missing.argmax()) + 1}"
            f" ({int(missing.sum())} such rows); leave those rows out, or write an empty text"
        )
    return tokens([text or "" for text in texts], data, base)


def tokens(texts: Sequence[str], data: Data, base: Path) -> np.ndarray:
    """Return the tokens (N, L) of texts, each by itself: cut to L, or -1 after its end."""
    told = _told(data)
    split = _splitter(told, base)
    found = np.full((len(texts), told.length), NOT_COUNTED, np.int64)
    for row, text in enumerate(texts):
        own = split(text)[: told.length]
        found[row, : len(own)] = own
    return found


def _splitter(told: TextInput, base: Path) -> Callable[[str], list[int]]:
    """Return the function from a text to its tokens, which a tokenizer cuts where it must end in a mark."""
    if told.words is not None:
        return partial(hashed, buckets=told.words)
    folder = base / str(told.folder)
    split = tokenizer(str(folder), hash_of_tokenizer(folder))
    return lambda text: list(split(text, truncation=True, max_length=told.length, verbose=False)["input_ids"])


def hash_of_tokenizer(folder: Path) -> str:
    """Return the SHA-256 over the contents of the files of a tokenizer."""
    files = sorted(path for path in folder.glob("*") if path.suffix in (".json", ".txt", ".model"))
    return hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()


@functools.lru_cache(maxsize=4)
def tokenizer(folder: str, content: str) -> Any:
    """Return the tokenizer in a local folder whose files have the hash `content`; no code of the folder is run.

    Raises DataError if there is none, and UsageError without transformers.
    """
    del content
    try:
        import transformers
    except ImportError:
        raise UsageError("data.text needs transformers; run `pip install 'dpsgd[transformers]'`") from None
    if not Path(folder).is_dir():
        raise DataError(f"data.text.folder: {folder} is no folder (nothing is downloaded)")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"data.text.folder: {folder} holds no tokenizer that can be read: {said}") from None


def _of_folder(path: Path, data: Data) -> TableRows:
    """Return the texts of a folder's .txt files; classes are the names of the folders that they are in."""
    files = sorted(file for file in path.rglob("*.txt") if file.is_file())
    if not files:
        raise DataError(f"{path} holds no .txt files")
    large = next((file for file in files if file.stat().st_size > MOST_BYTES), None)
    if large is not None:
        raise DataError(f"{large} is larger than {MOST_BYTES} bytes; cut it into texts of one record each")
    try:
        texts = [file.read_text("utf-8") for file in files]
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: a file is no UTF-8 text ({error.reason})") from None
    return TableRows.of({"text": texts, data.target or _OF_FOLDER: [file.parent.name for file in files]})


def hash_of_folder(path: Path) -> str:
    """Return the SHA-256 over names and contents of a folder's .txt files."""
    told = hashlib.sha256()
    for file in sorted(path.rglob("*.txt")):
        told.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return told.hexdigest()
