"""Which form of a norm to compute: from Gram matrices of positions, or from the instantiated gradient.

Both are exact; they differ in work and memory by orders of magnitude with a layer's shape.

Not here: the forms themselves (`linear.py`, `conv.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# Operations alone decide where one form needs this many times the other's.
_CLEAR = 4.0


class Chooser:
    """The choice of one layer, by shape: from operation counts, and on a GPU from one timed trial where they are near.

    A choice once made for a shape stays, so a training keeps to one form from its first step.
    """

    def __init__(self) -> None:
        self._gram: dict[tuple[int, ...], bool] = {}

    def pick(
        self, shape: tuple[int, int, int], like: torch.Tensor, forms: tuple[Callable[[], Result], Callable[[], Result]]
    ) -> Result:
        """What the cheaper of `forms` (Gram, instantiated) gives; `shape` is positions, inputs and outputs.

        The Gram form takes T^2 (I + O) operations an example and the instantiated one T I O.
        """
        positions, inputs, outputs = shape
        ratio = positions * (inputs + outputs) / (inputs * outputs)
        key = (*shape, *like.shape)
        if like.device.type != "cuda" or not 1 / _CLEAR < ratio < _CLEAR:
            return forms[0 if ratio <= 1 else 1]()
        if key not in self._gram:
            if torch.cuda.is_current_stream_capturing():
                return forms[0 if ratio <= 1 else 1]()
            first, second = (_seconds(form) for form in forms)
            self._gram[key] = first <= second
        return forms[0 if self._gram[key] else 1]()


def _seconds(form: Callable[[], Any]) -> float:
    """Milliseconds of a second run of `form` on the GPU."""
    form()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    form()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
