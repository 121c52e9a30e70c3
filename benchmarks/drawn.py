"""Images that no page reports, which the constants for networks of images are chosen on (`benchmarks/rule.py`).

`small digits` are scikit-learn's 1,797 digits, three times as large and with a margin, 28 x 28. `drawings` are of 30
drawings in strokes, three a class, each by 400 hands. `drawings on leaves` are the same, in a random colour on dead
leaves, 3 x 32 x 32. A sixth of the records of each judge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from benchmarks import real
from examples import frontier_features as drawing

CLASSES, DRAWINGS, HANDS = 10, 3, 400


def write_digits(folder: Path, model: dict[str, Any]) -> Path:
    """A recipe for scikit-learn's digits, all settings of the method by rule."""
    images, labels = load_digits(return_X_y=True)
    large = np.kron(images.reshape(-1, 1, 8, 8), np.ones((3, 3))) * (255 / 16)
    return _write(folder, np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2))).astype(np.uint8), labels, model)


def write_drawings(folder: Path, model: dict[str, Any]) -> Path:
    """A recipe for drawings in strokes by many hands."""
    drawn = drawing.draw_by_hands(CLASSES * DRAWINGS, HANDS, (1, 28, 28), 1)
    return _write(folder, drawn.reshape(-1, 1, 28, 28), _labels(), model)


def write_drawings_on_leaves(folder: Path, model: dict[str, Any]) -> Path:
    """A recipe for the drawings, each in a colour of its own on dead leaves."""
    ink = drawing.draw_by_hands(CLASSES * DRAWINGS, HANDS, (1, 32, 32), 1).reshape(-1, 1, 32, 32) / 255
    leaves = drawing.draw("dead-leaves", len(ink), (3, 32, 32), 2)
    colours = np.random.default_rng(3).uniform(0, 255, (len(ink), 3, 1, 1))
    return _write(folder, (ink * colours + (1 - ink) * leaves).astype(np.uint8), _labels(), model)


def _labels() -> np.ndarray:
    return np.repeat(np.arange(CLASSES * DRAWINGS) % CLASSES, HANDS)


def _write(folder: Path, images: np.ndarray, labels: np.ndarray, model: dict[str, Any]) -> Path:
    order = np.random.default_rng(0).permutation(len(images))
    images, labels, held = images[order], labels[order], len(images) // 6
    np.savez(folder / "own.npz", x=images[held:], y=labels[held:], x_test=images[:held], y_test=labels[:held])
    data = {"path": "own.npz", "classes": list(range(CLASSES)), "bounds": [0, 255]}
    return real.write_recipe(folder, data=data, model=model, method={"kind": "dp-sgd"}, repeats=2)
