"""The measurement of one trained model on its held-out records: outputs to cells, cells to one noisy release.

The release, its sensitivity and its price are those of `price.py`. A record's cell is a function of the released model
and of that record alone: nothing is fitted on the held-out records.
"""

from __future__ import annotations

import numpy as np

from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.evaluation import estimates, strategy
from dpsgd_cli.evaluation.estimates import Measured, Noised
from dpsgd_cli.evaluation.strategy import BINS, EDGES, ERRORS, SIDE, Strategy
from dpsgd_cli.noise.run import gaussian

PURPOSE = "evaluation"
"""Purpose of the random streams of the noise."""
_TINY = 1e-300


def measure_classes(
    labels: np.ndarray, outputs: np.ndarray, release: Release, stream: Streams, places: int
) -> Measured:
    """Release the cells of records with class indices `labels` (n,) and `outputs` (n, K), and estimate metrics.

    Args: outputs are logits of K >= 2 classes, or for K = 1 the margin of the second; private. `release`: from
    `price.held_out_releases`; the ledger must have admitted it before. `places`: the public number of records at
    most.
    """
    two = outputs.shape[1] <= 2
    if two:
        outputs = outputs.astype(np.float64)
        margins = outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0.0)
        cells = labels * BINS + _bins(margins)
    else:
        right = outputs.argmax(axis=1) == labels
        cells = right * BINS + _bins(margins_of(outputs)[np.arange(len(labels)), labels])
    plan = strategy.for_two_classes() if two else strategy.for_many_classes()
    noised = _released(np.bincount(cells, minlength=2 * BINS), plan, _gaussian(release, 1), stream, places)
    found = estimates.of_two_classes(noised) if two else estimates.of_many_classes(noised)
    return Measured("two-classes" if two else "classes", noised, found)


def measure_numbers(
    targets: np.ndarray,
    predictions: np.ndarray,
    bounds: tuple[float, float],
    release: Release,
    stream: Streams,
    places: int,
) -> Measured:
    """Release the cells and then the moments of errors of `predictions` (n,) for `targets` (n,), both private.

    Args: `bounds`: the declared bounds of the target, public. Other arguments as in `measure_classes`. The clamp of the
    moments is computed from the first release.
    """
    scale = bounds[1] - bounds[0]
    half = _gaussian(release, 2)
    errors = np.nan_to_num((targets - predictions) / scale, nan=1.0, posinf=1.0, neginf=-1.0)
    side = np.searchsorted(ERRORS[1:-1], np.abs(errors))
    cells = np.where(errors < 0, SIDE - 1 - side, SIDE + side)
    noised = _released(np.bincount(cells, minlength=2 * SIDE), strategy.for_errors(), half, stream, places)
    clamp = estimates.clamp_of(noised)
    at = np.nan_to_num((targets - (bounds[0] + bounds[1]) / 2) / (scale / 2))
    exact = estimates.moments_of(np.abs(errors), at, clamp).sum(axis=0)
    deviation = half.noise_multiplier * half.sensitivity
    moments = gaussian(stream, PURPOSE, 1, exact, half, places)
    metrics = estimates.of_moments(moments, deviation, noised, clamp, scale) | estimates.of_errors(noised, scale)
    return Measured("numbers", noised, metrics, clamp * scale)


def margins_of(outputs: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)) of each class (n, K) for logits (n, K): a class's score in `sets.py`."""
    logits = outputs.astype(np.float64)
    logits = logits - logits.max(axis=1, keepdims=True)
    weights = np.exp(logits)
    others = weights.sum(axis=1, keepdims=True) - weights
    return logits - np.log(np.maximum(others, _TINY))


def _gaussian(release: Release, count: int) -> GaussianSum:
    """Return the mechanism of a release that is made `count` times. Raises PrivacyError if it was charged otherwise."""
    if not isinstance(release.mechanism, GaussianSum) or release.count != count:
        raise PrivacyError(f"a measurement of {count} releases was charged as {release.count}")
    return release.mechanism


def _bins(margins: np.ndarray) -> np.ndarray:
    """Return the bin of each margin: bin j holds (EDGES[j], EDGES[j + 1]]. NaN counts as the least margin."""
    return np.searchsorted(EDGES[1:-1], np.nan_to_num(margins, nan=-np.inf), side="left")


def _released(counts: np.ndarray, plan: Strategy, mechanism: GaussianSum, stream: Streams, places: int) -> Noised:
    """Release A x + noise for the exact `counts` x (cells,)."""
    released = gaussian(stream, PURPOSE, 0, plan.matrix @ counts, mechanism, places)
    return Noised.of(released, plan, mechanism.noise_multiplier * mechanism.sensitivity)
