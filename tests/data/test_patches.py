"""Random patch features: of each image alone, the same of mirror images, and as slow obvious code has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpsgd_cli.data import patches, synthetic


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "IMAGES", 20)
    monkeypatch.setattr(patches, "CUT", 2000)
    monkeypatch.setattr(patches, "FOR_THRESHOLD", 500)
    patches._fixed.cache_clear()


SMALL = patches.Patches((3, 12, 12), 8, 4, 2, 1, 2, "dead-leaves", 0)


def images(count: int, side: int = 12) -> torch.Tensor:
    return torch.from_numpy(synthetic.draw("dead-leaves", count, (3, side, side), 7)).float() / 255


def test_likenesses_are_those_of_one_patch_at_a_time() -> None:
    (image,) = images(1)
    fixed = patches._fixed(SMALL, patches.IMAGES)
    places = [0, 2, 4, 6, 8]
    found = np.zeros((8, 5, 5))
    for row, top in enumerate(places):
        for column, left in enumerate(places):
            cut = image[:, top : top + 4, left : left + 4].permute(1, 2, 0).reshape(-1)
            white = (cut - cut.mean() - fixed.mean) @ fixed.whiten
            like = fixed.dictionary.float().T @ (white / white.norm()) - fixed.threshold.float()
            found[:, row, column] = like.clamp(min=0)
    halves = (slice(0, 3), slice(2, 5))
    grid = np.array([[[one[a, b].mean() for b in halves] for a in halves] for one in found])
    expected = (grid[:4] + grid[4:, :, ::-1]) / 2
    assert np.allclose(SMALL(image[None])[0], expected, atol=0.002)
    assert expected.max() > 0.02


def test_a_mirror_image_has_the_same_features_and_others_do_not_matter() -> None:
    many = images(5)
    found = SMALL(many)
    assert found.shape == (5, 4, 2, 2)
    assert torch.allclose(SMALL(many.flip(3)), found, atol=0.002)
    assert torch.allclose(SMALL(many[3:4]), found[3:4], atol=1e-3)
    assert not torch.allclose(SMALL(many.flip(2)), found, atol=0.004)


def test_a_fifth_of_synthetic_places_pass_each_threshold() -> None:
    plain = patches.Patches((3, 12, 12), 8, 4, 1, 1, 9, "dead-leaves", 3)
    fixed = patches._fixed(plain, patches.IMAGES)
    cut = plain._cut(images(40)).flatten(0, 1)
    passed = patches._unit((cut - fixed.mean) @ fixed.whiten) @ fixed.dictionary.float() > fixed.threshold.float()
    assert 0.15 < float(passed.float().mean()) < 0.25


def test_a_shrunk_image_is_cut_after_shrinking() -> None:
    coarse = patches.Patches((3, 12, 12), 8, 4, 1, 2, 1, "dead-leaves", 0)
    fine = images(2)
    assert coarse(fine).shape == (2, 4, 1, 1)
    blocks = torch.nn.functional.avg_pool2d(fine, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(coarse(fine), coarse(blocks))
