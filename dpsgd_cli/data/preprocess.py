"""The steps of a `preprocess:` list: their effect on the layout, on rows, and on the bound of a row's norm.

`dataset.py` defines the interface of a step; `projections.py` has pca and rotate, `bins.py` has bin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.common.text_format import suggested
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import (
    Column,
    FittedOn,
    Layout,
    Length,
    Step,
    length_of,
    refuse_codes,
)
from dpsgd_cli.data.on_disk import Transform, flatten
from dpsgd_cli.data.projections import Project, Rotation
from dpsgd_cli.data.step_settings import Bias, OneHot, Scale, UnitNorm
from dpsgd_cli.errors import DataError


class ExpandCategories(Step):
    """Step that replaces a categorical column by one 0/1 column per public value. Acts on each record alone."""

    settings: OneHot
    fitted_on = "nothing"

    def bounded(self, length: Length, before: Layout) -> Length:
        return length

    def _chosen(self, layout: Layout) -> set[str]:
        known = layout.categorical
        for name in self.settings.columns or ():
            if name not in known:
                raise DataError(f"one-hot: {name!r} is not a categorical column{suggested(name, known)}")
        return set(known if self.settings.columns is None else self.settings.columns)

    def plan(self, layout: Layout) -> Layout:
        chosen = self._chosen(layout)
        if layout.columns is None:
            return layout
        columns: list[Column] = []
        for column in layout.columns:
            if column.name in chosen:
                columns += [
                    Column(f"{column.name}={value}", (0.0, 1.0), indicator=True, category=column.name)
                    for value in column.values or ()
                ]
            else:
                columns.append(column)
        return Layout((len(columns),), tuple(columns))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        chosen = self._chosen(layout)
        after = self.plan(layout)

        def transform(x: np.ndarray) -> np.ndarray:
            if not chosen:
                return x
            out = np.zeros((len(x), *after.shape), x.dtype)
            at, every = 0, np.arange(len(x))
            for index, column in enumerate(layout.columns or ()):
                if column.name in chosen:
                    out[every, at + x[:, index].astype(np.int64)] = 1
                    at += len(column.values or ())
                else:
                    out[:, at] = x[:, index]
                    at += 1
            return out

        return transform


class Rescale(Step):
    """Affine map of every numeric column, from public bounds (per record) or fitted on training rows (not private)."""

    def __init__(self, settings: Scale, adjacency: Adjacency) -> None:
        super().__init__(settings, adjacency)
        self.by, self.to = settings.by, settings.to
        if self.by != "bounds":
            self.nonprivate = (
                f"scale by {self.by} was fitted on the training rows without noise: the privacy statement does not"
                " cover it (scale by bounds does not read the data)"
            )

    @property
    def fitted_on(self) -> FittedOn:
        return "nothing" if self.by == "bounds" else "training"

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(None, length.constants)

    def plan(self, layout: Layout) -> Layout:
        after = None if self.by == "standard" else self.to
        if layout.columns is None:
            if self.by == "bounds" and layout.bounds is None:
                raise DataError(
                    "scale by bounds: the features have no public bounds here; put scale before pca, bias and"
                    " standard scaling, give data.bounds: [low, high], or leave scale out"
                )
            return dataclasses.replace(layout, bounds=after)
        unbounded = [c.name for c in layout.columns if c.numeric and c.bounds is None]
        if self.by == "bounds" and unbounded:
            raise DataError(
                f"scale by bounds: no public bounds for column{'s' * (len(unbounded) > 1)} {', '.join(unbounded)};"
                f" give data.bounds: {{{unbounded[0]}: [low, high], ...}} (or one pair for all) from public knowledge,"
                " not from the data, or drop the column, or scale by standard (not private, and recorded as such)"
            )
        columns = tuple(dataclasses.replace(c, bounds=after) if c.numeric else c for c in layout.columns)
        return dataclasses.replace(layout, columns=columns)

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        numeric = np.array([c.numeric for c in layout.columns]) if layout.columns is not None else None
        start, stop = (0.0, 1.0) if self.by == "standard" else self.to

        def transform(x: np.ndarray) -> np.ndarray:
            low, high = _ends(layout, x.dtype) if kept is None else kept
            size = np.where(high > low, high - low, 1.0)
            out = (x - low) / size
            if self.by != "standard":
                np.clip(out, 0, 1, out=out)
            out = out * (stop - start) + start
            if numeric is not None and not numeric.all():
                out[:, ~numeric] = x[:, ~numeric]
            return out.astype(np.float32, copy=False)

        return transform

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray | None:
        """Return the values that map to 0 and to 1, (2, ...); None for bounds.

        They are the minimum and the maximum of each feature, or its mean and its mean plus its standard deviation.
        """
        if self.by == "standard":
            mean = rows.mean(axis=0, dtype=np.float64)
            deviation = rows.std(axis=0, dtype=np.float64)
            return np.stack([mean, mean + deviation]).astype(rows.dtype)
        return np.stack([rows.min(axis=0), rows.max(axis=0)]) if self.by == "min-max" else None


def _ends(layout: Layout, dtype: np.dtype) -> np.ndarray:
    """Return the public bounds, (2, features), or (2, 1) if all features share them."""
    pairs = [layout.bounds] if layout.columns is None else [c.bounds for c in layout.columns]
    return np.array([pair or (0.0, 1.0) for pair in pairs], dtype).T


class Normalise(Step):
    """Division of each row by its L2 norm, or by max(1, norm). A zero row stays zero. Acts on each record alone."""

    settings: UnitNorm
    fitted_on = "nothing"

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(1.0, 0.0)

    def plan(self, layout: Layout) -> Layout:
        refuse_codes("unit-norm", layout)
        if layout.columns is None:
            return dataclasses.replace(layout, bounds=(-1.0, 1.0))
        columns = tuple(dataclasses.replace(c, bounds=(-1.0, 1.0)) for c in layout.columns)
        return dataclasses.replace(layout, columns=columns)

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        def transform(x: np.ndarray) -> np.ndarray:
            flat = flatten(x).astype(np.result_type(x, np.float32), copy=False)
            norms = np.linalg.norm(flat, axis=1, keepdims=True)
            divisor = np.maximum(norms, 1) if self.settings.at_most else np.where(norms > 0, norms, 1)
            return (flat / divisor).reshape(x.shape)

        return transform


class AppendConstant(Step):
    """Step that appends a feature with the same value in every record. Arrays are flattened."""

    settings: Bias
    fitted_on = "nothing"

    def bounded(self, length: Length, before: Layout) -> Length:
        return Length(length.whole, length.constants + self.settings.value**2)

    def plan(self, layout: Layout) -> Layout:
        shape = (layout.features + 1,)
        if layout.columns is None:
            return Layout(shape)
        return Layout(shape, (*layout.columns, Column("bias", indicator=True)))

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        def transform(x: np.ndarray) -> np.ndarray:
            flat = flatten(x)
            return np.hstack([flat, np.full((len(x), 1), self.settings.value, x.dtype)])

        return transform


STEPS: dict[str, Callable[[Any, Adjacency], Step]] = {
    "one-hot": ExpandCategories,
    "bin": BinColumns,
    "scale": Rescale,
    "unit-norm": Normalise,
    "bias": AppendConstant,
    "pca": Project,
    "rotate": Rotation,
}
"""Class of each step, by its key in a recipe; it takes the settings, and the adjacency of a private step."""


def norm_bound(steps: Sequence[Step], layouts: Sequence[Layout]) -> float | None:
    """Return the largest L2 norm of a preprocessed record that the public bounds allow; None without such a bound.

    `layouts` are those before each step, and after the last. Reads no value. A numeric column contributes the larger
    absolute value of its bounds, the columns of one category together 1, a constant its value. After unit-norm or bin
    the norm of the whole row is at most 1, and a projection makes no row longer.
    """
    length = Length(None, 0.0)
    for step, before in zip(steps, layouts, strict=False):
        length = step.bounded(length, before)
    return length_of(length, layouts[-1])
