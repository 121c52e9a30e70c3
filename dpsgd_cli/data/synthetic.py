"""Synthetic images: random strokes, which resemble handwriting, and dead leaves, which resemble photographs.

They are drawn from a public seed alone, so anything computed from them (whitening, a rotation) is data-independent.
Dead leaves (Lee, Mumford and Huang 2001, "Occlusion models for natural images") are overlapping shapes with radii of
density r^-3. They have the edges and the spectrum of natural images.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpsgd_cli.errors import DataError

AT_ONCE = 500
VARIED_AT_ONCE = 100


def draw(kind: str, count: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Draw images (count, channels, side, side) of bytes. The same seed gives the same images, bit by bit.

    The random numbers go only through sums, products, quotients and square roots, which are equal on all machines. A
    larger `count` begins with the images of a smaller one.

    >>> draw("strokes", 2, (1, 28, 28), 0).shape
    (2, 1, 28, 28)
    """
    blocks = []
    for number, start in enumerate(range(0, count, AT_ONCE)):
        stream = np.random.default_rng([seed, number])
        blocks.append(KINDS[kind](stream, AT_ONCE, shape)[: count - start])
    return np.concatenate(blocks) if blocks else np.zeros((0, *shape), np.uint8)


def draw_variants(count: int, each: int, shape: tuple[int, int, int], seed: int) -> np.ndarray:
    """Draw `count` drawings of strokes, each by `each` hands, (count, each, channels, side, side) of bytes.

    None of them is an image of `draw`.

    >>> draw_variants(2, 3, (1, 28, 28), 0).shape
    (2, 3, 1, 28, 28)
    """
    blocks = []
    for number, start in enumerate(range(0, count, VARIED_AT_ONCE)):
        stream = np.random.default_rng([seed, number, each])
        blocks.append(stroke_variants(stream, VARIED_AT_ONCE, each, shape)[: count - start])
    return np.concatenate(blocks)


