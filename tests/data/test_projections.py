"""Principal directions, whitening, and directions of synthetic images, which are fitted on those alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.data import projections, synthetic
from dpsgd_cli.data.dataset import Dataset, Layout
from dpsgd_cli.data.projections import Rotation
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.step_settings import Rotate, Variants
from dpsgd_cli.errors import DataError
from dpsgd_cli.preconditioning.second_moments import blocks, second_moments

TURN = {"components": 6, "images": "strokes", "records": 60}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda project: tmp_path / "cache")


def prepared(folder: Path, rows: np.ndarray, **changes: Any) -> Dataset:
    np.savez(folder / "own.npz", x=rows, y=np.arange(len(rows)) % 2)
    section: dict[str, Any] = {"path": "own.npz", "bounds": [0, 255], "classes": [0, 1], "split": {"test": 5}}
    section |= {"features": [{"kind": "hog", "cell": 2}], "preprocess": [{"rotate": TURN}, {"unit-norm": {}}]} | changes
    return data.prepare(Data.model_validate(section), folder, 1, lambda *_: pytest.fail("no noise"), "add-remove")


def pictures(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (20, 1, 8, 8), np.uint8)


@pytest.mark.parametrize(("records", "features", "kept"), [(9000, 10_000, 8192), (8000, 64, 64), (300, 5000, 299)])
def test_auto_is_all_directions_that_images_and_features_have_up_to_8192(
    records: int, features: int, kept: int
) -> None:
    step = Rotation(Rotate.model_validate({"images": "dead-leaves", "records": records}), "add-remove")
    assert step.plan(Layout((features,))).features == kept


def test_no_record_moves_the_directions(tmp_path: Path) -> None:
    first, second = (prepared(tmp_path, pictures(seed)) for seed in (0, 1))
    assert list(first.fitted) == ["1"]
    assert (first.fitted["1"] == second.fitted["1"]).all()
    assert first.train_x.shape == (15, 6)
    assert np.allclose(np.linalg.norm(first.train_x, axis=1), 1, rtol=1e-5)
    assert any("strokes images that a public seed draws; no image that anybody took" in s for s in first.declarations)
    assert first.norm_bound == 1
    assert first.nonprivate == ()


@pytest.mark.parametrize("records", [40, 400], ids=["fewer images than features", "more"])
def test_directions_are_those_of_the_synthetic_images(records: int) -> None:
    """scikit-learn's PCA of the same images, divided by the power that is asked for."""
    from sklearn.decomposition import PCA

    settings = Rotate(components=5, images="strokes", records=records, power=0.3, floor=0.1)
    step, layout = Rotation(settings, "add-remove"), Layout((1, 8, 8), bounds=(0.0, 2.0))
    images = step.drawn(layout)
    assert images.max() > 1.5
    assert (images == (synthetic.draw("strokes", records, (1, 8, 8), 0) * (2 / 255)).astype(np.float32)).all()
    rows = np.random.default_rng(0).random((7, 1, 8, 8), np.float32)
    found = step.transform(layout, step.kept(images, layout))(rows)
    oracle = PCA(5).fit(images.reshape(records, -1).astype(np.float64))
    variances = oracle.explained_variance_ * (records - 1) / records
    expected = oracle.transform(rows.reshape(7, -1)) / (variances + 0.1 * variances.mean()) ** 0.3
    assert np.allclose(np.abs(found), np.abs(expected), rtol=1e-2, atol=1e-3)


def test_with_variants_what_hands_change_is_evened_first() -> None:
    """Around its drawing's mean a variant varies by 1 in every direction, and images most in the first ones."""
    variants = Variants(images=80, each=4, among=20)
    settings = Rotate(components=20, images="strokes", records=300, power=0, floor=1e-6, variants=variants)
    step, layout = Rotation(settings, "add-remove"), Layout((1, 8, 8))
    images = step.drawn(layout)
    assert images.shape == (300 + 80 * 4, 1, 8, 8)
    assert (images[:300] == (synthetic.draw("strokes", 300, (1, 8, 8), 0) * (1 / 255)).astype(np.float32)).all()
    found = step.transform(layout, step.kept(images, layout))(images)
    assert np.allclose(found[:300].mean(axis=0), 0, atol=1e-3)
    hands = found[300:].reshape(80, 4, 20)
    apart = (hands - hands.mean(axis=1, keepdims=True)).reshape(-1, 20)
    assert np.allclose(apart.T @ apart / (80 * 3), np.eye(20), atol=0.01)
    whole = found[:300].T @ found[:300] / 300
    assert np.allclose(whole, np.diag(np.diag(whole)), atol=0.01 * whole[0, 0])
    assert (np.diff(np.diag(whole)) <= 0).all()


