"""The step that turns private columns into columns with public bounds and values; it comes before all other steps.

What is released, at what price: `discovery/price.py`. All that later steps are told is public: a numeric column lies in
[0, 1], and a categorical column has `most_categories` places, one for a missing value and one for all other categories.
So the number of features does not depend on data. Bounds and categories themselves are in what is kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import Mechanism
from dpsgd_cli.data.dataset import Column, Layout, Length, Noised, PrivateStep
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.settings import Data
from dpsgd_cli.discovery import price
from dpsgd_cli.discovery.run import Counts, Found, code, counts_of_codes, counts_of_numbers
from dpsgd_cli.discovery.settings import Discovery

OTHER = "other"
MISSING = ""


class Discover(PrivateStep):
    """Bounds and categories of private columns, from one noisy histogram of the training rows.

    A missing value is NaN. It adds nothing to the histogram. Afterwards it is the filling of its column, else the
    middle of the bounds, or a category of its own.
    """

    settings: Discovery
    fitted_on = "training"

    def __init__(self, settings: Discovery, adjacency: Adjacency, names: Mapping[str, bool], most_rows: int) -> None:
        """Take the names of the private columns, True for categorical ones, and the most rows of a user, or 1.

        While settings are `auto`, the step has no release yet and can only `plan`.
        """
        super().__init__(settings, adjacency)
        self.adjacency, self.most_rows = adjacency, most_rows
        self.texts: Mapping[str, Mapping[float, str]] = {}
        if not settings.settled:
            return
        assert not isinstance(settings.noise_multiplier, str) and not isinstance(settings.delta, str)
        self.release = price.histogram(settings.noise_multiplier, adjacency, len(names))
        self.names = (price.named(settings.delta, adjacency),) if any(names.values()) else ()

    @property
    def releases(self) -> tuple[Mechanism, ...]:
        """The histogram, and the names of categories, which have no draws of their own."""
        assert self.release is not None, "the automatic settings of data.discovery were not resolved"
        return self.release, *self.names

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(None, length.constants)

    def plan(self, layout: Layout) -> Layout:
        places = (*(f"#{place}" for place in range(1, self.settings.most_categories + 1)), MISSING, OTHER)
        made = []
        for column in layout.columns or ():
            if column.private == "bounds":
                column = Column(column.name, (0.0, 1.0))
            elif column.private == "categories":
                column = Column(column.name, values=places)
            made.append(column)
        return dataclasses.replace(layout, columns=tuple(made))

    def counts(self, rows: np.ndarray, layout: Layout, weights: np.ndarray | None = None) -> Counts:
        """Return the exact counts of all private columns for rows that count as `weights` (N,). Private."""
        numbers, codes = {}, {}
        for index, column in enumerate(layout.columns or ()):
            if column.private == "bounds":
                numbers[column.name] = counts_of_numbers(rows[:, index], weights)
            elif column.private == "categories":
                found, counts = counts_of_codes(rows[:, index], weights)
                known = self.texts.get(column.name, {})
                codes[column.name] = (counts, [known.get(own, f"{own:.0f}") for own in found.tolist()])
        return Counts(numbers, codes, self.most_rows)

    def learn(
        self, rows: np.ndarray, layout: Layout, weights: np.ndarray | None = None
    ) -> Callable[[Noised], np.ndarray]:
        counts = self.counts(rows, layout, weights)
        assert self.release is not None
        scale = self.release.noise_multiplier * self.release.sensitivity
        return lambda noised: counts.released(noised, self.settings, scale).to_array()

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        assert kept is not None
        found, most = Found.from_array(kept), self.settings.most_categories

        def transform(x: np.ndarray) -> np.ndarray:
            out = np.array(x, dtype=np.float64)
            for index, column in enumerate(layout.columns or ()):
                own = out[:, index]
                if column.private == "bounds":
                    own[:] = _scaled(own, found.bounds[column.name], column.filling)
                elif column.private == "categories":
                    places = {code(text): place for place, text in enumerate(found.categories[column.name])}
                    filling = column.filling if isinstance(column.filling, str) else MISSING
                    missing = most if filling == MISSING else places.get(code(filling), most + 1)
                    different, which = np.unique(own, return_inverse=True, equal_nan=True)
                    own[:] = np.array(
                        [missing if math.isnan(one) else places.get(one, most + 1) for one in different.tolist()]
                    )[which]
            return out

        return transform


def _scaled(values: np.ndarray, bounds: tuple[float, float], filling: float | str | None) -> np.ndarray:
    """Return values (N,) moved from the bounds to [0, 1] and clamped; missing ones as `filling`, else as 1/2."""
    low, high = bounds
    middle = (low + high) / 2 if filling is None else float(filling)
    return np.clip((np.where(np.isnan(values), middle, values) - low) / (high - low), 0.0, 1.0)


def found_by_trial(data: Data, released: Mapping[str, np.ndarray], trials: range) -> list[Found]:
    """Return what was released of the private columns for each of `trials`; empty if the recipe has no private column.

    `released` is `Dataset.released`, which rows that stand in for a recipe's own leave empty.
    """
    keys = [f"{trial}/0" for trial in trials]
    return [Found.from_array(released[key]) for key in keys if key in released] if data.private_columns else []
