"""The measurement of one trained model on its held-out records: outputs to cells, cells to one noisy release.

The release, its sensitivity and its price are those of `price.py`. A row's cell is a function of the released model and
of that row alone: nothing is fitted on the held-out records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.engine.settings import MOST_NAMED
from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.evaluation import groups, metrics, strategy
from dpsgd_cli.evaluation.estimates import Estimate, Group, Measured, Noised, mean_of
from dpsgd_cli.evaluation.groups import HeldOut
from dpsgd_cli.evaluation.strategy import BINS, EDGES, ERRORS, FINE, FINE_EDGES, SIDE, TARGETS
from dpsgd_cli.noise.run import gaussian

PURPOSE = "evaluation"
"""Purpose of the random streams of the noise."""
_Estimated = tuple[Noised, dict[str, Estimate]]
_TINY = 1e-300
_SINGLE = HeldOut()


@dataclass(frozen=True)
class ClassCounts:
    """Exact counts of rows; private. They add up over pieces of the rows.

    `cells`, and for more than two classes sums of `confidence`, are those of each block of a `HeldOut`. `tables`: one
    (K, K) of classes by answers; none where it is not released.
    """

    classes: int
    cells: Sequence[np.ndarray]
    confidence: Sequence[np.ndarray]
    tables: Sequence[np.ndarray]

    @classmethod
    def of(cls, labels: np.ndarray, outputs: np.ndarray, held: HeldOut) -> ClassCounts:
        """Return the counts of rows with class indices `labels` (n,) and `outputs` (n, K), as in `measure_classes`."""
        classes = max(outputs.shape[1], 2)
        plan = strategy.for_two_classes() if classes == 2 else strategy.for_many_classes()
        cells = held.counts(_cells(labels, outputs), len(plan.matrix))
        if classes == 2:
            return cls(classes, cells, [], [])
        pairs = labels * classes + outputs.argmax(axis=1)
        named = classes <= MOST_NAMED
        table = np.bincount(pairs, held.weights, classes**2).reshape(classes, classes) if named else None
        return cls(classes, cells, held.sums(_confidence(outputs)), [] if table is None else [table.astype(float)])

    def __add__(self, other: ClassCounts) -> ClassCounts:
        def both(one: Sequence[np.ndarray], more: Sequence[np.ndarray]) -> list[np.ndarray]:
            return [own + beside for own, beside in zip(one, more, strict=True)]

        pairs = ((self.cells, other.cells), (self.confidence, other.confidence), (self.tables, other.tables))
        return ClassCounts(self.classes, *(both(*pair) for pair in pairs))


def measure_classes(
    labels: np.ndarray, outputs: np.ndarray, release: Release, stream: Streams, places: int, held: HeldOut = _SINGLE
) -> Measured:
    """Release the cells of rows with class indices `labels` (n,) and `outputs` (n, K), and estimate metrics.

    Args: outputs are logits of K >= 2 classes, or for K = 1 the margin of the second; private. Others as in
    `measure_counts`.
    """
    return measure_counts(ClassCounts.of(labels, outputs, held), release, stream, places, held)


def measure_counts(
    exact: ClassCounts, release: Release, stream: Streams, places: int, held: HeldOut = _SINGLE
) -> Measured:
    """Release counts of rows, and estimate metrics.

    Args: `release`: from `price.held_out_releases`; the ledger must have admitted it before. `places`: the public
    number of rows at most. `held`: weights and groups of the rows.
    """
    two, confused = exact.classes == 2, bool(exact.tables)
    plan = strategy.for_two_classes() if two else strategy.for_many_classes()
    share = 1 - groups.OF_CONFUSION * confused - groups.OF_CONFIDENCE * (not two)
    blocks = groups.encoded(exact.cells, plan.matrix, share)
    blocks += [] if two else groups.encoded(exact.confidence, None, groups.OF_CONFIDENCE)
    blocks += groups.encoded(exact.tables, None, groups.OF_CONFUSION) if confused else []
    mechanism = _gaussian(release, 1)
    noisy = _released(blocks, mechanism, stream, 0, places)
    deviation, ways = mechanism.noise_multiplier * mechanism.sensitivity, len(held.blocks)
    counts = groups.decoded(noisy[:ways], plan.inverse, share)
    confidences = None if two else groups.decoded(noisy[ways : 2 * ways], None, groups.OF_CONFIDENCE)

    def estimated(own: np.ndarray, sure: np.ndarray | None, factor: Callable[[float], float]) -> _Estimated:
        """Return the estimates from counts (cells,); `factor`: of the noise in them, given their share."""
        noised = Noised(own, plan, deviation * factor(share))
        if sure is None:
            return noised, metrics.of_two_classes(noised)
        return noised, metrics.of_many_classes(noised, float(sure[0]), deviation * factor(groups.OF_CONFIDENCE))

    of_all = None if confidences is None else groups.total(confidences)
    noised, found = estimated(groups.total(counts), of_all, partial(groups.of_total, _sizes(held)))
    confusion, f1 = (metrics.confusion_of_two(noised), metrics.f1_of_two(noised)) if two else ([], [])
    constants, gain = metrics.baseline_of_two(noised) if two else ({}, None)
    if confused:
        (table,) = groups.decoded(noisy[-1:], None, groups.OF_CONFUSION)
        confusion, f1, (constants, gain) = metrics.confusion_of_many(table, deviation / groups.OF_CONFUSION**0.5)
        found["balanced_accuracy"] = mean_of([row[own] for own, row in enumerate(confusion)])

    def group(column: int, value: int) -> Group:
        sure = None if confidences is None else confidences[column][:, value]
        own, metrics_of_own = estimated(
            counts[column][:, value], sure, partial(groups.of_value, _sizes(held)[column], ways)
        )
        return Group(own.records, metrics_of_own)

    kind = "two-classes" if two else "classes"
    curve = metrics.curve_of(noised) if two else []
    by_value, vector = _by_value(held, group), _joined(noisy)
    made = Measured(kind, noised, found, None, held.users, by_value, confusion, f1, curve, released=(vector,))
    return replace(made, constants=constants, gain=gain)


def measure_numbers(
    targets: np.ndarray,
    predictions: np.ndarray,
    bounds: tuple[float, float],
    release: Release,
    stream: Streams,
    places: int,
    held: HeldOut = _SINGLE,
) -> Measured:
    """Release the cells and then the moments of errors of `predictions` (n,) for `targets` (n,), both private.

    Args: `bounds`: the declared bounds of the target, public. Other arguments as in `measure_classes`. The clamp of the
    moments and the baseline's answer are computed from the first release.
    """
    scale, plan = bounds[1] - bounds[0], strategy.for_errors()
    half = _gaussian(release, 2)
    deviation = half.noise_multiplier * half.sensitivity
    errors = np.nan_to_num((targets - predictions) / scale, nan=1.0, posinf=1.0, neginf=-1.0)
    side = np.searchsorted(ERRORS[1:-1], np.abs(errors))
    cells = np.where(errors < 0, SIDE - 1 - side, SIDE + side)
    at = np.nan_to_num((targets - (bounds[0] + bounds[1]) / 2) / (scale / 2)).clip(-1.0, 1.0)
    bins = np.minimum((at + 1) / 2 * TARGETS, TARGETS - 1).astype(np.int64)
    of_targets, share = strategy.for_targets(), 1 - groups.OF_TARGETS
    blocks = groups.encoded(held.counts(cells, 2 * SIDE), plan.matrix, share)
    blocks += groups.encoded([np.bincount(bins, held.weights, TARGETS)[:, None]], of_targets.matrix, groups.OF_TARGETS)
    noisy = _released(blocks, half, stream, 0, places)
    counts = groups.decoded(noisy[:-1], plan.inverse, share)
    (drawn,) = groups.decoded(noisy[-1:], of_targets.inverse, groups.OF_TARGETS)
    noised = Noised(groups.total(counts), plan, deviation * groups.of_total(_sizes(held), share))
    clamp, constant = metrics.clamp_of(noised), metrics.median_of(drawn[:, 0])
    blocks = groups.encoded(held.sums(metrics.moments_of(np.abs(errors), at, clamp, constant)), None, 1.0)
    of_moments = _released(blocks, half, stream, 1, places)
    moments = groups.decoded(of_moments, None, 1.0)

    def estimated(released: np.ndarray, of: Noised) -> dict[str, Estimate]:
        own = metrics.of_moments(released, of.deviation * math.sqrt(share), of, clamp, scale, constant)
        return own | metrics.of_errors(of, scale)

    def group(column: int, value: int) -> Group:
        factor = groups.of_value(_sizes(held)[column], len(held.blocks), share)
        own = Noised(counts[column][:, value], plan, deviation * factor)
        told = estimated(moments[column][:, value], own)
        return Group(own.records, {name: one for name, one in told.items() if not name.startswith("constant")})

    found = estimated(groups.total(moments), noised)
    constants = {name: found.pop(f"constant_{name}") for name in ("mae", "rmse")} | {"r2": Estimate(0.0, 0.0, 0.0)}
    vectors = (_joined(noisy), _joined(of_moments))
    made = Measured("numbers", noised, found, clamp * scale, held.users, _by_value(held, group), released=vectors)
    return replace(made, constants=constants, gain=found["r2"])


def margins_of(outputs: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)) of each class (n, K) for logits (n, K): the margins."""
    logits = outputs.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(logits)
    others = weights.sum(axis=1, keepdims=True) - weights
    return logits - np.log(np.maximum(others, _TINY))


