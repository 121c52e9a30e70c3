"""Random streams: every draw of a trial is a function of (its seed, the purpose, a counter) and nothing else.

So a trial draws the same numbers alone, in a pack or after a resume, and no stream is ever shared between
trials, purposes or steps. Trials without a seed get `SecureStreams`, whose draws come from the operating system.

Not here: what the draws are used for (`noise.py`, `sampling.py`, `packing.py`).
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import numpy as np
import torch

_WORDS = 624  # of a Mersenne Twister's state


class Streams(Protocol):
    """The randomness of one trial."""

    reproducible: bool

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        """Fill `out` with independent standard normals and return it."""

    def bits(self, purpose: str, counter: int) -> int:
        """512 uniform bits, as an integer."""

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        """A uniformly random set of `size` distinct integers of 0..n-1; int64 (size,), in no promised order."""

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        """A uniformly random permutation of 0..n-1; int64 (n,)."""

    def integer(self, purpose: str) -> int:
        """A 63-bit integer, to seed what can only be seeded by one."""


class SeededStreams:
    """Reproducible streams keyed by a non-negative integer seed: Philox (NumPy), Mersenne Twister (torch, CPU).

    A CPU torch generator takes only the low 32 bits of a seed; its whole state is set here from 128 bits
    instead, so that two streams coincide only by a collision of SHA-256's first 128 bits.
    """

    reproducible = True

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _key(self, purpose: str, counter: int) -> int:
        digest = hashlib.sha256(f"{self.seed}/{purpose}/{counter}".encode()).digest()
        return int.from_bytes(digest[:16], "little")

    def _numpy(self, purpose: str, counter: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key(purpose, counter)))

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        key = self._key(purpose, counter)
        generator = torch.Generator(out.device)
        if out.device.type == "cpu":
            words = np.random.SeedSequence(key).generate_state(_WORDS, np.uint32)
            generator.set_state(_mersenne_state(generator, words))
        else:
            generator.manual_seed(key & (2**63 - 1))
        return out.normal_(generator=generator)

    def bits(self, purpose: str, counter: int) -> int:
        return int.from_bytes(hashlib.sha512(f"{self.seed}/{purpose}/{counter}".encode()).digest(), "little")

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return self._numpy(purpose, 2 * counter + 1).choice(n, size, replace=False, shuffle=False)

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        return self._numpy(purpose, counter).permutation(n)

    def integer(self, purpose: str) -> int:
        return self._key(purpose, 0) & (2**63 - 1)


def _mersenne_state(generator: torch.Generator, words: np.ndarray) -> torch.Tensor:
    """A CPU generator's state with its 624 words replaced and nothing cached.

    Layout (checked by a test against NumPy's Mersenne Twister): seed u64, left i32, seeded i32, next u64,
    624 words as u64, then the cached normals.
    """
    raw = generator.get_state().numpy().copy()
    raw[8:24].view(np.uint32)[:] = (1, 1, 0, 0)
    raw[24 : 24 + 8 * _WORDS].view(np.uint64)[:] = words
    raw[24 + 8 * _WORDS :] = 0
    return torch.from_numpy(raw)


class SecureStreams:
    """Draws from the operating system's cryptographic generator; never repeated, never stored.

    Normals: Box-Muller in float64 on 53-bit uniforms, four independent normals added and halved, so that
    the gaps of one floating-point normal do not show (Holohan and Braghin, 2021, "Secure random sampling in
    differential privacy", with n = 2).
    """

    reproducible = False

    def _words(self, count: int) -> np.ndarray:
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def _uniform(self, count: int) -> np.ndarray:
        """In (0, 1], multiples of 2^-53."""
        return ((self._words(count) >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        del purpose, counter
        pairs = 2 * out.numel()
        radius = np.sqrt(-2.0 * np.log(self._uniform(pairs)))
        angle = 2.0 * np.pi * self._uniform(pairs)
        normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        mixed = normals.reshape(4, out.numel()).sum(axis=0) / 2.0
        here = torch.from_numpy(mixed).reshape(out.shape)
        # from pinned memory a GPU fetches them by itself, while the next ones are drawn
        return out.copy_(here.pin_memory() if out.is_cuda else here, non_blocking=True)

    def bits(self, purpose: str, counter: int) -> int:
        del purpose, counter
        return int.from_bytes(self._words(8).tobytes(), "little")

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        if 2 * size > n:
            return self.permutation(purpose, counter, n)[:size]
        found = np.empty(0, dtype=np.int64)
        # the multiples of n below 2^64: a word beyond them would favour small numbers
        fair = np.uint64((1 << 64) // n * n - 1)
        while len(found) < size:
            words = self._words(size)
            drawn = (words[words <= fair] % np.uint64(n)).astype(np.int64)
            joined = np.concatenate([found, drawn])
            found = joined[np.sort(np.unique(joined, return_index=True)[1])]
        return found[:size]

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        del purpose, counter
        return np.argsort(self._words(n), kind="stable").astype(np.int64)

    def integer(self, purpose: str) -> int:
        del purpose
        return int(self._words(1)[0] >> np.uint64(1))
