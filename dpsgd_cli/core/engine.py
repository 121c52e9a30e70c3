"""How a batch's clipped sums are run: operation by operation, from captured graphs, compiled, or as time tells.

All ways give the same sums to rounding, and none of them draws a random number, so the choice changes neither what is
released nor its price. On a CPU nothing is chosen by a clock: a seeded run would depend on what else the machine does.

Not here: the sums (`clipping.py`), the ways themselves (`replay.py`, `compiling.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from dpsgd_cli.core.clipping import Clipping, Diagnostics, SumClipped, add_clipped_sums, sum_clipped
from dpsgd_cli.core.losses import Loss
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.replay import Graphs, Replayer
from dpsgd_cli.core.tensors import Rows
from dpsgd_cli.errors import ModelError

Add = Callable[[Rows, Diagnostics], None]

_UNTIMED, _TIMED = 3, 5
# Of training ahead, for each layer: several times what compiling takes (`python benchmarks/step.py --wide`).
_WORTH_SECONDS = 60.0


@dataclass(frozen=True)
class Ways:
    """What a recipe allows: `compiles` and `graphs` as under `runtime`; of `calls` in all, those of at most
    `small` rows are captured."""

    compiles: bool | Literal["auto"]
    graphs: bool
    small: int
    calls: int


def adder(pack: Pack, loss: Loss, clipping: Clipping | None, ways: Ways) -> Add:
    """What adds the clipped gradients of rows to the pack's sums, as `add_clipped_sums` does.

    Pack, loss and bounds stay the same tensors from call to call.
    """
    on_device = pack.values.is_cuda

    def way(function: SumClipped) -> Add:
        def plain(rows: Rows, seen: Diagnostics) -> None:
            add_clipped_sums(pack, rows, loss, clipping, seen, function)

        if not (on_device and ways.graphs):
            return plain
        replayer = Replayer(pack, loss, clipping, Graphs(), function)
        return lambda rows, seen: (replayer.add if rows[0].shape[1] <= ways.small else plain)(rows, seen)

    if ways.compiles is False or (ways.compiles == "auto" and (pack.session.rounds or not on_device)):
        return way(sum_clipped)
    from dpsgd_cli.core.compiling import Compiled  # takes a while to import

    compiled = way(Compiled())
    if ways.compiles is True:
        return compiled
    slow = _WORTH_SECONDS * len(pack.layers) / max(1, ways.calls)
    return Quicker(way(sum_clipped), compiled, slow, _after_device)


class Quicker:
    """Of two ways to add a batch's sums, the one that took less time in a few calls of a training.

    The second, which takes long to prepare, is tried where a call of the first takes `slow` seconds or more; where it
    fails the first goes on. Every call adds its batch once, so trying costs no work. `clock` gives seconds, when
    everything that was asked for is done.
    """

    def __init__(self, first: Add, second: Add, slow: float, clock: Callable[[], float]) -> None:
        self._first, self._second = first, second
        self._slow = slow
        self._clock = clock
        self._times: tuple[list[float], list[float]] = ([], [])
        self.chosen: Add | None = None

    def __call__(self, rows: Rows, seen: Diagnostics) -> None:
        timing = self.chosen is None
        way = self._next() if self.chosen is None else self.chosen
        begun = self._clock() if timing else 0.0
        try:
            way(rows, seen)
        except ModelError:
            if way is self._first:
                raise
            # there was no program for these rows, and nothing was added
            self.chosen = self._first
            self._first(rows, seen)
            return
        if timing:
            self._times[way is self._second].append(self._clock() - begun)
            self._choose()

    def _next(self) -> Add:
        return self._first if len(self._times[0]) < _UNTIMED + _TIMED else self._second

    def _choose(self) -> None:
        ours, theirs = (_usual(times) if len(times) == _UNTIMED + _TIMED else None for times in self._times)
        if theirs is not None and ours is not None:
            self.chosen = self._second if theirs < ours else self._first
        elif ours is not None and ours < self._slow:
            self.chosen = self._first


def _usual(times: list[float]) -> float:
    """Of all but the first calls, which have things to prepare."""
    return statistics.median(times[_UNTIMED:])


def _after_device() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()
