"""Blocks of the released vector: everybody, the values of public columns, confidences and the confusion of classes.

Let X (d, G) be the counts of cells (`strategy.py`) for each of the G values of a public column. A block releases
A X R + noise, with the strategy A of cells and the symmetric root R of (I + J) / 2, J of ones. A record is in one cell
and has one value, so it moves the block by a column of A times a row of R, whose lengths are at most 1 and exactly 1.

Estimates: X^ = A^-1 Y R^-1 is unbiased. (R R)^-1 = 2 (I - J / (1 + G)), so the counts of one value, and those of all
values together, both have the noise covariance of A alone times `spread(G)` = 2 G / (1 + G), below 2. Another weight of
J makes one of the two worse.

A block of confidences has one row in place of cells: a record adds a number in [0, 1]. The block of targets has cells
with a strategy of their own and one value: a record adds a column, of length at most 1.

Several blocks: block b is multiplied by the root of its share q_b, and the shares add up to 1. A record then moves the
whole vector by at most the root of the sum of q_b: 1. Counts from block b have noise variance 1 / q_b times that of a
block alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

OF_CONFUSION = 0.2
"""Share of the confusion matrix of more than two classes; the others get the rest."""
OF_CONFIDENCE = 0.04
"""Share of the sum of confidences of more than two classes."""
OF_TARGETS = 0.1
"""Share of the counts of targets, beside those of errors."""


@dataclass(frozen=True)
class Grouping:
    """A public column whose `values` group the records; `codes` (n,) are the rows' own, private, 0 to G - 1."""

    name: str
    values: tuple[str, ...]
    codes: np.ndarray


EVERYBODY = Grouping("", ("",), np.zeros(0, np.int64))
"""The grouping with one value."""


@dataclass(frozen=True)
class HeldOut:
    """Weights and groups of held-out rows.

    `weights` (n,), private, add up to at most 1 for each record or user; None: 1 each. `groupings`: the columns by
    whose values metrics are also wanted. `users`: a unit is a user, with several rows.
    """

    weights: np.ndarray | None = None
    groupings: tuple[Grouping, ...] = ()
    users: bool = False

    @property
    def blocks(self) -> tuple[Grouping, ...]:
        """The groupings, or the one of everybody."""
        return self.groupings or (EVERYBODY,)

    def part(self, rows: slice) -> HeldOut:
        """Return the weights and groups of some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(
            self, weights=weights, groupings=tuple(replace(one, codes=one.codes[rows]) for one in self.groupings)
        )

    def counts(self, cells: np.ndarray, number: int) -> list[np.ndarray]:
        """Return for each block the weighted number of rows (number, G) in each cell; `cells` (n,) are indices."""
        found = []
        for block in self.blocks:
            codes = block.codes if self.groupings else 0
            size = len(block.values)
            flat = np.bincount(cells * size + codes, self.weights, minlength=number * size)
            found.append(flat.astype(float).reshape(number, size))
        return found

    def sums(self, vectors: np.ndarray) -> list[np.ndarray]:
        """Return for each block the weighted sums (d, G) of the rows' `vectors` (n, d)."""
        weighed = vectors if self.weights is None else vectors * self.weights[:, None]
        found = []
        for block in self.blocks:
            own = block.codes[:, None] == np.arange(len(block.values)) if self.groupings else np.ones((len(vectors), 1))
            found.append(weighed.T @ own.astype(float))
        return found


def mixing(groups: int) -> np.ndarray:
    """Return R (G, G), the symmetric root of (I + J) / 2: its rows have length 1."""
    mean = np.full((groups, groups), 1 / groups)
    return (np.eye(groups) - mean) * math.sqrt(1 / 2) + mean * math.sqrt((1 + groups) / 2)


def unmixing(groups: int) -> np.ndarray:
    """Return the inverse of `mixing`."""
    mean = np.full((groups, groups), 1 / groups)
    return (np.eye(groups) - mean) * math.sqrt(2) + mean * math.sqrt(2 / (1 + groups))


def spread(groups: int) -> float:
    """Return the noise variance of one value's counts, and of the total, over that of a block without values."""
    return 2 * groups / (1 + groups)


def encoded(tables: Sequence[np.ndarray], matrix: np.ndarray | None, share: float) -> list[np.ndarray]:
    """Return the exact blocks of `tables` (d, G), which get equal parts of `share`; `matrix` None is the identity."""
    root = math.sqrt(share / len(tables))
    return [(one if matrix is None else matrix @ one) @ mixing(one.shape[1]) * root for one in tables]


def decoded(blocks: Sequence[np.ndarray], inverse: np.ndarray | None, share: float) -> list[np.ndarray]:
    """Return unbiased `tables` from noisy blocks: the inverse of `encoded`."""
    root = math.sqrt(share / len(blocks))
    return [(one if inverse is None else inverse @ one) @ unmixing(one.shape[1]) / root for one in blocks]


def of_value(groups: int, blocks: int, share: float) -> float:
    """Return the deviation of the noise in the counts of one value of a block, over that of the released numbers."""
    return math.sqrt(spread(groups) * blocks / share)


def of_total(sizes: Sequence[int], share: float) -> float:
    """Return the same for the total: the mean of the totals of all blocks."""
    return math.sqrt(sum(map(spread, sizes)) / len(sizes) / share)


def total(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Return the counts (d,) of all values together: the mean over blocks."""
    return np.asarray(sum(one.sum(axis=1) for one in tables) / len(tables))
