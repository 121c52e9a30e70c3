"""Whose each row is, where `privacy.unit` protects all rows of a user together: users are numbered, cut and counted.

Neighbouring data sets differ in all rows of one user, however many: the user and their rows are there or not
(add-remove), are others (replace-one, of any number from 1), or are null rows, which add nothing (zero-out). A user's
place (`splits.py`) is their number, from 0, in the order of the users' names as text; neighbours are data sets in which
everybody else keeps theirs, as there. What follows of a user's rows is then a function of that user's place and rows:

- which part of a cut, and which fold: of the place alone, so all rows of a user go together;
- which of the rows are taken, if there are more than `most_rows`: those with the smallest coins, a row's coin being a
  hash of the user's place and the row's number among that user's, in the order of the file. No value and no label of
  any row, no row of anybody else, and no secret enters.

So a row that comes or goes changes what is taken of its own user's rows, and of nobody else's.
The number of users is public, as the number of records is elsewhere. How many rows each has is not.

Not here: what a user adds to a sum (`core/units.py`).
"""

from __future__ import annotations

import dataclasses
import datetime
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.data import table
from dpsgd_cli.data.dataset import Dataset, Part, Source
from dpsgd_cli.data.on_disk import UNREADABLE, DiskPart
from dpsgd_cli.data.splits import SECOND_FILE, coins, splitmix
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.recipe.schema.unit import Unit
from dpsgd_cli.wording import count, quoted, shortened

if TYPE_CHECKING:
    import pandas as pd

_ROWS_OF_A_USER = 4
_NAMES = (str, bytes, numbers.Number, np.bool_, datetime.date, datetime.time, np.datetime64, type(None))
NOBODYS = "leave those rows out, or give each a user of its own"


def owners_of(cells: pd.Series, where: str) -> np.ndarray:
    """Names (N,) of the users whose rows these are: the text of each cell, exactly as it was written.

    Text stays as it is (blanks and leading zeros too), integers are exact, floats have their shortest digits.

    Raises DataError for a gap, for a cell that is no text, number or date, for text that is no valid Unicode or holds a
    NUL, and for two cells of different types that have the same name (1 and "1"): whether they are one user is unknown.

    Guarantee: cells of different text never become one user, who would then be protected less than their rows need.
    """
    import pandas as pd

    if isinstance(cells.dtype, pd.CategoricalDtype):
        values, codes = [*cells.cat.categories, None], cells.cat.codes.to_numpy()
    else:
        values, codes = list(cells.to_numpy()), np.arange(len(cells))
    column = f"{where}: privacy.unit.column {quoted(cells.name)}"
    odd = np.array([pd.api.types.is_list_like(value) or not isinstance(value, _NAMES) for value in values])[codes]
    if odd.any():
        raise DataError(
            f"{column} holds a {type(values[codes[int(odd.argmax())]]).__name__} in data row {int(odd.argmax()) + 1},"
            " which is no name; write text or numbers"
        )
    missing = np.array([_is_gap(value) for value in values], dtype=bool)[codes]
    if missing.any():
        raise DataError(
            f"{column} has {count(int(missing.sum()), 'gap')}, first in data"
            f" row {int(missing.argmax()) + 1}; a row of nobody's is protected with nobody's: {NOBODYS}"
        )
    names = [_name(value) for value in values]
    broken = np.array([_is_broken(name) for name in names], dtype=bool)[codes]
    if broken.any():
        raise DataError(
            f"{column} is no valid text in data row {int(broken.argmax()) + 1} (half of a surrogate pair, or a NUL);"
            " rename that user"
        )
    kinds: dict[str, type] = {}
    for row, name in enumerate(names):
        if kinds.setdefault(name, type(values[row])) is not type(values[row]) and values[row] is not None:
            first = int((codes == row).argmax()) + 1
            raise DataError(
                f"{column} has one name both as text and as a number, the second in data row {first}; write all names"
                " of users as text"
            )
    return np.array(names, dtype=str)[codes]


def _name(value: object) -> str:
    return value if isinstance(value, str) else str(value)


def _is_gap(value: object) -> bool:
    """Whether a cell says nobody: empty, or a usual word for a missing value."""
    import pandas as pd

    return value.strip() in table.MISSING if isinstance(value, str) else bool(pd.isna(value))


def _is_broken(name: str) -> bool:
    """Whether text has no UTF-8, or a NUL, which arrays of text lose at its end."""
    try:
        return b"\0" in name.encode()
    except UnicodeEncodeError:
        return True


