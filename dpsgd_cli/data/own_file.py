"""Reading a user's own csv, parquet or npz file as the recipe's `data:` section describes it.

Whatever is read from the file for want of a declaration (class labels, category values) is declared public, with
a warning. Not here: cards, and what the numbers must look like (`table.py`).
"""

from __future__ import annotations

import csv
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpsgd_cli.data import table
from dpsgd_cli.data.dataset import Column, Layout, Part, Source, flatten
from dpsgd_cli.data.step import suggest
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema import Data

if TYPE_CHECKING:
    import pandas as pd

SEPARATORS = (",", ";", "\t", "|")


def read(data: Data, base: Path) -> Source:
    """Read `data.path` (and `data.test_path`), relative to `base`. Raises DataError for anything unusable."""
    assert data.path is not None
    paths = [_existing(base / name) for name in (data.path, data.test_path) if name is not None]
    for path in paths:
        if kind_of(path) not in FILE_KINDS:
            raise DataError(f"{path}: unknown kind of file; data.path takes {', '.join(FILE_KINDS)}")
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    if kind_of(paths[0]) == ".npz":
        return _read_arrays(data, paths, hashes)
    return _read_tables(data, paths, hashes)


def kind_of(path: Path) -> str:
    """The ending that says how to read `path`."""
    return "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix.lower()


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise DataError(f"no such file: {path.resolve()}; data.path is relative to the recipe's own folder")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    return path


# Tables


def _read_tables(data: Data, paths: list[Path], hashes: dict[str, str]) -> Source:
    frames = [FILE_KINDS[kind_of(path)](path, data) for path in paths]
    columns, warnings = _declare(data, frames, paths)
    layout = Layout((len(columns),), tuple(columns))
    matrices = [table.to_matrix(frame, columns, path.name) for frame, path in zip(frames, paths, strict=True)]
    labels, classes = _labels(data, frames, paths)
    parts = [Part(x, y) for x, y in zip(matrices, labels, strict=True)]
    said = _declarations(data, columns, classes)
    if data.task == "classification" and data.classes is None:
        warnings.append(f"the class labels were read from the data and are declared public: {list(classes or ())}")
    return Source(
        paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, tuple(warnings), hashes
    )


