"""From the rows of private columns to their counts, and from noisy counts to bounds and categories.

Cells of a numeric column are public and the same for every column: from -2^40 to 2^40, each power of two down to 2^-20
cut into four equal steps, and one cell for all that is nearer to 0. Values beyond are in the outermost cells. Bounds
are ends of cells: 0, or a power of two times 1, 1.25, 1.5 or 1.75.

Categories are distinguished by a code, a hash of the cell's text. So the code of a record depends on that record alone,
as every number of a row must (`data/splits.py`). A file in which two texts of a column have one code is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpsgd_cli.discovery import price
from dpsgd_cli.discovery.settings import Discovery
from dpsgd_cli.errors import DataError

LEAST, MOST, STEPS = -20, 40, 4
"""Exponents of the least and the greatest power of two among the ends of cells, and cells from a power to the next."""
_POSITIVE = np.outer(2.0 ** np.arange(LEAST, MOST), 1 + np.arange(STEPS) / STEPS).ravel()
EDGES = np.concatenate([[-(2.0**MOST)], -_POSITIVE[::-1], _POSITIVE, [2.0**MOST]])
"""Ends of the cells of a numeric column, ascending."""
CELLS = len(EDGES) - 1
CLEAR = 4.0
"""Standard deviations of its noise that a count has to exceed to count as more than noise."""
GROWTH = 2.0
"""Standard deviations of its noise that a power beside those that are clear has to add, to be taken along."""
_LONGEST = 16
_CODE_BITS = 52
_MOST_RECORDS = 10**9


def code(text: str) -> float:
    """Return the code of a category: the first 52 bits of BLAKE2b of its text, a whole number that float64 holds.

    >>> code("a") == code("a"), code("a") == code("b"), code("") < 2**52
    (True, False, True)
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> (64 - _CODE_BITS))


def codes(texts: Iterable[str], column: str) -> dict[float, str]:
    """Return the text of each code. Raises DataError if two texts of the `column` have one code."""
    found: dict[float, str] = {}
    for text in texts:
        if found.setdefault(code(text), text) != text:
            raise DataError(f"column {column!r}: two of its categories cannot be told apart; drop the column")
    return found


@dataclass(frozen=True)
class Found:
    """Release of the private columns: bounds (low, high) by numeric column, categories by categorical one.

    `unclear` are numeric columns of which no count was clear of its noise, so that their bounds are a guess.
    """

    bounds: Mapping[str, tuple[float, float]]
    categories: Mapping[str, Sequence[str]]
    unclear: Sequence[str] = ()

    @property
    def lines(self) -> list[str]:
        """One line for each column, for people."""
        told = [f"{name}: {low:g} to {high:g}" for name, (low, high) in self.bounds.items()]
        return told + [f"{name}: {', '.join([*own, 'other'])}" for name, own in self.categories.items()]

    @property
    def warnings(self) -> list[str]:
        """Warnings that follow from the release itself."""
        lost = [f"{name}: no count is clear of the noise, so its bounds are a guess" for name in self.unclear]
        lost += [f"{name}: no category is above the threshold" for name, own in self.categories.items() if not own]
        return [f"private columns: {'; '.join(lost)}; raise data.discovery.share, or state them"] if lost else []

    def to_array(self) -> np.ndarray:
        """Return it as bytes, uint8, of JSON. `from_array` is the inverse."""
        return np.frombuffer(json.dumps(vars(self)).encode(), np.uint8).copy()

    @classmethod
    def from_array(cls, kept: np.ndarray) -> Found:
        """Raises ValueError if `kept` is no array of `to_array`."""
        held: dict[str, Any] = json.loads(kept.astype(np.uint8).tobytes())
        bounds = {name: (float(low), float(high)) for name, (low, high) in held["bounds"].items()}
        categories = {name: list(map(str, own)) for name, own in held["categories"].items()}
        return cls(bounds, categories, list(map(str, held["unclear"])))


