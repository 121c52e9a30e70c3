"""Scores of canaries under banded correlated noise: by blocks of steps, for every group that a canary may be in.

Multiplied by the public matrix C, the release is C g plus independent noise. Let a canary be in group j of b. In blocks
of b steps that begin at j, j + b, ..., it moves the rows by weights w times its gradient, |w| = 1, if it was drawn. So
the release shows sum_k w_k (C r)_{s+k} of the canary in a block that begins at s: a subsampled Gaussian, as a step of
independent noise does. A canary of an unknown group is in each group with probability 1 / b, so its likelihood ratio is
the mean of the groups' ratios.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import logsumexp


class Blocks:
    """Scores of canaries, shape (R, k). `weights` are w, the first column of C."""

    def __init__(self, weights: Sequence[float], shape: tuple[int, ...]) -> None:
        self._weights = weights
        self._raw: deque[np.ndarray] = deque(maxlen=len(weights))
        self._rows: deque[np.ndarray] = deque(maxlen=len(weights))
        self._scores = np.zeros((len(weights), *shape))
        self._steps = 0

    def add(self, seen: np.ndarray, score: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return log-likelihood ratios of all steps so far, after a step that shows `seen` on the canary coordinates.

        `score` returns the log-likelihood ratio of one block.
        """
        bands = len(self._weights)
        self._raw.appendleft(seen)
        self._rows.append(self._sum(self._raw))
        self._steps += 1
        if self._steps >= bands:
            self._scores[self._steps % bands] += score(self._sum(self._rows))
        return np.asarray(logsumexp(self._scores, axis=0) - math.log(bands))

    def _sum(self, rows: deque[np.ndarray]) -> np.ndarray:
        return np.asarray(sum(weight * row for weight, row in zip(self._weights, rows, strict=False)))
