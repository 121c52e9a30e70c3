"""Files of synthetic images, for people to look at. `data/synthetic.py` draws the images."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dpsgd_cli.errors import DataError

A_SIDE = 10
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
        image.imsave(picture, _sheet(images[: A_SIDE**2]))
    except OSError as error:
        raise DataError(f"{directory}: {error.strerror or error}") from None
    return [array, picture]


def _sheet(images: np.ndarray) -> np.ndarray:
    """Return the images in a grid of `A_SIDE` columns, enlarged, with three colour channels."""
    count, _, side, _ = images.shape
    rows = -(-count // A_SIDE)
    colours = images[:, :3] if images.shape[1] >= 3 else np.repeat(images[:, :1], 3, axis=1)
    sheet = np.zeros((rows * A_SIDE, 3, side, side), np.uint8)
    sheet[:count] = colours
    whole = sheet.reshape(rows, A_SIDE, 3, side, side).transpose(0, 3, 1, 4, 2).reshape(rows * side, A_SIDE * side, 3)
    return whole.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)
