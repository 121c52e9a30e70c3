"""A table of any length, condensed for the draft of a recipe: read a part at a time, once for a whole file.

Of each column all cells of the first part are kept, then cells with a text that the column has not had, and infinite
numbers. All cells, and the different ones among them, are counted. From about `MOST_TEXTS` different texts on, a column
has no list of categories: of its later cells, one of each new shape is kept, where all runs of digits have one shape.
So a word or a comma among numbers is found far down, and a day that is none among dates is not. Memory depends on the
length of a part, not on the number of rows. Of a table of one part all cells stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.table import gaps
from dpsgd_cli.data.written_numbers import plain_cells
from dpsgd_cli.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

MOST_TEXTS = 10_000
MOST_HASHES = 1 << 16


@dataclass(frozen=True)
class Condensed:
    """The kept cells of a column, indexed by their places in the file, and facts about all of its cells.

    `cells` counts those that are no gaps, `different` those of them that differ from each other.
    """

    kept: pd.Series
    gaps: bool
    cells: int
    different: int


def condensed(
    parts: Iterable[pd.DataFrame], written: TableFormat, target: str, counted: Callable[[str], bool]
) -> tuple[dict[str, Condensed], int]:
    """Return the columns of a table that is given in `parts`, and its number of rows.

    Different fractions are counted only in the columns that `counted` names.
    """
    columns, rows = dict[str, _Column](), 0
    for part in parts:
        rows += len(part)
        for name in part.columns:
            columns.setdefault(name, _Column(written, name == target, counted(name))).add(part[name])
    return {name: column.made() for name, column in columns.items()}, rows


class Different:
    """Number of different values, exact up to `MOST_HASHES`, then within about 1%.

    Adaptive sampling: only hashes below 2^64 / 2^k are kept, with k as large as it must be (Wegman; Flajolet 1990, "On
    adaptive sampling", Computing 43).
    """

    def __init__(self) -> None:
        self._hashes, self._counts, self._halved = np.empty(0, np.uint64), np.empty(0, np.int64), 0

    def add(self, values: np.ndarray, counts: np.ndarray) -> None:
        """Add different values (n,) and how often each occurs (n,)."""
        import pandas as pd

        hashes = pd.util.hash_array(values, categorize=False)
        found, place = np.unique(np.concatenate([self._hashes, hashes]), return_inverse=True)
        times = np.bincount(place, np.concatenate([self._counts, counts]), len(found)).astype(np.int64)
        below = self._below(found)
        self._hashes, self._counts = found[below], times[below]
        while len(self._hashes) > MOST_HASHES:
            self._halved += 1
            below = self._below(self._hashes)
            self._hashes, self._counts = self._hashes[below], self._counts[below]

    def _below(self, hashes: np.ndarray) -> np.ndarray:
        return hashes >> np.uint64(64 - self._halved) == 0 if self._halved else np.ones(len(hashes), bool)

    def of(self, cells: int) -> int:
        """Return the number among so many cells: all of them if no value in the sample occurs twice."""
        if (self._counts == 1).all():
            return cells
        return min(cells, len(self._hashes) << self._halved)


@dataclass
class _Column:
    """A column while a table is read. If `every_gap`, all gaps are kept, as those of the target: each is a fault."""

    written: TableFormat
    every_gap: bool
    counted: bool
    parts: list[pd.Series] = field(default_factory=list)
    seen: set[Any] = field(default_factory=set)
    full: bool = False
    shapes: set[str] = field(default_factory=set)
    gaps: bool = False
    cells: int = 0
    different: Different = field(default_factory=Different)

    def made(self) -> Condensed:
        """Return the column once all parts are taken."""
        import pandas as pd

        kept = self.parts[0]
        if len(self.parts) > 1:
            plain = [one.astype(object) if isinstance(one.dtype, pd.CategoricalDtype) else one for one in self.parts]
            kept = pd.concat(plain)
        return Condensed(kept, self.gaps, self.cells, self.different.of(self.cells))

    def add(self, part: pd.Series) -> None:
        """Take the column's cells of the next part."""
        import pandas as pd

        first = not self.parts
        if part.dtype == np.float64 and not first and self.full and not self.counted:
            self._add_fractions(part)
            return
        try:
            part = plain_cells(part)
        except DataError:
            self.parts += [part] * first
            return
        empty = gaps(part, self.written)
        codes, values = pd.factorize(part.where(~empty) if empty.any() else part)
        kind = getattr(values.dtype, "kind", "O")
        values = np.asarray(values, dtype=None if kind in "biuf" else object)
        self.gaps, self.cells = self.gaps or bool(empty.any()), self.cells + int((codes >= 0).sum())
        if len(values):
            self.different.add(values, np.bincount(codes[codes >= 0], minlength=len(values)))
        fresh = self._fresh(values)
        if first:
            self.parts.append(part)
            return
        begins = np.unique(codes, return_index=True)[1][-len(values) :]  # -1, a gap, comes first
        places = np.concatenate([begins[fresh], np.flatnonzero(empty) if self.every_gap else []]).astype(int)
        if len(places):
            self.parts.append(part.iloc[np.sort(places)])

    def _add_fractions(self, part: pd.Series) -> None:
        values = part.to_numpy()
        empty = np.isnan(values)
        self.gaps, self.cells = self.gaps or bool(empty.any()), self.cells + int((~empty).sum())
        odd = np.isinf(values) | (empty & self.every_gap)
        if odd.any():
            self.parts.append(part[odd])

    def _fresh(self, values: np.ndarray) -> np.ndarray:
        """Return the places of the values that are kept, and remember the values."""
        if self.full:
            return np.flatnonzero(~np.isfinite(values)) if values.dtype.kind in "biuf" else self._of_new_shapes(values)
        told = values.tolist()
        fresh = [at for at, value in enumerate(told) if value not in self.seen][: 2 * MOST_TEXTS - len(self.seen)]
        self.seen.update(told[at] for at in fresh)
        self.full = len(self.seen) > MOST_TEXTS
        return np.array(fresh, dtype=int)

    def _of_new_shapes(self, values: np.ndarray) -> np.ndarray:
        """Return the place of the first value of each shape that no earlier one has; none once there are many."""
        self.shapes = self.shapes or set(_shapes(list(map(str, self.seen))))
        if len(self.shapes) > MOST_TEXTS // 2:
            return np.empty(0, int)
        shapes = _shapes(list(map(str, values.tolist())))
        new = set(shapes) - self.shapes if len(shapes) == len(values) else set()
        self.shapes |= new
        return np.array(sorted(shapes.index(shape) for shape in new), int)


def _shapes(texts: list[str]) -> list[str]:
    """Return texts with one zero in place of each run of digits.

    >>> _shapes(["1,234.50", "2020-12-31"])
    ['0,0.0', '0-0-0']
    """
    together = _END.join(texts).translate(_DIGITS)
    while "00" in together:
        together = together.replace("00", "0")
    return together.split(_END)


_DIGITS = str.maketrans("123456789", "0" * 9)
_END = "\0\n"
