"""Tier D on the recipe's own file: what one record changes before training.

Every record but the removed one must stay where it was. No model is trained. The file is read, and its
records are divided as training would divide them: into splits, folds and teachers' parts. Then the first record, a
record from the middle and one of several identical records are removed in turn (with `privacy.unit`: all records of
that user), and the rest is divided again. Under add-remove, a training part must stay the same, or lose one record and
gain none. If held-out records are private, they are a part like the training records, and one part alone may change.
Under replace-one and zero-out, the record is overwritten with zeros instead; a part may then lose one record and gain
one.

Records are compared by their bytes, never by the keys that the division uses.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from dpsgd_cli.audit.findings import Finding, exact_finding
from dpsgd_cli.data import preparation
from dpsgd_cli.data.dataset import Part, RawDataset
from dpsgd_cli.data.on_disk import DiskPart
from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.recipe.schema import Recipe

_MOST_ROWS = 50_000
_MOST_TRIALS = 5


def compare_file(loaded: SettledRecipe) -> Iterator[Finding]:
    """Yield the finding on each removal; nothing if the recipe divides no records.

    Only the first 50,000 rows of a larger file are read. Raises DataError if the data are not available.
    """
    recipe = loaded.recipe
    source = _head(load_raw(recipe.data, loaded.base))
    assert isinstance(source.train, Part)
    if not recipe.data.cuts and source.test is not None:
        return
    whole = _trained_on(source, loaded)
    twice = len(source.train) - len(set(_bytes(source.train)))  # which may lie in different parts
    for name, row in _rows_to_remove(source.train).items():
        owners = np.arange(len(source.train)) if source.train.owners is None else source.train.owners
        gone = owners == owners[row]
        removed = dataclasses.replace(source, train=_without(source.train, gone, recipe))
        rest = _trained_on(removed, loaded)
        changes = [(one - other, other - one) for one, other in zip(whole, rest, strict=True)]
        lost, gained = (max(sum(change[i].values()) for change in changes) for i in (0, 1))
        parts = sum(any(change) for change in changes)
        allowed = int(gone.sum())
        # with folds, several trials have the record; of teachers, only one
        most = 1 if isinstance(recipe.method, PateMethod) else len(changes)
        wrong = lost > allowed or gained > (allowed if recipe.data.by_place else 0) or parts > most
        unit = "records" if recipe.data.unit is None else "records of users"
        moved = f"a part lost {lost} and gained {gained}; {parts} changed"
        yield exact_finding("D", f"{unit} that train, without {name}", moved, "nobody else moves", wrong)
        if recipe.data.measured_privately:
            before, after = (_held_out(one, loaded) for one in (source, removed))
            left, came = sum((before - after).values()), sum((after - before).values())
            both = sum((whole[0] & before).values()) > twice
            replaced = allowed if recipe.data.by_place else 0
            wrong = left + lost > allowed or came > replaced or (left > 0 and parts > 0) or both
            told = f"the held-out part lost {left} and gained {came}; {'some' if both else 'no'} records are in both"
            yield exact_finding("D", f"held-out {unit}, without {name}", told, "one part changes, by what left", wrong)


def _head(source: RawDataset) -> RawDataset:
    """Return the first rows of the source, in memory."""
    parts = {}
    for name in ("train", "test"):
        part = getattr(source, name)
        if isinstance(part, DiskPart):
            part = Part(np.asarray(part.x[0:_MOST_ROWS]), np.asarray(part.y[0:_MOST_ROWS]))
        parts[name] = part if part is None or len(part) <= _MOST_ROWS else part.only(np.arange(_MOST_ROWS))
    return dataclasses.replace(source, **parts)


def _rows_to_remove(part: Part) -> dict[str, int]:
    """Return the rows to remove, by a description of each."""
    found = {"the first record": 0, "a record of the middle": len(part) // 2}
    seen = Counter(_bytes(part))
    twice = next((row for row, own in enumerate(_bytes(part)) if seen[own] > 1), None)
    return found if twice is None else found | {"one of several identical records": twice}


def _without(part: Part, gone: np.ndarray, recipe: Recipe) -> Part:
    if not recipe.data.by_place:
        return part.only(~gone)
    x, y = part.x.copy(), part.y.copy()
    x[gone], y[gone] = 0, 0
    return dataclasses.replace(part, x=x, y=y)


def _bytes(part: Part) -> list[bytes]:
    return [x.tobytes() + y.tobytes() for x, y in zip(part.x, part.y, strict=True)]


def _trained_on(source: RawDataset, loaded: SettledRecipe) -> list[Counter[bytes]]:
    """Return the records of every training part: of each trial's folds, of each teacher, or of all trials."""
    recipe = loaded.recipe
    part = preparation.training_rows(source, recipe.data, loaded.base)
    if recipe.folds is not None:
        held = part.known_keys.folds(recipe.folds, recipe.repeats, recipe.seed or 0)[:, :_MOST_TRIALS]
        return [Counter(_bytes(part.only(~own))) for own in held.T]
    if isinstance(recipe.method, PateMethod):
        teacher = part.known_keys.parts(recipe.method.teachers.count, "teachers", 0)
        return [Counter(_bytes(part.only(teacher == own))) for own in range(recipe.method.teachers.count)]
    return [Counter(_bytes(part))]


def _held_out(source: RawDataset, loaded: SettledRecipe) -> Counter[bytes]:
    return Counter(_bytes(preparation.held_out_rows(source, loaded.recipe.data, loaded.base)))
