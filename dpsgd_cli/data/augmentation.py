"""Random crops and flips of training images, with K copies of each whose gradients are averaged before clipping.

De et al. 2022, "Unlocking high-accuracy differentially private image classification through scale", section 3.1
(augmentation multiplicity; Hoffer et al. 2019 without privacy).

Guarantee: the price of a step does not change. Proof: fix the trials' keys. The K copies of example i are then a
function of its own image, the step and the key, and of no row number or other record. So it adds clip((1/K) sum_k
g_ik), where g_ik is the gradient on its copy k: a vector of L2 norm at most the bound, which depends on example i
alone. When one record is added, removed or replaced, no other record's part of the sum moves, and the sum's sensitivity
is that of plain clipping under every adjacency and for every value of the keys, secret or not. (K copies clipped one by
one would have K times the sensitivity.)

Draws: crop and flip of a copy are a hash of (the trial's key, step, content of the image, copy) alone. So a trial sees
the same images alone or in a pack, in one process or several, in batches of any size and after a resume, and equal
images have equal crops. The hash need not be cryptographic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dpsgd_cli.data.settings import Augment
from dpsgd_cli.engine.dropout import content, mixed
from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.errors import ModelError

_BITS = 20


class Augmentation:
    """Maker of augmented copies of images (C, H, W) for every trial of a pack.

    Raises ModelError if inputs are not images, or if they are too small for the reflected padding.
    """

    def __init__(self, settings: Augment, streams: Sequence[Streams], shape: tuple[int, ...]) -> None:
        if len(shape) != 3:
            raise ModelError(f"data.augment needs images (channels, height, width), but one input is {shape}")
        if settings.padding == "reflect" and settings.crop >= min(shape[1:]):
            raise ModelError(
                f"data.augment.crop: {settings.crop} pixels cannot be reflected at images of {shape[1]} x {shape[2]};"
                " make it smaller"
            )
        self.settings, self.copies = settings, settings.copies
        self.shape = shape
        self.keys = torch.tensor([stream.integer("augment") for stream in streams])

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """Return K augmented copies (R, K B, C, H, W) of images `x` (R or 1, B, C, H, W), all first copies first."""
        trials, (channels, height, width) = len(self.keys), self.shape
        down, right, mirrored = self._draw(x, step)
        rows = down.unsqueeze(-1) + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device).expand(*mirrored.shape, -1)
        columns = right.unsqueeze(-1) + torch.where(mirrored.unsqueeze(-1), width - 1 - columns, columns)
        margin = self.settings.crop
        mode = "reflect" if self.settings.padding == "reflect" else "constant"
        wide = F.pad(x.flatten(0, 1), (margin,) * 4, mode=mode) if margin else x.flatten(0, 1)
        wide = wide.flatten(2).view(x.shape[0], 1, x.shape[1], channels, -1)
        places = (rows.unsqueeze(-1) * (width + 2 * margin) + columns.unsqueeze(-2)).flatten(3)
        copies = self.copies
        found = wide.expand(trials, copies, -1, -1, -1).gather(4, places.unsqueeze(3).expand(-1, -1, -1, channels, -1))
        return found.view(trials, copies * x.shape[1], channels, height, width)

    def _draw(self, x: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Draw offsets in 0..2 crop, downwards and to the right, and a mask of mirrored copies; (R, K, B) each."""
        if self.keys.device != x.device:
            self.keys = self.keys.to(x.device)
        keys = mixed(self.keys + int(mixed(torch.tensor(step)))).view(-1, 1, 1)
        copy = torch.arange(self.copies, device=x.device).view(1, -1, 1)
        bits = mixed((keys ^ content(x.flatten(0, 1)).view(x.shape[0], 1, -1)) + copy)
        low = (1 << _BITS) - 1
        offsets = 2 * self.settings.crop + 1
        down, right = (((bits >> by & low) * offsets) >> _BITS for by in (0, _BITS))
        return down, right, (bits >> 2 * _BITS & 1).bool() & self.settings.flip
