"""Transforms of images against slow obvious code: scattering, random patches, histograms of oriented gradients."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dpsgd_cli.data import image_transforms as transforms
from dpsgd_cli.data import synthetic
from dpsgd_cli.data.image_transforms import Scattering, hog


def morlet(side: int, scale: int, index: int, orientations: int) -> np.ndarray:
    """The wavelet as a function of the offset from its centre, wrapped around the torus."""
    width, frequency, slant = 0.8 * 2**scale, 3 * math.pi / 4 / 2**scale, 4 / orientations
    angle = (orientations - orientations // 2 - 1 - index) * math.pi / orientations

    def gabor(f: float) -> np.ndarray:
        total = np.zeros((side, side), complex)
        for y, x in itertools.product(range(-2 * side, 3 * side), repeat=2):
            u = y * math.cos(angle) + x * math.sin(angle)
            v = -y * math.sin(angle) + x * math.cos(angle)
            total[y % side, x % side] += np.exp(-(u**2 + slant**2 * v**2) / (2 * width**2) + 1j * f * u)
        return total * slant / (2 * math.pi * width**2)

    wave, bump = gabor(frequency), gabor(0.0)
    return np.asarray(wave - wave.sum() / bump.sum() * bump)


def low_pass(side: int, scales: int) -> np.ndarray:
    width = 0.8 * 2 ** (scales - 1)
    total = np.zeros((side, side))
    for y, x in itertools.product(range(-2 * side, 3 * side), repeat=2):
        total[y % side, x % side] += math.exp(-(y**2 + x**2) / (2 * width**2)) / (2 * math.pi * width**2)
    return total


def convolve(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    out = np.zeros(x.shape, complex)
    for y, z in itertools.product(range(x.shape[0]), repeat=2):
        out += kernel[y, z] * np.roll(x, (y, z), axis=(0, 1))
    return out


def slowly(image: np.ndarray, scales: int, orientations: int) -> np.ndarray:
    """Every coefficient of one image without any subsampling before the end."""
    unit = 2**scales
    side = ((len(image) + unit) // unit + 1) * unit
    before = (side - len(image)) // 2
    x = np.pad(image, (before, side - len(image) - before), mode="reflect")
    phi = low_pass(side, scales)

    def averaged(u: np.ndarray) -> np.ndarray:
        return np.asarray(convolve(u, phi).real[::unit, ::unit][1:-1, 1:-1][: len(image) // unit, : len(image) // unit])

    waves = {(j, i): morlet(side, j, i, orientations) for j in range(scales) for i in range(orientations)}
    envelopes = {key: abs(convolve(x, wave)) for key, wave in waves.items()}
    found = [averaged(x), *(averaged(u) for u in envelopes.values())]
    for (j, i), (k, n) in itertools.product(waves, repeat=2):
        if k > j:
            found.append(averaged(abs(convolve(envelopes[j, i], waves[k, n]))))
    return np.stack(found)


@pytest.mark.parametrize(("side", "orientations"), [(8, 4), (12, 4)])
def test_coefficients_are_those_of_the_definition(side: int, orientations: int) -> None:
    image = np.random.default_rng(0).random((side, side))
    found = Scattering(side, 2, orientations)(torch.from_numpy(image[None, None]).float())[0].numpy()
    expected = slowly(image, 2, orientations)
    assert found.shape == expected.shape == (1 + 2 * orientations + orientations**2, side // 4, side // 4)
    assert np.abs(found[0] - expected[0]).max() < 1e-6
    # envelopes are subsampled as soon as their wavelet is smooth: aliasing of a few percent of the largest coefficient
    assert np.abs(found[1:] - expected[1:]).max() < 0.05 * expected[1:].max()
    assert np.abs(found[1 : 1 + orientations] - expected[1 : 1 + orientations]).max() < 1e-6


def test_published_sizes_for_cifar() -> None:
    transform = Scattering(32)
    assert (transform.paths, transform.grid, transform.padded) == (81, 8, 40)
    assert transform(torch.zeros(2, 3, 32, 32)).shape == (2, 243, 8, 8)


def test_a_constant_image_has_an_average_only() -> None:
    found = Scattering(16)(torch.full((1, 1, 16, 16), 0.5))[0]
    assert torch.allclose(found[0], torch.tensor(0.5), atol=1e-3)
    assert found[1:].abs().max() < 1e-5


def test_images_stay_apart_and_noise_shrinks() -> None:
    x = torch.rand(3, 2, 16, 16, generator=torch.Generator().manual_seed(0))
    transform = Scattering(16)
    assert torch.allclose(transform(x)[1], transform(x[1:2])[0], atol=1e-6)
    moved = x + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    # every coefficient stands for 4 x 4 pixels
    distance = 4 * (transform(moved) - transform(x)).flatten(1).norm(dim=1)
    assert (distance <= 1.5 * (moved - x).flatten(1).norm(dim=1)).all()


@pytest.fixture
def few_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforms, "PATCH_IMAGES", 20)
    monkeypatch.setattr(transforms, "PATCHES_CUT", 2000)
    monkeypatch.setattr(transforms, "THRESHOLD_PATCHES", 500)
    transforms._fixed.cache_clear()


SMALL = transforms.Patches((3, 12, 12), 8, 4, 2, 1, 2, "dead-leaves", 0)


def images(count: int, side: int = 12) -> torch.Tensor:
    return torch.from_numpy(synthetic.draw("dead-leaves", count, (3, side, side), 7)).float() / 255


@pytest.mark.usefixtures("few_images")
def test_likenesses_are_those_of_one_patch_at_a_time() -> None:
    (image,) = images(1)
    fixed = transforms._fixed(SMALL, transforms.PATCH_IMAGES)
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


@pytest.mark.usefixtures("few_images")
def test_a_mirror_image_has_the_same_features_and_others_do_not_matter() -> None:
    many = images(5)
    found = SMALL(many)
    assert found.shape == (5, 4, 2, 2)
    assert torch.allclose(SMALL(many.flip(3)), found, atol=0.002)
    assert torch.allclose(SMALL(many[3:4]), found[3:4], atol=1e-3)
    assert not torch.allclose(SMALL(many.flip(2)), found, atol=0.004)


@pytest.mark.usefixtures("few_images")
def test_a_fifth_of_synthetic_places_pass_each_threshold() -> None:
    plain = transforms.Patches((3, 12, 12), 8, 4, 1, 1, 9, "dead-leaves", 3)
    fixed = transforms._fixed(plain, transforms.PATCH_IMAGES)
    cut = plain._cut(images(40)).flatten(0, 1)
    passed = (
        transforms._unit_rows((cut - fixed.mean) @ fixed.whiten) @ fixed.dictionary.float() > fixed.threshold.float()
    )
    assert 0.15 < float(passed.float().mean()) < 0.25


@pytest.mark.usefixtures("few_images")
def test_a_shrunk_image_is_cut_after_shrinking() -> None:
    coarse = transforms.Patches((3, 12, 12), 8, 4, 1, 2, 1, "dead-leaves", 0)
    fine = images(2)
    assert coarse(fine).shape == (2, 4, 1, 1)
    blocks = torch.nn.functional.avg_pool2d(fine, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.allclose(coarse(fine), coarse(blocks))


def test_an_edge_votes_for_its_direction_in_all_four_cells_of_a_block() -> None:
    """Along x rises the image: direction 0. Along y: the middle of the half turn."""
    ramp = torch.linspace(0, 1, 8)
    across, down = ramp.expand(1, 1, 8, 8), ramp[:, None].expand(1, 1, 8, 8)
    for image, bin_ in ((across, 0), (down, 2)):
        (found,) = hog(image.clone(), 4, 4)
        votes = found.reshape(4, 4)
        assert votes.argmax(dim=1).tolist() == [bin_] * 4
        assert torch.isclose(votes.square().sum(), torch.tensor(1.0), atol=0.01)
        assert torch.isclose(votes.sum(), votes[:, bin_].sum())


def test_a_flat_image_has_no_edges_and_blocks_overlap() -> None:
    found = hog(torch.full((2, 3, 16, 16), 0.5), 4, 9)
    assert found.shape == (2, 36, 3, 3)
    assert (found == 0).all()
