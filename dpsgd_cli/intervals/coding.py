"""Choice of the features whose coefficients can be told: independent ones that noise does not hide. Uses NumPy only.

The features of a category are 1 in one of them, so they add up to the constant: single coefficients mean nothing, only
differences do. One of them, the reference, is left out. Which features add up to others follows from public inputs;
which are hidden, and which are frequent, from released sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FEWEST_TIMES = 5.0
"""A feature is hidden if its released sum of squares is below this many standard deviations of its noise."""


@dataclass(frozen=True)
class Coding:
    """Features by their numbers: `hidden` by noise; `references`, left out; and `free`, D' others.

    `coded` (D', D) turns weights of all D features into those of the free ones in an equal model. `back` (D, D) turns
    weights on the table's rows into weights on preconditioned rows.
    """

    hidden: np.ndarray
    references: list[int]
    free: list[int]
    coded: np.ndarray
    back: np.ndarray

    @property
    def matrix(self) -> np.ndarray:
        """Return T (D, D') of `law.py`: weights of the free features, as weights on preconditioned rows."""
        return self.back[:, self.free]


def chosen(inputs: np.ndarray, sums: np.ndarray, spread: float, root: np.ndarray, bias: bool) -> Coding:
    """Choose a coding.

    Args: `inputs` (n, D): public rows of the table's features; with `bias` the last is the constant. `sums` (D, D): a
    released sum over preconditioned rows x root, with noise of standard deviation `spread` on its diagonal. `root`
    (D, D): symmetric.
    """
    back = np.linalg.inv(root)
    sizes = np.einsum("ij,ik,kj->j", back, sums, back)
    known = sizes > _FEWEST_TIMES * spread * np.square(back).sum(axis=0)
    hidden = np.flatnonzero(~known)
    without = inputs[~(inputs[:, hidden] != 0).any(axis=1)]
    inputs = without if len(without) >= inputs.shape[1] else inputs
    # the constant first, then rare features before frequent ones
    constant = len(sizes) - 1 if bias else -1
    order = sorted(map(int, np.flatnonzero(known)), key=lambda at: (at != constant, sizes[at]))
    basis, free = np.zeros((len(inputs), 0)), set()
    for at in order:
        rest = inputs[:, at]
        for _ in range(2):  # once is not enough in floating point
            rest = rest - basis @ (basis.T @ rest)
        if np.linalg.norm(rest) > 1e-6 * np.linalg.norm(inputs[:, at]):
            basis = np.hstack([basis, rest[:, None] / np.linalg.norm(rest)])
            free.add(at)
    listed = sorted(free)
    coded = np.zeros((len(listed), len(sizes)))
    coded[:, known] = np.linalg.lstsq(inputs[:, listed], inputs[:, known], rcond=None)[0]
    coded[np.abs(coded) < 1e-9] = 0.0
    return Coding(hidden, [at for at in order if at not in free], listed, coded, back)
