"""Metrics by name: one entry each, with its tasks, its words, its direction and its function.

To add one, add an entry. In results a metric is named after where it was measured: `test_accuracy`,
`validation_accuracy`, `nonprivate_train_accuracy`; `constant_accuracy` is what a constant gets on the test records.

What is a mean over records is measured at every evaluation; what takes a whole table of answers, by scikit-learn's
definitions, once: of the published weights on the test records.

Not here: passing a table through a model (`core/losses.py`); torch, whose tensors the functions only take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PLACES = ("nonprivate_train_", "validation_", "test_", "constant_")


@dataclass(frozen=True)
class Metric:
    """`of_records`: outputs (R, B, K) and labels (R, B) to what each record counts (R, B), of which the metric is the
    mean; None for the loss that a model was trained by, and for what is no mean.

    `of_table`: one trial's answers on all records of a table; not a number where the records do not define it.
    `in_units`: it is in the target's own unit.
    """

    tasks: tuple[str, ...]
    words: str
    less_is_better: bool
    of_records: Callable[[Tensor, Tensor], Tensor] | None = None
    of_table: Callable[[Answers], float] | None = None
    in_units: bool = False

    @property
    def at_every_look(self) -> bool:
        """Whether it is a mean over records."""
        return self.of_records is not None or self.of_table is None


@dataclass(frozen=True)
class Answers:
    """One trial's on N records: `truth` (N,) class indices or targets, `told` (N,) classes or numbers.

    For classes also `scores`, which order records: (N,) of the second of two, or (N, K); and `probabilities` of that
    shape, where there are any.
    """

    truth: np.ndarray
    told: np.ndarray
    scores: np.ndarray | None = None
    probabilities: np.ndarray | None = None


def answers_of_classes(truth: np.ndarray, outputs: np.ndarray, clipped: float | None) -> Answers:
    """From the outputs (N, K) of one trial: logits of K classes or, where K is 1, the margin of the second of two.

    `clipped` is as of `probabilities_by`; None where margins say nothing of probabilities.
    """
    outputs = outputs.astype(np.float64)
    shares = None if clipped is None else probabilities_by(outputs, clipped)
    if outputs.shape[1] > 2:
        return Answers(truth, outputs.argmax(axis=1), shares, shares)
    margin = outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0.0)
    return Answers(truth, (margin > 0).astype(np.int64), margin, None if shares is None else shares[:, 1])


def probabilities_by(outputs: np.ndarray, clipped: float) -> np.ndarray:
    """Probabilities, float64 (N, classes), by outputs (N, K): logits of classes or, where K is 1, of the second of two.

    `clipped` is the most that training let a residual p - y of two classes count; infinite where it let all of it, and
    for more classes.
    What training looks for is then not the share s of positives among records alike, but the p at which their clipped
    residuals cancel: (1 - s) min(p, clipped) = s min(1 - p, clipped), which is solved for s here.

    >>> probabilities_by(np.array([[-math.log(9)]]), 0.5).round(6).tolist()
    [[0.833333, 0.166667]]
    """
    from scipy.special import softmax

    outputs = outputs.astype(np.float64)
    shares = softmax(np.hstack([np.zeros_like(outputs), outputs]) if outputs.shape[1] == 1 else outputs, axis=1)
    seen = np.minimum(shares, clipped)
    return np.asarray(seen / seen.sum(axis=1, keepdims=True))


def constant_answers(truth: np.ndarray, classes: int | None) -> Answers:
    """Of the best that knows no feature: the shares of the `classes` among the records and the most frequent, or the
    mean (scikit-learn's DummyClassifier, strategy prior, and DummyRegressor)."""
    if classes is None:
        return Answers(truth, np.full(len(truth), truth.mean()))
    shares = np.bincount(truth, minlength=classes) / len(truth)
    scores = np.tile(shares, (len(truth), 1))
    own = scores[:, 1] if classes == 2 else scores
    return Answers(truth, np.full(len(truth), shares.argmax()), own, own)


def right_answers(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether each record's class is told; one output tells two classes apart by its sign."""
    if outputs.shape[-1] == 1:
        return (outputs.squeeze(-1) > 0) == (labels > 0)
    return outputs.argmax(dim=-1) == labels


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """How far each record's output is from its target."""
    return (outputs.squeeze(-1) - targets).abs()


def _accuracy(answers: Answers) -> float:
    return float((answers.truth == answers.told).mean())


def _balanced_accuracy(answers: Answers) -> float:
    """The mean of the classes' recalls, over the classes that there are."""
    from sklearn.metrics import recall_score

    there = np.unique(answers.truth)
    return float(recall_score(answers.truth, answers.told, labels=there, average="macro", zero_division=0))


def _f1(answers: Answers) -> float:
    """Of the second of two classes; of more, the mean of each one's."""
    from sklearn.metrics import f1_score

    several = answers.scores is not None and answers.scores.ndim == 2
    return float(f1_score(answers.truth, answers.told, average="macro" if several else "binary", zero_division=0))


def _auc(answers: Answers) -> float:
    """Of more than two classes, the mean of each against the rest; undefined where a class has no record."""
    from sklearn.metrics import roc_auc_score

    classes = 2 if answers.scores is None or answers.scores.ndim == 1 else answers.scores.shape[1]
    if len(np.unique(answers.truth)) < classes:
        return math.nan
    several = {"multi_class": "ovr", "labels": np.arange(classes)} if classes > 2 else {}
    return float(roc_auc_score(answers.truth, answers.scores, **several))


def _log_loss(answers: Answers) -> float:
    """Of the probabilities, each at least as large as the least that float64 tells from 0 beside 1."""
    from sklearn.metrics import log_loss

    shares = answers.probabilities
    if shares is None:
        return math.nan
    return float(log_loss(answers.truth, shares, labels=np.arange(2 if shares.ndim == 1 else shares.shape[1])))


def _calibration_error(answers: Answers) -> float:
    """By how much confidence and accuracy differ: the mean of the difference in 15 bins of equal width, each weighted
    by its records (Guo et al. 2017, equation 5). Confidence is the probability of the class that is told."""
    shares = answers.probabilities
    if shares is None:
        return math.nan
    confidence = np.maximum(shares, 1 - shares) if shares.ndim == 1 else shares.max(axis=1)
    gaps = (answers.truth == answers.told) - confidence
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    # a constant that says the shares of the records is calibrated to rounding
    return round(float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps)), 12)