def dead_leaves(stream: np.random.Generator, count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw ellipses and rectangles with colour gradients, front to back, at twice the resolution, then average.

    Each leaf is tested only on the pixels that are still free: `image`, `y` and `x` belong to those.
    """
    channels, side, _ = shape
    fine = 2 * side
    painted = np.zeros((count * fine * fine, channels), np.float32)
    free = np.arange(len(painted))
    image, place = np.divmod(free, fine * fine)
    y, x = (one.astype(np.float32) for one in np.divmod(place, fine))
    for leaf in range(LEAVES):
        one = _leaves(stream, count, channels, fine, leaf == LEAVES - 1)
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
    return _bytes(smooth + stream.normal(0, GRAIN, smooth.shape))


def _leaves(stream: np.random.Generator, count: int, channels: int, fine: int, last: bool) -> dict[str, np.ndarray]:
    """Draw one leaf for each image; the `last` one covers the image."""
    share = stream.random(count)
    radius = fine / np.sqrt(share / MOST**2 + (1 - share) / LEAST**2)
    radius = np.full(count, 10.0 * fine) if last else radius
    centre = (stream.random((2, count)) * 1.2 - 0.1) * fine
    arrow = stream.normal(0, 1, (2, count))
    arrow /= np.sqrt(arrow[0] * arrow[0] + arrow[1] * arrow[1])
    stretch = 0.5 + 1.5 * stream.random(count)
    found = {
        "y": centre[0],
        "x": centre[1],
        "cos": arrow[0],
        "sin": arrow[1],
        "long": radius * stretch,
        "short": radius / stretch,
        "colour": _colours(stream, count, channels),
        "slope": SLOPE * stream.normal(0, 1, (count, 1)) * np.ones((1, channels)),
    }
    return {name: held.astype(np.float32) for name, held in found.items()} | {"corners": stream.random(count) < 0.5}


LEAVES = 120
LEAST, MOST = 0.05, 0.6
SLOPE = 0.08
GRAIN = 0.01
CHROMA = 0.3


def _colours(stream: np.random.Generator, count: int, channels: int) -> np.ndarray:
    """Draw colours (count, channels): a grey level uniform on [0, 1] plus a smaller random tint."""
    grey = stream.random((count, 1))
    if channels == 1:
        return grey
    return grey + CHROMA * stream.normal(0, 1, (count, channels))


def _bytes(images: np.ndarray) -> np.ndarray:
    return np.round(np.clip(images, 0, 1) * 255).astype(np.uint8)


def strokes(stream: np.random.Generator, count: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw images of one to three smooth pen strokes of one width."""
    drawn = stream.integers(1, STROKES + 1, count)
    width = stream.uniform(THIN, THICK, count)
    corners = np.stack([stream.uniform(0.2, 0.8, (count, 4, 2)) for _ in range(STROKES)], axis=1)
    return _inked(drawn, width, corners, shape)


def stroke_variants(stream: np.random.Generator, count: int, each: int, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw `count` drawings like those of `strokes`, each by `each` hands: (count, each, channels, side, side).

    A hand has its own pen width. It slants, rotates, stretches and shifts the drawing, and bends each stroke.
    """
    drawn = np.repeat(stream.integers(1, STROKES + 1, count), each)
    meant = np.repeat(stream.uniform(0.2, 0.8, (count, STROKES, 4, 2)), each, axis=0)
    hands = count * each
    bent = meant + BENT * stream.normal(0, 1, meant.shape)
    slant = np.eye(2) + SLANTED * stream.normal(0, 1, (hands, 2, 2))
    middle = 0.5 + MOVED * stream.normal(0, 1, (hands, 1, 1, 2))
    away = bent[..., None] - 0.5
    corners = away[..., 0, :] * slant[:, None, None, 0] + away[..., 1, :] * slant[:, None, None, 1] + middle
    width = stream.uniform(THIN, THICK, hands)
    return _inked(drawn, width, corners, shape).reshape(count, each, *shape)


STROKES = 3
THIN, THICK = 0.03, 0.06
BENT = 0.02
SLANTED = 0.2
MOVED = 0.04
POINTS = 24


def _inked(drawn: np.ndarray, width: np.ndarray, corners: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Draw the first `drawn` strokes of each image: Bezier curves of `corners` (count, strokes, 4, 2), unit square."""
    channels, side, _ = shape
    ink = np.zeros((len(drawn), side, side), np.float32)
    rows, columns = np.meshgrid(*[np.arange(side, dtype=np.float32)] * 2, indexing="ij")
    reach = (width * side)[:, None, None] + 0.5
    for stroke in range(corners.shape[1]):
        place = _path(corners[:, stroke]) * side
        for point in range(POINTS):
            y = rows - place[:, point, 0, None, None]
            x = columns - place[:, point, 1, None, None]
            far = np.sqrt(y * y + x * x)
            level = np.clip(reach - far, 0, 1) * (stroke < drawn)[:, None, None]
            np.maximum(ink, level, out=ink)
    return _bytes(np.repeat(ink[:, None], channels, axis=1))


def _path(corners: np.ndarray) -> np.ndarray:
    """Return points (count, POINTS, 2) on Bezier curves with four control points."""
    t = np.linspace(0, 1, POINTS)[None, :, None]
    s = 1 - t
    weights = [s * s * s, 3 * t * s * s, 3 * t * t * s, t * t * t]
    path = sum(weight * corners[:, None, number] for number, weight in enumerate(weights))
    return np.asarray(path, np.float32)


KINDS: dict[str, Callable[[np.random.Generator, int, tuple[int, int, int]], np.ndarray]] = {
    "strokes": strokes,
    "dead-leaves": dead_leaves,
}
"""Generators of images by their name in a recipe."""

USUAL = {"strokes": (1, 28), "dead-leaves": (3, 32)}
"""Usual number of channels and side of each kind."""

COLUMNS = 10
ENLARGED = 3


def write(kind: str, images: np.ndarray, directory: Path) -> list[Path]:
    """Write `images`, uint8 (N, channels, side, side), as a npy file, and the first hundred as one picture.

    Returns both paths. Raises DataError if they cannot be written.
    """
    from matplotlib import image  # takes a while to import

    array, picture = directory / f"{kind}.npy", directory / f"{kind}.png"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        np.save(array, images)
        image.imsave(picture, _sheet(images[: COLUMNS**2]))
    except OSError as error:
        raise DataError(f"{directory}: {error.strerror or error}") from None
    return [array, picture]


def _sheet(images: np.ndarray) -> np.ndarray:
    """Return the images in a grid of `COLUMNS` columns, enlarged, with three colour channels."""
    count, _, side, _ = images.shape
    rows = -(-count // COLUMNS)
    colours = images[:, :3] if images.shape[1] >= 3 else np.repeat(images[:, :1], 3, axis=1)
    sheet = np.zeros((rows * COLUMNS, 3, side, side), np.uint8)
    sheet[:count] = colours
    whole = sheet.reshape(rows, COLUMNS, 3, side, side).transpose(0, 3, 1, 4, 2).reshape(rows * side, COLUMNS * side, 3)
    return whole.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
