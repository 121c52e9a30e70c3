"""Wavelet scattering against slow obvious code."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from dpsgd_cli.data.features import Scattering


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
