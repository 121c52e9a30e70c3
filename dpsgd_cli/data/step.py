"""What every preprocessing step offers: plan on a layout, fit on training rows, transform any rows.

A step first plans (layout in, layout out: every mistake is found before a value is read) and then fits on the
training rows, which yields a function from noise draws to the transform of any rows.

Not here: the steps (`preprocess.py`), their order and what they are charged (`preparation.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from dpsgd_cli.data.dataset import Layout
from dpsgd_cli.errors import DataError
from dpsgd_cli.privacy.mechanism import GaussianSum

Draw = Callable[[tuple[int, ...]], np.ndarray]
Transform = Callable[[np.ndarray], np.ndarray]

UNTOLD: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
"""For `np.errstate` where private rows are read and transformed: a warning would tell of single records."""


class Step(ABC):
    """One preprocessing step with its settings.

    `release` is the mechanism that the step is (its draws are standard normal, of the trial's own stream);
    `nonprivate` says that it reads the training rows without noise; `declaration` what it takes to be public.
    """

    release: GaussianSum | None = None
    nonprivate: str | None = None
    declaration: str | None = None

    @abstractmethod
    def plan(self, layout: Layout) -> Layout:
        """The layout after this step; raises DataError for what the step cannot do."""

    @abstractmethod
    def fit(self, rows: np.ndarray, layout: Layout) -> Callable[[Draw], Transform]:
        """Read the training rows as far as the step does; `layout` is theirs, before the step."""


class PrivateStep(Step):
    """A step whose only look at the training rows is a release: an array, of which the transform is post-processing.

    What was released may be kept and used again (after a resume) without a second release.
    """

    @abstractmethod
    def learn(self, rows: np.ndarray, layout: Layout) -> Callable[[Draw], np.ndarray]:
        """From noise draws to the array that is released."""

    @abstractmethod
    def apply(self, released: np.ndarray) -> Transform:
        """The transform that follows from what was released; reads no data."""

    def fit(self, rows: np.ndarray, layout: Layout) -> Callable[[Draw], Transform]:
        learned = self.learn(rows, layout)
        return lambda draw: self.apply(learned(draw))


def refuse_codes(step: str, layout: Layout) -> None:
    """Raise DataError while a categorical column is still a column of codes, which `step` cannot take for numbers."""
    if layout.categorical:
        names = ", ".join(layout.categorical)
        raise DataError(
            f"{step}: {names} would be used as numbers but hold categories; put one-hot before, or drop them"
        )
