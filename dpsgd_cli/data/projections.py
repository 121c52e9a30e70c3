"""The step `pca`: projection onto principal directions of records, whose covariance is released with noise, or public.

`preconditioning/second_moments.py` computes the covariance and its noise. All else is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.dataset import FittedOn, Layout, Length, Noised, PrivateStep, length_of, refuse_codes
from dpsgd_cli.data.on_disk import Transform, flatten
from dpsgd_cli.data.step_settings import Pca
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
