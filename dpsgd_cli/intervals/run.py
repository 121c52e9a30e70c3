"""Releases that intervals are computed from: the rounds of a logistic model, and the sums of least squares.

A model's file holds one vector of released and public numbers for each trial: a `LogisticRelease` or a
`SquaresRelease`. Intervals are functions of it and of the recipe; no record is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.intervals.law import Law, inverse_of, is_settled, sampling_of, solved
from dpsgd_cli.intervals.price import CURVATURE, LABEL, SQUARES
from dpsgd_cli.noise.run import gaussian
from dpsgd_cli.preconditioning.second_moments import as_vector, at_most_one, blocks, exactly_one, from_vector

Pieces = Callable[[], Iterator[tuple[np.ndarray, np.ndarray]]]
"""Function that yields rows u (n, D), float64 with norms of at most 1, and labels (n,) 0 or 1, in pieces. Private."""


@dataclass(frozen=True)
class LogisticRelease:
    """Release of the last round: theta (D,), and the noisy sums H~, g~, S~ of `price.py`, without their factors.

    `bound` is R. `deviation` is the standard deviation of the noise on the vector that was released.
    """

    bound: float
    deviation: float
    theta: np.ndarray
    curvature: np.ndarray
    gradient: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(cls, bound: float, deviation: float, theta: np.ndarray, released: np.ndarray) -> LogisticRelease:
        """Return the parts of a released vector."""
        size = len(theta)
        triangle = size * (size + 1) // 2
        curvature, squares = (from_vector(part) for part in (released[:triangle], released[triangle + size :]))
        gradient = released[triangle : triangle + size]
        return cls(bound, deviation, theta, curvature / CURVATURE, gradient, squares / SQUARES)

    @classmethod
    def from_vector(cls, kept: np.ndarray) -> LogisticRelease:
        """Return the content of `vector`. Raises ValueError for a vector of another length."""
        size = (math.isqrt(4 * len(kept) + 1) - 3) // 2
        if len(kept) != (size + 1) * (size + 2) or size < 1:
            raise ValueError(f"{len(kept)} numbers are no release for intervals")
        matrices = kept[2 + 2 * size :].reshape(2, -1)
        return cls(
            float(kept[0]), float(kept[1]), kept[2 : 2 + size], from_vector(matrices[0]),
            kept[2 + size : 2 + 2 * size], from_vector(matrices[1]),
        )  # fmt: skip

    @property
    def vector(self) -> np.ndarray:
        """Return the content as one vector of (D + 1) (D + 2) numbers."""
        ends = [np.array([self.bound, self.deviation]), self.theta, self.gradient]
        return np.concatenate([*ends, as_vector(self.curvature), as_vector(self.squares)])

    @property
    def stepped(self) -> np.ndarray:
        """Return theta after a Newton step. Eigenvalues of H~ below half the noise's spread are raised to that."""
        values, vectors = np.linalg.eigh(self.curvature)
        least = self.deviation / CURVATURE * math.sqrt(2 * len(values)) / 2
        return self.theta - vectors @ ((vectors.T @ self.gradient) / np.maximum(values, least))

    @property
    def seen(self) -> tuple[np.ndarray, float]:
        """Return H~ and h, from which a coding is chosen."""
        return self.curvature, self.deviation / CURVATURE

    def law(self, coding: np.ndarray, bias: bool) -> Law | None:
        """Return the law of the estimate of theta in a `coding` (D, D'); None if noise hides the curvature.

        With `bias` the last entry of each row u is 1 / R, so the last entry of H~ tells the sum of p (1 - p). Without,
        the trace does, or less.
        """
        inverse = inverse_of(self.curvature, coding)
        if inverse is None:
            return None
        sampling = sampling_of(self.curvature, self.squares, inverse, self.deviation / SQUARES)
        found = solved(inverse, -self.gradient, sampling, self.deviation / CURVATURE, self.deviation)
        weighted = self.curvature[-1, -1] * self.bound**2 if bias else np.trace(self.curvature)
        settled = is_settled(found.estimate, self.curvature, float(weighted))
        return replace(found, estimate=self.theta + found.estimate, settled=settled)


