"""Users: the rows of each user, where `privacy.unit` protects all rows of a user together.

Neighbouring data sets differ in all rows of one user, however many. The user and their rows are present or absent
(add-remove), are replaced by others (replace-one, any number of rows from 1), or are null rows, which add nothing
(zero-out). A user's key (`splits.py`) is a hash of their name under add-remove, and their rank by name, from 0,
otherwise. The key and the user's own rows decide:

- the part of a cut, and the fold. They depend on the key alone, so all rows of a user stay together;
- the rows that are used if a user has more than `most_rows`: those with the smallest coins. A row's key is a hash of
  the user's name, of its own content and of its number among the user's identical rows.

Adding or removing a row therefore changes which rows of its own user are used, and nobody else's. The number of users
is public, as the number of records is elsewhere. The number of rows of a user is not.

`users/run.py` computes what a user adds to a sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.common.text_format import count, quoted
from dpsgd_cli.data.cells import Cells
from dpsgd_cli.data.dataset import Dataset, Part, RawDataset
from dpsgd_cli.data.on_disk import DiskPart, stored
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.splits import SECOND_FILE, Keys, coin, content_keys
from dpsgd_cli.errors import DataError
from dpsgd_cli.users.settings import Unit

_ROWS_OF_A_USER = 4
NOBODYS = "leave those rows out, or give each a user of its own"


def owners_of(cells: Cells, where: str) -> np.ndarray:
    """Return the names (N,) of the users whose rows these are: the text of each cell, exactly as written.

    Text stays as it is (blanks and leading zeros too), integers are exact, floats have their shortest digits. Raises
    DataError for a gap, and for text that holds a NUL.

    Guarantee: cells of different text never become one user, who would then be protected less than their rows need.
    """
    column = f"{where}: privacy.unit.column {quoted(cells.name)}"
    missing = cells.gaps()
    if missing.any():
        raise DataError(
            f"{column} has {count(int(missing.sum()), 'gap')}, first in data row {cells.row(missing.argmax())}; a row"
            f" of nobody's is protected with nobody's: {NOBODYS}"
        )
    # arrays of text drop a NUL at the end
    broken = cells.mapped(lambda text: "\0" in (text or ""), bool)
    if broken.any():
        raise DataError(f"{column} is no valid text in data row {cells.row(broken.argmax())} (a NUL); rename that user")
    return cells.mapped(lambda text: text or "", str)


def owners_in_array(given: Any, rows: int, where: str) -> np.ndarray:
    """Return the names (N,) of the users in an array with one entry for each of `rows` rows.

    Raises DataError as `owners_of` does, and for any other shape or type of array.
    """
    if given.shape != (rows,) or given.dtype.kind not in "biufUS":
        raise DataError(
            f"{where} has shape {given.shape} of {given.dtype}, but must be ({rows},), a number or text for each row"
        )
    if given.dtype.kind == "S":
        try:
            given = np.char.decode(given, "utf-8")
        except UnicodeDecodeError:
            raise DataError(f"{where} holds bytes that are no UTF-8 text; store the names as text") from None
    return owners_of(Cells.of(where, given), where)


def owners_in_file(path: Path, rows: Sequence[int]) -> list[np.ndarray]:
    """Return the names of the users in a .npy file, for consecutive parts with `rows` rows."""
    given = np.array(stored(path))
    return np.split(owners_in_array(given, sum(rows), f"{path}"), np.cumsum(rows)[:-1])


def by_user(source: RawDataset, data: Data) -> RawDataset:
    """Return the source with its rows in memory, grouped by user, with the keys of their users.

    Files that are pooled (data.split, folds) are one part. Raises DataError if there is only one user, or if a user of
    the training file has rows in the test file, which are public.
    """
    assert data.unit is not None
    parts = [part for part in (source.train, source.test) if isinstance(part, Part)]
    if data.pooled and len(parts) > 1:
        parts = [parts[0].pooled(parts[1])]
    found = [np.unique(_owners(part), return_inverse=True) for part in parts]
    if len(parts) > 1:
        _refuse_shared(found[0][0], found[1][0], source.name, data.unit)
    if len(found[0][0]) < 2:
        raise DataError(
            f"{source.name}: all {count(len(parts[0]), 'row')} are one user's by privacy.unit.column"
            f" {quoted(data.unit.column)}: their data are all there is, and a model of them protects nobody; name a"
            " column that tells users apart"
        )
    if data.by_place:
        first = (0, SECOND_FILE)
        keys = [Keys(place + user, True, of_users=True) for place, (_, user) in zip(first, found, strict=False)]
    else:
        keys = [Keys.of_names(names)[user] for names, user in found]
    grouped = [_by_user(part, own) for part, own in zip(parts, keys, strict=True)]
    told = (
        f"Whose a row is (privacy.unit.column {data.unit.column}) is taken as the data say it; whoever has rows under"
        f" several names is protected under each by itself. At most {data.unit.most_rows} rows of a user are used,"
        " chosen by a hash of their content.",
    )
    return dataclasses.replace(
        source, train=grouped[0], test=grouped[1] if grouped[1:] else None, declarations=(*source.declarations, *told)
    )


def in_memory(part: Part | DiskPart) -> Part:
    """Return a part with all of its rows in memory."""
    if isinstance(part, Part):
        return part
    x, y = (np.asarray(rows[0 : len(part)]) for rows in (part.x, part.y))
    return Part(x, y)


def members_of(keys: np.ndarray, most_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys (U,) of the users of rows with `keys` (N,), and their rows' numbers (U, M), -1 for none.

    The first `most_rows` rows of each user are taken, in their order.

    >>> members_of(np.array([0, 0, 0, 4]), most_rows=2)
    (array([0, 4]), array([[ 0,  1],
           [ 3, -1]]))
    """
    users, user, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    order = np.argsort(user, kind="stable")
    in_turn = np.arange(len(keys)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken = in_turn < most_rows
    members = np.full((len(users), most_rows), -1, np.int64)
    members[user[order][taken], in_turn[taken]] = order[taken]
    return users, members


def shares_of_rows(members: np.ndarray) -> np.ndarray:
    """Return the weight (U, M) of each row of `members_of` in its user's mean: 1 / n_u, and 0 for an empty place.

    >>> shares_of_rows(np.array([[0, 1], [3, -1]])).tolist()
    [[0.5, 0.5], [1.0, 0.0]]
    """
    there = members >= 0
    return np.asarray(there / np.maximum(there.sum(axis=1, keepdims=True), 1))


def as_users(dataset: Dataset, data: Data) -> Dataset:
    """Return synthetic training rows with each row repeated as several rows of one user, if users are the unit.

    If gradients are wrongly clipped by row, a user then adds that many clip bounds to the sum.
    """
    if data.unit is None:
        return dataset
    times = min(data.unit.most_rows, _ROWS_OF_A_USER)
    x, y = (np.repeat(rows, times, axis=0) for rows in (dataset.train_x, dataset.train_y))
    users, test = len(dataset.train_y), SECOND_FILE + np.arange(len(dataset.test_y))
    keys = Keys(np.concatenate([np.repeat(np.arange(users), times), test]), True, of_users=True)
    return dataclasses.replace(dataset, train_x=x, train_y=y, keys=keys)


def _owners(part: Part) -> np.ndarray:
    assert part.owners is not None
    return part.owners


def _by_user(part: Part, keys: Keys) -> Part:
    """Return the rows grouped by user, with those of a user in the order of their coins."""
    rows = content_keys(part.x, part.y, keys.values)
    order = np.lexsort((coin(rows.values, 0, "rows of a user"), keys.values))
    return dataclasses.replace(part, keys=keys).only(order)


def _refuse_shared(train: np.ndarray, test: np.ndarray, name: str, unit: Unit) -> None:
    shared = len(np.intersect1d(train, test, assume_unique=True))
    if shared:
        raise DataError(
            f"{name}: {count(shared, 'user')} of the training rows (privacy.unit.column {quoted(unit.column)}) have"
            " test rows too, and those are public; give data.split, which keeps all rows of a user in one part, or test"
            " rows of others"
        )
