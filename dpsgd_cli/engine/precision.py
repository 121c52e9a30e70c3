"""Floating-point precision of sums over records and of passes through a model (`runtime.dtype`).

## Sums: sensitivity after rounding

A ledger assumes that one record moves a sum of N vectors, each of L2 norm at most C, by at most C. The computed sum
differs from the exact one. Let u be the unit roundoff of the additions (2^-24 for float32, 2^-53 for float64), S the
exact sum and s the computed one. For n numbers x_i added up in any order, multiplied out beforehand or fused,

    |s - S| <= g(n) sum |x_i|,   g(n) = n u / (1 - n u)      (Higham 2002, Section 3.1 and equation 4.4),

coordinate by coordinate, and so |s - S|_2 <= g(n) N C for vectors, as |sum_i |x_i| |_2 <= sum_i |x_i|_2. On a
neighbouring data set all rounding errors may differ, because the rows after the added or removed one move. Hence

    |s(D) - s(D')|_2 <= C (1 + 2 N g(N + 2)) =: C (1 + excess).

In float32 this bound is useless. For N = 5,000,000, repeated rows moved a sum by 1.07 C. With float64 used only between
chunks of 4,096, rows of period 3 after one other row moved it by 1.25 C. In float64 `excess` is

>>> [f"{excess(n):.1e}" for n in (50_000, 500_000, 5_000_000)]
['5.6e-07', '5.6e-05', '5.6e-03']

for one long chain of additions. All sums in this package are sums of pieces of at most `MOST_ROWS` records, so no
number takes part in more than MOST_ROWS + N / MOST_ROWS additions:

>>> [f"{excess(n, MOST_ROWS):.1e}" for n in (50_000, 500_000, 5_000_000)]
['1.8e-07', '1.8e-06', '1.9e-05']

Without a seed, noise is increased by this excess and by the rounding to the public grid (`noise.Grid`). With a seed
(for experiments), nothing is added.

Proved: sums of a convex model (`problems/`) are products in float64 of float32 factors, added up in float64. The bound
above holds for them, given each record's own contribution. It also holds for a network's sums if a step expects more
than `MOST_FLOAT32` records, or if `runtime.dtype` is float64. Noise is added in float64 before any rounding to float32.

Not proved: (a) A network's sum over one piece of a smaller step is a float32 product. Its worst case is 2 N g(N) with
u = 2^-24: 4% of C for 600 records, and 32 C for 16,384, which is useless. It needs every rounding of every addition to
go in the same direction, and it is not charged. (b) A record's contribution is assumed to be a function of that record
and the weights. A library may round a record's margin or activations differently at another position of a product, by a
few units in the last place. At a kink of the loss this can flip a slope. (c) A contribution's norm is at most C up to
float32 rounding, for every N.

## Rounded passes

Parameters, norms, clip factors, noise and updates are float32 (or float64) in every mode. With `bfloat16`, a recorded
pass works on a rounded copy of the parameters and keeps each layer's input a and output gradient d with 8-bit
significands. With `tf32`, matrix products of a GPU inside the passes round their factors to 10 bits.

Clipping stays equally strict. An example's contribution is defined by the recorded a and d, however they were computed.
Its norm and its part of the sum are both computed from them by `product`. So an example adds a vector of norm at most
C, up to float32 rounding, although it is a rounded gradient:

- *Products.* The product of two 8-bit significands is exact in float32, so a GPU's tensor cores may multiply them.
  Assumed of their accumulators: they add up at least 8 exact products at a time, each time with an error of at most
  2^-23 of the sum of magnitudes so far. So a sum of n products errs by at most n / 8 times 2^-23 of the sum of their
  magnitudes. Norms are raised by that much (`layers/base.py`). `tests/engine/test_gpu.py` measures it where there is a
  GPU; it held on an H200.
- *Factors.* A clip factor f times d has 24 bits. `product` splits e = f d into hi + lo of 8 bits each. If e has
  exponent k, then |e - hi| <= 2^(k - 8). The difference is exact, and rounding it to lo errs by at most 2^(k - 17),
  which is at most 2^-17 |e|. With S = sum_t |a_t| |d_t|, a part of the sum errs by at most (2^-17 + 2^-24) f S in norm.
  `LOST` is twice that. Factors are computed from |g| + `LOST` S instead of |g|. Then what an example adds has norm at
  most f |g| + f LOST S <= C.

The price also requires that the other examples' parts of a sum do not change when one example is added or removed. In
float32 this holds up to rounding. In rounded passes a part would change by 8-bit rounding if a library computes a row
differently in products of another shape, as with batches of random size. So batches are padded with masked rows to one
public width and processed in pieces of that width: every product has one shape, for every batch. A row's result is
assumed not to depend on its position in a product.

`Layer.rounds` says which layers support rounded passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

MOST_ROWS = 1 << 14
"""Largest number of records of a trial in one piece of a sum."""
MOST_FLOAT32 = 1 << 14
"""Largest number of records in a step for which a network's products may be float32."""
PRECISION = torch.float64
"""Dtype of sums over records."""
PARAMETERS = {"float64": torch.float64}
"""Dtype of parameters, norms and noise by `runtime.dtype`; float32 for all others."""
SHORT = torch.bfloat16
"""Dtype of 8-bit significands, whose products are exact in float32."""
LOST = 1.02 * 2.0**-16
"""What splitting takes from or adds to a contribution: at most this share of sum_t |a_t| |d_t|; see above."""
PASSES = {"bfloat16": SHORT}
"""Dtype of recorded passes by `runtime.dtype`; all others use the parameters' dtype."""


