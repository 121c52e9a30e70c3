"""Histograms of oriented gradients: local statistics of the directions of edges in an image.

Dalal and Triggs 2005, "Histograms of oriented gradients for human detection". They are data-independent.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def hog(images: Tensor, cell: int, orientations: int) -> Tensor:
    """Map images (B, C, side, side) to features (B, 4 orientations, cells - 1, cells - 1), with cells = side // cell.

    At each pixel, the channel with the largest gradient is used. Its magnitude is shared between the two bins nearest
    to its direction, ignoring the sign. Votes are averaged in cells, and every block of 2 x 2 cells is divided by its
    norm.
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
