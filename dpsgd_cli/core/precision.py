"""What the passes through a model are computed in: `runtime.dtype`.

Parameters, norms, clip factors, noise and updates are float32 (or float64) in every mode, sums float64
(`summing.py`). With `bfloat16` a recorded pass works on a rounded copy of the parameters and keeps each layer's input a
and output gradient d as 8-bit significands; with `tf32` a GPU's matrix products inside the passes round their factors
to 10 bits.

Why clipping is as strict as before: an example's contribution is defined by the recorded a and d, however these
came to be. Its norm and its part of the sum are both computed from them, in float32: 8-bit significands are
exact there. So what one example adds has norm at most C to float32 rounding, although it is a rounded gradient.

The price also needs that everybody else's part of a sum stays as it is when one example comes or goes. In float32 it
does to rounding. Here a part would move by 8-bit rounding where a library computes a row differently in products of
another shape, as batches of random size have. So these are padded with masked rows to one public width, and worked
off in pieces of it: every product has one shape, whoever is in the batch. That a row's result does not depend on its
place in a product is taken for granted.

Not here: which layers can (`Layer.rounds`), the passes themselves (`packing.py`, `clipping.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

NAMES = ("float32", "float64", "bfloat16", "tf32")


def of_parameters(name: str) -> torch.dtype:
    """The type of parameters, norms, sums and noise under `runtime.dtype` = `name`."""
    return torch.float64 if name == "float64" else torch.float32


def of_passes(name: str) -> torch.dtype | None:
    """The type that recorded passes round to; None where they work on the parameters themselves."""
    return torch.bfloat16 if name == "bfloat16" else None


def keep_sums_exact() -> None:
    """No rounded products on a GPU but where `rounded_products` asks for them: cuDNN would round a convolution's."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def rounded_products(wanted: bool) -> Iterator[None]:
    """Let a GPU round the factors of matrix products to 10 bits, as long as the context lasts; nothing on a CPU."""
    if not wanted:
        yield
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        keep_sums_exact()
