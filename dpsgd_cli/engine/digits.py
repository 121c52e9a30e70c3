"""Digits of exact standard normals: integers X = floor(N 2^42), where N is a real standard normal.

Release. Let S be an exact sum, sigma the standard deviation of its noise, and q = sigma 2^-42 (public).
`noise.add_noise` releases y = m + X, where m = rint(S / q), clipped to +-2^62. The weights are a function of
(y + 1/2) q.

Sensitivity and theorem. m is an integer, so m + floor(N 2^42) = floor(m + N 2^42): y is a function of m q + sigma N,
the Gaussian mechanism centred at m q. Every theorem on that mechanism (composition, sampling, shuffling, filters) holds
for y. The support of y is the integers for any data, so no floating-point grid is visible, in any precision of the
model. A float normal has a grid of its own, and its sum with S reveals S (Mironov 2012, "On significance of the least
significant bits for differential privacy").

Charge. Rounding to m moves each coordinate by at most 1/2 on either of two neighbouring data sets. `noise.Grid`
increases the noise accordingly, so the ledger's noise multiplier is valid.

Sampler. |N| < 16 is divided into cells of width 1/64 (the mass beyond 16 is 2 Q(16) = 1.3e-57, which no training ever
sees). In cell k the density is at least that of its outer end; the table holds `flat`, the floor of 2^16 times the
corresponding mass. A draw uses one 64-bit word. Its first 16 bits select a slot of the table. With probability .99 the
slot is a cell in which N is uniform, and 36 further bits are the digits of X below the cell. No float is involved.

The other .01 have the distribution of the mass that the floors leave (`_remainder`). Cells are proposed in proportion
to a bound on their remaining mass and accepted with probability remaining / bound. An acceptance compares a uniform
number with a density. Float64 decides if the two differ by more than `_GAP`; its error is below 2^-56 (x to 2^-48, exp
to 4 units in the last place, all over 64). If they are closer (2^-40 of all numbers), `Decimal` decides with as many
further digits as necessary. So X has exactly the distribution of floor(N 2^42) given |N| < 16, if its bits are uniform.

Bits. AES-256 in counter mode, with a key from the operating system that is new for each draw and then discarded:
nothing repeats after a fork or a resume. Blocks never repeat under one key; blocks of random bits would repeat with
probability 2^-71 in 8 GB. To distinguish these bits from random ones is to break AES.

On a device, the words of the common case are of ChaCha20 (`chacha.py`), and the formula above runs there on integers.
Which draws the table leaves is known there only, and the host does not wait for their number K. It sends as many
numbers of `_remainder` as K does not pass but with probability 2^-200 (`most_left`), a function of the public size.
The K draws take the first K of them in order, and the rest is discarded. These are independent of the words, so the
distribution is the one above, up to that event, in which torch raises an error instead of returning numbers.
"""

from __future__ import annotations

import math
import os
from decimal import Context, Decimal
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from dpsgd_cli.engine.chacha import ChaCha
from dpsgd_cli.engine.tensors import to_device

BITS = 42
"""Number of binary digits after the point of a normal."""
CELLS = 1024
"""Number of cells of |N|, each of width 1/64."""
_WIDTH_BITS = 6
_DIGITS = BITS - _WIDTH_BITS
_SLOT_BITS = 16
_SLOTS = 1 << _SLOT_BITS
_BELOW = (1 << _DIGITS) - 1
_MORE = 64 - _SLOT_BITS
"""Number of digits below a cell in a proposal's first word: those of X and 12 more."""
UNIT = (5, 24)
"""Mass of one slot of a proposal: 5 / 2^24."""
_GAP = 2.0**-50
_PROPOSALS = 1 << 14
AT_ONCE = {True: 1 << 16, False: 1 << 22}
"""Numbers drawn together on a CPU (True), whose caches hold few, and on a device, where many take as long as few."""
_PI = Decimal(
    "3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803482534211706798214808651"
)
_EXACT = Context(prec=100)