def test_variants_are_of_strokes_and_among_enough_directions() -> None:
    with pytest.raises(ValueError, match="variants: are drawn of strokes, not of dead-leaves"):
        Rotate.model_validate({"components": 5, "images": "dead-leaves", "variants": {"among": 5}})
    with pytest.raises(ValueError, match="among: 4 directions, of which 5 are kept"):
        Rotate.model_validate({"components": 5, "images": "strokes", "variants": {"among": 4}})


def test_each_record_turns_alone() -> None:
    step, layout = Rotation(Rotate.model_validate(TURN), "add-remove"), Layout((1, 8, 8))
    kept = step.kept(step.drawn(layout), layout)
    rows = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    transform = step.transform(layout, kept)
    assert np.allclose(transform(rows)[:1], transform(rows[:1]), atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"scale": {"by": "standard"}}, {"rotate": TURN}], "must be fitted on no record"),
        ([{"pca": {"components": 7, "noise_multiplier": 1}}, {"rotate": TURN}], "must be fitted on no record"),
        ([{"rotate": TURN | {"components": 60}}], "60 images of 324 features have 59 directions"),
        ([{"rotate": TURN | {"variants": {"among": 60}}}], "among is 60, but 60 images of 324 features"),
    ],
)
def test_what_could_look_at_records_or_lacks_directions_is_refused(
    tmp_path: Path, steps: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        prepared(tmp_path, pictures(0), preprocess=steps)


def test_rows_that_are_no_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a record is"):
        prepared(tmp_path, pictures(0).reshape(20, 64), features=None)


def test_directions_are_the_leading_eigenvectors_with_a_fixed_sign() -> None:
    root = np.random.default_rng(2).standard_normal((8, 8))
    matrix = root @ root.T
    values, vectors = np.linalg.eigh(matrix)
    axes = projections.directions(matrix, 3)
    assert axes.shape == (8, 3)
    for rank in range(3):
        assert abs(axes[:, rank] @ vectors[:, -1 - rank]) == pytest.approx(1)
        np.testing.assert_allclose(matrix @ axes[:, rank], values[-1 - rank] * axes[:, rank], rtol=1e-8, atol=1e-8)
        assert axes[np.abs(axes[:, rank]).argmax(), rank] > 0


def test_whitened_projections_have_equal_second_moments_and_the_old_total() -> None:
    rows = np.random.default_rng(3).standard_normal((200, 5)) * [4, 3, 2, 1, 0.5] / 30
    matrix = second_moments(blocks(rows), 5)
    axes = projections.directions(matrix, 3)
    plain, white = rows @ axes, rows @ (axes * projections.whitening(matrix, axes))
    moments = (white**2).sum(axis=0)
    np.testing.assert_allclose(moments, moments.mean(), rtol=1e-9)
    assert moments.sum() == pytest.approx((plain**2).sum())
    assert not np.allclose((plain**2).sum(axis=0), moments.mean(), rtol=0.1)


@pytest.mark.parametrize("matrix", [np.zeros((3, 3)), -np.eye(3)])
def test_whitening_leaves_directions_without_moment_alone(matrix: np.ndarray) -> None:
    assert projections.whitening(matrix, np.eye(3)[:, :2]).tolist() == [1, 1]


def test_whitening_bounds_the_factor_of_an_empty_direction() -> None:
    assert projections.whitening(np.diag([1.0, 0.0]), np.eye(2)).max() == pytest.approx(math.sqrt(0.5e6), rel=1e-5)
