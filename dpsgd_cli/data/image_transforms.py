"""Transforms of images without weights: wavelet scattering, random patches, histograms of oriented gradients.

Each is fixed before any record is read and acts on each image alone. `features.py` makes extractors of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dpsgd_cli.data import synthetic

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


PATCH_IMAGES = 1000
PATCHES_CUT = 100_000
PATCH_RIDGE = 0.01
PATCH_ACTIVE = 0.2
THRESHOLD_PATCHES = 10_000


@dataclass(frozen=True)
class Patches:
    """Random patch features (B, patches / 2, places, places) of images (B, C, side, side) with values in [0, 1].

    The image is shrunk by `shrink`. At every `stride`-th position, the patch of `size` x `size` pixels is centred,
    whitened and scaled to unit norm. Its similarity to each of `patches` others (an even number, including mirror
    images) counts as far as it exceeds a threshold that a fifth of the synthetic patches exceed. The excess is averaged
    over a grid of `places` x `places` overlapping parts, then over the image and its mirror image. Products are of
    bfloat16 numbers.

    Source: Coates, Lee and Ng 2011, "An analysis of single-layer networks in unsupervised feature learning"; here the
    patches are data-independent, cut at random from the images of `synthetic.py` and whitened on those. Mirror images
    of patches are patches too, so an image and its mirror image have the same features.
    """

    shape: tuple[int, int, int]
    patches: int
    size: int
    stride: int
    shrink: int
    places: int
    images: str
    seed: int

    def __call__(self, images: Tensor) -> Tensor:
        fixed = _fixed(self, PATCH_IMAGES)
        cut = self._cut(images)
        among = cut.shape[1]
        bright = _unit_rows((cut.flatten(0, 1) - fixed.mean) @ fixed.whiten).bfloat16()
        likeness = functional.relu_(torch.addmm(-fixed.threshold, bright, fixed.dictionary))
        maps = torch.matmul(_parts(math.isqrt(among), self.places), likeness.reshape(len(images), among, self.patches))
        grid = maps.float().transpose(1, 2).reshape(len(images), self.patches, self.places, self.places)
        first, mirrored = grid.split(self.patches // 2, dim=1)
        # a patch occurs in the mirrored image where its mirror image occurs in the image
        return (first + mirrored.flip(3)) / 2

    def _cut(self, images: Tensor) -> Tensor:
        """Return the patches (B, P, size size C) of images, each minus its mean."""
        small = functional.avg_pool2d(images, self.shrink) if self.shrink > 1 else images
        last = small.permute(0, 2, 3, 1).contiguous()
        seen = last.unfold(1, self.size, self.stride).unfold(2, self.size, self.stride)
        cut = seen.permute(0, 1, 2, 4, 5, 3).reshape(len(images), -1, self.size**2 * images.shape[1])
        return cut - cut.mean(dim=2, keepdim=True)


@dataclass(frozen=True)
class _Fixed:
    """Constants from synthetic images: whitening x -> (x - mean) @ whiten, unit patches and similarity thresholds."""

    mean: Tensor
    whiten: Tensor
    dictionary: Tensor
    threshold: Tensor


@functools.lru_cache(maxsize=4)
def _fixed(settings: Patches, images: int) -> _Fixed:
    """Compute the constants from synthetic images of the public seed and their mirror images.

    Mirror images are included so that whitening commutes with mirroring.
    """
    drawn = torch.from_numpy(synthetic.draw(settings.images, images, settings.shape, settings.seed))
    cut = settings._cut(drawn.float() / 255).flatten(0, 1)
    order = np.random.default_rng(settings.seed).permutation(len(cut))[: max(PATCHES_CUT, settings.patches)]
    cut = cut[torch.from_numpy(order)]
    both = torch.cat([cut, _mirrored(cut, settings)])
    mean = both.mean(dim=0)
    centred = (both - mean).double()
    moments, axes = torch.linalg.eigh(centred.T @ centred / len(both))
    whiten = ((axes * (moments + PATCH_RIDGE * moments.mean()).rsqrt()) @ axes.T).float()
    own = _unit_rows((cut[: settings.patches // 2] - mean) @ whiten)
    seen = both[torch.linspace(0, len(both) - 1, THRESHOLD_PATCHES).long()]
    threshold = torch.quantile(_unit_rows((seen - mean) @ whiten) @ own.T, 1 - PATCH_ACTIVE, dim=0).repeat(2)
    dictionary = torch.cat([own, _mirrored(own, settings)]).T.contiguous()
    return _Fixed(mean, whiten, dictionary.bfloat16(), threshold.bfloat16())


def _mirrored(cut: Tensor, settings: Patches) -> Tensor:
    side = settings.size
    return cut.reshape(-1, side, side, settings.shape[0]).flip(2).reshape(cut.shape)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(dim=1, keepdim=True).add(1e-12).sqrt()


@functools.lru_cache(maxsize=8)
def _parts(among: int, places: int) -> Tensor:
    """Return the matrix (places^2, among^2) that averages over each part of a grid; uneven parts overlap."""
    ends = [(number * among // places, -(-(number + 1) * among // places)) for number in range(places)]
    found = torch.zeros(places, places, among, among)
    for row, (top, bottom) in enumerate(ends):
        for column, (left, right) in enumerate(ends):
            found[row, column, top:bottom, left:right] = 1 / ((bottom - top) * (right - left))
    return found.reshape(places**2, among**2).bfloat16()


def hog(images: Tensor, cell: int, orientations: int) -> Tensor:
    """Map images (B, C, side, side) to features (B, 4 orientations, cells - 1, cells - 1), with cells = side // cell.

    These are histograms of oriented gradients: local statistics of the directions of edges.

    At each pixel, the channel with the largest gradient is used. Its magnitude is shared between the two bins nearest
    to its direction, ignoring the sign. Votes are averaged in cells, and every block of 2 x 2 cells is divided by its
    norm.

    Source: Dalal and Triggs 2005, "Histograms of oriented gradients for human detection".
    """
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    steep, colour = torch.hypot(across, down).max(dim=1, keepdim=True)
    angle = torch.atan2(down.gather(1, colour), across.gather(1, colour))
    place = (angle / math.pi * orientations) % orientations
    bins = torch.arange(orientations).reshape(1, -1, 1, 1)
    apart = (place - bins).abs()
    near = (1 - torch.minimum(apart, orientations - apart)).clamp(min=0)
    votes = functional.avg_pool2d(near * steep, cell)
    blocks = torch.cat([votes[:, :, i : i - 1 or None, j : j - 1 or None] for i in (0, 1) for j in (0, 1)], dim=1)
    return blocks / (blocks.square().sum(dim=1, keepdim=True) + 1e-4).sqrt()
