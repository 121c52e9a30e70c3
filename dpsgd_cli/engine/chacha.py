"""Uniform bits on a device: the keystream of ChaCha20 (RFC 8439, Section 2.3), by integer operations of torch.

A block is 64 bytes: a state of sixteen 32-bit words (four constants, eight of the key, a counter, three of a nonce)
goes through 20 rounds and is added to itself as it was. Blocks are computed side by side. To distinguish the blocks of
one key from random bits is to break ChaCha20.

Guarantee: no block is used twice. A `ChaCha` has a key from the operating system, new for each object and then
discarded, so nothing repeats after a fork or a resume. Its nonce is 0, its blocks are numbered from 0, and it refuses
to pass `MOST_BLOCKS`.

Words are int32, whose sums and products wrap modulo 2^32 on CPUs and GPUs. No operation has a shape that depends on a
number, and none waits for the device.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from dpsgd_cli.engine.tensors import to_device

MOST_BLOCKS = 1 << 31
"""Blocks of one key: those whose number is at least 0 as an int32. They are 128 GiB."""
WORTH_COMPILING = 1 << 30
"""Blocks that a process computes uncompiled before it compiles the rounds, of 8 numbers each.

They should take as long as the compiler takes: nine seconds at a nanosecond a number, which is reckoned.
"""
_CONSTANTS = b"expand 32-byte k"
_DOUBLE_ROUNDS = 10
_WORDS = 8  # of 64 bits, in a block
Rounds = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def head(key: bytes) -> Tensor:
    """Return the first twelve words of a state as int32 (3, 4): the constants and the 32 bytes of the key."""
    if len(key) != 32:
        raise ValueError(f"a key of ChaCha20 has 32 bytes, not {len(key)}")
    return torch.frombuffer(bytearray(_CONSTANTS + key), dtype=torch.int32).view(3, 4)


def blocks(head: Tensor, tail: Tensor, rounds: Rounds) -> Tensor:
    """Return keystream blocks as int32 (4, 4, n): word 4 i + j of block b is at [i, j, b].

    `head` (3, 4) is `head` of the key, on the device. `tail` (4, n): counters and nonces of the blocks. `rounds`:
    `_quarter_rounds`, or a program of it.
    """
    first = torch.cat([head.unsqueeze(2).expand(3, 4, tail.shape[1]), tail.unsqueeze(0)])
    a, b, c, d = first.unbind()
    for _ in range(_DOUBLE_ROUNDS):
        a, b, c, d = rounds(a, b, c, d)
        # columns of the turned rows are the diagonals
        a, b, c, d = rounds(a, b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0))
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.stack([a, b, c, d]) + first


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the quarter rounds of all four columns; rows are (4, n)."""
    a = a + b
    d = _turned(d ^ a, 16)
    c = c + d
    b = _turned(b ^ c, 12)
    a = a + b
    d = _turned(d ^ a, 8)
    c = c + d
    return a, _turned(b ^ c, 7), c, d


def _turned(x: Tensor, by: int) -> Tensor:
    """Return each word turned left by `by` bits; a shift to the right copies the sign, which the mask removes."""
    return (x >> (32 - by)).bitwise_and_((1 << by) - 1).add_(x, alpha=1 << by)


@cache
def _compiled(device: torch.device, backend: str = "inductor") -> Rounds:
    """Return `_quarter_rounds` as a program, or as it is if a compiler fails or the program has another result."""
    program: Rounds = torch.compile(_quarter_rounds, backend=backend, dynamic=True)
    random = torch.randint(-(1 << 31), 1 << 31, (4, 4, 4096), generator=torch.Generator().manual_seed(0))
    rows = to_device(random.to(torch.int32), device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, about its own code
            same = torch.equal(torch.stack(program(*rows)), torch.stack(_quarter_rounds(*rows)))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - a compiler's failures have no common type
        same = False
    return program if same else _quarter_rounds


class ChaCha:
    """Uniform 64-bit words on a device, from a key that no other object has."""

    computed: ClassVar[int] = 0  # blocks of all objects

    def __init__(self, device: torch.device) -> None:
        self._head = to_device(head(os.urandom(32)), device)
        self._next = 0

    @torch.no_grad()
    def words(self, count: int) -> Tensor:
        """Return `count` new words, int64 (count,); the rest of the last two blocks is discarded.

        Raises ValueError beyond `MOST_BLOCKS` blocks.
        """
        # two blocks side by side make a 64-bit word of two words of 32
        start, number = self._next, 2 * -(-count // (2 * _WORDS))
        if start + number > MOST_BLOCKS:
            raise ValueError(f"a draw of more than {_WORDS * MOST_BLOCKS} words under one key")
        self._next = start + number
        tail = torch.zeros(4, number, dtype=torch.int32, device=self._head.device)
        tail[0] = torch.arange(start, start + number, dtype=torch.int32, device=self._head.device)
        ChaCha.computed += number
        rounds = _compiled(tail.device) if ChaCha.computed > WORTH_COMPILING else _quarter_rounds
        return blocks(self._head, tail, rounds).view(torch.int64).view(-1)[:count]