def _confidence(outputs: np.ndarray) -> np.ndarray:
    """Return the probability (n, 1) in [0, 1] of each row's most probable class; 0 where it is not a number."""
    return np.nan_to_num(1 / (1 + np.exp(-margins_of(outputs).max(axis=1, keepdims=True))), nan=0.0)


def _cells(labels: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the cell (n,) of each row: its class or if it is predicted right, and the bin of its margin."""
    if outputs.shape[1] <= 2:
        outputs = outputs.astype(np.float64)
        return labels * BINS + _bins(outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0.0), EDGES)
    right = outputs.argmax(axis=1) == labels
    return right * FINE + _bins(margins_of(outputs)[np.arange(len(labels)), labels], FINE_EDGES)


def _sizes(held: HeldOut) -> list[int]:
    return [len(block.values) for block in held.blocks]


def _by_value(held: HeldOut, group: Callable[[int, int], Group]) -> dict[str, dict[str, Group]]:
    """Return the groups by column and value; `group` estimates one, given the numbers of its column and value."""
    return {
        block.name: {value: group(column, number) for number, value in enumerate(block.values)}
        for column, block in enumerate(held.groupings)
    }


def _gaussian(release: Release, count: int) -> GaussianSum:
    """Return the mechanism of a release that is made `count` times. Raises PrivacyError if it was charged otherwise."""
    if not isinstance(release.mechanism, GaussianSum) or release.count != count:
        raise PrivacyError(f"a measurement of {count} releases was charged as {release.count}")
    return release.mechanism


def _bins(margins: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the bin of each margin: bin j holds (edges[j], edges[j + 1]]. NaN counts as the least margin."""
    return np.searchsorted(edges[1:-1], np.nan_to_num(margins, nan=-np.inf), side="left")


def _released(
    blocks: Sequence[np.ndarray], mechanism: GaussianSum, stream: Streams, number: int, places: int
) -> list[np.ndarray]:
    """Release all exact `blocks` as one vector with noise, number `number` of the stream; return the noisy blocks."""
    noisy = gaussian(stream, PURPOSE, number, _joined(blocks), mechanism, places)
    ends = np.cumsum([block.size for block in blocks])[:-1]
    return [own.reshape(block.shape) for own, block in zip(np.split(noisy, ends), blocks, strict=True)]


def _joined(blocks: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([block.ravel() for block in blocks])
