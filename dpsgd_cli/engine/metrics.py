"""Metrics by name, each with its tasks, its wording, its direction and its function.

To add a metric, add an entry to METRICS. In results a prefix says where a metric was measured: `test_accuracy`,
`validation_accuracy`, `nonprivate_train_accuracy`; `constant_accuracy` is the majority-class (or mean) baseline on the
test records.

A metric that is a mean over records is measured at every evaluation. A metric that needs a table of all answers is
scikit-learn's, where it has it, and is measured once, for the published weights on the test records.

Not here: passing a table through a model (`engine/evaluate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpsgd_cli.engine.settings import MOST_NAMED

if TYPE_CHECKING:
    from torch import Tensor

PLACES = ("nonprivate_train_", "validation_", "test_", "constant_")


@dataclass(frozen=True)
class Metric:
    """One metric.

    `of_records` maps outputs (R, B, K) and labels (R, B) to values per record (R, B); the metric is their mean. It is
    None for the training loss and for metrics that are not means. `of_table` maps one trial's answers on all records to
    the metric, or to NaN if the records do not define it. `in_units`: the metric is in the target's unit. `places`
    maps labels (R, B, ...) to how many of a record's places count (R, B): the metric is then a sum over places, divided
    by their number. `of_logs`: it is the exponential of that mean.
    """

    tasks: tuple[str, ...]
    words: str
    less_is_better: bool
    of_records: Callable[[Tensor, Tensor], Tensor] | None = None
    of_table: Callable[[Answers], float] | None = None
    in_units: bool = False
    places: Callable[[Tensor], Tensor] | None = None
    of_logs: bool = False

    @property
    def at_every_look(self) -> bool:
        """True for a mean over records, which every evaluation measures."""
        return self.of_records is not None or self.of_table is None


@dataclass(frozen=True)
class Answers:
    """One trial's answers on N records: `truth` (N,) class indices or targets, `told` (N,) the predictions.

    For classes, `scores` order the records: (N,) for the second of two classes, or (N, K). `probabilities` have the
    same shape, or are None for a model without probabilities.
    """

    truth: np.ndarray
    told: np.ndarray
    scores: np.ndarray | None = None
    probabilities: np.ndarray | None = None


@dataclass(frozen=True)
class Reading:
    """A way to read outputs (N, K) of a model of classes: logits of K classes, or for K = 1 the second's margin.

    `clipped` is as in `probabilities_by`, or None for a loss without probabilities. `weights`: public weights of the
    classes' losses in training. `costs`: public costs of missing a record of each class; left out, the weights.
    """

    clipped: float | None = math.inf
    weights: tuple[float, ...] | None = None
    costs: tuple[float, ...] | None = None

    @property
    def plain(self) -> bool:
        """Return True if the largest output decides."""
        return self.clipped is None or (self.weights is None and self.costs is None)

    def probabilities(self, outputs: np.ndarray) -> np.ndarray:
        """Return probabilities of the classes, float64 (N, classes); the loss must have some."""
        assert self.clipped is not None
        return probabilities_by(outputs, self.clipped, self.weights)

    def decisive(self, outputs: np.ndarray) -> np.ndarray:
        """Return numbers, float64 like `outputs`, of which the largest decides, or the sign of a single one.

        A class is decided for if its probability times its cost is the largest: that loses least on average.
        """
        outputs = outputs.astype(np.float64)
        if self.plain:
            return outputs
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(self.probabilities(outputs)) + np.log(self.costs or self.weights or (1.0,))
            return np.diff(logs, axis=1) if outputs.shape[1] == 1 else logs

    def chosen(self, outputs: np.ndarray) -> np.ndarray:
        """Return the index of the class that is decided for, (N,)."""
        own = self.decisive(outputs)
        return own.argmax(axis=1) if own.shape[1] > 1 else (own[:, 0] > 0).astype(np.int64)


def answers_of_classes(truth: np.ndarray, outputs: np.ndarray, reading: Reading) -> Answers:
    """Return the answers of one trial, given its outputs (N, K), which are as in `Reading`."""
    shares, told = None if reading.clipped is None else reading.probabilities(outputs), reading.chosen(outputs)
    if outputs.shape[1] > 2:
        return Answers(truth, told, shares, shares)
    outputs = outputs.astype(np.float64)
    margin = outputs[:, -1] - (outputs[:, 0] if outputs.shape[1] == 2 else 0.0)
    return Answers(truth, told, margin, None if shares is None else shares[:, 1])


def probabilities_by(outputs: np.ndarray, clipped: float, weights: Sequence[float] | None = None) -> np.ndarray:
    """Return probabilities, float64 (N, classes), of outputs (N, K): logits, or for K = 1 that of the second class.

    `clipped` is the bound at which training clipped the residual p - y, of length r sqrt(2) at most sqrt(2), by r;
    infinite without clipping. `weights` w_k multiplied the losses of each class before. So training does not converge
    to the shares s of classes among records with equal features, but to the p at which their clipped residuals cancel:
    sum_k s_k min(w_k, clipped / r_k) (p - e_k) = 0, where 2 r_k^2 = |p - e_k|^2, with the unit vector e_k of class k.
    So s_k is proportional to p_k max(1 / w_k, r_k / clipped). Without weights that keeps the order of classes.

    >>> probabilities_by(np.array([[-math.log(9)]]), 0.5).round(6).tolist()
    [[0.833333, 0.166667]]
    """
    outputs = outputs.astype(np.float64)
    outputs = np.hstack([np.zeros_like(outputs), outputs]) if outputs.shape[1] == 1 else outputs
    shares = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    if shares.shape[1] == 2 and weights is None:
        seen = np.minimum(shares, clipped)  # proportional to it, and equal where both are clipped
    else:
        squares = shares**2
        lengths = np.sqrt(((1 - shares) ** 2 + squares.sum(axis=1, keepdims=True) - squares) / 2)
        seen = shares * np.maximum(1.0 if weights is None else 1 / np.array(weights), lengths / clipped)
    return np.asarray(seen / seen.sum(axis=1, keepdims=True))


def constant_answers(truth: np.ndarray, classes: int | None) -> Answers:
    """Return the answers of the baseline without features: the most frequent class with the class shares, or the mean.

    It equals scikit-learn's DummyClassifier (strategy prior) and DummyRegressor.
    """
    if classes is None:
        return Answers(truth, np.broadcast_to(truth.mean(axis=0), truth.shape))
    if truth.ndim == 2:
        usual = (np.where(truth >= 0, truth, 0).mean(axis=0) > 0.5).astype(np.int64)
        return Answers(truth, np.broadcast_to(usual, truth.shape))
    shares = np.bincount(truth, minlength=classes) / len(truth)
    scores = np.tile(shares, (len(truth), 1))
    own = scores[:, 1] if classes == 2 else scores
    return Answers(truth, np.full(len(truth), shares.argmax()), own, own)


def of_constants(
    task: str, truth: np.ndarray, classes: int | None, labels: Sequence[object] | None = None
) -> dict[str, float]:
    """Return the task's metrics of the best answers without features: `constant_answers`, for `mae` the median."""
    found = of_table(task, constant_answers(truth, classes), labels)
    if "mae" in found:
        medians = Answers(truth, np.broadcast_to(np.median(truth, axis=0), truth.shape))
        found |= {name: own for name, own in of_table(task, medians, labels).items() if name.startswith("mae")}
    return found


