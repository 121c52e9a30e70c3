"""The steps of a `preprocess:` list, on the layout, on rows, and on the bound of a row's norm; and their application.

All trials share the steps before the first private one. From there on each trial has its own rows, because it has its
own noise. `preparation.py` chooses the steps and the rows; its caller charges the releases.

`dataset.py` defines the interface of a step; `bins.py` has bin. For pca, `preconditioning/second_moments.py` computes
the covariance of records, which is released with noise, or public; all else is post-processing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.common.free_memory import refuse_beyond_memory
from dpsgd_cli.common.text_format import count, suggested
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, FittedOn, Layout, Length, Noised, PrivateStep, Step, length_of, refuse_codes
from dpsgd_cli.data.on_disk import DiskRows, Rows, Transform, flatten
from dpsgd_cli.data.step_settings import Bias, OneHot, Pca, Scale, UnitNorm
from dpsgd_cli.engine.coded_rows import Coder
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning import price as second_moments
from dpsgd_cli.preconditioning import second_moments as moments


class Project(PrivateStep):
    """Projection of the rows onto the principal directions of their (noisy) unit-norm covariance.

    The rows are shrunk to unit norm for the covariance only (`preconditioning/second_moments.py`), as in Abadi et al.
    2016, section 5.2; the rows themselves are projected. `public` leaves the noise out; `whiten` scales the
    projections, which is post-processing of the same release.
    """

    def __init__(self, settings: Pca, adjacency: Adjacency) -> None:
        super().__init__(settings, adjacency)
        self.components = settings.components
        self.whiten = settings.whiten
        if settings.of == "public":
            self.declaration = f"The principal directions (pca, {self.components} components) are of public records."
        elif settings.noise_multiplier is None:
            self.declaration = f"The principal directions (pca, {self.components} components) are declared public."
        else:
            bound = second_moments.sensitivity(adjacency)
            self.release = GaussianSum(settings.noise_multiplier, adjacency, sensitivity=bound, label="pca")

    @property
    def fitted_on(self) -> FittedOn:
        return "public" if self.settings.of == "public" else "training"

    def bounded(self, length: Length, before: Layout) -> Length:
        """Return the bound before the step, as a projection makes no row longer; none if whitening stretches rows."""
        return Length(None if self.whiten else length_of(length, before), 0.0)

    def plan(self, layout: Layout) -> Layout:
        refuse_codes("pca", layout)
        if self.components > layout.features:
            raise DataError(
                f"pca: components is {self.components}, but the data have {count(layout.features, 'feature')}"
            )
        return Layout((self.components,))

    def learn(
        self, rows: np.ndarray, layout: Layout, weights: np.ndarray | None = None
    ) -> Callable[[Noised], np.ndarray]:
        if weights is not None:
            raise TypeError("a projection is proved for whole rows, each a record of its own")
        exact = moments.second_moments(moments.blocks(rows), layout.features)

        def with_noise(noised: Noised) -> np.ndarray:
            matrix = exact if self.release is None else moments.with_noise(exact, noised)
            axes = directions(matrix, self.components)
            if self.whiten:
                axes = axes * whitening(matrix, axes) ** float(self.whiten)
            return axes.astype(np.float32)

        return with_noise

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        assert kept is not None
        return lambda x: flatten(x).astype(np.float32, copy=False) @ kept


def whitening(matrix: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """Return factors (components,) that make the second moments of projected features equal and keep their sum.

    Notation: S is `matrix`; `axes` (D, components) are its `directions`; the second moment along axis k is v_k^T S v_k.
    The factors depend on the released matrix alone, so they cost no privacy. Moments below 1e-6 of the largest are
    raised to that. Without any positive moment all factors are 1.
    """
    moments = np.einsum("ik,ij,jk->k", axes, matrix, axes, optimize=True)
    largest = moments.max()
    if not largest > 0:
        return np.ones(len(moments))
    moments = np.maximum(moments, 1e-6 * largest)
    return np.asarray(np.sqrt(moments.mean() / moments))


def directions(matrix: np.ndarray, components: int) -> np.ndarray:
    """Return the `components` leading eigenvectors of a symmetric (D, D) matrix, as columns (D, components).

    Each is signed so that its entry of largest absolute value is positive: equal matrices give equal projections.
    """
    from scipy.linalg import eigh

    size = len(matrix)
    _, vectors = eigh(matrix, subset_by_index=[size - components, size - 1])
    vectors = vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return np.asarray(vectors * np.sign(largest))


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
                    codes = x[:, index].astype(np.int64)
                    out[every, at + np.maximum(codes, 0)] = codes >= 0  # below 0: none of the values
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
            if self.by == "bounds" and layout.bounds is None and layout.integers:
                return layout
            if self.by == "bounds" and layout.bounds is None:
                raise DataError(
                    "scale by bounds: the features have no public bounds here; put scale before pca, bias and"
                    " standard scaling, give data.bounds: [low, high], or leave scale out"
                )
            return dataclasses.replace(layout, bounds=after, integers=False)
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
            if self.by == "bounds" and layout.bounds is None and layout.integers:
                return x
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
            return dataclasses.replace(layout, bounds=(-1.0, 1.0), integers=False)
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


Noising = Callable[[int, str, np.ndarray, GaussianSum], np.ndarray]
"""Function of (trial, purpose, exact sum, mechanism) that returns the sum with the noise of the mechanism."""
Released = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, the output of private ones, and the source of their noise.

    `fitted` is the state of other steps: entries that are there are used, others are computed and added. `made` are
    transforms with that state. `weights` gives, by trial, what each row counts in the first private step: of the
    training part, or of the training and test parts.
    """

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released
    noised: Noising
    fitted: Released = field(default_factory=dict)
    made: dict[str, Transform] = field(default_factory=dict)
    weights: Callable[[int], np.ndarray] | None = None

    def run(
        self, parts: Sequence[Rows], trials: int, has_public: bool = False, coded: bool = False
    ) -> tuple[list[Rows], bool]:
        """Return all parts, transformed, and True if each trial has its own.

        The first part is the training rows. If `has_public`, the last part is the public rows. Rows that stay on disk
        are transformed when they are read. With `coded`, rows that the last step can keep as codes are `CodedRows`.
        """
        private = [index for index, step in enumerate(self.steps) if step.release is not None]
        first = private[0] if private else len(self.steps)
        coder = self._coder() if coded and not private else None
        if coder is None and self.steps:
            held, features = sum(len(part) for part in parts if isinstance(part, np.ndarray)), self.layouts[-1].features
            refuse_beyond_memory(
                4 * held * features * (trials if private else 1),
                f"{held} rows of {features} features",
                "use fewer features or rows, end data.preprocess with bin: {grid: 2048}, which keeps rows as codes, or"
                " give data.on_disk: true",
            )
        for index in range(first - (coder is not None)):
            parts = self._without_noise(index, parts, f"{index}", has_public)
        if coder is not None:
            return [
                part.coded(coder) if isinstance(part, DiskRows) else coder(cast(np.ndarray, part)) for part in parts
            ], False
        if not private:
            return [_through(_own, part) for part in parts], False
        learn_shared = cache(lambda: self._learn(first, parts))
        shape = self.layouts[-1].shape
        rooms = [np.empty((trials, len(part), *shape), np.float32) for part in parts]
        for trial in range(trials):
            own = list(parts)
            for index in range(first, len(self.steps)):
                if self.steps[index].release is None:
                    own = self._without_noise(index, own, f"{trial}/{index}", has_public)
                    continue
                learn = learn_shared if index == first else partial(self._learn, index, own)
                if self.weights is not None:
                    learn = partial(self._learn, index, own, self.weights(trial))
                transform = self._private(learn, trial, index)
                own = [transform(cast(np.ndarray, part)) for part in own]
            for room, rows in zip(rooms, own, strict=True):
                room[trial] = _own(cast(np.ndarray, rows))
        return [*rooms], True

    def _coder(self) -> Coder | None:
        """Return the function that makes the last step's rows as codes; None if it keeps features."""
        last = self.steps[-1] if self.steps else None
        return last.coded(self.layouts[-2]) if isinstance(last, BinColumns) else None

    def kept(self, noiselessly: bool) -> Released:
        """Return the state of steps without a release: if `noiselessly`, of those with `nonprivate`, else of others."""
        return {
            key: held
            for key, held in self.fitted.items()
            if (self.steps[int(key.rpartition("/")[2])].nonprivate is not None) == noiselessly
        }

    def _without_noise(self, index: int, parts: Sequence[Rows], key: str, has_public: bool) -> list[Rows]:
        """Return all parts after a step that draws no noise; it is fitted first if its state is not known."""
        step, layout = self.steps[index], self.layouts[index]
        if key not in self.fitted and step.fitted_on != "nothing":
            rows = self._rows_to_fit(step, index, parts, has_public)
            # rows on disk support the array operations of these steps; `preparation.py` refuses other steps
            kept = step.kept(cast(np.ndarray, rows), layout)
            self.fitted.update({} if kept is None else {key: kept})
        if key not in self.made:
            self.made[key] = step.transform(layout, self.fitted.get(key))
        return [_through(self.made[key], part) for part in parts]

    def _rows_to_fit(self, step: Step, index: int, parts: Sequence[Rows], has_public: bool) -> Rows:
        """Return the rows that a step without a release states to be fitted on.

        Raises TypeError for a step that reads training rows and has neither a declaration nor `nonprivate`.
        """
        if step.fitted_on == "public":
            if not has_public:
                raise DataError("pca: of: public needs data.public, say {from: test, records: 1000}")
            return parts[-1]
        if step.fitted_on != "training" or not step.covered:
            raise TypeError(f"step {type(step).__name__} is fitted on {step.fitted_on} rows, which nothing covers")
        return parts[0]

    def _learn(
        self, index: int, parts: Sequence[Rows], weights: np.ndarray | None = None
    ) -> Callable[[Noised], np.ndarray]:
        step, rows = self.steps[index], cast(np.ndarray, parts[0])
        assert isinstance(step, PrivateStep)
        if weights is not None and len(weights) > len(rows):
            rows = np.concatenate([rows, cast(np.ndarray, parts[1])])
        return step.learn(rows, self.layouts[index], weights)

    def _private(self, learn: Callable[[], Callable[[Noised], np.ndarray]], trial: int, index: int) -> Transform:
        """Return the transform of a private step. `learn` reads the rows, and only if nothing was released before.

        The purpose of the noise includes the step's index, so that no two steps of a trial share noise.
        """
        step, key = self.steps[index], f"{trial}/{index}"
        mechanism = step.release
        assert mechanism is not None
        if key not in self.released:
            self.released[key] = learn()(lambda exact: self.noised(trial, f"preprocess-{index}", exact, mechanism))
        return step.transform(self.layouts[index], self.released[key])


def _through(transform: Transform, rows: Rows) -> Any:
    return rows.then(transform) if isinstance(rows, DiskRows) else transform(cast(np.ndarray, rows))


def _own(x: np.ndarray) -> np.ndarray:
    # the cached rows of a file are read-only; training gets a writable copy, of float32 or of whole numbers
    return np.require(x, np.int64 if x.dtype == np.int64 else np.float32, ["C", "W"])
