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
"""

from __future__ import annotations

import math
import os
from decimal import Context, Decimal
from functools import cache
from typing import NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

BITS = 42
"""Number of binary digits after the point of a normal."""
CELLS = 1024
"""Number of cells of |N|, each of width 1/64."""
_WIDTH_BITS = 6
_DIGITS = BITS - _WIDTH_BITS
_SLOT_BITS = 16
_SLOTS = 1 << _SLOT_BITS
_BELOW = np.uint64((1 << _DIGITS) - 1)
_MORE = 64 - _SLOT_BITS
"""Number of digits below a cell in a proposal's first word: those of X and 12 more."""
UNIT = (5, 24)
"""Mass of one slot of a proposal: 5 / 2^24."""
_GAP = 2.0**-50
_BLOCK = 1 << 16
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


def fill(out: np.ndarray, stream: Keystream) -> None:
    """Fill `out`, contiguous int64 of any shape, with independent X, in 3 MiB of memory for any size."""
    if not out.flags.c_contiguous:
        raise ValueError("digits are drawn into contiguous arrays only")
    flat = out.reshape(-1)
    for start in range(0, len(flat), _BLOCK):
        _fill_block(flat[start : start + _BLOCK], stream)


def _fill_block(out: np.ndarray, stream: Keystream) -> None:
    known = table()
    words = stream.words(len(out))
    slots = words >> np.uint64(64 - _SLOT_BITS)
    np.take(known.cells, slots.view(np.int64), out=(cells := np.empty(len(out), np.int16)), mode="clip")
    np.left_shift(cells, _DIGITS, out=out, dtype=np.int64)
    words &= _BELOW
    out |= words.view(np.int64)
    left = np.flatnonzero(slots >= np.uint64(known.filled))
    out[left] = _remainder(len(left), stream)


def _remainder(count: int, stream: Keystream) -> np.ndarray:
    """Draw `count` numbers X, int64, from the distribution of the mass that the first table leaves."""
    found = np.empty(0, dtype=np.int64)
    while len(found) < count:
        # three of five proposals are accepted
        found = np.concatenate([found, _accepted(2 * (count - len(found)) + 32, stream)])
    return found[:count]


def _accepted(proposals: int, stream: Keystream) -> np.ndarray:
    known = table()
    first, second = stream.words(proposals), stream.words(proposals)
    slots = (first >> np.uint64(64 - _SLOT_BITS)).view(np.int64)
    cells = known.others[slots].astype(np.int64)
    below = (first & np.uint64((1 << _MORE) - 1)).view(np.int64)
    sizes = np.where(cells < 0, -1 - cells, cells)
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