def of_constant_places(task: str, truth: np.ndarray, labels: Sequence[object] | None = None) -> dict[str, float]:
    """Return the metrics of the best answer that is the same at each place of labels (N, ...) with one at each place.

    The most frequent label is right at its share of the places; their shares have the least perplexity. With `labels`,
    the names of the classes, the F1 score of each is a metric, too.
    """
    counts = np.bincount(truth[truth >= 0].reshape(-1), minlength=len(labels or ()))
    shares = counts / max(1, counts.sum())
    known = {"token_accuracy": float(shares.max(initial=0.0))}
    known["perplexity"] = float(np.exp(-(shares[shares > 0] * np.log(shares[shares > 0])).sum()))
    known = {name: value for name, value in known.items() if task in METRICS[name].tasks}
    if labels is None:
        return known
    usual = np.arange(len(counts)) == counts.argmax()
    return known | of_counts(counts, usual * counts.sum(), usual * counts, labels)


def f1_scores(of: np.ndarray, told: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the F1 score of each class or label, (K,), NaN for one that neither truth nor answers hold.

    Counts are by class, (K,): records or places of the class, answers of it, and both at once.
    """
    return np.divide(2 * right, of + told, out=np.full(len(of), math.nan), where=of + told > 0)


def _mean_known(each: np.ndarray) -> float:
    """Return the mean of the F1 scores that are not NaN, those of classes or labels that occur; 0 if all are."""
    return 0.0 if np.isnan(each).all() else float(np.nanmean(each))


def of_counts(of: np.ndarray, told: np.ndarray, right: np.ndarray, labels: Sequence[object]) -> dict[str, float]:
    """Return the mean F1 score of the classes that occur, and the F1 score of each, 0 for one that does not.

    Counts are as in `f1_scores`. `labels` names the classes.
    """
    each = f1_scores(of, told, right)
    return {"label_f1": _mean_known(each)} | _by_label("label_f1", labels, each)


def _by_label(name: str, labels: Sequence[object], each: np.ndarray) -> dict[str, float]:
    return {f"{name}_{label}": float(own) for label, own in zip(labels, np.nan_to_num(each), strict=True)}


def right_answers(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return for each record whether the predicted class is correct; a single output predicts by its sign."""
    if outputs.shape[-1] == 1:
        return (outputs.squeeze(-1) > 0) == (labels > 0)
    return outputs.argmax(dim=-1) == labels


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the absolute error of each record's output."""
    return (outputs.squeeze(-1) - targets).abs()


def places_counted(labels: Tensor) -> Tensor:
    """Return how many places of each record (R, B, ...) have a label: one that is not negative."""
    return (labels >= 0).flatten(2).sum(dim=2)


def right_places(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how many places of each record have the largest of K outputs (R, B, ..., K) at their label."""
    return ((outputs.argmax(dim=-1) == labels) & (labels >= 0)).flatten(2).sum(dim=2)


def surprise(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of each record's labels, summed over places that have one."""
    logs = outputs.log_softmax(dim=-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -(logs * (labels >= 0)).flatten(2).sum(dim=2)


def counts_of(truth: np.ndarray, told: np.ndarray, classes: int) -> np.ndarray:
    """Return counts (3, K): records of each class, answers of it, and both at once; truth and answers are (N,)."""
    return np.stack([np.bincount(own, minlength=classes) for own in (truth, told, truth[truth == told])])


def counts_of_places(outputs: Tensor, labels: Tensor) -> np.ndarray:
    """Return `counts_of` one trial's places, whose answer is the largest of outputs (B, ..., K).

    Labels are (B, ...), below 0 where none counts.
    """
    there = labels >= 0
    return counts_of(labels[there].cpu().numpy(), outputs.argmax(dim=-1)[there].cpu().numpy(), outputs.shape[-1])


def right_labels(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how many of each record's labels (R, B, K) of 0 or 1 are those that log odds (R, B, K) say."""
    return (((outputs > 0).long() == labels) & (labels >= 0)).sum(dim=2)


def _counts(answers: Answers, classes: int = 0) -> np.ndarray:
    return counts_of(answers.truth, answers.told, max(classes, answers.truth.max() + 1, answers.told.max() + 1))


def _balanced_accuracy(answers: Answers) -> float:
    """Return the mean recall of the classes that occur."""
    of, _, right = _counts(answers)
    return float((right[of > 0] / of[of > 0]).mean())


def _f1(answers: Answers) -> float:
    """Return the F1 score of the second of two classes; for more classes, the mean over classes that occur."""
    each = f1_scores(*_counts(answers))
    return _mean_known(each[1:] if answers.scores is None or answers.scores.ndim == 1 else each)


def ranked(own: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many records of the others, and of a class's `own` (N,), have at least each score, as counts.

    Scores fall from above the largest, where both counts are 0, over each that occurs in finite `scores` (N,).
    """
    order = np.argsort(-scores, kind="stable")
    last = np.flatnonzero(np.diff(scores[order], append=-math.inf))
    true = np.cumsum(own[order], dtype=np.int64)[last]
    return np.append(0, last + 1 - true), np.append(0, true)


def _auc(answers: Answers) -> float:
    """Return the area under the ROC curve; for more than two classes, the mean of one class against the rest.

    It is NaN if a class has no record.
    """
    assert answers.scores is not None
    scores = answers.scores if answers.scores.ndim == 2 else answers.scores[:, None]
    areas = []
    for column, label in enumerate(range(scores.shape[1]) if scores.shape[1] > 1 else (1,)):
        false, true = ranked(answers.truth == label, scores[:, column])
        pairs = false[-1] * true[-1]
        areas.append(np.trapezoid(true, false) / pairs if pairs else math.nan)
    return float(np.mean(areas))


def _average_precision(answers: Answers) -> float:
    """Return the mean precision over the records of the second of two classes, by their scores; NaN for more classes.

    Unlike the AUC it is low where a rare class is hard to find: without features it is the class's share.
    """
    if answers.scores is None or answers.scores.ndim == 2 or not answers.truth.any():
        return math.nan
    false, true = ranked(answers.truth == 1, answers.scores)
    return float((np.diff(true) * (true / np.maximum(1, false + true))[1:]).sum() / true[-1])


def _recall(answers: Answers) -> float:
    """Return the recall of the second of two classes at the most false positives that `FALSE_POSITIVES` allows.

    It is NaN for more classes, and if a class has no record.
    """
    if answers.scores is None or answers.scores.ndim == 2 or len(np.unique(answers.truth)) < 2:
        return math.nan
    false, true = ranked(answers.truth == 1, answers.scores)
    return float(true[false / false[-1] <= FALSE_POSITIVES].max() / true[-1])


def _log_loss(answers: Answers) -> float:
    """Return the log loss, with probabilities clipped at the machine epsilon of float64."""
    shares = answers.probabilities
    if shares is None:
        return math.nan
    shares = np.stack([1 - shares, shares], axis=1) if shares.ndim == 1 else shares
    own, least = shares[np.arange(len(shares)), answers.truth], np.finfo(np.float64).eps
    return float(-np.log(np.clip(own, least, 1 - least)).mean())


def _calibration_error(answers: Answers) -> float:
    """Return the expected calibration error (Guo et al. 2017, equation 5), with 15 bins of equal width.

    It is the mean absolute difference of confidence and accuracy per bin, weighted by records. Confidence is the
    probability of the predicted class.
    """
    shares = answers.probabilities
    if shares is None:
        return math.nan
    confidence = np.maximum(shares, 1 - shares) if shares.ndim == 1 else shares.max(axis=1)
    gaps = (answers.truth == answers.told) - confidence
    bins = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(np.int64) - 1, 0, CALIBRATION_BINS - 1)
    # rounding makes the error of the majority-class baseline, which is calibrated, exactly 0
    return round(float(np.abs(np.bincount(bins, gaps, CALIBRATION_BINS)).sum() / len(gaps)), 12)


def _mean_absolute_error(answers: Answers) -> float:
    return float(np.abs(answers.truth - answers.told).mean())


def _root_mean_square(answers: Answers) -> float:
    return math.sqrt(np.square(answers.truth - answers.told).mean())


def _r2(answers: Answers) -> float:
    """Return 1 minus the squared error divided by that of the mean; NaN if all targets are equal."""
    error, spread = np.square(answers.truth - answers.told).mean(), np.var(answers.truth)
    return math.nan if np.ptp(answers.truth) == 0 else float(1 - error / spread)


def _f1_of_labels(answers: Answers) -> np.ndarray:
    """Return `f1_scores` of each of K labels, from truth and answers of 0 or 1 (N, K); places below 0 do not count."""
    of, told = (np.where(answers.truth >= 0, own, 0) for own in (answers.truth, answers.told))
    return f1_scores(of.sum(axis=0), told.sum(axis=0), (of * told).sum(axis=0))


def _share_right(answers: Answers) -> float:
    """Return the share of right answers; labels below 0 do not count."""
    return float((answers.truth == answers.told)[answers.truth >= 0].mean())


CALIBRATION_BINS = 15
FALSE_POSITIVES = 0.01
CLASSES, NUMBERS = ("classification",), ("regression",)
PLACES_OF_CLASSES, LABELS, TOKENS = ("token-classification",), ("multi-label",), ("next-token",)

# The order decides which metric is the default.
METRICS = {
    "accuracy": Metric(CLASSES, "accuracy", False, right_answers, _share_right),
    "mae": Metric(NUMBERS, "mean absolute error", True, absolute_errors, _mean_absolute_error, in_units=True),
    "perplexity": Metric(TOKENS, "perplexity", True, surprise, places=places_counted, of_logs=True),
    "token_accuracy": Metric(
        (*PLACES_OF_CLASSES, *TOKENS), "share of places that are right", False, right_places, places=places_counted
    ),
    "label_accuracy": Metric(
        LABELS, "share of labels that are right", False, right_labels, _share_right, places=places_counted
    ),
    "label_f1": Metric(
        (*LABELS, *PLACES_OF_CLASSES),
        "mean F1 of the labels",
        False,
        of_table=lambda answers: _mean_known(_f1_of_labels(answers)),
    ),
    "balanced_accuracy": Metric(CLASSES, "balanced accuracy", False, of_table=_balanced_accuracy),
    "f1": Metric(CLASSES, "F1", False, of_table=_f1),
    "auc": Metric(CLASSES, "area under the ROC curve", False, of_table=_auc),
    "average_precision": Metric(CLASSES, "average precision", False, of_table=_average_precision),
    "recall": Metric(CLASSES, "recall at 1% false positives", False, of_table=_recall),
    "log_loss": Metric(CLASSES, "log loss", True, of_table=_log_loss),
    "ece": Metric(CLASSES, "expected calibration error", True, of_table=_calibration_error),
    "rmse": Metric(NUMBERS, "root mean squared error", True, of_table=_root_mean_square, in_units=True),
    "r2": Metric(NUMBERS, "share of variance explained (R2)", False, of_table=_r2),
    "loss": Metric((*CLASSES, *NUMBERS, *PLACES_OF_CLASSES, *LABELS, *TOKENS), "loss", True),
}


def metrics_of(task: str) -> dict[str, Metric]:
    """Return the metrics of a task, by name."""
    return {name: metric for name, metric in METRICS.items() if task in metric.tasks}


def of_table(task: str, answers: Answers, labels: Sequence[object] | None = None) -> dict[str, float]:
    """Return the task's metrics that need a table of answers, without those that are undefined for it.

    All are NaN if an answer or a score is not finite. `labels` names the classes, or a record's several
    labels. Each then has a metric of its own: the F1 score (0 where neither truth nor answers hold it). Classes have
    none if there are more than `MOST_NAMED`.
    """
    known = {name: metric.of_table for name, metric in metrics_of(task).items() if metric.of_table is not None}
    sound = np.isfinite(answers.told).all() and (answers.scores is None or np.isfinite(answers.scores).all())
    if not sound:
        return dict.fromkeys(known, math.nan)
    found = {name: function(answers) for name, function in known.items()}
    if task == "classification" and labels is not None and len(labels) <= MOST_NAMED:
        found |= _by_label("f1", labels, f1_scores(*_counts(answers, len(labels))))
    if task == "multi-label" and labels is not None:
        found |= _by_label("label_f1", labels, _f1_of_labels(answers))
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _of_column(column: str) -> tuple[Metric | None, str]:
    """Return the metric of a column, and the class or label that it is of: `a` for `test_f1_a`, or ""."""
    place = next((place for place in PLACES if column.startswith(place)), "")
    name = column.removeprefix(place)
    if name in METRICS or not place:
        return METRICS.get(name), ""
    whole = next((known for known in ("label_f1", "f1") if name.startswith(f"{known}_")), None)
    return (None, "") if whole is None else (METRICS[whole], name.removeprefix(f"{whole}_"))


def in_words(column: str) -> str:
    """Return the words for a column of a result.

    >>> in_words("test_mae"), in_words("test_f1_ham"), in_words("epsilon")
    ('test mean absolute error', 'test F1 of ham', 'epsilon')
    """
    metric, label = _of_column(column)
    if metric is None:
        return column
    words = "F1" if label and metric is METRICS["label_f1"] else metric.words
    return f"{column.partition('_')[0]} {words}{f' of {label}' if label else ''}"


def less_is_better(column: str) -> bool:
    """Return True if lower values of a column are better; False for a column that is not a metric.

    >>> less_is_better("test_loss"), less_is_better("test_mae"), less_is_better("test_accuracy")
    (True, True, False)
    """
    metric, _ = _of_column(column)
    return metric is not None and metric.less_is_better


def is_of_class(column: str) -> bool:
    """Return True for a column of one class of a classification alone, which summaries leave to tables.

    >>> is_of_class("test_f1_a"), is_of_class("test_f1"), is_of_class("test_label_f1_a")
    (True, False, False)
    """
    metric, label = _of_column(column)
    return bool(label) and metric is METRICS["f1"]


def usual_metric(columns: list[str]) -> str | None:
    """Return the default test metric among `columns`; None if there is none."""
    return next((f"test_{name}" for name in METRICS if f"test_{name}" in columns), None)