def counts_of_numbers(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Return the sum of `weights` (N,) of the `values` (N,) in each cell, (CELLS,), float64; None: 1 each.

    A value that is not finite is in no cell. Guarantee: each row adds its weight to at most one count.
    """
    known = np.isfinite(values)
    cells = np.searchsorted(EDGES, values[known], side="right") - 1
    own = None if weights is None else weights[known]
    return np.bincount(np.clip(cells, 0, CELLS - 1), own, minlength=CELLS).astype(np.float64)


def counts_of_codes(values: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the different codes among `values` (N,), and the sum of the `weights` (N,) of each; None: 1 each.

    NaN, a missing value, has none, and a row of weight 0 is not there. Guarantee: each row adds its weight to at most
    one count.
    """
    known = np.isfinite(values) if weights is None else np.isfinite(values) & (weights > 0)
    found, which = np.unique(values[known], return_inverse=True)
    own = None if weights is None else weights[known]
    return found, np.bincount(which, own, minlength=len(found)).astype(np.float64)


def bounds_of(noisy: np.ndarray, scale: float, outside: float) -> tuple[tuple[float, float], bool]:
    """Return bounds (low < high) from noisy counts (CELLS,), and True if the counts are clear of noise of size `scale`.

    They begin as those around all powers of two whose count is clear of the noise; if there is none, around the
    powers next to each other that are clearest of it together. They grow by powers that add more than noise does,
    lose cells at their ends that add less, and then cells that hold at most a share `outside` of the records on
    either side.
    """
    zero = len(_POSITIVE)
    starts = np.array([*range(0, zero, STEPS), zero, *range(zero + 1, CELLS, STEPS)])
    ends = np.array([*starts[1:], CELLS])
    powers, spread = np.add.reduceat(noisy, starts), scale * np.sqrt(ends - starts)
    clear = np.flatnonzero(powers > CLEAR * spread)
    deviation = math.inf
    if len(clear):
        first, last = int(clear[0]), int(clear[-1])
    else:
        deviation, first, last = _clearest(powers, starts, ends, scale)
    gains = powers - GROWTH * spread
    first, last = first - _most(gains[:first][::-1]), last + _most(gains[last + 1 :])
    outer = (noisy - scale)[starts[first] : ends[first]][::-1]
    start = int(ends[first]) - (_most(outer) or len(outer))
    outer = (noisy - scale)[max(start, int(starts[last])) : ends[last]]
    end = int(ends[last]) - len(outer) + (_most(outer) or len(outer))
    kept = np.maximum(noisy[start:end], 0.0)
    most = outside * kept.sum()
    below, above = (int((one.cumsum() > most).argmax()) for one in (kept, kept[::-1]))
    return _between(start + below, end - above), deviation > CLEAR


def _clearest(powers: np.ndarray, starts: np.ndarray, ends: np.ndarray, scale: float) -> tuple[float, int, int]:
    """Return which powers in a row are clearest of noise: their standard deviations, the first and the last.

    `powers` are noisy counts, `starts` and `ends` the cells of each.
    """
    sums, found = np.concatenate([[0.0], powers.cumsum()]), []
    for length in (1, 2, 4, 8, _LONGEST):
        cells = ends[length - 1 :] - starts[: len(starts) - length + 1]
        deviations = (sums[length:] - sums[:-length]) / (scale * np.sqrt(cells))
        first = int(deviations.argmax())
        found.append((float(deviations[first]), first, first + length - 1))
    return max(found)


def _most(gains: np.ndarray) -> int:
    """Return how many of the first `gains` add up to the most; 0 if none do to more than 0."""
    sums = np.concatenate([[0.0], gains.cumsum()])
    return int(sums.argmax())


def _between(start: int, end: int) -> tuple[float, float]:
    """Return bounds around the cells from `start` up to `end`; the cell around 0 counts as 0."""
    zero = len(_POSITIVE)
    low, high = 0.0 if start == zero else float(EDGES[start]), 0.0 if end == zero + 1 else float(EDGES[end])
    return (low, high) if low < high else (0.0, 1.0)


def categories_of(noisy: np.ndarray, texts: Sequence[str], least: float, most: int) -> list[str]:
    """Return the categories whose noisy counts exceed `least`: the `most` largest of them, in alphabetical order."""
    above = [(-count, text) for count, text in zip(noisy.tolist(), texts, strict=True) if count > least]
    return sorted(text for _, text in sorted(above)[:most])


@dataclass(frozen=True)
class Counts:
    """Exact counts of all private columns, by name: of cells, or of codes with their texts.

    `rows` is the number of rows that the unit of privacy has at most.
    """

    numbers: Mapping[str, np.ndarray]
    codes: Mapping[str, tuple[np.ndarray, Sequence[str]]]
    rows: int

    def released(self, noised: Callable[[np.ndarray], np.ndarray], settings: Discovery, scale: float) -> Found:
        """Return what is read from the counts with noise of standard deviation `scale`, which `noised` adds."""
        assert settings.settled and not isinstance(settings.delta, str)
        exact = [*self.numbers.values(), *(counts for counts, _ in self.codes.values())]
        flat = np.concatenate(exact)
        _check_margin(len(flat), settings)
        parts = iter(np.split(noised(flat), np.cumsum([len(own) for own in exact])[:-1]))
        numeric = {name: bounds_of(next(parts), scale, settings.outside) for name in self.numbers}
        least = price.threshold(scale, settings.delta, len(self.codes), self.rows) if self.codes else 0.0
        named = {
            name: categories_of(next(parts), texts, least, settings.most_categories)
            for name, (_, texts) in self.codes.items()
        }
        bounds = {name: pair for name, (pair, _) in numeric.items()}
        return Found(bounds, named, [name for name, (_, clear) in numeric.items() if not clear])


def _check_margin(numbers: int, settings: Discovery) -> None:
    """Raise ValueError if noise on the public grid could be larger than thresholds count on."""
    from dpsgd_cli.noise.run import Grid  # torch, which reading a table does without

    assert not isinstance(settings.noise_multiplier, str)
    grid = Grid.of(numbers, _MOST_RECORDS, [settings.noise_multiplier])
    # half a step of rounding on either side, in standard deviations; no threshold is nearer to 1 than two of them
    if grid.raised + 2.0**-grid.bits > price.MARGIN:
        raise ValueError(f"noise of {numbers} counts is too coarse for thresholds; drop columns with many categories")