def excess(records: int, piece: int | None = None, unit: float = 2.0**-53) -> float:
    """Return the relative increase of a sum's sensitivity by rounding: 2 N g(n + 2), see the module's docstring.

    One record moves the computed sum by at most C (1 + excess). `records` are added up in pieces of `piece` (all at
    once by default), whose sums are added up; `unit` is the unit roundoff. The 2 in n + 2 is for the rounding of a
    product and of a weight.
    """
    piece = min(records, piece or records)
    additions = (piece + -(-records // piece) + 2) * unit
    return 2 * records * additions / (1 - additions)


def add_product(total: Tensor, slopes: Tensor, rows: Tensor, weights: Tensor | None = None) -> None:
    """Add sum_i weights[i] slopes[i] rows[i] to `total` (A, P), float64, in place.

    Slopes are (n, A), rows (n, P), n <= MOST_ROWS. `weights` (n, A or 1) is the number of records that each row
    represents; None means 1. One row for many equal records is as exact as their sum, because products are float64.
    """
    own = slopes.to(PRECISION)
    if weights is not None:
        own = own.mul_(weights) if own is not slopes else own * weights
    total.addmm_(own.T, rows.to(PRECISION))


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b: in float32 if a factor has 8-bit significands (`SHORT`), else in the factors' dtype.

    Shapes (..., M, K) and (..., K, N); leading axes broadcast. A float32 factor beside a short one is split in two, of
    which each product is exact: see the module's docstring.
    """
    if SHORT not in (a.dtype, b.dtype):
        return torch.matmul(a, b)
    found = [_short_product(x, y) for x in _parts(a) for y in _parts(b)]
    return found[0] if len(found) == 1 else found[0] + found[1]


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    """Return hi and lo, `SHORT`, of a float32 tensor; a short one as it is.

    hi is rounded as an integer. A compiler may take x.to(SHORT).float() for x, so that lo would be 0.
    """
    if x.dtype == SHORT:
        return (x,)
    high = ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return high.to(SHORT), (x - high).to(SHORT)


def _short_product(a: Tensor, b: Tensor) -> Tensor:
    if not a.is_cuda:
        return torch.matmul(a.float(), b.float())
    lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    left, right = (x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]) for x in (a, b))
    return torch.bmm(left, right, out_dtype=torch.float32).view(*lead, a.shape[-2], b.shape[-1])


def keep_sums_exact() -> None:
    """Turn off rounded (TF32) products on a GPU outside of `rounded_products`; cuDNN rounds convolutions by default.

    Parts of products in bfloat16 are never added up in bfloat16.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def rounded_products(wanted: bool) -> Iterator[None]:
    """If `wanted`, let a GPU round the factors of matrix products to 10 bits (TF32) while the context lasts."""
    if not wanted:
        yield
        return
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        keep_sums_exact()
