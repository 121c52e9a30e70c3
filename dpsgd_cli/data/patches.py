"""Random patch features: similarity of every place of an image to each of some thousand patches of synthetic images.

Coates, Lee and Ng 2011 ("An analysis of single-layer networks in unsupervised feature learning"), with
data-independent patches: they are cut at random from the images of `synthetic.py` and whitened on those. Mirror images
of patches are patches too, so an image and its mirror image have the same features.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dpsgd_cli.data import synthetic

IMAGES = 1000
CUT = 100_000
RIDGE = 0.01
ACTIVE = 0.2
FOR_THRESHOLD = 10_000


@dataclass(frozen=True)
class Patches:
    """Features (B, patches / 2, places, places) of images (B, C, side, side) with values in [0, 1].

    The image is shrunk by `shrink`. At every `stride`-th position, the patch of `size` x `size` pixels is centred,
    whitened and scaled to unit norm. Its similarity to each of `patches` others (an even number, including mirror
    images) counts as far as it exceeds a threshold that a fifth of the synthetic patches exceed. The excess is averaged
    over a grid of `places` x `places` overlapping parts, then over the image and its mirror image. Products are of
    bfloat16 numbers.
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
        fixed = _fixed(self, IMAGES)
        cut = self._cut(images)
        among = cut.shape[1]
        bright = _unit((cut.flatten(0, 1) - fixed.mean) @ fixed.whiten).bfloat16()
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
    order = np.random.default_rng(settings.seed).permutation(len(cut))[: max(CUT, settings.patches)]
    cut = cut[torch.from_numpy(order)]
    both = torch.cat([cut, _mirrored(cut, settings)])
    mean = both.mean(dim=0)
    centred = (both - mean).double()
    moments, axes = torch.linalg.eigh(centred.T @ centred / len(both))
    whiten = ((axes * (moments + RIDGE * moments.mean()).rsqrt()) @ axes.T).float()
    own = _unit((cut[: settings.patches // 2] - mean) @ whiten)
    seen = both[torch.linspace(0, len(both) - 1, FOR_THRESHOLD).long()]
    threshold = torch.quantile(_unit((seen - mean) @ whiten) @ own.T, 1 - ACTIVE, dim=0).repeat(2)
    dictionary = torch.cat([own, _mirrored(own, settings)]).T.contiguous()
    return _Fixed(mean, whiten, dictionary.bfloat16(), threshold.bfloat16())


def _mirrored(cut: Tensor, settings: Patches) -> Tensor:
    side = settings.size
    return cut.reshape(-1, side, side, settings.shape[0]).flip(2).reshape(cut.shape)


def _unit(rows: Tensor) -> Tensor:
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
