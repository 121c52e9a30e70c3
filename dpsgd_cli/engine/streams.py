"""Random streams: every draw of a trial is a function of (its seed, the purpose, a counter) and nothing else.

So a trial draws the same numbers alone, in a pack or after a resume. No stream is shared between trials, purposes or
steps. Trials without a seed use `SecureStreams`, whose draws come from the operating system, or `SharedStreams` with
several processes.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import secrets
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from dpsgd_cli.engine import digits
from dpsgd_cli.engine.discrete import Coins

_WORDS = 624  # words of a Mersenne Twister's state


class Streams(Protocol):
    """The randomness of one trial."""

    reproducible: bool

    def under(self, name: str) -> Streams:
        """Return streams of this trial with a separate namespace of purposes, called `name`."""

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with independent standard normals N and return it; int64 gets floor(N 2^42) (`digits.py`).

        Secure streams raise TypeError unless `out` is int64: they have no floating-point normals.
        """

    def coins(self, purpose: str, counter: int) -> Coins:
        """Return a source of fair coins, for Laplace noise and choices."""

    def bits(self, purpose: str, counter: int) -> int:
        """Draw 512 uniform bits, as an integer."""

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        """Draw a uniformly random set of `size` distinct integers of 0..n-1; int64 (size,), in unspecified order."""

    def integers(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        """Draw `size` independent uniform integers of 0..n-1; int64 (size,)."""

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        """Draw a uniformly random permutation of 0..n-1; int64 (n,)."""

    def integer(self, purpose: str) -> int:
        """Draw a 63-bit integer, as a seed for other generators."""


class SeededStreams:
    """Reproducible streams keyed by a seed: Philox (NumPy), Mersenne Twister (torch, CPU).

    A CPU generator of torch uses only the low 32 bits of a seed. So its whole state is set from 128 bits instead. Two
    streams coincide only if the first 128 bits of SHA-256 collide.
    """

    reproducible = True

    def __init__(self, seed: int | str) -> None:
        self.seed = seed

    def under(self, name: str) -> Streams:
        return SeededStreams(f"{self.seed}/{name}")

    def _key(self, purpose: str, counter: int) -> int:
        digest = hashlib.sha256(f"{self.seed}/{purpose}/{counter}".encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def _numpy(self, purpose: str, counter: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(purpose, counter)))

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        if out.dtype == torch.int64:
            return out.copy_((self.normal(purpose, counter, out.double()) * 2.0**digits.BITS).floor_())
        key = self._key(purpose, counter)
        generator = torch.Generator(out.device)
        if out.device.type == "cpu":
            words = np.random.SeedSequence(key).generate_state(_WORDS, np.uint32)
            generator.set_state(_mersenne_state(generator, words))
        else:
            generator.manual_seed(key & (2**63 - 1))
        return out.normal_(generator=generator)

    def coins(self, purpose: str, counter: int) -> Coins:
        return random.Random(self._key(purpose, counter)).getrandbits

    def bits(self, purpose: str, counter: int) -> int:
        return int.from_bytes(hashlib.sha512(f"{self.seed}/{purpose}/{counter}".encode()).digest(), "little")

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return self._numpy(purpose, 2 * counter + 1).choice(n, size, replace=False, shuffle=False)

    def integers(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return self._numpy(purpose, counter).integers(n, size=size)

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        return self._numpy(purpose, counter).permutation(n)

    def integer(self, purpose: str) -> int:
        return self._key(purpose, 0) & (2**63 - 1)


def _mersenne_state(generator: torch.Generator, words: np.ndarray) -> torch.Tensor:
    """Return a CPU generator's state with its 624 words replaced and nothing cached.

    Layout (tested against NumPy's Mersenne Twister): seed u64, left i32, seeded i32, next u64, 624 words as u64, then
    the cached normals.
    """
    raw = generator.get_state().numpy().copy()
    raw[8:24].view(np.uint32)[:] = (1, 1, 0, 0)
    raw[24 : 24 + 8 * _WORDS].view(np.uint64)[:] = words
    raw[24 + 8 * _WORDS :] = 0
    return torch.from_numpy(raw)


class SecureStreams:
    """Streams from the operating system's cryptographic generator; draws are never repeated and never stored.

    Normals are exact, by AES with a new key from the operating system for each draw (`digits.py`). They are drawn on
    the CPU and then moved to the device.
    """

    reproducible = False

    def _source(self, *place: object) -> Callable[[int], np.ndarray]:
        """Return a function that draws n uniform 64-bit words, for the draw at `place` (kind, purpose, counter)."""
        del place
        return lambda count: np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def under(self, name: str) -> Streams:
        del name
        return self

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        if out.dtype != torch.int64:
            raise TypeError(f"noise for {purpose} was asked for as {out.dtype}; without a seed it is drawn as integers")
        here = out if out.is_cpu else torch.empty(out.shape, dtype=torch.int64)
        digits.fill(here.numpy(), digits.fresh())
        # a GPU copies from pinned memory asynchronously, while the next ones are drawn
        return out if here is out else out.copy_(here.pin_memory() if out.is_cuda else here, non_blocking=True)

    def coins(self, purpose: str, counter: int) -> Coins:
        return secrets.randbits

    def bits(self, purpose: str, counter: int) -> int:
        return int.from_bytes(self._source("bits", purpose, counter)(8).tobytes(), "little")

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        words = self._source("distinct", purpose, counter)
        if 2 * size > n:
            return np.argsort(words(n), kind="stable").astype(np.int64)[:size]
        found = np.empty(0, dtype=np.int64)
        while len(found) < size:
            joined = np.concatenate([found, _fair(words(size), n)])
            found = joined[np.sort(np.unique(joined, return_index=True)[1])]
        return found[:size]

    def integers(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        words = self._source("integers", purpose, counter)
        found = np.empty(0, dtype=np.int64)
        while len(found) < size:
            found = np.concatenate([found, _fair(words(size), n)])
        return found[:size]

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        return np.argsort(self._source("permutation", purpose, counter)(n), kind="stable").astype(np.int64)

    def integer(self, purpose: str) -> int:
        return int(self._source("integer", purpose, 0)(1)[0] >> np.uint64(1))


def _fair(words: np.ndarray, n: int) -> np.ndarray:
    """Return integers of 0..n-1 from the words below the largest multiple of n; the others would favour small ones."""
    fair = np.uint64((1 << 64) // n * n - 1)
    found: np.ndarray = (words[words <= fair] % np.uint64(n)).astype(np.int64)
    return found


class SharedStreams(SecureStreams):
    """Secure streams for several processes: all draw the same batches, and only process 0 draws noise.

    Integers, permutations and sets are functions of (key, purpose, counter) through SHAKE-256. The key is 256 bits from
    the operating system of process 0 plus the trial's number. It is sent to the other processes and never stored.
    Normals and coins come from the operating system of process 0; other processes raise RuntimeError.
    """

    def __init__(self, key: bytes, first: bool) -> None:
        self._key = key
        self._first = first

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        if not self._first:
            raise RuntimeError(f"noise for {purpose} was asked for on a process that must not draw any")
        return super().normal(purpose, counter, out)

    def coins(self, purpose: str, counter: int) -> Coins:
        if not self._first:
            raise RuntimeError(f"coins for {purpose} were asked for on a process that must not draw any")
        return super().coins(purpose, counter)

    def _source(self, *place: object) -> Callable[[int], np.ndarray]:
        prefix, piece = self._key + "/".join(map(str, place)).encode(), itertools.count(1)

        def words(count: int) -> np.ndarray:
            digest = hashlib.shake_256(prefix + b"/" + next(piece).to_bytes(8, "little")).digest(8 * count)
            return np.frombuffer(digest, dtype=np.uint64)

        return words
