"""Public records: cut from the others by places alone, and all that `pca: {of: public}` ever looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.data.dataset import UNKNOWN, Dataset
from dpsgd_cli.data.settings import Data

STEPS = [{"pca": {"components": 2, "of": "public"}}]


def prepared(folder: Path, train: np.ndarray, source: str = "test", steps: Any = STEPS) -> Dataset:
    """60 training and 40 test records of 5 features whose first two tell which record it is; 10 are public."""
    rng = np.random.default_rng(1)
    held = np.hstack([np.arange(1000, 1040)[:, None], rng.normal(size=(40, 4))])
    np.savez(folder / "own.npz", x=train, y=np.arange(len(train)) % 2, x_test=held, y_test=np.arange(40) % 2)
    section = {"path": "own.npz", "classes": [0, 1], "public": {"from": source, "records": 10}, "preprocess": steps}

    return data.prepare(Data.model_validate(section), folder, 1, refuse, "add-remove")


def rows() -> np.ndarray:
    return np.hstack([np.arange(60)[:, None], np.random.default_rng(0).normal(size=(60, 4))])


@pytest.mark.parametrize(("source", "sizes"), [("test", (60, 30)), ("train", (50, 40))])
def test_public_records_are_neither_trained_on_nor_judge(source: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    found = prepared(tmp_path, rows(), source, [])
    parts = [set(part[:, 0].tolist()) for part in (found.train_x, found.test_x, found.public_x)]
    assert [len(part) for part in parts] == [*sizes, 10]
    assert len(set.union(*parts)) == 100
    assert parts[2] <= set(range(1000, 1040) if source == "test" else range(60))


def test_directions_of_public_records_look_at_no_training_record(tmp_path: Path) -> None:
    found, plain = prepared(tmp_path, rows()), prepared(tmp_path, rows(), steps=[])
    units = plain.public_x / np.maximum(1, np.linalg.norm(plain.public_x, axis=1, keepdims=True))
    axes = np.linalg.eigh(units.T @ units)[1][:, ::-1][:, :2]
    assert np.allclose(np.abs(found.test_x), np.abs(plain.test_x @ axes), rtol=1e-4, atol=1e-3)
    other = prepared(tmp_path, np.random.default_rng(5).normal(size=(60, 5)) * 100)
    assert (other.test_x == found.test_x).all(), "the training records moved the directions"
    assert not found.nonprivate
    assert any("of public records" in said for said in found.declarations)


def test_records_of_an_unlabelled_file_go_the_way_of_all_others(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((30, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=images[:20], y=np.arange(20) % 2, x_test=images[20:], y_test=np.arange(10) % 2)
    np.savez(tmp_path / "unlabelled.npz", x=images[20:])
    section = {
        "path": "own.npz",
        "classes": [0, 1],
        "public": {"path": "unlabelled.npz"},
        "features": {"kind": "scattering"},
        "preprocess": [{"pca": {"components": 3, "of": "public"}}],
    }
    found = data.prepare(Data.model_validate(section), tmp_path, 1, refuse, "add-remove")
    assert found.public_x.shape == (10, 3)
    assert (found.public_x == found.test_x).all()
    assert (found.public_y == UNKNOWN).all()
    assert set(found.sha256) == {"own.npz", "unlabelled.npz"}


def refuse(trial: int, purpose: str, *rest: object) -> np.ndarray:
    raise AssertionError("public directions need no noise")
