"""Write the features of `recipes/frontier/` and `recipes/beyond/cifar10-*` as an npz file, which these recipes read.

    python examples/frontier_features.py mnist recipes/frontier 1425
    python examples/frontier_features.py cifar10 recipes/frontier 2649 5298

The first word names a set of features (`SETS`), the second a folder, and each number a count of directions. Writes
FOLDER/SET-COUNT.npz with x, y, x_test and y_test. A set that ends in `-held` tests on 10,000 records that are held out
of the training part. MNIST takes minutes, CIFAR-10 half an hour on two cores and 8 GB of memory.

No image of a data set shapes a feature: a row is a function of one image, of formulae, and of images that a public seed
draws (`draw`). So neighbouring data sets stay neighbouring, and the features cost no privacy.

1. An image becomes the joined features of several formulae, in half precision: wavelet scattering, histograms of
   gradients, mean colours, and similarities to random patches of drawn images.
2. Joined features x become (x - m) V (e + .02 mean(e))^-power. Mean m, principal directions V and their variances e are
   those of drawn images: random strokes, which resemble handwriting, or dead leaves, which resemble photographs.
3. With `hands`, directions in which drawings of one picture by several hands differ are evened first: within the first
   1,500 principal directions, by (C + .02 mean(c))^-1/2, with C the covariance around each picture's mean and c its
   eigenvalues.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.linalg import eigh
from torch import Tensor
from torch.nn import functional

from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.features import Scattering
from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.data.settings import Data, ValidationSet
from dpsgd_cli.data.splits import content_keys

Maps = Callable[[Tensor], Tensor]
"""A function from images (B, C, side, side), with values in [0, 1], to features (B, ...) of each image."""
FLOOR = 0.02
AMONG = 1500
PICTURES, HANDS = 1200, 8
HELD = 10_000


def draw(kind: str, count: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Draw images (count, channels, side, side) of bytes: `strokes` or `dead-leaves`.

    Random numbers go through sums, products, quotients and square roots only, which are equal on all machines.
    """
    blocks = []
    for number, start in enumerate(range(0, count, 500)):
        blocks.append(KINDS[kind](np.random.default_rng([seed, number]), 500, shape)[: count - start])
    return np.concatenate(blocks)


