"""Streams of which nothing but noise can be drawn twice."""

from __future__ import annotations

import numpy as np

from dpsgd_cli.engine.streams import SeededStreams


class Fresh(SeededStreams):
    """Streams of which nothing but noise can be drawn twice, as if they were secure, but the first time is known."""

    reproducible = False

    def __init__(self, trial: int, asked: dict[tuple[object, ...], int]) -> None:
        super().__init__(trial)
        self.asked = asked

    def _purpose(self, kind: str, purpose: str, counter: int) -> str:
        place = (self.seed, kind, purpose, counter)
        self.asked[place] = self.asked.get(place, 0) + 1
        return purpose if self.asked[place] == 1 else f"{purpose}, time {self.asked[place]}"

    def bits(self, purpose: str, counter: int) -> int:
        return super().bits(self._purpose("bits", purpose, counter), counter)

    def distinct(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return super().distinct(self._purpose("distinct", purpose, counter), counter, n, size)

    def integers(self, purpose: str, counter: int, n: int, size: int) -> np.ndarray:
        return super().integers(self._purpose("integers", purpose, counter), counter, n, size)

    def permutation(self, purpose: str, counter: int, n: int) -> np.ndarray:
        return super().permutation(self._purpose("permutation", purpose, counter), counter, n)

    def integer(self, purpose: str) -> int:
        return super().integer(self._purpose("integer", purpose, 0))
