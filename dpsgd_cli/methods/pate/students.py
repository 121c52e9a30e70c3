"""Training sets of PATE students: public records with released labels.

They use no private data, so they cost nothing. Votes and their release are in `run.py`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dpsgd_cli.methods.pate.settings import LabelSpreading, Supervised

Lessons = tuple[np.ndarray, np.ndarray]
"""Row numbers of public records (n,), and their labels, int64 (n,)."""


def answered(order: np.ndarray, answers: np.ndarray) -> Lessons:
    """Return the released lessons. `answers` belong to the first records in `order`; a negative one is no answer."""
    given = np.flatnonzero(answers >= 0)
    return order[given], answers[given].astype(np.int64)


@dataclass(frozen=True)
class Course:
    """Rule that turns released answers into lessons; `graph` (Q, Q) joins neighbours for label spreading."""

    settings: Supervised | LabelSpreading
    graph: Any = None

    @classmethod
    def of(cls, settings: Supervised | LabelSpreading, public: Tensor) -> Course:
        """Return the course for public records (Q, ...); build the graph for label spreading."""
        if isinstance(settings, Supervised):
            return cls(settings)
        return cls(settings, _graph(settings, public.flatten(1).cpu().numpy()))

    def first(self, rows: np.ndarray, labels: np.ndarray) -> Lessons:
        """Return the lessons of the first student."""
        if isinstance(self.settings, Supervised) or not len(rows):
            return rows, labels
        known = np.full(self.graph.shape[0], -1)
        known[rows] = labels
        return self._spread(known, self.settings.clamping, self.settings.balanced)

    def next(self, predicted: np.ndarray) -> Lessons:
        """Return the lessons of the next student, from the previous one's predictions (Q,) on all public records."""
        assert isinstance(self.settings, LabelSpreading)
        return self._spread(predicted, self.settings.later_clamping, False)

    def _spread(self, known: np.ndarray, clamping: float, balanced: bool) -> Lessons:
        """Return all records that the graph connects to a labelled one, each with its most likely label."""
        from sklearn.semi_supervised import LabelSpreading as Spreading  # takes a while to import

        spreading = Spreading(kernel=lambda one, other: self.graph, alpha=clamping, max_iter=200)
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            # scikit-learn warns if labels still change after 200 rounds, and divides by 0 where no label arrives
            warnings.simplefilter("ignore")
            spreading.fit(np.zeros((len(known), 1)), known)
        shares, classes = spreading.label_distributions_, spreading.classes_
        reached = np.flatnonzero(np.isfinite(shares).all(axis=1) & (shares.sum(axis=1) > 0))
        if balanced:
            shares = shares / (known[:, None] == classes).sum(axis=0)
        return reached, classes[shares[reached].argmax(axis=1)].astype(np.int64)


def _graph(settings: LabelSpreading, x: np.ndarray) -> Any:
    """Return symmetric weights between each record (Q, D) and its nearest neighbours, sparse (Q, Q)."""
    from sklearn.neighbors import kneighbors_graph

    graph = kneighbors_graph(x, min(settings.neighbours, len(x) - 1), mode="distance")
    width = settings.width * np.median(graph.data)
    graph.data = np.exp(-((graph.data / max(width, np.finfo(float).tiny)) ** 2))
    return graph.maximum(graph.T)
