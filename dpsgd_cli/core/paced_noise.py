"""Standard normals for trials that draw at their own pace: the adaptive methods.

Not here: trials in step (`noise.py`), how much noise (the method scales it).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dpsgd_cli.core.streams import Streams

_BLOCK_ELEMENTS = 1 << 14


class PacedNoise:
    """The k-th draw of a trial is a function of its streams, the purpose, k and the size, whoever else draws when.

    No normal is given out twice. `drawn` counts each trial's draws and goes into checkpoints: set it back with
    `resume`.
    """

    def __init__(self, streams: Sequence[Streams], purpose: str, size: int, like: Tensor) -> None:
        self._streams = streams
        self._purpose = purpose
        self._length = max(1, min(64, _BLOCK_ELEMENTS // max(1, size)))
        self._block = torch.empty(len(streams), self._length, size, dtype=like.dtype, device=like.device)
        self.drawn = [0] * len(streams)
        self._filled = [-1] * len(streams)

    def draw(self, trials: Sequence[int]) -> Tensor:
        """One draw (A, size) for each of `trials` (distinct)."""
        places = []
        for trial in trials:
            number, place = divmod(self.drawn[trial], self._length)
            if number != self._filled[trial]:
                self._streams[trial].normal(self._purpose, number, self._block[trial])
                self._filled[trial] = number
            places.append(place)
            self.drawn[trial] += 1
        return self._block[torch.tensor(list(trials)), torch.tensor(places)]

    def resume(self, drawn: Sequence[int]) -> None:
        """Continue after `drawn` draws of each trial; secure streams then draw afresh."""
        self.drawn = list(drawn)
        self._filled = [-1] * len(self.drawn)
