"""The steps `pca` and `rotate`: projections onto principal directions, of records (private) or of synthetic images.

pca: `preconditioning/second_moments.py` computes the covariance of the records and its noise. All else is
post-processing.

rotate: costs no privacy. Guarantee: the state of the step is a function of its settings, of a record's layout and of
the steps before it, none of which was fitted on records (`refuse_fitted`). The step acts on each record alone.

With `variants` the directions are those of a discriminant analysis without labels: each drawing is a class, and its
variants by several hands are the members. Let C be the covariance of variants around their drawing's mean, within the
first principal directions, and c its eigenvalues. Rows are multiplied by (C + floor mean(c))^-1/2, so that the
differences between hands weigh equally little in all directions. Then the principal directions are kept.

`data/synthetic.py` draws the images; `preprocess.py` applies the steps before this one to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.common.text_format import count
from dpsgd_cli.data import array_cache as cache
from dpsgd_cli.data import synthetic
from dpsgd_cli.data.dataset import FittedOn, Layout, Length, Noised, PrivateStep, Step, length_of, refuse_codes
from dpsgd_cli.data.on_disk import Transform, flatten
from dpsgd_cli.data.step_settings import DIRECTIONS, Pca, Rotate
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning import price as second_moments
from dpsgd_cli.preconditioning import second_moments as moments

VERSION = 1
ROWS_AT_ONCE = 2048


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
    return signed(vectors[:, ::-1])


def signed(vectors: np.ndarray) -> np.ndarray:
    """Return columns (D, K), each with the sign that makes its entry of largest absolute value positive."""
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return np.asarray(vectors * np.sign(largest))


class Rotation(Step):
    """The map x -> (x - m) V (e + floor mean(e))^-power; mean m, directions V, variances e of synthetic images."""

    settings: Rotate
    fitted_on = "synthetic"
    before_cut = True

    def bounded(self, length: Length, before: Layout) -> Length:
        """Return no bound: division by powers of variances stretches some directions."""
        return Length(None, 0.0)

    def __init__(self, settings: Rotate, adjacency: Adjacency) -> None:
        super().__init__(settings, adjacency)
        self.declaration = (
            f"The directions of rotate are of {settings.images} images that a public seed draws; no image that anybody"
            " took was looked at."
        )

    def plan(self, layout: Layout) -> Layout:
        refuse_codes("rotate", layout)
        return Layout((self._components(layout.features),))

    def _components(self, features: int) -> int:
        """Return the number of directions that are kept. Raises DataError if `features` allow fewer than asked for."""
        settings, most = self.settings, min(features, self.settings.records - 1)
        name, asked = "components", settings.components
        if settings.variants is not None:
            name, asked = "among", settings.variants.among
        if asked != "auto" and asked > most:
            raise DataError(
                f"rotate: {name} is {asked}, but {count(settings.records, 'image')} of"
                f" {count(features, 'feature')} have {most} directions; ask for fewer, or give more records"
            )
        if settings.components != "auto":
            return settings.components
        return min(DIRECTIONS, most if asked == "auto" else asked)

    def drawn(self, layout: Layout) -> np.ndarray:
        """Return the images (N, *shape) as records of `layout`, then the variants, those of each drawing together."""
        if len(layout.shape) != 3 or layout.shape[1] != layout.shape[2]:
            raise DataError(f"rotate: images that are drawn are (channels, side, side), but a record is {layout.shape}")
        low, high = layout.bounds or (0.0, 1.0)
        channels, side, _ = layout.shape
        settings, shape = self.settings, (channels, side, side)
        images = synthetic.draw(settings.images, settings.records, shape, settings.seed)
        if settings.variants is not None:
            varied = synthetic.draw_variants(settings.variants.images, settings.variants.each, shape, settings.seed)
            images = np.concatenate([images, varied.reshape(-1, *shape)])
        return (low + (high - low) / 255 * images).astype(np.float32)

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray:
        """Return (features + 1, components): scaled directions, then minus the projected mean of `rows` (synthetic)."""
        place = cache.place("rotations", [VERSION, self.settings.model_dump(exclude_none=True)], [rows])
        found = cache.load(place)
        if found is None:
            found = self._axes(flatten(rows).astype(np.float32))
            cache.keep(place, found)
        return found

    def _axes(self, x: np.ndarray) -> np.ndarray:
        settings, plain = self.settings, x[: self.settings.records]
        components = self._components(x.shape[1])
        mean = plain.mean(axis=0)
        plain = plain - mean
        if settings.variants is None:
            axes, variances = _principal(plain, components)
        else:
            first, _ = _principal(plain, settings.variants.among)
            hands = (x[settings.records :] @ first).reshape(-1, settings.variants.each, settings.variants.among)
            even = first @ _evened(hands, settings.floor)
            axes, variances = _principal(plain @ even, components)
            axes = even @ axes
        axes = axes * (variances + settings.floor * variances.mean()) ** -settings.power
        return np.vstack([axes, -(mean @ axes)]).astype(np.float32)

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        assert kept is not None

        def transform(x: np.ndarray) -> np.ndarray:
            place = cache.place("rotated", [VERSION, x.shape], [x, kept])
            out = cache.load(place)
            if out is None:
                out = rotated(x, kept)
                cache.keep(place, out)
            return out

        return transform


def _principal(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` principal directions (features, count) of centred rows, and their variances."""
    from scipy.linalg import eigh

    wide = x.shape[1] > len(x)
    gram = (x @ x.T if wide else x.T @ x) / len(x)
    size = len(gram)
    variances, vectors = eigh(gram, subset_by_index=[size - count, size - 1], overwrite_a=True)
    variances, vectors = np.maximum(variances[::-1], 0), vectors[:, ::-1]
    if wide:
        vectors = x.T @ vectors
        vectors /= np.maximum(np.linalg.norm(vectors, axis=0), 1e-30)
    return signed(vectors), variances


def _evened(hands: np.ndarray, floor: float) -> np.ndarray:
    """Return (C + floor mean(c))^-1/2, (directions, directions), for variants (drawings, each, directions)."""
    drawings, each, directions = hands.shape
    apart = (hands - hands.mean(axis=1, keepdims=True)).reshape(-1, directions)
    moments, vectors = np.linalg.eigh(apart.T @ apart / (drawings * (each - 1)))
    moments = np.maximum(moments, 0)
    return np.asarray((vectors * (moments + floor * moments.mean()) ** -0.5) @ vectors.T)


def rotated(x: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Return rows (N, ...) projected by the step's state `kept`, float32 (N, components), a block at a time."""
    out = np.empty((len(x), kept.shape[1]), np.float32)
    for start in range(0, len(x), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        np.matmul(flatten(x[block]).astype(np.float32), kept[:-1], out=out[block])
    return out + kept[-1]


def refuse_fitted(steps: Sequence[Step]) -> None:
    """Raise DataError if a step before `rotate` is fitted on records: its directions would then depend on them."""
    rotations = [index for index, step in enumerate(steps) if step.fitted_on == "synthetic"]
    for step in steps[: rotations[-1]] if rotations else ():
        if step.fitted_on not in ("nothing", "synthetic"):
            raise DataError(
                "rotate: synthetic images go through the steps before it, which must be fitted on no record; put pca"
                " after it, and scale by bounds"
            )
