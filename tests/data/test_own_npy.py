"""A user's own npy files: what is read and declared, and one clear message for each way to be wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dpsgd_cli import data
from dpsgd_cli.data import opening
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

X = np.random.default_rng(0).integers(0, 256, (60, 2, 3)).astype(np.uint8)
Y = np.arange(60) % 3 * 10
FILES: dict[str, Any] = {"path": "x.npy", "target": "y.npy", "classes": [20, 0, 10]}


def write(folder: Path, **arrays: np.ndarray) -> Path:
    files: dict[str, np.ndarray] = {"x": X, "y": Y, **arrays}
    for name, array in files.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def read(folder: Path, **changes: Any) -> Any:
    return opening.load_raw(Data.model_validate(FILES | changes), folder)


def test_features_labels_and_what_is_declared(tmp_path: Path) -> None:
    source = read(write(tmp_path))
    assert np.array_equal(source.train.x[0:60], X.astype(np.float32)) and source.train.x.dtype == np.float32
    assert source.train.y[0:6].tolist() == [1, 2, 0, 1, 2, 0], "places in the list of classes"
    assert source.train.y.dtype == np.int64 and source.test is None and source.warnings == ()
    assert (source.layout.shape, source.layout.bounds, source.classes) == ((2, 3), (0, 255), (20, 0, 10))
    assert source.declarations == ("The class labels are public (recipe): 20, 0, 10.",)
    bounds = read(tmp_path, bounds=[0, 255]).declarations
    assert bounds == (*source.declarations, "The bounds of the numeric features are public (recipe).")
    expected = {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("x.npy", "y.npy")}
    assert source.sha256 == expected


def test_a_test_part_and_targets(tmp_path: Path) -> None:
    write(tmp_path, x=X.astype(np.float64), y=Y / 4, u=X[:5] / 2, v=Y[:5].astype(np.float16))
    changes = {"task": "regression", "classes": None, "test_path": "u.npy", "test_target": "v.npy", "bounds": [0, 300]}
    source = read(tmp_path, **changes)
    assert source.test is not None and len(source.test) == 5
    assert source.train.x.dtype == np.float64 and source.layout.bounds == (0, 300)
    assert np.array_equal(source.train.y[0:60], (Y / 4).astype(np.float32))
    assert np.array_equal(source.test.x[0:5], X[:5] / 2) and source.classes is None
    assert set(source.sha256) == {"x.npy", "y.npy", "u.npy", "v.npy"}


@pytest.mark.parametrize("wrong", [{"path": "x.npy"}, FILES | {"test_path": "u.npy"}, FILES | {"test_target": "v.npy"}])
def test_files_of_rows_and_of_labels_go_in_pairs(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="target"):
        Data.model_validate(wrong)


def normal(trial: int, purpose: str, exact: np.ndarray, *rest: object) -> np.ndarray:
    return np.asarray(exact + np.random.default_rng([trial, len(purpose)]).standard_normal(exact.shape))


STEPS: dict[str, list[dict[str, Any]]] = {
    "scaled": [{"scale": {"to": [-1, 1]}}, {"unit-norm": {}}, {"bias": {}}],
    "public pca": [{"scale": {}}, {"pca": {"components": 2, "public": True}}],
}


@pytest.mark.parametrize("steps", STEPS)
def test_preprocessing_is_that_of_rows_in_memory(tmp_path: Path, steps: str) -> None:
    """Train, test and validation rows, of each trial, to rounding of a projection of fewer rows at once."""
    np.savez(tmp_path / "d.npz", x=X[:50], y=Y[:50], x_test=X[50:], y_test=Y[50:])
    write(tmp_path, x=X[:50], y=Y[:50], u=X[50:], v=Y[50:])
    shared = {"classes": [20, 0, 10], "preprocess": STEPS[steps]}
    on_disk = {"path": "x.npy", "target": "y.npy", "test_path": "u.npy", "test_target": "v.npy"}
    made = [
        data.prepare(Data.model_validate(own | shared), tmp_path, 2, normal, "add-remove")
        for own in ({"path": "d.npz"}, on_disk)
    ]
    for part in ("train_x", "train_y", "test_x", "test_y"):
        memory, disk = (getattr(one, part) for one in made)
        assert memory.shape == disk.shape
        np.testing.assert_allclose(disk[0 : len(disk)], memory, rtol=1e-5, atol=1e-6)
    assert not made[0].per_trial and not made[1].per_trial
    assert made[0].declarations == made[1].declarations


def test_a_private_projection_of_rows_on_disk_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    steps = [{"scale": {}}, {"pca": {"components": 2, "noise_multiplier": 3}}]
    with pytest.raises(DataError, match="pca with noise makes rows of each trial's own"):
        data.prepare(Data.model_validate(FILES | {"preprocess": steps}), tmp_path, 2, normal, "add-remove")


def test_a_cut_for_testing_and_one_for_validation(tmp_path: Path) -> None:
    """Disjoint, together everything, features beside their labels, and counted before anything is read."""
    write(tmp_path, x=np.arange(120, dtype=np.float32).reshape(60, 2), y=np.arange(60) % 3)
    own = Data.model_validate(
        FILES
        | {"classes": [0, 1, 2], "split": {"test": 9}, "validation": {"records": 6, "public": True}, "preprocess": []}
    )
    made, outline = data.prepare(own, tmp_path, 1, normal, "add-remove"), data.outline(own, tmp_path)
    parts = [(made.train_x, made.train_y), (made.test_x, made.test_y), (made.validation_x, made.validation_y)]
    rows = [(x[0 : len(x)][:, 0] / 2).astype(int) for x, _ in parts]
    assert [len(own) for own in rows] == [45, 9, 6] == [outline.train_records, outline.test_records, 6]
    assert sorted(np.concatenate(rows)) == list(range(60))
    assert all(np.array_equal(y[0 : len(y)], own % 3) for (_, y), own in zip(parts, rows, strict=True))
