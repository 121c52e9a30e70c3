"""Metrics by name: one entry each, with its tasks, its words, its direction and its function.

To add one that is a mean over records, add an entry. In results a metric is named after where it was measured:
`test_accuracy`, `validation_accuracy`, `nonprivate_train_accuracy`.

Not here: passing a table through a model (`core/losses.py`); torch, whose tensors the functions only take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PLACES = ("nonprivate_train_", "validation_", "test_")


@dataclass(frozen=True)
class Metric:
    """`of_records`: outputs (R, B, K) and labels (R, B) to what each record counts (R, B), of which the metric is the
    mean; None for the loss that a model was trained by."""

    tasks: tuple[str, ...]
    words: str
    less_is_better: bool
    of_records: Callable[[Tensor, Tensor], Tensor] | None = None


def right_answers(outputs: Tensor, labels: Tensor) -> Tensor:
    """Whether each record's class is told; one output tells two classes apart by its sign."""
    if outputs.shape[-1] == 1:
        return (outputs.squeeze(-1) > 0) == (labels > 0)
    return outputs.argmax(dim=-1) == labels


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """How far each record's output is from its target."""
    return (outputs.squeeze(-1) - targets).abs()


# In the order in which one is taken where nobody says which.
METRICS = {
    "accuracy": Metric(("classification",), "accuracy", False, right_answers),
    "mae": Metric(("regression",), "mean absolute error", True, absolute_errors),
    "loss": Metric(("classification", "regression"), "loss", True),
}


def metrics_of(task: str) -> dict[str, Metric]:
    """The metrics of a task."""
    return {name: metric for name, metric in METRICS.items() if task in metric.tasks}


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