def draw_by_hands(count: int, each: int, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Draw `count` pictures in strokes, each by `each` hands: (count, each, channels, side, side) of bytes."""
    blocks = []
    for number, start in enumerate(range(0, count, 100)):
        blocks.append(strokes_by_hands(np.random.default_rng([seed, number, each]), 100, each, shape)[: count - start])
    return np.concatenate(blocks)


def dead_leaves(stream: np.random.Generator, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw ellipses and rectangles with colour gradients, front to back, at twice the resolution, then average.

    Radii have the density r^-3 (Lee, Mumford and Huang 2001, "Occlusion models for natural images"). A leaf is tested
    only on the pixels that are still free: `image`, `y` and `x` belong to those.
    """
    channels, side, _ = shape
    fine = 2 * side
    painted = np.zeros((count * fine * fine, channels), np.float32)
    free = np.arange(len(painted))
    image, place = np.divmod(free, fine * fine)
    y, x = (one.astype(np.float32) for one in np.divmod(place, fine))
    for leaf in range(120):
        one = _leaves(stream, count, channels, fine, leaf == 119)
        dy, dx = y - one["y"][image], x - one["x"][image]
        along = (one["cos"][image] * dx + one["sin"][image] * dy) / one["long"][image]
        across = (one["cos"][image] * dy - one["sin"][image] * dx) / one["short"][image]
        corner = one["corners"][image]
        far = np.where(corner, np.maximum(np.abs(along), np.abs(across)), along * along + across * across)
        inside = far < 1
        chosen, own = free[inside], image[inside]
        painted[chosen] = one["colour"][own] + along[inside, None] * one["slope"][own]
        left = ~inside
        free, image, y, x = free[left], image[left], y[left], x[left]
    four = painted.reshape(count, side, 2, side, 2, channels).transpose(2, 4, 0, 5, 1, 3)
    smooth = (four[0, 0] + four[0, 1] + four[1, 0] + four[1, 1]) / 4
    return _bytes(smooth + stream.normal(0, 0.01, smooth.shape))


def _leaves(stream: np.random.Generator, count: int, channels: int, fine: int, last: bool) -> dict[str, np.ndarray]:
    """Draw one leaf for each image; the `last` one covers the image."""
    share = stream.random(count)
    radius = fine / np.sqrt(share / 0.6**2 + (1 - share) / 0.05**2)
    radius = np.full(count, 10.0 * fine) if last else radius
    centre = (stream.random((2, count)) * 1.2 - 0.1) * fine
    arrow = stream.normal(0, 1, (2, count))
    arrow /= np.sqrt(arrow[0] * arrow[0] + arrow[1] * arrow[1])
    stretch = 0.5 + 1.5 * stream.random(count)
    colour = stream.random((count, 1))
    if channels > 1:
        colour = colour + 0.3 * stream.normal(0, 1, (count, channels))
    slope = 0.08 * stream.normal(0, 1, (count, 1)) * np.ones((1, channels))
    found = {"y": centre[0], "x": centre[1], "cos": arrow[0], "sin": arrow[1], "colour": colour, "slope": slope}
    found |= {"long": radius * stretch, "short": radius / stretch}
    return {name: held.astype(np.float32) for name, held in found.items()} | {"corners": stream.random(count) < 0.5}


def strokes(stream: np.random.Generator, count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw images of one to three smooth pen strokes of one width."""
    drawn = stream.integers(1, 4, count)
    width = stream.uniform(0.03, 0.06, count)
    corners = np.stack([stream.uniform(0.2, 0.8, (count, 4, 2)) for _ in range(3)], axis=1)
    return _inked(drawn, width, corners, shape)


def strokes_by_hands(stream: np.random.Generator, count: int, each: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw `count` pictures like those of `strokes`, each by `each` hands: (count, each, channels, side, side).

    A hand has its own pen width. It slants, rotates, stretches and shifts the picture, and bends each stroke.
    """
    drawn = np.repeat(stream.integers(1, 4, count), each)
    meant = np.repeat(stream.uniform(0.2, 0.8, (count, 3, 4, 2)), each, axis=0)
    hands = count * each
    bent = meant + 0.02 * stream.normal(0, 1, meant.shape)
    slant = np.eye(2) + 0.2 * stream.normal(0, 1, (hands, 2, 2))
    middle = 0.5 + 0.04 * stream.normal(0, 1, (hands, 1, 1, 2))
    away = bent[..., None] - 0.5
    corners = away[..., 0, :] * slant[:, None, None, 0] + away[..., 1, :] * slant[:, None, None, 1] + middle
    width = stream.uniform(0.03, 0.06, hands)
    return _inked(drawn, width, corners, shape).reshape(count, each, *shape)


def _inked(drawn: np.ndarray, width: np.ndarray, corners: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Draw the first `drawn` strokes of each image: Bezier curves of `corners` (count, strokes, 4, 2), unit square."""
    channels, side, _ = shape
    ink = np.zeros((len(drawn), side, side), np.float32)
    rows, columns = np.meshgrid(*[np.arange(side, dtype=np.float32)] * 2, indexing="ij")
    reach = (width * side)[:, None, None] + 0.5
    t = np.linspace(0, 1, 24)[None, :, None]
    s = 1 - t
    weights = [s * s * s, 3 * t * s * s, 3 * t * t * s, t * t * t]
    for stroke in range(corners.shape[1]):
        path = sum(weight * corners[:, stroke, None, number] for number, weight in enumerate(weights))
        place = np.asarray(path, np.float32) * side
        for point in range(place.shape[1]):
            y = rows - place[:, point, 0, None, None]
            x = columns - place[:, point, 1, None, None]
            level = np.clip(reach - np.sqrt(y * y + x * x), 0, 1) * (stroke < drawn)[:, None, None]
            np.maximum(ink, level, out=ink)
    return _bytes(np.repeat(ink[:, None], channels, axis=1))


def _bytes(images: np.ndarray) -> np.ndarray:
    return np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)


KINDS = {"strokes": strokes, "dead-leaves": dead_leaves}


def scattering(side: int, grey: bool = False) -> Maps:
    """Wavelet scattering to order 2, with square roots of orders 1 and 2, and each order at unit norm."""
    transform = Scattering(side)
    first = transform.orientations * transform.scales

    def maps(images: Tensor) -> Tensor:
        found = transform(images.mean(dim=1, keepdim=True) if grey else images)
        by_path = found.reshape(len(found), -1, transform.paths, *found.shape[2:])
        mean, *others = by_path.split([1, first, transform.paths - 1 - first], dim=2)
        return torch.cat([_unit(order) for order in (mean, *(one.clamp(min=0).sqrt() for one in others))], dim=2)

    return maps


def histograms(images: Tensor) -> Tensor:
    """Histograms of oriented gradients, in cells of 4 x 4 pixels and 9 directions, of each pixel's steepest colour.

    A magnitude is shared between the two bins nearest to its direction, ignoring the sign. Every block of 2 x 2 cells
    is divided by its norm. Source: Dalal and Triggs 2005, "Histograms of oriented gradients for human detection".
    """
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    across = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    steep, colour = torch.hypot(across, down).max(dim=1, keepdim=True)
    angle = torch.atan2(down.gather(1, colour), across.gather(1, colour))
    place = (angle / math.pi * 9) % 9
    apart = (place - torch.arange(9).reshape(1, -1, 1, 1)).abs()
    near = (1 - torch.minimum(apart, 9 - apart)).clamp(min=0)
    votes = functional.avg_pool2d(near * steep, 4)
    blocks = torch.cat([votes[:, :, i : i - 1 or None, j : j - 1 or None] for i in (0, 1) for j in (0, 1)], dim=1)
    return _unit(blocks / (blocks.square().sum(dim=1, keepdim=True) + 1e-4).sqrt())


def mean_colours(images: Tensor) -> Tensor:
    """Mean of each colour over a grid of 4 x 4, at unit norm."""
    return _unit(functional.adaptive_avg_pool2d(images, 4))


def mirrored(maps: Maps) -> Maps:
    """Return the mean of the features of an image and of its mirror image."""
    return lambda images: (maps(images) + maps(images.flip(-1))) / 2


@dataclass(frozen=True)
class Patches:
    """Square roots of similarities to `count` random patches, mirror images included, of dead leaves of `shape`.

    The image is shrunk by `shrink`. At every position, the patch of `size` x `size` pixels is centred, whitened and
    scaled to unit norm. Its similarity to each random patch counts as far as it exceeds a threshold that a fifth of the
    patches of dead leaves exceed. The excess is averaged over `places` x `places` overlapping parts, then over the
    image and its mirror image. Products are of bfloat16 numbers.

    Source: Coates, Lee and Ng 2011, "An analysis of single-layer networks in unsupervised feature learning".
    """

    shape: tuple[int, ...]
    count: int
    size: int
    shrink: int = 1
    places: int = 3

    def __call__(self, images: Tensor) -> Tensor:
        mean, whiten, dictionary, threshold = self.fixed
        cut = self.cut(images)
        side = math.isqrt(cut.shape[1])
        bright = _unit_rows((cut.flatten(0, 1) - mean) @ whiten).bfloat16()
        likeness = functional.relu_(torch.addmm(-threshold, bright, dictionary))
        maps = torch.matmul(_parts(side, self.places), likeness.reshape(len(images), side**2, self.count))
        grid = maps.float().transpose(1, 2).reshape(len(images), self.count, self.places, self.places)
        first, mirror = grid.split(self.count // 2, dim=1)
        # a patch occurs in the mirrored image where its mirror image occurs in the image
        return _unit(((first + mirror.flip(3)) / 2).sqrt())

    def cut(self, images: Tensor) -> Tensor:
        """Return the patches (B, P, size size C) of images, each minus its mean."""
        small = functional.avg_pool2d(images, self.shrink) if self.shrink > 1 else images
        last = small.permute(0, 2, 3, 1).contiguous()
        seen = last.unfold(1, self.size, 1).unfold(2, self.size, 1)
        cut = seen.permute(0, 1, 2, 4, 5, 3).reshape(len(images), -1, self.size**2 * images.shape[1])
        return cut - cut.mean(dim=2, keepdim=True)

    @functools.cached_property
    def fixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean, whitening, unit patches and thresholds, from drawn images and their mirror images."""
        cut = self.cut(torch.from_numpy(draw("dead-leaves", 1000, self.shape)).float() / 255).flatten(0, 1)
        cut = cut[torch.from_numpy(np.random.default_rng(0).permutation(len(cut))[: max(100_000, self.count)])]
        both = torch.cat([cut, self._flipped(cut)])
        mean = both.mean(dim=0)
        centred = (both - mean).double()
        moments, axes = torch.linalg.eigh(centred.T @ centred / len(both))
        whiten = ((axes * (moments + 0.01 * moments.mean()).rsqrt()) @ axes.T).float()
        own = _unit_rows((cut[: self.count // 2] - mean) @ whiten)
        seen = both[torch.linspace(0, len(both) - 1, 10_000).long()]
        threshold = torch.quantile(_unit_rows((seen - mean) @ whiten) @ own.T, 0.8, dim=0).repeat(2)
        dictionary = torch.cat([own, self._flipped(own)]).T.contiguous()
        return mean, whiten, dictionary.bfloat16(), threshold.bfloat16()

    def _flipped(self, cut: Tensor) -> Tensor:
        return cut.reshape(-1, self.size, self.size, self.shape[0]).flip(2).reshape(cut.shape)


def _unit_rows(rows: Tensor) -> Tensor:
    return rows / rows.square().sum(dim=1, keepdim=True).add(1e-12).sqrt()


def _unit(maps: Tensor) -> Tensor:
    """Return each record's maps divided by their L2 norm; zero stays zero."""
    norms = maps.flatten(1).norm(dim=1).clamp(min=1e-12)
    return maps / norms.reshape(-1, *[1] * (maps.dim() - 1))


@functools.lru_cache(maxsize=8)
def _parts(among: int, places: int) -> Tensor:
    """Return the matrix (places^2, among^2) that averages over each part of a grid; uneven parts overlap."""
    ends = [(number * among // places, -(-(number + 1) * among // places)) for number in range(places)]
    found = torch.zeros(places, places, among, among)
    for row, (top, bottom) in enumerate(ends):
        for column, (left, right) in enumerate(ends):
            found[row, column, top:bottom, left:right] = 1 / ((bottom - top) * (right - left))
    return found.reshape(places**2, among**2).bfloat16()


def joined(formulae: Sequence[Maps], images: np.ndarray) -> np.ndarray:
    """Return the features (N, F) of images (N, C, side, side), each image's by itself, in half precision."""
    found = []
    with torch.inference_mode():
        for start in range(0, len(images), 16):
            block = torch.from_numpy(np.array(images[start : start + 16], np.float32, order="C"))
            found.append(torch.cat([maps(block).flatten(1) for maps in formulae], dim=1).half().numpy())
    return np.concatenate(found)


@dataclass(frozen=True)
class FeatureSet:
    """Formulae for the images of a card, and the drawn images whose principal directions the features are put on."""

    card: str
    formulae: tuple[Maps, ...]
    drawn: str
    images: int
    power: float
    hands: bool = False


DIGITS = (scattering(28), histograms)
FORMULAE = (mirrored(scattering(32, grey=True)), mirrored(histograms), mirrored(mean_colours))
PHOTO = (3, 32, 32)
LARGE, SHRUNK = Patches(PHOTO, 2048, 6), Patches(PHOTO, 1024, 6, shrink=2, places=2)
PHOTOGRAPHS = (LARGE, Patches(PHOTO, 1024, 4), Patches(PHOTO, 512, 3), SHRUNK, *FORMULAE)
SETS = {
    "mnist": FeatureSet("mnist", DIGITS, "strokes", 8000, 0.0, hands=True),
    "mnist-principal": FeatureSet("mnist", DIGITS, "strokes", 8000, 0.25),
    "cifar10": FeatureSet("cifar10", PHOTOGRAPHS, "dead-leaves", 8000, 0.35),
    "cifar10-few": FeatureSet("cifar10", PHOTOGRAPHS, "dead-leaves", 3000, 0.25),
    "cifar10-small": FeatureSet("cifar10", (LARGE, SHRUNK, *FORMULAE), "dead-leaves", 3000, 0.25),
}


def rotation(own: FeatureSet, drawn: np.ndarray, count: int) -> np.ndarray:
    """Return (F + 1, count): scaled directions, then minus the projected mean, of the features `drawn` of drawings."""
    plain = drawn[: own.images].astype(np.float32)
    mean = plain.mean(axis=0)
    plain = plain - mean
    if own.hands:
        first, _ = _principal(plain, AMONG)
        hands = (drawn[own.images :].astype(np.float32) @ first).reshape(PICTURES, HANDS, AMONG)
        apart = (hands - hands.mean(axis=1, keepdims=True)).reshape(-1, AMONG)
        moments, vectors = np.linalg.eigh(apart.T @ apart / (PICTURES * (HANDS - 1)))
        moments = np.maximum(moments, 0)
        even = first @ ((vectors * (moments + FLOOR * moments.mean()) ** -0.5) @ vectors.T)
        axes, variances = _principal(plain @ even, count)
        axes = even @ axes
    else:
        axes, variances = _principal(plain, count)
    axes = axes * (variances + FLOOR * variances.mean()) ** -own.power
    return np.vstack([axes, -(mean @ axes)]).astype(np.float32)


def _principal(x: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first `count` principal directions (features, count) of centred rows, and their variances."""
    wide = x.shape[1] > len(x)
    gram = (x @ x.T if wide else x.T @ x) / len(x)
    size = len(gram)
    variances, vectors = eigh(gram, subset_by_index=[size - count, size - 1], overwrite_a=True)
    variances, vectors = np.maximum(variances[::-1], 0), vectors[:, ::-1]
    if wide:
        vectors = x.T @ vectors
        vectors /= np.maximum(np.linalg.norm(vectors, axis=0), 1e-30)
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return vectors * np.sign(largest), variances


def rotated(x: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Return features (N, F) on the directions of `turn`, float32 (N, count)."""
    blocks = [x[start : start + 2048].astype(np.float32) @ turn[:-1] for start in range(0, len(x), 2048)]
    return np.concatenate(blocks) + turn[-1]


def drawings(own: FeatureSet, shape: tuple[int, ...]) -> np.ndarray:
    """Return drawn images with values in [0, 1], float32, followed by those of several hands."""
    images = draw(own.drawn, own.images, shape)
    if own.hands:
        images = np.concatenate([images, draw_by_hands(PICTURES, HANDS, shape).reshape(-1, *shape)])
    return (1 / 255 * images).astype(np.float32)


def main(name: str, folder: Path, counts: Sequence[int]) -> None:
    """Write the features of one set on so many directions, a file for each count."""
    own = SETS[name.removesuffix("-held")]
    raw = load_raw(Data(name=own.card), Path())
    assert isinstance(raw.train, Part) and isinstance(raw.test, Part)
    drawn = joined(own.formulae, drawings(own, raw.layout.shape))
    x, y = joined(own.formulae, raw.train.x), raw.train.y
    if name.endswith("-held"):
        held = content_keys(raw.train.x, y).held_out(ValidationSet(records=HELD, public=True))
        x_test, y_test = x[held], y[held]
    else:
        held = np.zeros(len(x), bool)
        x_test, y_test = joined(own.formulae, raw.test.x), raw.test.y
    for count in counts:
        turn = rotation(own, drawn, count)
        rows = {"x": rotated(x, turn)[~held], "y": y[~held], "x_test": rotated(x_test, turn), "y_test": y_test}
        np.savez(folder / f"{name}-{count}.npz", **rows)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), [int(count) for count in sys.argv[3:]])