class DigitTable(NamedTuple):
    """Tables of the sampler: `cells` for the common case and `others` for the remaining mass.

    `flat` and `bound` (1024,): number of slots of each cell of |N| in `cells` and in `others`. `cells` and `others`
    (2^16,) int16: the cell k of each slot, -1024 <= k < 1024, for the interval [k / 64, (k + 1) / 64). The first
    `filled` slots of `cells` are in use, and the first `proposed` of `others`.
    """

    flat: np.ndarray
    bound: np.ndarray
    cells: np.ndarray
    others: np.ndarray
    filled: int
    proposed: int


@cache
def table() -> DigitTable:
    """Return the tables of the sampler, cached; `tests/engine/test_digits.py` checks every cell to 60 digits."""
    ends = np.exp(-np.square(np.arange(CELLS + 1) / 64) / 2) / math.sqrt(2 * math.pi) / 64
    flat = np.floor(ends[1:] * _SLOTS).astype(np.int64)
    left = ends[:-1] - flat / _SLOTS
    # 1e-9 is above the rounding of `ends`; a bound may exceed the remaining mass
    bound = np.ceil(left * (2.0 ** UNIT[1] / UNIT[0]) + 1e-9).astype(np.int64)

    def slots(counts: np.ndarray) -> tuple[np.ndarray, int]:
        magnitudes = np.repeat(np.arange(CELLS, dtype=np.int16), counts)
        signed = np.concatenate([magnitudes, -1 - magnitudes])
        return np.pad(signed, (0, _SLOTS - len(signed))), len(signed)

    (cells, filled), (others, proposed) = slots(flat), slots(bound)
    return DigitTable(flat, bound, cells, others, filled, proposed)


class Keystream:
    """Uniform 64-bit words: AES-256 in counter mode from 0; no other stream may use the same 32-byte key."""

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next `count` words, uint64."""
        room = np.empty(count + 2, dtype=np.uint64)  # the library needs one block of space after the last byte
        self._encryptor.update_into(bytes(8 * count), room.data.cast("B"))
        return room[:count]

    def bits(self, count: int) -> int:
        """Return a uniform integer of `count` bits; the rest of its last word is discarded."""
        words = self.words(-(-count // 64))
        return int.from_bytes(words.tobytes(), "little") >> (64 * len(words) - count)


def fresh() -> Keystream:
    """Return a stream with a new key from the operating system, for one draw."""
    return Keystream(os.urandom(32))


def fill(out: Tensor, stream: Keystream, there: ChaCha | None = None) -> None:
    """Fill `out`, contiguous int64 of any shape, with independent X, in memory that does not grow with its size.

    `there` gives the bits of the common case on the device of `out`; without it, `out` is a tensor of the host and all
    bits are of `stream`.
    """
    if not out.is_contiguous():
        raise ValueError("digits are drawn into contiguous tensors only")
    for part in out.view(-1).split(AT_ONCE[there is None]):
        if there is None:
            left = _fill_common(part, torch.from_numpy(stream.words(len(part)).view(np.int64)))
            many = int(left.sum())
        else:
            left, many = _fill_common(part, there.words(len(part))), most_left(len(part))
        part.masked_scatter_(left, to_device(torch.from_numpy(_remainder(many, stream)), out.device))


def _fill_common(out: Tensor, words: Tensor) -> Tensor:
    """Fill `out` (n,) from uniform `words` (n,), both int64; return a mask (n,) of the draws that the table leaves."""
    slots = (words >> (64 - _SLOT_BITS)) & (_SLOTS - 1)
    torch.bitwise_left_shift(_cells(out.device)[slots].long(), _DIGITS, out=out)
    out |= words & _BELOW
    return slots >= table().filled


@cache
def _cells(device: torch.device) -> Tensor:
    """Return the table's `cells` on a device."""
    return to_device(torch.from_numpy(table().cells), device)


