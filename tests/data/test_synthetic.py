"""Images of a seed: the same everywhere, of bytes, and of no data."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from dpsgd_cli.data import synthetic

SHAPES = {"strokes": (1, 28, 28), "dead-leaves": (3, 32, 32)}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "AT_ONCE", 8)


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_more_images_begin_with_the_same_ones(kind: str) -> None:
    many = synthetic.draw(kind, 12, SHAPES[kind], 5)
    assert many.shape == (12, *SHAPES[kind])
    assert many.dtype == np.uint8
    assert (synthetic.draw(kind, 3, SHAPES[kind], 5) == many[:3]).all()
    assert len({image.tobytes() for image in many}) == 12
    assert (synthetic.draw(kind, 3, SHAPES[kind], 6) != many[:3]).any()


@pytest.mark.parametrize(
    ("kind", "sha256"),
    [
        ("strokes", "719806a25bd03303cc5fcdd485f4e3539525f0490da8a0af8bacee10877e755a"),
        ("dead-leaves", "479054d91d8f707bbd447fbe333b8569e58f8b298f8cc721e7795c82bfcd24fc"),
    ],
)
def test_a_seed_gives_the_same_images_to_the_bit(kind: str, sha256: str) -> None:
    found = synthetic.draw(kind, 4, SHAPES[kind], 0)
    assert hashlib.sha256(found.tobytes()).hexdigest() == sha256


def test_no_pixel_is_left_without_a_leaf() -> None:
    dark = synthetic.draw("dead-leaves", 8, (1, 32, 32), 0) == 0
    assert dark.mean() < 0.2


def test_strokes_are_ink_on_an_empty_ground() -> None:
    found = synthetic.draw("strokes", 8, (1, 28, 28), 0)
    ink = (found > 0).mean(axis=(1, 2, 3))
    assert (ink > 0).all()
    assert (ink < 0.5).all()


def test_hands_draw_the_same_drawing_each_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pixels of one drawing are more alike than those of two; more drawings begin with the same ones."""
    monkeypatch.setattr(synthetic, "VARIED_AT_ONCE", 8)
    many = synthetic.draw_variants(12, 3, (1, 28, 28), 5)
    assert many.shape == (12, 3, 1, 28, 28)
    assert (synthetic.draw_variants(2, 3, (1, 28, 28), 5) == many[:2]).all()
    assert len({image.tobytes() for image in many.reshape(36, -1)}) == 36
    flat = many.reshape(12, 3, -1) / 255
    apart = np.linalg.norm(flat[:, 0] - flat[:, 1], axis=1).mean()
    assert apart < 0.9 * np.linalg.norm(flat[:-1, 0] - flat[1:, 0], axis=1).mean()


def test_hands_of_a_seed_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "VARIED_AT_ONCE", 8)
    found = synthetic.draw_variants(2, 2, (1, 28, 28), 0)
    assert hashlib.sha256(found.tobytes()).hexdigest().startswith("68a9744d1fb48ef335cb11c868f6566d")