def _read_csv(path: Path, data: Data) -> pd.DataFrame:
    import pandas as pd

    try:
        with open_text(path) as lines:
            first = next((line for line in lines if line.strip()), "")
        separator = max(SEPARATORS, key=_outside_quotes(first).count)
        names = next(csv.reader([first.strip("\r\n")], delimiter=separator), [])
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from None
    _check_header(path, names, data)
    words = {*(data.categorical or ())} | ({data.target} if data.task == "classification" else set())
    try:
        frame = pd.read_csv(
            path,
            sep=separator,
            encoding="utf-8-sig",
            skipinitialspace=True,
            index_col=False,
            keep_default_na=False,
            na_values={name: list(table.MISSING) for name in names if name not in words},
            dtype=dict.fromkeys(words, "category"),
            usecols=[name for name in names if name not in data.drop],
        )
    except (ValueError, pd.errors.ParserError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a table: {str(error).strip()}") from None
    if frame.empty:
        raise DataError(f"{path} has a header but no rows")
    return frame


def open_text(path: Path):  # type: ignore[no-untyped-def]
    """`path` opened as text, through gzip when it is compressed."""
    import gzip

    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _outside_quotes(line: str) -> str:
    return "".join(line.split('"')[::2])


def _read_parquet(path: Path, data: Data) -> pd.DataFrame:
    import pandas as pd

    try:
        frame = pd.read_parquet(path)
    except ImportError:
        raise DataError(f"{path}: reading parquet needs pyarrow; run `pip install 'dpsgd[parquet]'`") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from None
    _check_header(path, [str(name) for name in frame.columns], data)
    if frame.empty:
        raise DataError(f"{path} has no rows")
    return frame.drop(columns=data.drop)


def _check_header(path: Path, names: list[str], data: Data) -> None:
    """Every column that the recipe names must be there, and no name twice."""
    problems = [f"{path}: two columns are called {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    asked = {"target": [data.target], "categorical": data.categorical or (), "bounds": bounds, "drop": data.drop}
    for key, wanted in asked.items():
        problems += [
            f"{path}: data.{key} names {n!r}, which is no column{suggest(str(n), names)}"
            for n in wanted
            if n not in names
        ]
    unusable = {*(data.categorical or ()), *data.drop, data.target}
    problems += [f"data.bounds names {name!r}, which is not a numeric feature" for name in bounds if name in unusable]
    if data.target in data.drop:
        problems.append(f"data.drop names the target {data.target!r}")
    if problems:
        raise DataError("\n".join(problems))


def _declare(data: Data, frames: list[pd.DataFrame], paths: list[Path]) -> tuple[list[Column], list[str]]:
    """The columns with what is public about each, and a warning for what had to be read from the rows."""
    warnings = []
    columns = []
    bounds = data.bounds if isinstance(data.bounds, dict) else {}
    for name in frames[0].columns:
        if name == data.target:
            continue
        for frame, path in zip(frames[1:], paths[1:], strict=True):
            if name not in frame.columns:
                raise DataError(f"{path} has no column {name!r}, which {paths[0].name} has")
        if data.categorical is None or name not in data.categorical:
            pair = bounds.get(name) if isinstance(data.bounds, dict) else data.bounds
            columns.append(Column(str(name), pair))
        elif isinstance(data.categorical, dict):
            columns.append(Column(str(name), values=tuple(table.plain_text(v) for v in data.categorical[name])))
        else:
            columns.append(Column(str(name), values=_found_values(frames, str(name))))
            warnings.append(
                f"the values of categorical column {name!r} were read from the data and are declared public;"
                f" if they are not, list them: data.categorical: {{{name}: [...]}}"
            )
    if not columns:
        raise DataError(f"{paths[0]} has no feature columns left besides the target {data.target!r}")
    return columns, warnings


def _found_values(frames: list[pd.DataFrame], name: str) -> tuple[str, ...]:
    found = {table.plain_text(value) for frame in frames for value in frame[name].dropna().unique()}
    return tuple(sorted(found - {""}))


def _labels(
    data: Data, frames: list[pd.DataFrame], paths: list[Path]
) -> tuple[list[np.ndarray], tuple[object, ...] | None]:
    import pandas as pd

    sizes = [len(frame) for frame in frames]
    target = pd.concat([frame[data.target].astype(object) for frame in frames], ignore_index=True)
    target.name = data.target
    classes: tuple[object, ...] | None = None
    try:
        if data.task == "regression":
            y = table.to_numbers(target).astype(np.float32)
        else:
            y, classes = table.to_labels(target, data.classes)
    except DataError as error:
        raise DataError(f"{' and '.join(path.name for path in paths)}: {error}") from None
    return np.split(y, np.cumsum(sizes)[:-1]), classes


def _declarations(data: Data, columns: list[Column], classes: tuple[object, ...] | None) -> tuple[str, ...]:
    said = []
    if classes is not None:
        how = "recipe" if data.classes is not None else "read from the data"
        said.append(f"The class labels are public ({how}): {', '.join(map(str, classes))}.")
    if data.bounds is not None:
        said.append("The bounds of the numeric features are public (recipe).")
    if any(column.values is not None for column in columns):
        how = "recipe" if isinstance(data.categorical, dict) else "read from the data"
        said.append(f"The values of the categorical columns are public ({how}).")
    return tuple(said)


# Arrays


def _read_arrays(data: Data, paths: list[Path], hashes: dict[str, str]) -> Source:
    """x (N, ...) and labels y (or `data.target`), with x_test and y_test or a second file for testing."""
    unusable = [key for key in ("categorical", "drop") if getattr(data, key)]
    if unusable or isinstance(data.bounds, dict):
        raise DataError(
            f"{paths[0]}: an npz file has no column names; leave out {', '.join(unusable) or 'the names in bounds'},"
            " and give data.bounds as one [low, high]"
        )
    target = data.target or "y"
    stored = _load_npz(paths[0])
    pairs = [(_array(stored, "x", paths[0]), _array(stored, target, paths[0]))]
    if paths[1:]:
        other = _load_npz(paths[1])
        pairs.append((_array(other, "x", paths[1]), _array(other, target, paths[1])))
    elif "x_test" in stored:
        pairs.append((_array(stored, "x_test", paths[0]), _array(stored, f"{target}_test", paths[0])))
    _check_arrays(pairs, paths[0])
    labels, classes = _array_labels(data, [y for _, y in pairs], target, paths[0])
    pair = data.bounds
    if pair is None and pairs[0][0].dtype == np.uint8:
        pair = (0.0, 255.0)
    parts = [Part(_floating(x), y) for (x, _), y in zip(pairs, labels, strict=True)]
    said = _declarations(data, [], classes)
    warnings: tuple[str, ...] = ()
    if classes is not None and data.classes is None:
        warnings = (f"the class labels were read from the data and are declared public: {list(classes)}",)
    layout = Layout(pairs[0][0].shape[1:], bounds=pair)
    return Source(paths[0].name, parts[0], parts[1] if parts[1:] else None, layout, classes, said, warnings, hashes)


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as npz arrays: {error}") from None


def _array(stored: dict[str, np.ndarray], name: str, path: Path) -> np.ndarray:
    if name not in stored:
        raise DataError(f"{path} has no array {name!r}{suggest(name, stored)}")
    return stored[name]


def _check_arrays(pairs: list[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    for x, y in pairs:
        if x.ndim < 2 or x.size == 0:
            raise DataError(f"{path}: x has shape {x.shape}, but must be (N, ...) with at least one row and feature")
        if y.shape != (len(x),):
            raise DataError(f"{path}: the labels have shape {y.shape}, but must be ({len(x)},), one for each row of x")
        if x.shape[1:] != pairs[0][0].shape[1:]:
            raise DataError(f"{path}: test rows have shape {x.shape[1:]}, training rows {pairs[0][0].shape[1:]}")
        if x.dtype.kind not in "biuf":
            raise DataError(f"{path}: x holds {x.dtype}, but must hold numbers")
        finite = np.isfinite(flatten(x)).all(axis=1)
        if not finite.all():
            raise DataError(
                f"{path}: {int((~finite).sum())} rows of x hold NaN or infinite values, the first is row"
                f" {int((~finite).argmax()) + 1}; fill them or leave those rows out"
            )


def _array_labels(
    data: Data, labels: list[np.ndarray], target: str, path: Path
) -> tuple[list[np.ndarray], tuple[object, ...] | None]:
    import pandas as pd

    frames = [pd.DataFrame({target: y}) for y in labels]
    return _labels(data.model_copy(update={"target": target}), frames, [path])


def _floating(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64 if x.dtype.itemsize > 4 else np.float32, copy=False)


FILE_KINDS: dict[str, Callable[[Path, Data], pd.DataFrame]] = {
    ".csv": _read_csv,
    ".csv.gz": _read_csv,
    ".parquet": _read_parquet,
}