def most_left(count: int) -> int:
    """Return how many of `count` words leave the table at most, but for an event of probability below 2^-200.

    Their number is binomial, with variance v = count p (1 - p). By Bernstein's inequality (Boucheron, Lugosi and
    Massart 2013, Corollary 2.11) it passes its mean by t with probability at most exp(-t^2 / (2 v + 2 t / 3)).
    """
    p, least = 1 - table().filled / _SLOTS, 200 * math.log(2)
    passed = least / 3 + math.sqrt(least * least / 9 + 2 * least * count * p * (1 - p))
    return min(count, math.ceil(count * p + passed))


def _remainder(count: int, stream: Keystream) -> np.ndarray:
    """Draw `count` numbers X, int64, from the distribution of the mass that the first table leaves."""
    parts, missing = [np.empty(0, dtype=np.int64)], count
    while missing > 0:
        # three of five proposals are accepted; few at a time stay in a core's cache
        parts.append(_accepted(min(2 * missing + 32, _PROPOSALS), stream))
        missing -= len(parts[-1])
    return np.concatenate(parts)[:count]


def _accepted(proposals: int, stream: Keystream) -> np.ndarray:
    known = table()
    first, second = stream.words(proposals), stream.words(proposals)
    slots = (first >> np.uint64(64 - _SLOT_BITS)).view(np.int64)
    cells = known.others[slots].astype(np.int64)
    below = (first & np.uint64((1 << _MORE) - 1)).view(np.int64)
    sizes = cells ^ (cells >> 63)  # -1 - k for k < 0
    x = (cells + below * 2.0**-_MORE) / 64
    density = np.exp(x * x / -2) * (1 / (64 * math.sqrt(2 * math.pi))) - known.flat[sizes] * 2.0**-_SLOT_BITS
    asked = second * 2.0**-64 * (known.bound[sizes] * (UNIT[0] * 2.0 ** -UNIT[1]))
    accepted = asked < density
    for close in np.flatnonzero(np.abs(asked - density) < _GAP):
        accepted[close] = accepts(int(cells[close]), int(below[close]), int(second[close]), stream)
    accepted &= slots < known.proposed
    return (cells[accepted] << _DIGITS) | (below[accepted] >> (_MORE - _DIGITS))


def accepts(cell: int, below: int, uniform: int, stream: Keystream) -> bool:
    """Return True if u times the bound of the cell is below the remaining density at x, decided exactly.

    `below` holds the first 48 digits of x below `cell`, `uniform` the first 64 digits of u. Further digits are drawn as
    needed. Raises RuntimeError if 256 digits do not decide, which means that the random bits are broken.
    """
    known, size = table(), -1 - cell if cell < 0 else cell
    floor = Decimal(int(known.flat[size])) / _SLOTS
    bound = Decimal(int(known.bound[size]) * UNIT[0]) / (1 << UNIT[1])
    root = _EXACT.multiply(64, _EXACT.sqrt(_EXACT.multiply(2, _PI)))
    places, digits = _MORE, 64

    def left(numerator: int) -> Decimal:
        """Return the remaining density at x = numerator 2^-places / 64, to 90 digits."""
        x = _EXACT.divide(Decimal(numerator), Decimal(64 << places))
        power = _EXACT.divide(_EXACT.multiply(x, x), Decimal(-2))
        return _EXACT.subtract(_EXACT.divide(_EXACT.exp(power), root), floor)

    while digits < 256:
        ends = sorted(left((cell << places) + below + more) for more in (0, 1))
        low, high = (
            _EXACT.divide(_EXACT.multiply(bound, Decimal(uniform + more)), Decimal(1 << digits)) for more in (0, 1)
        )
        if high <= ends[0] or low >= ends[1]:
            return bool(high <= ends[0])
        below, places = below << 32 | stream.bits(32), places + 32
        uniform, digits = uniform << 32 | stream.bits(32), digits + 32
    raise RuntimeError("a uniform number and a density agree in 256 binary digits: the random bits are broken")