def owners_in_array(given: Any, rows: int, where: str) -> np.ndarray:
    """Names (N,) of the users of an array with an entry for each of `rows`; DataError as for `owners_of`."""
    import pandas as pd

    if given.shape != (rows,) or given.dtype.kind not in "biufUS":
        raise DataError(
            f"{where} has shape {given.shape} of {given.dtype}, but must be ({rows},), a number or text for each row"
        )
    if given.dtype.kind == "S":
        try:
            given = np.char.decode(given, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{where} holds bytes that are no UTF-8 text; store the names as text") from None
    return owners_of(pd.Series(given.astype(object) if given.dtype.kind == "U" else given, name=where), where)


def owners_in_file(path: Path, rows: Sequence[int]) -> list[np.ndarray]:
    """Names of the users of a .npy file, for parts of so many rows, one after the other."""
    try:
        given = np.load(path, allow_pickle=False)
    except UNREADABLE as error:
        raise DataError(f"{path} cannot be read as a npy array: {shortened(str(error), 200)}") from None
    return np.split(owners_in_array(given, sum(rows), f"{path}"), np.cumsum(rows)[:-1])


def by_user(source: Source, data: Data) -> Source:
    """The source with its rows in memory, user by user, in the places of their users.

    Files that are pooled (data.split, folds) are one part. Raises DataError where there is one user only, and where a
    user of the training file has rows in the test file, which are public.
    """
    assert data.unit is not None
    parts = [part for part in (source.train, source.test) if isinstance(part, Part)]
    if data.pooled and len(parts) > 1:
        parts = [_joined(parts)]
    found = [np.unique(_owners(part), return_inverse=True) for part in parts]
    if len(parts) > 1:
        _refuse_shared(found[0][0], found[1][0], source.name, data.unit)
    if len(found[0][0]) < 2:
        raise DataError(
            f"{source.name}: all {count(len(parts[0]), 'row')} are one user's by privacy.unit.column"
            f" {quoted(data.unit.column)}: their data are all there is, and a model of them protects nobody; name a"
            " column that tells users apart"
        )
    placed = [_in_places(part, places) for part, (_, places) in zip(parts, found, strict=True)]
    told = (
        f"Whose a row is (privacy.unit.column {data.unit.column}) is taken as the data say it; whoever has rows under"
        f" several names is protected under each by itself. At most {data.unit.most_rows} rows of a user are used,"
        " chosen by no value.",
    )
    return dataclasses.replace(
        source, train=placed[0], test=placed[1] if placed[1:] else None, declarations=(*source.declarations, *told)
    )


def in_memory(part: Part | DiskPart) -> Part:
    """All rows of a part that stays on disk, read at once."""
    if isinstance(part, Part):
        return part
    return Part(*(np.asarray(rows[0 : len(part)]) for rows in (part.x, part.y)))


def members_of(places: np.ndarray, most_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The places (U,) of the users in `places` (N,), and which rows of theirs are taken: numbers (U, M), -1 for none.

    Guarantee: a line of the second depends on nothing but its user's place and how many rows that user has, but for the
    numbers themselves, which say where in `places` those rows stand.

    >>> members_of(np.array([0, 0, 0, 4]), most_rows=2)
    (array([0, 4]), array([[ 2,  1],
           [ 3, -1]]))
    """
    users, user, sizes = np.unique(places, return_inverse=True, return_counts=True)
    in_turn = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    number = np.empty_like(in_turn)
    number[np.argsort(user, kind="stable")] = in_turn
    drawn = splitmix(0, coins(users, 0, "rows of a user")[user] + number.astype(np.uint64))
    order = np.lexsort((drawn, user))
    taken = in_turn < most_rows
    members = np.full((len(users), most_rows), -1, np.int64)
    members[user[order][taken], in_turn[taken]] = order[taken]
    return users, members


def as_users(dataset: Dataset, unit: Unit | None) -> Dataset:
    """Made-up training rows, each as a user who has it several times, where users are the unit.

    What is clipped row by row, and not user by user, then adds up to that many clip bounds.
    """
    if unit is None:
        return dataset
    times = min(unit.most_rows, _ROWS_OF_A_USER)
    x, y = (np.repeat(rows, times, axis=0) for rows in (dataset.train_x, dataset.train_y))
    users, test = len(dataset.train_y), SECOND_FILE + np.arange(len(dataset.test_y))
    places = np.concatenate([np.repeat(np.arange(users), times), test])
    return dataclasses.replace(dataset, train_x=x, train_y=y, places=places)


def _owners(part: Part) -> np.ndarray:
    assert part.owners is not None
    return part.owners


def _joined(parts: Sequence[Part]) -> Part:
    x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
    return Part(x, y, owners=np.concatenate([_owners(part) for part in parts]))


def _in_places(part: Part, places: np.ndarray) -> Part:
    order = np.argsort(places, kind="stable")
    return Part(part.x[order], part.y[order], places[order])


def _refuse_shared(train: np.ndarray, test: np.ndarray, name: str, unit: Unit) -> None:
    shared = len(np.intersect1d(train, test, assume_unique=True))
    if shared:
        raise DataError(
            f"{name}: {count(shared, 'user')} of the training rows (privacy.unit.column {quoted(unit.column)}) have"
            " test rows too, and those are public; give data.split, which keeps all rows of a user in one part, or test"
            " rows of others"
        )
