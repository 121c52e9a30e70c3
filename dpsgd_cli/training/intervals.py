"""Intervals of a trained model's coefficients and shapes, from its file and its recipe alone. No record is read.

The model's file holds noisy sums (`dpsgd_cli/intervals/run.py`); `dpsgd_cli/intervals/law.py` has the law of estimates.
So intervals are post-processing, and cost nothing beyond the release of these sums, which the budget covers.

Estimated are the coefficients without ridge, clipped gradients or a last step: of logistic regression, or of least
squares, on the rows that the model takes, in the population that the records were drawn from. The published weights may
differ from them by more than an interval, which `note` of a coefficient says.

Assumed: records are independent; for least squares, residuals vary alike for all records. Without the first, nothing
holds. `results/evaluation/inference.md` has coverage without the second. Rows are those of columns within their public
bounds: values beyond are moved to them, and the coefficients are of the moved values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpsgd_cli.engine.settings import OneLayer
from dpsgd_cli.errors import DataError
from dpsgd_cli.intervals.coding import chosen
from dpsgd_cli.intervals.law import Intervals, Law
from dpsgd_cli.intervals.price import LABEL as RELEASED
from dpsgd_cli.intervals.run import LogisticRelease, SquaresRelease
from dpsgd_cli.results.shapes import Coefficient, Ends
from dpsgd_cli.training.inference import Trained

HIDDEN = "noise hides it"
OUTSIDE = "the weight is biased beyond its interval"
REFERENCE = "reference"


class Inference:
    """Intervals of linear functions of one trial's coefficients, in a `coding` (`intervals/coding.py`)."""

    def __init__(self, trained: Trained, trial: int, inputs: np.ndarray) -> None:
        """Read the released sums. `inputs` (n, D): inputs of the model made of public bounds and values.

        Raises DataError if the model's file does not fit its recipe.
        """
        self.trained = trained
        model = trained.loaded.recipe.model
        self.bias = isinstance(model, OneLayer) and model.has_bias
        kept = trained.bundle.kept[f"{trial}/{RELEASED}"].astype(np.float64)
        least_squares = trained.loaded.recipe.method.kind == "dp-least-squares"
        self.released: SquaresRelease | LogisticRelease
        try:
            self.released = (SquaresRelease if least_squares else LogisticRelease).from_vector(kept)
        except (ValueError, IndexError) as error:
            raise DataError(f"{trained.directory}: the release for intervals is damaged ({error})") from None
        inputs = inputs.reshape(len(inputs), -1).astype(np.float64)
        inputs = np.hstack([inputs, np.ones((len(inputs), 1))]) if self.bias else inputs
        self.root = np.eye(inputs.shape[1])
        if trained.bundle.cuts:
            cut = trained.bundle.cuts[trial].double().numpy()
            self.root[: len(cut), : len(cut)] -= cut @ cut.T
        self.coding = chosen(inputs, *self.released.seen, self.root, self.bias)

    @staticmethod
    def asked(trained: Trained, trial: int) -> bool:
        """Return True if a trial's release for intervals is kept beside its weights."""
        return f"{trial}/{RELEASED}" in trained.bundle.kept

    def law(self, contrast: np.ndarray) -> Law | None:
        """Return the law of the coefficients of a `contrast` (K,) of outputs, on rows u; None if noise hides it."""
        coding = self.coding.matrix
        if isinstance(self.released, LogisticRelease):
            return self.released.law(coding, self.bias)  # of its only output
        records = self.released.records(self.bias, int(self.trained.bundle.about.get("records") or 1))
        return self.released.law(coding, contrast, records, self.trained.classes is not None)

    def of(self, directions: np.ndarray, contrast: np.ndarray) -> Intervals:
        """Return the intervals of <c, w> for the rows c of `directions` (m, D), w the weights of a contrast of outputs.

        No interval is told of a direction with a hidden feature.
        """
        law = self.law(contrast)
        if law is None:
            unknown = np.full(len(directions), np.nan)
            return Intervals(unknown, unknown, unknown, np.zeros(len(directions), bool))
        found = law.of(directions @ self.root / self.released.bound)
        least = 1e-9 * np.abs(directions).max(axis=1, keepdims=True)
        return replace(found, told=found.told & ~(np.abs(directions[:, self.coding.hidden]) > least).any(axis=1))

    def shapes(self, directions: np.ndarray, contrasts: Sequence[np.ndarray]) -> list[list[Ends | None]]:
        """Return the ends of the interval of each effect (G, K), None where noise hides it.

        `directions` (G, D): of the effect of each value of a column. An effect is compared with the mean effect of the
        values that have no hidden feature of their own; where an interval is told, `Shape.effects` are as well.
        """
        if self.bias:
            directions = np.hstack([directions, np.zeros((len(directions), 1))])
        own = directions[:, self.coding.hidden] - np.median(directions[:, self.coding.hidden], axis=0)
        plain = ~(np.abs(own) > 1e-9).any(axis=1)
        directions = directions - directions[plain].mean(axis=0) if plain.any() else directions
        found = [self.of(directions, contrast) for contrast in contrasts]
        return [
            [(float(own.low[at]), float(own.high[at])) if own.told[at] else None for own in found]
            for at in range(len(directions))
        ]

    def coefficients(self, names: Sequence[str], outputs: Sequence[str], weights: np.ndarray) -> list[Coefficient]:
        """Return the coefficient of each feature (and of the bias, the last row) and output; `weights` (m, K).

        Weights with an interval are those of the coding, in which the references have none.
        """
        found, coded = [], self.coding.coded @ weights
        for output, label in enumerate(outputs):
            own = self.of(self.coding.coded, np.eye(len(outputs))[output])
            for at, name in enumerate(names):
                number = self.coding.free.index(at) if at in self.coding.free else None
                weight, value, ends = float(weights[at, output]), None, None
                note = REFERENCE if at in self.coding.references else HIDDEN
                if number is not None and own.told[number]:
                    weight, value = float(coded[number, output]), float(own.value[number])
                    ends = (float(own.low[number]), float(own.high[number]))
                    note = "" if ends[0] <= weight <= ends[1] else OUTSIDE
                found.append(
                    Coefficient(feature=name, output=label, weight=weight, estimate=value, ends=ends, note=note)
                )
        return found


def about(found: Sequence[Coefficient]) -> str:
    """Return sentences about intervals and what to mind."""
    found = [one for one in found if one.note != REFERENCE]
    told = [one for one in found if one.ends is not None]
    text = "95% intervals hold sampling and the noise added for privacy."
    if len(told) < len(found):
        text += f" {len(found) - len(told)} of {len(found)} coefficients have none, because noise hides them."
    outside = sum(one.note == OUTSIDE for one in told)
    if outside:
        text += (
            f" The weights of {outside} lie outside of their intervals: clipped gradients, few steps or a ridge bias"
            " the model beyond their width. Read the estimate, not the weight."
        )
    return text
