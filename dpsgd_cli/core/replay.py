"""Clipped sums of small models from captured graphs: the host starts one program a step instead of hundreds.

A graph is captured once for each shape of a batch and reads and writes fixed places in memory. What changes from
step to step stays outside: the batch is copied in before a replay, noise is drawn and added after it, and both were
charged before their epoch began (`methods/dp_sgd.py`). So no random number is inside a graph, and a replay cannot
repeat one. Weights and sums are the pack's own tensors, which updates change in place.

Not here: what the sums are (`clipping.py`).
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dpsgd_cli.core.clipping import Clipping, Diagnostics, Found, SumClipped, sum_clipped
from dpsgd_cli.core.losses import Loss
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.tensors import Rows

Capture = Callable[[Callable[[], Found]], tuple[Callable[[], None], Found]]
"""Runs a function once on fixed tensors; returns what repeats that run, and the tensors that then hold its results."""

_MOST_GRAPHS = 24


@dataclass(frozen=True)
class _Program:
    """A captured step: where its batch goes, what runs it, and where its losses and norms then are."""

    rows: Rows
    run: Callable[[], None]
    found: Found


class Replayer:
    """`add_clipped_sums` by captured graphs, for a pack, a loss and bounds that stay the same tensors.

    Shapes beyond the first 24, and whatever cannot be captured, run as they are. `function` is `sum_clipped`, or does
    the same in another way.
    """

    def __init__(
        self, pack: Pack, loss: Loss, clipping: Clipping | None, capture: Capture, function: SumClipped = sum_clipped
    ) -> None:
        self._pack = pack
        self._loss = loss
        self._clipping = clipping
        self._capture = capture
        self._function = function
        self._programs: dict[tuple[object, ...], _Program | None] = {}

    @torch.no_grad()
    def add(self, rows: Rows, seen: Diagnostics) -> None:
        """Add the clipped gradients of `rows` to the pack's sums, as `add_clipped_sums` does."""
        if rows[1].shape[1] == 0:
            return
        key = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in rows)
        if key not in self._programs:
            self._programs[key] = self._captured(rows) if len(self._programs) < _MOST_GRAPHS else None
        program = self._programs[key]
        if program is None:
            found = self._function(self._pack, rows, self._loss, self._clipping)
        else:
            for place, new in zip(program.rows, rows, strict=True):
                if place is not None and new is not None:
                    place.copy_(new)
            program.run()
            found = program.found
        seen.add(*found, rows[2], self._clipping)

    def _captured(self, rows: Rows) -> _Program | None:
        """A program for batches like `rows`; the pack's sums stay as they are."""
        x, y, mask = rows
        places = (x.clone(), y.clone(), None if mask is None else mask.clone())
        before = self._pack.sums.clone()
        try:
            run, found = self._capture(lambda: self._function(self._pack, places, self._loss, self._clipping))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # an operation that needs the host: torch names none that could be asked before
            for layer in self._pack.layers:
                layer.forget()
            return None
        finally:
            self._pack.sums.copy_(before)
        return _Program(places, run, found)


class Graphs:
    """Captures by CUDA graphs, after two runs that let libraries choose their algorithms and take their room.

    All captures share a stream, because libraries keep room for each stream that they see, and a pool of memory, which
    is safe while no two replays overlap and what a replay finds is read before the next. The stream is nobody else's,
    and graphs live as long as this does, those that failed too: with the first that goes, torch (2.13) gives back the
    room that libraries use on its stream (pytorch/pytorch issue 193402).
    """

    def __init__(self) -> None:
        self._side: torch.cuda.Stream | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool: torch.cuda.CUDAGraph | None = None

    def __call__(self, function: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        here = torch.cuda.current_stream()
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            try:
                function()
                with _no_waiting():
                    function()
            finally:
                # what an error left on the way must be over before sums are put back
                side.synchronize()
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        pool = None if self._pool is None else self._pool.pool()
        # torch leaves a capture that fails on its stream. Other threads may ask for pinned memory meanwhile
        with (
            _no_collecting(),
            torch.cuda.stream(here),
            torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"),
        ):
            found = function()
        self._pool = self._pool or graph
        return graph.replay, found


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Collect no garbage: a graph in it cannot be taken apart within a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Raise RuntimeError at what waits for the device: within a capture it would leave torch's allocator in pieces."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # that torch does not notice everything; what it overlooks fails in the capture
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
