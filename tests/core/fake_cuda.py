"""Stand-ins for what `torch.cuda` offers, over the device of `fake_gpu.py`: graphs, streams, events, memory.

Not here: operations on tensors.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.fake_gpu import PLACE, Gpu, Graph, OnGpu

MEMORY = 1 << 34


class Stream:
    """A queue of work. Work is done when it is asked for, so queues never differ; which one is current does matter."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.device = PLACE

    def wait_stream(self, other: Stream) -> None:
        del other

    def synchronize(self) -> None:
        self.cuda.gpu.wait("a stream's synchronize")


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        self.cuda.gpu.refuse_in_capture("an event's synchronize")
        self.cuda.gpu.waits.append("an event's synchronize")

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


class CudaGraph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.recorded = Graph()

    def pool(self) -> tuple[int, int]:
        return (0, id(self))

    def replay(self) -> None:
        """Graphs share their memory: what this one makes has no numbers yet, and what others left there is gone."""
        gpu = self.gpu
        gpu.replays += 1
        for graph in gpu.graphs:
            graph.spoil(Counter() if graph is self.recorded else gpu.places)
        self.recorded.replay(gpu.places)


class Cuda:
    """The state of `torch.cuda`: the current stream, the device, the capture under way."""

    def __init__(self, gpu: Gpu, devices: int = 1) -> None:
        self.gpu = gpu
        self.devices = devices
        self.chosen = 0
        self.default = self.stream = Stream(self)
        self.capture_stream = Stream(self)
        self.sync_debug = 0
        self.warned = False

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def capture(
        self, graph: CudaGraph, pool: Any = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """As `torch.cuda.graph`: where the capture fails, its stream stays the current one."""
        gpu, before, self.stream = self.gpu, self.stream, stream or self.capture_stream
        gpu.pools.append(pool)
        gpu.capturing, gpu.mode, gpu.thread, gpu.spoilt = (
            graph.recorded,
            capture_error_mode,
            threading.get_ident(),
            False,
        )
        try:
            yield
        finally:
            gpu.capturing = None
            graph.recorded.undo()
            if gpu.spoilt:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.stream = before
        gpu.captures += 1
        gpu.graphs.append(graph.recorded)

    def set_sync_debug_mode(self, mode: int | str) -> None:
        if not self.warned:
            self.warned = True
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)
        self.sync_debug = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)  # type: ignore[arg-type]
        self.gpu.forbidden = self.sync_debug == 2


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, torch.device("cpu"))  # type: ignore[call-arg]


def _pinning(gpu: Gpu) -> Callable[..., Tensor]:
    def pin_memory(self: Tensor, *_: Any) -> Tensor:
        if isinstance(self, OnGpu):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        # cudaHostAlloc, which a capture that is "global" forbids to every thread
        if gpu.capturing is not None and (gpu.mode == "global" or threading.get_ident() == gpu.thread):
            gpu.refuse_in_capture("pin_memory")
        copy = self.clone(memory_format=torch.contiguous_format)
        place = copy.untyped_storage().data_ptr()
        gpu.pinned.add(place)
        weakref.finalize(copy, gpu.pinned.discard, place)
        return copy

    return pin_memory


@contextmanager
def installed(patch: pytest.MonkeyPatch, devices: int = 1) -> Iterator[Gpu]:
    """The device, present as `cuda` to everything in this thread."""
    gpu = Gpu()
    cuda = gpu.cuda = Cuda(gpu, devices)
    bytes_held = lambda *_: gpu.held  # noqa: E731
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: devices,
        "current_device": lambda: cuda.chosen,
        "set_device": lambda device: setattr(cuda, "chosen", device.index or 0),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=MEMORY, name="a GPU made of a CPU"),
        "get_device_name": lambda *_: "a GPU made of a CPU",
        "synchronize": lambda *_: gpu.wait("torch.cuda.synchronize"),
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
        "Stream": lambda *_: Stream(cuda),
        "Event": lambda **_: Event(cuda),
        "CUDAGraph": lambda: CudaGraph(gpu),
        "graph": cuda.capture,
        "current_stream": lambda *_: cuda.stream,
        "stream": cuda.on,
        "set_sync_debug_mode": cuda.set_sync_debug_mode,
        "get_sync_debug_mode": lambda: cuda.sync_debug,
        "mem_get_info": lambda *_: (MEMORY - gpu.held, MEMORY),
        "memory_allocated": bytes_held,
        "memory_reserved": bytes_held,
        "reset_peak_memory_stats": lambda *_: setattr(gpu, "peak", gpu.held),
        "max_memory_allocated": lambda *_: gpu.peak,
        "empty_cache": lambda: None,
    }
    for name, stand_in in stand_ins.items():
        patch.setattr(torch.cuda, name, stand_in)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.Tensor, "pin_memory", _pinning(gpu))
    with gpu.modes():
        yield gpu
