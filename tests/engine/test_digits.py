"""Digits of exact normals: the sampler's tables in 60 digits, its decisions, and the law of what it gives."""

from __future__ import annotations

import os
import tracemalloc
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsgd_cli.engine import digits
from dpsgd_cli.engine.chacha import ChaCha
from dpsgd_cli.engine.digits import BITS, CELLS, Keystream

LEAST = 1e-6
KEY = bytes(range(32))


@cache
def drawn(count: int, device: bool = False) -> np.ndarray:
    """Digits of a fixed key; with `device` as a GPU draws them, by ChaCha20 and without asking how many are left."""
    out = torch.empty(count, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "urandom", lambda size: KEY[:size])
        digits.fill(out, Keystream(KEY), ChaCha(out.device) if device else None)
    return out.numpy()


def density(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.exp(-x * x / 2) / mpmath.sqrt(2 * mpmath.pi)


def test_every_cell_of_the_tables_is_right() -> None:
    """In 60 digits: the first table holds the floor of 2^16 times the least density times the width; the second allows
    no less than the most that is left."""
    made = digits.table()
    unit = mpmath.mpf(5) / 2**24
    with mpmath.workdps(60):
        for cell in range(CELLS):
            least, most = (density(mpmath.mpf(cell + end) / 64) / 64 for end in (1, 0))
            assert int(made.flat[cell]) == int(mpmath.floor(least * 2**16)), cell
            left = most - mpmath.mpf(int(made.flat[cell])) / 2**16
            assert 0 < left <= int(made.bound[cell]) * unit < left + 2 * unit, cell
    slots = np.bincount(made.cells[: made.filled].astype(np.int64) + CELLS, minlength=2 * CELLS)
    assert np.array_equal(slots, np.concatenate([made.flat[::-1], made.flat]))
    others = np.bincount(made.others[: made.proposed].astype(np.int64) + CELLS, minlength=2 * CELLS)
    assert np.array_equal(others, np.concatenate([made.bound[::-1], made.bound]))
    assert made.filled == 2 * made.flat.sum() <= 2**16 and made.proposed == 2 * made.bound.sum() <= 2**16
    assert made.filled / 2**16 == pytest.approx(0.9899, abs=1e-4)


def edge(cell: int, below: mpmath.mpf) -> mpmath.mpf:
    """The u below which a proposal at (cell + below) / 64 is accepted, times 2^64."""
    made, size = digits.table(), -1 - cell if cell < 0 else cell
    left = density((cell + below) / 64) / 64 - mpmath.mpf(int(made.flat[size])) / 2**16
    return left * 2**24 / 5 / int(made.bound[size]) * 2**64


class Given(Keystream):
    """Bits that a test gives, and after them a stream's."""

    def __init__(self, *given: np.ndarray) -> None:
        super().__init__(KEY)
        self.given, self.asked = list(given), 0

    def words(self, count: int) -> np.ndarray:
        if self.given:
            own = self.given.pop(0)
            assert len(own) == count
            return own.copy()
        self.asked += 1
        return super().words(count)


@pytest.mark.parametrize("cell", [0, 1, -1, 37, -64, 128, -261, 300, -1024, 1023])
def test_decisions_are_exact_however_close_they_are(cell: int) -> None:
    """By the first digits alone: the last uniform number that is below all densities at them, and the first above."""
    tried = 0
    with mpmath.workdps(60):
        for below in (0, 1, 2**47 + 12345, 2**48 - 1):
            low, high = sorted(edge(cell, mpmath.mpf(below + end) / 2**48) for end in (0, 1))
            for uniform, answer in ((int(low) - 1, True), (int(high) + 1, False)):
                if 0 <= uniform < 2**64:
                    tried += 1
                    stream = Given()
                    assert digits.accepts(cell, below, uniform, stream) is answer and not stream.asked
    assert tried >= 4


def test_what_first_digits_leave_open_is_decided_by_further_ones() -> None:
    """At the density itself: by 32 more digits of each, which are given; and one by 32 after those."""
    below, cell = 2**47 + 999, 11
    with mpmath.workdps(80):
        for place in (mpmath.mpf("0.25"), mpmath.mpf("0.8125")):
            at = int(edge(cell, (mpmath.mpf(below) + place) / 2**48) * 2**32)
            for step, answer in ((-(2**28), True), (2**28, False)):
                digits_of_u = at + step
                further = (int(place * 2**32), digits_of_u & (2**32 - 1))
                stream = Given(*(np.array([own << 32], dtype=np.uint64) for own in further))
                assert digits.accepts(cell, below, digits_of_u >> 32, stream) is answer
                assert not stream.given and not stream.asked, "decided by other digits than these"


def test_the_float_path_decides_as_the_exact_one() -> None:
    """4,000 proposals, with every one of them decided by `Decimal`."""
    before = digits._GAP
    kept = digits._accepted(4000, Keystream(KEY))
    try:
        digits._GAP = 1.0
        exact = digits._accepted(4000, Keystream(KEY))
    finally:
        digits._GAP = before
    assert np.array_equal(kept, exact) and len(kept) > 2000


def test_words_are_those_of_the_standard() -> None:
    """AES-256 in counter mode of zeros: NIST SP 800-38A, F.1.5, has the key and what AES makes of a block."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    assert block.update(bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")).hex() == "f3eed1bdb5d2a03c064b5a7e3db181f8"
    stream = Keystream(key)
    words = np.concatenate([stream.words(2), stream.words(4)])
    assert words.tobytes() == b"".join(block.update(count.to_bytes(16, "big")) for count in range(3))


def test_a_draw_takes_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return len(asked).to_bytes(count, "little")

    monkeypatch.setattr(os, "urandom", urandom)
    first, second = digits.fresh().words(4), digits.fresh().words(4)
    assert asked == [32, 32] and not np.array_equal(first, second)


def test_a_child_of_a_fork_draws_other_digits() -> None:
    """A pipe brings the child's digits back."""
    from dpsgd_cli.engine.streams import SecureStreams

    stream = SecureStreams()
    stream.normal("noise", 0, torch.empty(10, dtype=torch.int64))
    out, into = os.pipe()
    child = os.fork()
    own = stream.normal("noise", 1, torch.empty(10, dtype=torch.int64)).numpy()
    if child == 0:
        os.write(into, own.tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(out, 80), dtype=np.int64)
    assert len(theirs) == 10 and not set(theirs.tolist()) & set(own.tolist())


def cells_fit(x: np.ndarray, scale: float = 1.0) -> float:
    """p-value of chi-square over cells of width 1/8 within 4, and all beyond."""
    edges = np.arange(-32, 33) / 8
    counts = np.histogram(x, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
    law = np.diff(np.concatenate([[0.0], stats.norm.cdf(edges / scale), [1.0]]))
    return float(stats.chisquare(counts, law * len(x)).pvalue)


WAYS = pytest.mark.parametrize("device", [False, True], ids=["host", "device"])


@WAYS
def test_the_law_is_the_normal_one(device: bool) -> None:
    """4,000,000 draws of a fixed key: cells, Kolmogorov-Smirnov and moments up to 4; each would fail falsely for less
    than one key in 1e6. A scale of 1.01 is rejected, and so are digits that begin one place later."""
    x = drawn(4_000_000, device) * 2.0**-BITS
    assert cells_fit(x) > LEAST and stats.kstest(x[:400_000], "norm").pvalue > LEAST
    assert cells_fit(x * 1.01) < LEAST and cells_fit(x / 2) < LEAST
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - mean) < 5 * np.sqrt(variance / len(x)), power


def test_what_the_table_leaves_has_the_law_that_is_left() -> None:
    """400,000 numbers of the other hundredth: chi-square over cells; the law of the whole is rejected."""
    made = digits.table()
    found = digits._remainder(400_000, Keystream(KEY)) >> (BITS - 6)
    cells = np.arange(-320, 320)
    ends = np.arange(-320, 321) / 64
    ends[[0, -1]] = -np.inf, np.inf
    mass = np.diff(stats.norm.cdf(ends))
    size = np.where(cells < 0, -1 - cells, cells)
    left = mass - made.flat[size] / 2**16
    counts = np.bincount(np.clip(found, -320, 319) + 320, minlength=640)
    assert stats.chisquare(counts, left / left.sum() * len(found)).pvalue > LEAST
    assert stats.chisquare(counts, mass / mass.sum() * len(found)).pvalue < LEAST


@WAYS
@pytest.mark.parametrize("place", range(0, 36, 5))
def test_low_digits_are_fair_and_independent_of_the_cell(place: int, device: bool) -> None:
    """Bit `place` of 400,000 numbers, in cells of even and odd numbers; a bit that is 1 in 51% is found."""
    x = drawn(4_000_000, device)[:400_000]
    bit, odd = (x >> place) & 1, (x >> (BITS - 6)) & 1
    for chosen in (bit[odd == 0], bit[odd == 1]):
        assert stats.binomtest(int(chosen.sum()), len(chosen)).pvalue > LEAST
    assert stats.binomtest(round(0.51 * len(bit)), len(bit)).pvalue < LEAST


def test_tails_beyond_four_are_there() -> None:
    """20,000,000 draws: beyond 4.5 deviations 135.9 are expected, in cells that the table holds no slot of."""
    count, beyond = 20_000_000, 0
    stream, out = Keystream(KEY), torch.empty(1_000_000, dtype=torch.int64)
    for _ in range(count // len(out)):
        digits.fill(out, stream)
        beyond += int((out.abs() > int(4.5 * 2**BITS)).sum())
    law = stats.binom(count, 2 * stats.norm.sf(4.5))
    assert law.cdf(beyond) > LEAST and law.sf(beyond - 1) > LEAST
    assert law.cdf(beyond / 2) < LEAST and law.sf(2 * beyond) < LEAST


def test_tails_beyond_three_are_there_on_a_device() -> None:
    """4,000,000 draws: beyond 3.5 deviations 1861 are expected, all but one in a thousand of which the table leaves."""
    beyond = int((np.abs(drawn(4_000_000, True)) > int(3.5 * 2**BITS)).sum())
    law = stats.binom(4_000_000, 2 * stats.norm.sf(3.5))
    assert law.cdf(beyond) > LEAST and law.sf(beyond - 1) > LEAST
    assert law.cdf(0.8 * beyond) < LEAST and law.sf(1.2 * beyond) < LEAST


@pytest.mark.parametrize("count", [1, 100, 1 << 12, 1 << 16, 1 << 22])
def test_more_numbers_than_are_sent_are_never_left(count: int) -> None:
    """The binomial law of SciPy: below 2^-200 that they are too few, and no more than a ninth beyond what is usual."""
    sent, left = digits.most_left(count), 1 - digits.table().filled / 2**16
    assert sent == count or stats.binom.logsf(sent, count, left) / np.log(2) < -200
    assert count < 1 << 22 or sent < count * left * 10 / 9


def test_too_few_numbers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "most_left", lambda count: 1)
    out = torch.empty(4000, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="elements of source"):
        digits.fill(out, Keystream(KEY), ChaCha(out.device))


class Largest(TorchDispatchMode):
    """Keeps the largest number of elements of a tensor that is no view of `whole`."""

    def __init__(self, whole: torch.Tensor) -> None:
        super().__init__()
        self.whole, self.found = whole.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.whole:
                self.found = max(self.found, x.numel())
        return made


def test_tensors_of_any_size_take_a_few_megabytes() -> None:
    out = torch.empty(3_000_000, dtype=torch.int64)
    digits.table()
    tracemalloc.start()
    with Largest(out) as largest:
        digits.fill(out, Keystream(KEY))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20 and largest.found == 1 << 16


@WAYS
def test_pieces_of_a_stream_are_new(device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one draw share no number, and tensors that are not contiguous are refused."""
    monkeypatch.setitem(digits.AT_ONCE, False, 1 << 16)
    assert len(set(drawn(300_000, device).tolist())) > 299_990
    with pytest.raises(ValueError, match="contiguous"):
        digits.fill(torch.empty((4, 4), dtype=torch.int64)[:, 1], Keystream(KEY))