def _mean_absolute_error(answers: Answers) -> float:
    return float(np.abs(answers.truth - answers.told).mean())


def _root_mean_square(answers: Answers) -> float:
    from sklearn.metrics import root_mean_squared_error

    return float(root_mean_squared_error(answers.truth, answers.told))


def _r2(answers: Answers) -> float:
    """1 less the squared error as a share of that of the mean; undefined where all targets are equal."""
    from sklearn.metrics import r2_score

    return float(r2_score(answers.truth, answers.told)) if np.ptp(answers.truth) > 0 else math.nan


CALIBRATION_BINS = 15
CLASSES, NUMBERS = ("classification",), ("regression",)

# In the order in which one is taken where nobody says which.
METRICS = {
    "accuracy": Metric(CLASSES, "accuracy", False, right_answers, _accuracy),
    "mae": Metric(NUMBERS, "mean absolute error", True, absolute_errors, _mean_absolute_error, in_units=True),
    "balanced_accuracy": Metric(CLASSES, "balanced accuracy", False, of_table=_balanced_accuracy),
    "f1": Metric(CLASSES, "F1", False, of_table=_f1),
    "auc": Metric(CLASSES, "area under the ROC curve", False, of_table=_auc),
    "log_loss": Metric(CLASSES, "log loss", True, of_table=_log_loss),
    "ece": Metric(CLASSES, "expected calibration error", True, of_table=_calibration_error),
    "rmse": Metric(NUMBERS, "root mean squared error", True, of_table=_root_mean_square, in_units=True),
    "r2": Metric(NUMBERS, "share of variance explained (R2)", False, of_table=_r2),
    "loss": Metric(("classification", "regression"), "loss", True),
}


def metrics_of(task: str) -> dict[str, Metric]:
    """The metrics of a task."""
    return {name: metric for name, metric in METRICS.items() if task in metric.tasks}


def of_table(task: str, answers: Answers) -> dict[str, float]:
    """The task's metrics that take a table of answers; those that the records or the model do not define are left out.

    Where a score is not finite, all are not a number.
    """
    known = {name: metric.of_table for name, metric in metrics_of(task).items() if metric.of_table is not None}
    sound = np.isfinite(answers.told).all() and (answers.scores is None or np.isfinite(answers.scores).all())
    if not sound:
        return dict.fromkeys(known, math.nan)
    found = {name: function(answers) for name, function in known.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _of_column(column: str) -> Metric | None:
    place = next((place for place in PLACES if column.startswith(place)), "")
    return METRICS.get(column.removeprefix(place))


def in_words(column: str) -> str:
    """What a column of a result says.

    >>> in_words("test_mae"), in_words("epsilon")
    ('test mean absolute error', 'epsilon')
    """
    metric = _of_column(column)
    return column if metric is None else f"{column.partition('_')[0]} {metric.words}"


def less_is_better(column: str) -> bool:
    """Whether the best of a column is the least; of a column that holds no metric, the most.

    >>> less_is_better("test_loss"), less_is_better("test_accuracy")
    (True, False)
    """
    metric = _of_column(column)
    return metric is not None and metric.less_is_better


def usual_metric(columns: list[str]) -> str | None:
    """The test metric to speak of where nobody says which; None where there is none."""
    return next((f"test_{name}" for name in METRICS if f"test_{name}" in columns), None)
