"""Wavelet scattering of images: a transform without weights, which acts on each image alone."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_WIDTH = 0.8
_FREQUENCY = 3 * math.pi / 4


@dataclass(frozen=True)
class Scattering:
    """Wavelet scattering transform to order 2 of images (B, C, side, side), with J = `scales` and L = `orientations`.

    Coefficients of one channel: 1 average, L J of order 1, L^2 J (J - 1) / 2 of order 2, each on a grid of side / 2^J
    points per side. They scale with the image. They change by at most as much as the image does (in L2, to rounding).

    Source: Bruna and Mallat 2013, "Invariant scattering convolution networks". Filters and padding are those of Kymatio
    (Andreux et al. 2020, JMLR 21(60)), so published settings have the same meaning.
    """

    side: int
    scales: int = 2
    orientations: int = 8

    @property
    def paths(self) -> int:
        """Number of coefficients of one channel at one grid point."""
        second = self.orientations**2 * self.scales * (self.scales - 1) // 2
        return 1 + self.orientations * self.scales + second

    @property
    def grid(self) -> int:
        """Number of grid points per side."""
        return self.side // 2**self.scales

    @property
    def padded(self) -> int:
        """Side of the padded image, with reflected pixels around it."""
        unit = 2**self.scales
        return ((self.side + unit) // unit + 1) * unit

    def __call__(self, images: Tensor) -> Tensor:
        """Map (B, C, side, side) to (B, C * paths, grid, grid): orders 0, 1 and 2 within each channel."""
        batch, channels = images.shape[:2]
        flat = images.reshape(batch * channels, 1, self.side, self.side)
        before = (self.padded - self.side) // 2
        after = self.padded - self.side - before
        x = functional.pad(flat, (before, after, before, after), mode="reflect").squeeze(1)
        found = [self._average(x, 0)[:, None], *self._higher(x)]
        return torch.cat(found, dim=1).reshape(batch, channels * self.paths, self.grid, self.grid)

    def _higher(self, x: Tensor) -> list[Tensor]:
        first: list[Tensor] = []
        second: list[Tensor] = []
        spectrum = torch.fft.fft2(x)
        for j in range(self.scales):
            envelope = self._envelope(spectrum[:, None], j, 0)
            first.append(self._average(envelope, j))
            inner = torch.fft.fft2(envelope)
            for k in range(j + 1, self.scales):
                deeper = self._envelope(inner[:, :, None], k, j)
                second.append(self._average(deeper, k).flatten(1, 2))
        return [*first, *second]

    def _envelope(self, spectrum: Tensor, scale: int, at: int) -> Tensor:
        """Return |x * psi_scale| of every orientation at every 2^scale-th pixel, from the spectrum of x at `at`."""
        filters = _wavelets(self.padded, scale, self.orientations, at).to(spectrum.device)
        return torch.fft.ifft2(_fold(spectrum * filters, 2 ** (scale - at))).abs()

    def _average(self, x: Tensor, at: int) -> Tensor:
        """Return the low-pass of x (at scale `at`) on the grid, by two matrix products: the Gaussian is separable."""
        rows = _low_pass(self, at).to(x)
        return rows @ x @ rows.T


def _fold(spectrum: Tensor, step: int) -> Tensor:
    """Return the spectrum of every `step`-th point: the mean of the spectrum's aliases."""
    if step == 1:
        return spectrum
    *front, height, width = spectrum.shape
    return spectrum.reshape(*front, step, height // step, step, width // step).mean(dim=(-4, -2))


@functools.lru_cache(maxsize=64)
def _wavelets(side: int, scale: int, orientations: int, at: int) -> Tensor:
    """Return the Fourier transforms (L, side / 2^at, side / 2^at), real, of the Morlet wavelets of one scale."""
    width, frequency = _WIDTH * 2**scale, _FREQUENCY / 2**scale
    made = []
    for index in range(orientations):
        angle = (orientations - orientations // 2 - 1 - index) * math.pi / orientations
        slant = 4.0 / orientations
        wave, bump = (_gabor(side, width, angle, f, slant) for f in (frequency, 0.0))
        made.append(np.fft.fft2(wave - wave.sum() / bump.sum() * bump).real)
    filters = _fold(torch.from_numpy(np.stack(made)), 2**at) * 4**at if at else torch.from_numpy(np.stack(made))
    return filters.to(torch.float32)


def _gabor(side: int, width: float, angle: float, frequency: float, slant: float) -> np.ndarray:
    """Return an elongated Gaussian times a complex sinusoid, wrapped around the (side, side) torus."""
    wrapped = np.zeros((side, side), complex)
    for down, right in itertools.product(range(-2, 3), repeat=2):
        y, x = np.mgrid[down * side : (down + 1) * side, right * side : (right + 1) * side].astype(float)
        along = y * math.cos(angle) + x * math.sin(angle)
        across = -y * math.sin(angle) + x * math.cos(angle)
        wrapped += np.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2) + 1j * frequency * along)
    return np.asarray(wrapped * slant / (2 * math.pi * width**2))


@functools.lru_cache(maxsize=16)
def _low_pass(shape: Scattering, at: int) -> Tensor:
    """Return the matrix (grid, padded / 2^at) of periodic smoothing with the widest Gaussian and subsampling.

    Subsampling keeps every 2^(J - at)-th point and crops the padding.
    """
    side, step = shape.padded, 2**shape.scales
    width = _WIDTH * 2 ** (shape.scales - 1)
    distance = np.arange(side) + side * np.arange(-2, 3)[:, None]
    kernel = np.exp(-(distance**2) / (2 * width**2)).sum(axis=0) / math.sqrt(2 * math.pi * width**2)
    spectrum = np.fft.fft(kernel).real
    small = np.fft.ifft(spectrum.reshape(2**at, -1).mean(axis=0) * 2**at if at else spectrum).real
    points = len(small)
    places = (np.arange(side // step) * (step // 2**at))[1 : 1 + shape.grid]
    matrix = small[(places[:, None] - np.arange(points)) % points]
    return torch.from_numpy(matrix).to(torch.float32)
