"""What is computed in which precision: sums over records, and the passes through a model (`runtime.dtype`).

## Sums: what one record moves them by, after every rounding

A ledger says that one record moves a sum of N vectors, each of L2 norm at most C, by at most C. What is computed is
another number: let u be the unit roundoff of the additions (2^-24 for float32, 2^-53 for float64), S the exact sum and
s the computed one. In whatever order n numbers x_i are added up, multiplied out beforehand or fused,

    |s - S| <= g(n) sum |x_i|,   g(n) = n u / (1 - n u)      (Higham 2002, Section 3.1 and equation 4.4),

coordinate by coordinate, and so |s - S|_2 <= g(n) N C for vectors: |sum_i |x_i| |_2 <= sum_i |x_i|_2. A neighbour has
all its roundings anew, because rows behind the one that came or went move up. Hence

    |s(D) - s(D')|_2 <= C (1 + 2 N g(N + 2)) =: C (1 + excess).

In float32 that is no bound (N = 5,000,000: it was found at 1.07 C by repeated rows, and at 1.25 C with float64 used
only between chunks of 4,096, by rows of period 3 and one row before them). In float64 `excess` is

>>> [f"{excess(n):.1e}" for n in (50_000, 500_000, 5_000_000)]
['5.6e-07', '5.6e-05', '5.6e-03']

for one long chain of additions. All sums here are sums of pieces of at most `MOST_ROWS` records, so no number is in
more than MOST_ROWS + N / MOST_ROWS additions:

>>> [f"{excess(n, MOST_ROWS):.1e}" for n in (50_000, 500_000, 5_000_000)]
['1.8e-07', '1.8e-06', '1.9e-05']

Without a seed the noise pays for this excess, and for the rounding to the public grid: it is larger by as much
(`noise.Grid`). With a seed, an experiment, nothing is added.

What is proved. Sums of a convex model (`problems/`) are products in float64 of float32 factors, added up in float64:
the line above holds of them, given each record's own contribution. So it does of a network's sums where a step expects
more than `MOST_FLOAT32` records, or where `runtime.dtype` is float64. Noise is added in float64 before anything is
rounded to float32.

What is not proved. (a) A network's sum over one piece of a smaller step is a float32 product. Its worst case is
2 N g(N) with u = 2^-24 (4% of C for 600 records; 32 C for 16,384, which is no bound) and needs every rounding of every
addition to point the same way; it is not charged. (b) What one record contributes is taken for a function of that
record and the weights. A library may round a record's margin or activations differently in another place of a product,
by a few units in the last place; where a loss has a kink, that can turn a slope over. (c) A contribution's norm is at
most C to float32 rounding, whatever N is.

## Rounded passes

Parameters, norms, clip factors, noise and updates are float32 (or float64) in every mode. With `bfloat16` a recorded
pass works on a rounded copy of the parameters and keeps each layer's input a and output gradient d as 8-bit
significands; with `tf32` a GPU's matrix products inside the passes round their factors to 10 bits.

Why clipping is as strict as before: an example's contribution is defined by the recorded a and d, however these
came to be. Its norm and its part of the sum are both computed from them, in float32: 8-bit significands are
exact there. So what one example adds has norm at most C to float32 rounding, although it is a rounded gradient.

The price also needs that everybody else's part of a sum stays as it is when one example comes or goes. In float32 it
does to rounding. Here a part would move by 8-bit rounding where a library computes a row differently in products of
another shape, as batches of random size have. So these are padded with masked rows to one public width, and worked
off in pieces of it: every product has one shape, whoever is in the batch. That a row's result does not depend on its
place in a product is taken for granted.

Not here: which layers can (`Layer.rounds`), the passes and clipped sums themselves (`engine/packing.py`,
`clipping/run.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_ROWS = 1 << 14
"""Records of a trial in one piece of a sum."""
MOST_FLOAT32 = 1 << 14
"""Records of a step up to which a network's products may be float32."""
PRECISION = torch.float64
"""What sums over records are kept in."""
PARAMETERS = {"float64": torch.float64}
"""By `runtime.dtype`, the type of parameters, norms and noise; float32 where it says nothing else."""
PASSES = {"bfloat16": torch.bfloat16}
"""By `runtime.dtype`, the type that recorded passes round to; none where they work on the parameters themselves."""


def excess(records: int, piece: int | None = None, unit: float = 2.0**-53) -> float:
    """By which part of C more than C one record can move a computed sum: 2 N g(n + 2), see above.

    `records` are added up in pieces of `piece` (all at once by default), whose sums are added up; `unit` is the unit
    roundoff. The 2 is for a product's own rounding and a weight's.
    """
    piece = min(records, piece or records)
    additions = (piece + -(-records // piece) + 2) * unit
    return 2 * records * additions / (1 - additions)


def add_product(total: Tensor, slopes: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
    """total += sum_i weights[i] slopes[i] rows[i]: `total` (A, P) float64; slopes (n, A), rows (n, P), n <= MOST_ROWS.

    `weights` (n, A or 1) or None: how many records each row stands for. One of many equal records is as exact as
    the sum of all, because products are float64.
    """
    own = slopes.to(PRECISION)
    if weights is not None:
        own = own.mul_(weights) if own is not slopes else own * weights
    total.addmm_(own.T, rows.to(PRECISION))


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