@dataclass(frozen=True)
class SquaresRelease:
    """Release of least squares: noisy sums A (D, D) of u u^T, Z (D, K) of u y^T, and Y (K,) of squared targets.

    `bound` is R. The noise has standard deviation `deviation` on A (as `preconditioning/second_moments.py` says), and
    `deviation` / `weight` on Z.
    """

    bound: float
    deviation: float
    weight: float
    moments: np.ndarray
    products: np.ndarray
    squares: np.ndarray

    @classmethod
    def from_vector(cls, kept: np.ndarray) -> SquaresRelease:
        """Return the content of `vector`. Raises ValueError for a vector of another length."""
        outputs, size = int(kept[3]), int(kept[4])
        triangle = size * (size + 1) // 2
        if len(kept) != 5 + triangle + (size + 1) * outputs:
            raise ValueError(f"{len(kept)} numbers are no release of least squares")
        moments, products, squares = np.split(kept[5:], [triangle, triangle + size * outputs])
        bound, deviation, weight = (float(number) for number in kept[:3])
        return cls(bound, deviation, weight, from_vector(moments), products.reshape(size, outputs), squares)

    @property
    def vector(self) -> np.ndarray:
        """Return the content as one vector."""
        size, outputs = self.products.shape
        ends = np.array([self.bound, self.deviation, self.weight, outputs, size], dtype=np.float64)
        return np.concatenate([ends, as_vector(self.moments), self.products.ravel(), self.squares])

    @property
    def seen(self) -> tuple[np.ndarray, float]:
        """Return A and the standard deviation of its noise, from which a coding is chosen."""
        return self.moments, self.deviation

    def law(self, coding: np.ndarray, contrast: np.ndarray, records: float, classes: bool) -> Law | None:
        """Return the law of A^-1 Z c in a `coding` (D, D') for a `contrast` c (K,) of outputs; None if noise hides it.

        M is v A, with the mean squared residual v of <c, y>. It assumes that residuals vary alike for all records. One
        record has one class, so products of different one-hot targets are 0. `records`: their number.
        """
        inverse = inverse_of(self.moments, coding)
        if inverse is None:
            return None
        products = self.products @ contrast
        total = float(self.squares @ contrast**2) if classes else float(self.squares[0]) * float(contrast[0]) ** 2
        variance = max(0.0, total - float(products @ inverse @ products)) / max(records, 1.0)
        noise = self.deviation / self.weight * float(np.linalg.norm(contrast))
        return solved(inverse, products, variance * self.moments, self.deviation, noise)

    def records(self, bias: bool, most: int) -> float:
        """Return the number of records: from A with a constant 1 / R in each row, else `most`, the public places."""
        return max(1.0, self.moments[-1, -1] * self.bound**2) if bias else float(most)


@np.errstate(**SILENT)
def infer(
    context: PackContext, plans: Sequence[Plan], bias: bool, weights: Tensor, cuts: Sequence[Tensor]
) -> list[np.ndarray]:
    """Make the rounds of each trial on its training rows, and return the vectors of their releases.

    `weights` (R, P) are the trained models, with a `bias` or without one; where there are `cuts` of a preconditioner,
    they are models of the rows behind it.

    Raises PrivacyError if nothing public bounds the rows.
    """
    if not cuts and context.feature_bound is None:
        raise PrivacyError(
            "method.inference needs a preconditioner of second moments, or a public bound on the norm of a record's"
            " features: scale by bounds, or add unit-norm to data.preprocess"
        )
    bound = math.hypot(1.0, float(bias)) if cuts else float(context.feature_bound or 0.0)
    own, found = weights.detach().double().cpu().numpy(), []
    for trial, plan in enumerate(plans):
        cut = cuts[trial].double().cpu().numpy() if cuts else None
        pieces = partial(bounded_rows, context.table, trial, cut, bound, bias)

        def noised(number: int, exact: np.ndarray, mechanism: GaussianSum, trial: int = trial) -> np.ndarray:
            return gaussian(context.streams[trial], LABEL, number, exact, mechanism, context.table.summed)

        found.append(release_rounds(pieces, own[trial] * bound, bound, plan.mechanisms(LABEL), noised).vector)
    return found


def bounded_rows(
    table: Table, trial: int, cut: np.ndarray | None, bound: float, bias: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield a trial's rows with the bias's 1, over `bound`, and labels 0 or 1. Behind a `cut`, rows have norm 1.

    Rows that are longer than their bound are scaled down to it. Private.
    """
    x = (table.x[trial] if table.per_trial else table.x).flatten(1).cpu().numpy()
    taken = None if table.held_out is None else ~table.held_out[:, trial].cpu().numpy()
    for rows, labels in zip(blocks(x, taken), blocks(table.y.cpu().numpy(), taken), strict=True):
        moved = rows.astype(np.float64)
        if cut is not None:
            moved = exactly_one(moved - (moved @ cut) @ cut.T)
        moved = np.hstack([moved, np.ones((len(moved), 1))]) if bias else moved
        yield at_most_one(moved / bound), (labels[:, 0] > 0).astype(np.float64)


def release_rounds(
    pieces: Pieces,
    theta: np.ndarray,
    bound: float,
    mechanisms: Sequence[GaussianSum],
    noised: Callable[[int, np.ndarray, GaussianSum], np.ndarray],
) -> LogisticRelease:
    """Make the rounds of one trial and return the last.

    Args: `theta` (D,): the trained model on rows u. `mechanisms`: as charged. `noised` adds the noise of a round to its
    exact vector.
    """
    theta = np.where(np.isfinite(theta), theta, 0.0)
    made = None
    for number, mechanism in enumerate(mechanisms):
        theta = theta if made is None else made.stepped
        released = noised(number, exact_sums(pieces, theta), mechanism)
        made = LogisticRelease.of(bound, mechanism.noise_multiplier * mechanism.sensitivity, theta, released)
    assert made is not None, "intervals have rounds"
    return made


def exact_sums(pieces: Pieces, theta: np.ndarray) -> np.ndarray:
    """Return the vector of a round without noise, for any labels that are 0 or 1. Private."""
    size = len(theta)
    curvature, gradient, squares = np.zeros((size, size)), np.zeros(size), np.zeros((size, size))
    for rows, labels in pieces():
        residual = 1 / (1 + np.exp(-(rows @ theta))) - labels
        weight = np.abs(residual) * (1 - np.abs(residual))
        curvature += (rows * weight[:, None]).T @ rows
        gradient += residual @ rows
        squares += (rows * np.square(residual)[:, None]).T @ rows
    return np.concatenate([CURVATURE * as_vector(curvature), gradient, SQUARES * as_vector(squares)])
