"""Metrics of classes and of numbers, from noisy counts of cells (`estimates.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpsgd_cli.evaluation import groups
from dpsgd_cli.evaluation.estimates import Estimate, Noised, Z, fieller, in_range, mean_of, ratio_of
from dpsgd_cli.evaluation.strategy import (
    BINS,
    EDGES,
    ERRORS,
    FINE,
    FINE_LOSSES,
    LEAST_PROBABILITY,
    LOSSES,
    RIGHT,
    SIDE,
    SLACK,
    SQUARES,
    Strategy,
    within,
)

CALIBRATED = (0.2, 0.4, 0.6, 0.8)
"""Probabilities between the five groups of the calibration gaps."""
CURVE = range(4, BINS, 4)
"""Edges of margins at which the curve has points."""
MOMENTS = 6
"""Length of a record's vector of moments."""
WIDEST = 0.25
"""Width of a 95% interval of the majority class's share beyond which no point is shown."""
_EVERY = np.ones((2, BINS))
_OF_CLASS = (_EVERY * [[1.0], [0.0]], _EVERY * [[0.0], [1.0]])
_PREDICTED = (_EVERY * np.repeat([1.0, 0.0], BINS // 2), _EVERY * np.repeat([0.0, 1.0], BINS // 2))


def baseline_of_two(noised: Noised) -> tuple[dict[str, Estimate], Estimate]:
    """Return `baseline_of` from noisy cells of `strategy.for_two_classes`."""
    return baseline_of([noised], [own.reshape(1, -1) for own in _OF_CLASS], RIGHT.reshape(1, -1))


def of_two_classes(noised: Noised) -> dict[str, Estimate]:
    """Return metrics from noisy cells of `strategy.for_two_classes`.

    Accuracy, balanced accuracy, sensitivity and specificity (recall of each class), AUC, average precision, log loss
    (probabilities clipped to [.01, .99]), Brier score, and signed calibration gaps (mean label minus mean probability):
    of all records, and in five groups of probability.
    """
    recalls = [noised.ratio(RIGHT * own, own, 0.0, 1.0) for own in _OF_CLASS]
    probability = np.sqrt(SQUARES[0])
    gap = np.array([-probability, 1 - probability])
    found = {
        "accuracy": noised.ratio(RIGHT, _EVERY, 0.0, 1.0),
        "balanced_accuracy": mean_of(recalls),
        "sensitivity": recalls[1],
        "specificity": recalls[0],
        "auc": noised.shown(_auc(noised)),
        "average_precision": noised.shown(_average_precision(noised)),
        "log_loss": noised.ratio(LOSSES, _EVERY, 0.0, float(LOSSES.max())),
        "brier": noised.ratio(SQUARES, _EVERY, 0.0, 1.0),
        "calibration_gap": noised.ratio(gap, _EVERY, -1.0, 1.0),
    }
    group = np.digitize(probability, CALIBRATED)
    for number in range(len(CALIBRATED) + 1):
        inside = _EVERY * (group == number)
        found[f"calibration_gap_{number + 1}"] = noised.ratio(gap * inside, inside, -1.0, 1.0)
    return found


def confusion_of_two(noised: Noised) -> list[list[Estimate]]:
    """Return for each true class the share of its records that each class is predicted for."""
    return [[noised.ratio(own * one, own, 0.0, 1.0) for one in _PREDICTED] for own in _OF_CLASS]


def f1_of_two(noised: Noised) -> list[Estimate]:
    """Return each class's F1 score: twice what is predicted right, over records of the class plus predictions of it."""
    pairs = zip(_OF_CLASS, _PREDICTED, strict=True)
    return [noised.ratio(2 * own * told, own + told, 0.0, 1.0) for own, told in pairs]


def baseline_of(
    parts: Sequence[Noised], owns: Sequence[np.ndarray], right: np.ndarray
) -> tuple[dict[str, Estimate], Estimate]:
    """Return the metrics of always answering the most frequent class, and the model's accuracy minus that accuracy.

    Args: weights (parts, cells) of each class's records, and of those that are predicted right. Post-processing of the
    release, so it costs nothing: with the accuracy a, the sensitivity s and the specificity t, the share of the second
    class is (t - a) / (t - s). Counts of cells give it directly, also where s = t.

    The share of the most frequent class is at least each class's lower end, and at most the greatest upper end. It has
    no point if that interval is wider than `WIDEST`: noise then hides it. The baseline's log loss and Brier score are
    those of the shares as probabilities. For two classes they fall with the larger share. For more, the
    sums of the least and of the greatest parts that the classes may have in the log loss are the ends.
    """
    every = np.sum(owns, axis=0)
    shares = [ratio_of(parts, own, every, 0.0, 1.0) for own in owns]
    points = [one.value or 0.0 for one in shares]
    low, high = max(1 / len(owns), *(one.low for one in shares)), max(one.high for one in shares)
    known = high - low <= WIDEST
    most = Estimate(min(max(max(points), low), high) if known else None, low, high)
    found = {"accuracy": most, "balanced_accuracy": Estimate(1 / len(owns), 1 / len(owns), 1 / len(owns))}
    if len(owns) == 2:
        found["auc"] = Estimate(0.5, 0.5, 0.5)
        found["average_precision"] = replace(shares[1], value=shares[1].value if known else None)
        losses = {"log_loss": lambda share: _part(share) + _part(1 - share), "brier": lambda share: share * (1 - share)}
        for name, loss in losses.items():
            found[name] = Estimate(None if most.value is None else loss(most.value), loss(high), loss(low))
    else:
        # a part turns at shares of 1 / e and of the greatest probability, and nowhere else
        turns = (0.0, 1 / math.e, 1 - LEAST_PROBABILITY, 1.0)
        tried = [[min(max(turn, one.low), one.high) for turn in turns] for one in shares]
        least, greatest = (min(sum(end(map(_part, own)) for own in tried), math.log(len(owns))) for end in (min, max))
        value = min(max(sum(map(_part, points)), least), greatest)
        found["log_loss"] = Estimate(value if known else None, least, greatest)
    return found, ratio_of(parts, right - owns[int(np.argmax(points))], every, -1.0, 1.0)


def _part(share: float) -> float:
    """Return what a class with that share adds to the log loss of answering the shares; clipped as `LOSSES`."""
    return -share * math.log(min(max(share, LEAST_PROBABILITY), 1 - LEAST_PROBABILITY))


def curve_of(noised: Noised) -> list[tuple[float, Estimate, Estimate]]:
    """Return (probability, sensitivity, specificity) of predicting the second class above that probability."""
    found = []
    for edge in CURVE:
        above = (np.arange(BINS) >= edge).astype(float)
        sensitive = noised.ratio(_OF_CLASS[1] * above, _OF_CLASS[1], 0.0, 1.0)
        specific = noised.ratio(_OF_CLASS[0] * (1 - above), _OF_CLASS[0], 0.0, 1.0)
        found.append((float(1 / (1 + np.exp(-EDGES[edge]))), sensitive, specific))
    return found


def of_many_classes(noised: Noised, confidence: float, deviation: float) -> dict[str, Estimate]:
    """Return accuracy, log loss and the calibration gap from noisy cells of `strategy.for_many_classes`.

    The calibration gap is the accuracy minus the mean confidence, the probability of the predicted class. Args:
    `confidence`: the noisy sum of the records' confidences, and `deviation`, that of its noise.
    """
    every = np.ones_like(FINE_LOSSES)
    return {
        "accuracy": noised.ratio(every * [[0.0], [1.0]], every, 0.0, 1.0),
        "log_loss": noised.ratio(FINE_LOSSES, every, 0.0, float(FINE_LOSSES.max())),
        "calibration_gap": noised.shown(_gap_of_many(noised, confidence, deviation)),
    }


def _gap_of_many(noised: Noised, confidence: float, deviation: float) -> Estimate:
    """Return the accuracy minus the mean confidence.

    A record that is predicted right has the confidence p of its cell, and adds 1 - p to the numerator. One that is
    predicted wrong adds -c, where c is unknown; its square is at most c, and the sum of all c is the rest of the sum of
    confidences. So the variance is not understated.
    """
    right = np.concatenate([np.zeros(FINE), np.ones(FINE)])
    own = np.exp(-FINE_LOSSES[1])
    x, wrong = noised.projected, float(noised.projected[:FINE].sum())
    of_wrong = min(max(confidence - float(x[FINE:] @ own), 0.0), wrong)
    over, under = float(right @ noised.linear) - confidence, noised.records
    squares = float(x[FINE:] @ (1 - own) ** 2) + of_wrong + noised.deviation_of(right) ** 2 + deviation**2
    middle = float(x[FINE:] @ (1 - own)) - of_wrong
    shared = middle + float((right @ noised.root) @ noised.root.sum(axis=0))
    below = float(x.sum()) + noised.deviation_of(np.ones(2 * FINE)) ** 2
    low, high = fieller(over, under, squares, shared, below, -1.0, 1.0)
    point = min(max(middle / float(x.sum()), -1.0), 1.0) if x.sum() > 0 else None
    return Estimate(point, low, high)


def confusion_of_many(
    table: np.ndarray, deviation: float
) -> tuple[list[list[Estimate]], list[Estimate], tuple[dict[str, Estimate], Estimate]]:
    """Return the confusion matrix, each class's F1 score as in `f1_of_two`, and `baseline_of`.

    All are functions of the unbiased counts `table` (true class, predicted class), a block of its own, whose released
    numbers have noise of standard deviation `deviation`.
    """
    classes = len(table)
    inverse = groups.unmixing(classes)
    mixed = Strategy(np.linalg.inv(inverse) * SLACK, inverse / SLACK, inverse @ inverse.T)
    rows = [Noised(own, mixed, deviation) for own in table]
    every, f1 = np.ones(classes), []
    for own, row in enumerate(rows):
        right, either = np.zeros((2, classes, classes))
        right[own, own] = 2.0
        either[own] += 1.0
        either[:, own] += 1.0
        f1.append(row.shown(ratio_of(rows, right, either, 0.0, 1.0)))
    baseline = baseline_of(rows, [np.outer(one, every) for one in np.eye(classes)], np.eye(classes))
    return [[row.ratio(one, every, 0.0, 1.0) for one in np.eye(classes)] for row in rows], f1, baseline


def _average_precision(noised: Noised) -> Estimate:
    """Return the mean precision at the margins of the second class's records; a bin's own records count half.

    With cumulative counts a_j of the second class, and t_j of both, from the top: f(x) = sum_j x1_j (a_j / t_j) / n1.
    The interval is that of the first-order expansion at x+, f(x+) + g (x^ - x+), where g x+ = 0 because f does not
    depend on scale. If n1 cannot be distinguished from 0, it is [0, 1].
    """
    x0, x1 = noised.projected.reshape(2, BINS)
    positives = _OF_CLASS[1].ravel()
    many = float(x1.sum())
    deviation = math.hypot(noised.deviation_of(positives), math.sqrt(many))
    if many <= 0 or positives @ noised.linear <= Z * deviation:
        return Estimate(None, 0.0, 1.0)
    from_top = np.triu(np.ones((BINS, BINS))) - np.eye(BINS) / 2
    above, of_all = from_top @ x1, from_top @ (x0 + x1)
    precision = np.divide(above, of_all, out=np.zeros(BINS), where=of_all > 0)
    weight = np.divide(x1, of_all, out=np.zeros(BINS), where=of_all > 0)
    value = float(x1 @ precision) / many
    of_both = -from_top.T @ (weight * precision) / many
    of_second = (precision + from_top.T @ weight - value) / many + of_both
    gradient = np.concatenate([of_both, of_second])
    centre = value + float(gradient @ noised.linear)
    wide = Z * math.hypot(noised.deviation_of(gradient), math.sqrt(float(noised.projected @ gradient**2)))
    return Estimate(value, *in_range(centre - wide, centre + wide, 0.0, 1.0))


def _auc(noised: Noised) -> Estimate:
    """Return the area under the ROC curve; margins in the same bin count half.

    N = x1 K x0 and D = x1 J x0 are bilinear in the counts of the two classes, with K_ij = 1 for i > j and 1/2 for i =
    j, and J of ones. With B = K - t J and errors e = x^ - x, x^1 B x^0 - x1 B x0 = e1 B x0 + x1 B e0 + e1 B e0. The
    noise's mean tr(B C01) is subtracted; the variance is that of the three terms, whose covariances with the last are 0
    for symmetric errors.
    """
    ones = np.ones((BINS, BINS))
    order = np.tril(ones) - np.eye(BINS) / 2
    x0, x1 = noised.projected.reshape(2, BINS)
    noise = noised.covariance.reshape(2, BINS, 2, BINS)
    all00, all11, all10 = noise[0, :, 0] + np.diag(x0), noise[1, :, 1] + np.diag(x1), noise[1, :, 0]

    def statistic(form: np.ndarray) -> float:
        l0, l1 = noised.linear.reshape(2, BINS)
        return float(l1 @ form @ l0 - (form * all10).sum())

    def shared(a: np.ndarray, b: np.ndarray) -> float:
        first = (a @ x0) @ all11 @ (b @ x0) + (x1 @ a) @ all00 @ (x1 @ b)
        mixed = (a @ x0) @ all10 @ (x1 @ b) + (b @ x0) @ all10 @ (x1 @ a)
        second = ((a @ all00 @ b.T) * all11).sum() + ((a @ all10.T) * (b @ all10.T).T).sum()
        return float(first + mixed + second)

    squares = shared(order, order), shared(order, ones), shared(ones, ones)
    low, high = fieller(statistic(order), statistic(ones), *squares, 0.0, 1.0)
    pairs = float(x1.sum() * x0.sum())
    return Estimate(float(x1 @ order @ x0) / pairs if pairs > 0 else None, low, high)


def of_errors(noised: Noised, scale: float) -> dict[str, Estimate]:
    """Return quantiles of the absolute error, in units of the target; `scale` is its declared range.

    A quantile is the smallest edge below which at least that share of errors lies. Its interval is that of the edges
    whose share may be equal to it.
    """
    found = {}
    every = np.ones(2 * SIDE)
    shares = [noised.ratio(within(edge), every, 0.0, 1.0) for edge in range(1, SIDE + 1)]
    for quantile in (0.5, 0.9):
        reached = [edge for edge, one in enumerate(shares) if one.value is not None and one.value >= quantile]
        lowest = [edge for edge, one in enumerate(shares) if one.high >= quantile]
        highest = [edge for edge, one in enumerate(shares) if one.low >= quantile]
        low = ERRORS[lowest[0]] if lowest else ERRORS[-1]
        high = ERRORS[highest[0] + 1] if highest else ERRORS[-1]
        value = float(ERRORS[reached[0] + 1] * scale) if reached else None
        found[f"error_quantile_{round(100 * quantile)}"] = Estimate(value, float(low * scale), float(high * scale))
    return {name: noised.shown(one) for name, one in found.items()}


def moments_of(errors: np.ndarray, targets: np.ndarray, clamp: float, constant: float) -> np.ndarray:
    """Return each record's vector of moments (n, 6), of norm at most 1: (1, a, a^2, t, t^2, |t - c| / 2) / sqrt(6).

    Args: `errors` (n,) >= 0 and `clamp` > 0, as shares of the target's range; a = min(error / clamp, 1). `targets` (n,)
    are clipped to [-1, 1], the ends of the declared bounds. `constant`: c in [-1, 1], public.
    """
    a, t = np.minimum(errors / clamp, 1.0), targets.clip(-1.0, 1.0)
    return np.stack([np.ones_like(a), a, a**2, t, t**2, np.abs(t - constant) / 2], axis=1) * (
        SLACK / math.sqrt(MOMENTS)
    )


def median_of(counts: np.ndarray) -> float:
    """Return a median in [-1, 1] of targets from noised `counts` (d,) of d equal bins, linear within its bin."""
    below = np.maximum.accumulate(np.concatenate([[0.0], counts.cumsum()]))
    return float(np.interp(below[-1] / 2, below, np.linspace(-1.0, 1.0, len(below))))


def clamp_of(noised: Noised) -> float:
    """Return the clamp of errors: the lowest edge with at most 1% of the records beyond it, or one noise deviation."""
    for edge in range(1, SIDE):
        beyond = 1 - within(edge)
        if beyond @ noised.linear <= max(0.01 * noised.records, noised.deviation_of(beyond)):
            return float(ERRORS[edge])
    return float(ERRORS[-1])


def of_moments(
    released: np.ndarray, deviation: float, noised: Noised, clamp: float, scale: float, constant: float
) -> dict[str, Estimate]:
    """Return MAE and RMSE of errors clamped at `clamp`, R2, and the baselines' errors, from noised sums of moments.

    The baseline of the RMSE (`constant_rmse`, of targets within their bounds) is the mean of the targets, so its RMSE
    is their standard deviation. That of the MAE (`constant_mae`) is `constant`.

    Args: `released` (6,): the sums of `moments_of` with noise of standard deviation `deviation`. `noised`: the cells of
    errors, from which the fourth moment of the errors is taken, for variances only. `scale`: the target's range.
    """
    total, mean, square, at, at_square, apart = released * (math.sqrt(MOMENTS) / SLACK)
    noise = MOMENTS * deviation**2
    middle = np.minimum((ERRORS[1:] + ERRORS[:-1]) / 2, clamp) / clamp
    fourth = float(noised.projected @ np.concatenate([middle[::-1], middle]) ** 4)
    many, positive = max(total, 1.0), max(square, 0.0)
    fourth = min(max(fourth, positive**2 / many), positive)
    mae = _number(mean, total, max(square, 0.0), max(mean, 0.0), many, noise)
    mse = _number(square, total, fourth, positive, many, noise)
    apart_squares = max(at_square - 2 * constant * at + constant**2 * many, 0.0) / 4
    other = _number(apart, total, apart_squares, max(apart, 0.0), many, noise)
    determined = Estimate(None, -1.0, 1.0)
    variance, half = at_square / many - (at / many) ** 2, scale / 2
    # t^4 is at most t^2, so the variance of t^2 is at most E t^2; twice that covers the square of the mean
    error = Z * math.sqrt((2 * max(at_square, 0.0) + 5 * noise) / many**2)
    if variance > error:
        ratio = (2 * clamp) ** 2
        determined = Estimate(
            1 - mse.value * ratio / variance if mse.value is not None else None,
            max(1 - mse.high * ratio / (variance - error), -1.0),
            min(1 - mse.low * ratio / (variance + error), 1.0),
        )
    unit = clamp * scale
    root = None if mse.value is None else math.sqrt(mse.value) * unit
    found = {
        "mae": mae.times(unit),
        "rmse": Estimate(root, math.sqrt(mse.low) * unit, math.sqrt(mse.high) * unit),
        "r2": determined,
        "constant_mae": other.times(scale),
        "constant_rmse": Estimate(
            math.sqrt(max(variance, 0.0)) * half if variance > error else None,
            math.sqrt(max(variance - error, 0.0)) * half,
            math.sqrt(max(variance + error, 0.0)) * half,
        ),
    }
    return {name: noised.shown(one) for name, one in found.items()}


def _number(over: float, under: float, squares: float, cross: float, many: float, noise: float) -> Estimate:
    """Return a mean in [0, 1] of records' numbers: their noised sum `over`, and the noised number `under`."""
    low, high = fieller(over, under, squares + noise, cross, many + noise, 0.0, 1.0)
    return Estimate(min(max(over / under, 0.0), 1.0) if under > 0 else None, low, high)
