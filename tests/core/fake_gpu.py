"""A GPU made of a CPU: tensors that say they are on `cuda:0`, compute real numbers, and refuse what a GPU refuses.

Its tensors (`OnGpu`) are torch's meta tensors with a CPU tensor inside, so every operation of eager code, autograd's
included, passes `Gpu._run`. There it raises where a GPU would: tensors of both sides in one operation, `numpy()` of a
tensor on the device, inside a capture whatever needs the host or draws random numbers. It counts what makes the host
wait, and raises there too when told (`no_waiting`). Backward runs on a thread of its own, as on a GPU. A captured
graph is a tape of operations on fixed tensors: nothing has run when it ends, and a replay runs nothing but the tape.

Not here: time, streams that race, kernels and their rounding. What only a real GPU can show is in `test_gpu.py`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PLACE = torch.device("cuda", 0)
# operations whose result's shape or value the host must know
_WAITS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.unique_dim.default, aten.bincount.default, aten.equal.default, aten._linalg_check_errors.default,
}  # fmt: skip
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
_PRODUCTS = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default,
}  # fmt: skip
# what a library keeps for each stream of each thread that it sees
WORKSPACE = 32 << 20
_MOVES = {aten._to_copy.default, aten.copy_.default}


def _flat(x: Any) -> list[Any]:
    """What lies in nested tuples, lists and dicts."""
    if type(x) in (tuple, list):
        return [own for each in x for own in _flat(each)]
    return _flat(list(x.values())) if type(x) is dict else [x]


def _mapped(kind: type, function: Callable[[Any], Any], x: Any) -> Any:
    """The same nest with `function` of every `kind`."""
    if isinstance(x, kind):
        return function(x)
    if type(x) in (tuple, list):
        return type(x)([_mapped(kind, function, own) for own in x])
    return {key: _mapped(kind, function, own) for key, own in x.items()} if type(x) is dict else x


class OnGpu(Tensor):
    """A tensor on the device; `numbers` holds them."""

    numbers: Tensor
    device = property(lambda self: PLACE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: Gpu) -> OnGpu:
        shape = torch.empty_strided(inner.size(), inner.stride(), dtype=inner.dtype, device="meta")
        return torch.Tensor._make_subclass(cls, shape)

    def __init__(self, inner: Tensor, gpu: Gpu) -> None:
        self.gpu = gpu
        self.lie_on(inner)

    def lie_on(self, inner: Tensor) -> None:
        """Have these numbers from now on."""
        before = getattr(self, "place", None)
        self.numbers = inner
        storage = inner.untyped_storage()
        self.place = storage.data_ptr()
        self.gpu.hold(self.place, storage.nbytes())
        if before is not None:
            self.gpu.drop(before)

    def __del__(self) -> None:
        if hasattr(self, "place"):
            self.gpu.drop(self.place)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        gpu = next(x.gpu for x in _flat((args, kwargs)) if isinstance(x, OnGpu))
        return gpu._run(func, args, kwargs or {})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self) -> Any:
        self.gpu.wait("tolist")
        return self.numbers.tolist()


@dataclass
class Graph:
    """What a capture recorded."""

    steps: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    made: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, func: Any, args: Any, kwargs: Any) -> None:
        """Before an operation: keep what it is about to overwrite."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self._keep(value)
        if isinstance(kwargs.get("out"), Tensor):
            self._keep(kwargs["out"])

    def _keep(self, value: Tensor) -> None:
        place = value.untyped_storage().data_ptr()
        if place not in self.made and place not in self.kept:
            whole = _whole(value)
            self.kept[place] = (whole, whole.clone())

    def add(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        self.steps.append((func, args, kwargs, found))
        before = {x.untyped_storage().data_ptr() for x in _flat((args, kwargs)) if isinstance(x, Tensor)}
        for x in _flat(found):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in before:
                self.made[x.untyped_storage().data_ptr()] = x

    def undo(self) -> None:
        """Nothing of a capture has run: what was there is as it was, what was made holds no numbers."""
        for whole, before in self.kept.values():
            whole.copy_(before)
        self.spoil(Counter())

    def spoil(self, alive: Counter[int]) -> None:
        """Take the numbers from what was made here and is not in use."""
        for place, made in self.made.items():
            if made.is_floating_point() and not alive[place]:
                _whole(made).fill_(torch.nan)

    def replay(self, alive: Counter[int]) -> None:
        """Run what was recorded; `alive` says which memory is in use."""
        with torch._C._DisableTorchDispatch():
            self._run(alive)

    def _run(self, alive: Counter[int]) -> None:
        for func, args, kwargs, found in self.steps:
            flat = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
            before = {x.untyped_storage().data_ptr() for x in flat}
            if any(place not in self.made and not alive[place] for place in before):
                raise RuntimeError(f"a replay of {func} reads or writes memory that was given back")
            again = _flat(func(*args, **kwargs))
            for old, new in zip(_flat(found), again, strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() not in before:
                    old.copy_(new)


def _whole(x: Tensor) -> Tensor:
    """All numbers of the memory that `x` lies in."""
    storage = x.untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, (storage.nbytes() // x.element_size(),))  # type: ignore[call-overload]


class Gpu:
    """The device: what waits, what is captured, how much is held."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.refused: list[str] = []
        self.forbidden = False
        self.capturing: Graph | None = None
        self.captures = self.replays = 0
        self.graphs: list[Graph] = []
        self.pools: list[Any] = []
        self.mode, self.thread, self.spoilt = "global", 0, False
        self.cuda: Any = None
        self.ran: list[Any] = []
        self.places: Counter[int] = Counter()
        self.sizes: dict[int, int] = {}
        self.peak = 0
        self.workspaces: set[tuple[bool, int]] = set()
        self.pinned: set[int] = set()
        self.lock = threading.RLock()

    @property
    def held(self) -> int:
        return sum(self.sizes.values()) + WORKSPACE * len(self.workspaces)

    def hold(self, place: int, size: int) -> None:
        with self.lock:
            self.places[place] += 1
            self.sizes[place] = size
            self.peak = max(self.peak, self.held)

    def drop(self, place: int) -> None:
        with self.lock:
            self.places[place] -= 1
            if not self.places[place]:
                del self.places[place], self.sizes[place]

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        self.refuse_in_capture(what)
        self.waits.append(what)
        if self.forbidden:
            raise RuntimeError(f"called a synchronizing CUDA operation: {what}")

    def refuse_in_capture(self, what: str) -> None:
        if self.capturing is not None:
            self.spoilt = True
            self.refused.append(what)
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")

    @contextmanager
    def no_waiting(self) -> Iterator[None]:
        """Every wait is an error: `torch.cuda.set_sync_debug_mode("error")`."""
        self.forbidden = True
        try:
            yield
        finally:
            self.forbidden = False

    @contextmanager
    def modes(self) -> Iterator[None]:
        """In this thread, `cuda` means this device."""
        with ExitStack() as stack:
            stack.enter_context(_Operations(self))
            stack.enter_context(_Calls(self))
            yield

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation. What has nothing to do with the device runs as it is."""
        flat = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        to = kwargs.get("device")
        ours = [x for x in flat if isinstance(x, OnGpu)]
        here = [x for x in flat if not isinstance(x, OnGpu) and not x.is_meta]
        if not ours and (to is None or to.type != "meta"):
            return func(*args, **kwargs)
        self._check(func, args, kwargs, ours, here)
        if func is aten.set_.source_Tensor:
            args[0].lie_on(args[1].numbers.detach())
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        inside = {id(x.numbers): x for x in ours}
        args_, kwargs_ = _mapped(OnGpu, lambda x: x.numbers, (args, kwargs))
        if to is not None:
            kwargs_["device"] = torch.device("cpu")
        if self.capturing is not None:
            self.capturing.note(func, args_, kwargs_)
        found = func(*args_, **kwargs_)
        if func is aten.copy_.default and not isinstance(args[0], OnGpu):
            return args[0]
        if self.capturing is not None:
            self.capturing.add(func, args_, kwargs_, found)
        self.ran.append(func)
        if func in _PRODUCTS and self.cuda is not None:
            self.workspaces.add((threading.current_thread().name == "backward", id(self.cuda.stream)))
        if func is aten._to_copy.default and to is not None and to.type == "cpu":
            return found
        return _mapped(Tensor, lambda x: inside[id(x)] if id(x) in inside else OnGpu(x, self), found)

    def _check(self, func: Any, args: Any, kwargs: Any, ours: list[OnGpu], here: list[Tensor]) -> None:
        to = kwargs.get("device")
        name = str(func)
        if func in _MOVES:
            source, target = (args[0], to) if func is aten._to_copy.default else (args[1], args[0].device)
            down, up = isinstance(source, OnGpu), not isinstance(source, OnGpu)
            if (down and to is not None and to.type == "cpu") or (down and target is not None and target == _CPU):
                self.wait(f"{name} to the host")
            if up:
                self.refuse_in_capture(f"{name} from the host")
                going = kwargs.get("non_blocking", False) or (len(args) > 2 and args[2])
                if not (going and source.untyped_storage().data_ptr() in self.pinned):
                    self.wait(f"{name} from the host, not pinned or waited for")
            return
        if func in _INDEXED:
            for index in args[1]:
                if index is not None and not isinstance(index, OnGpu):
                    self.wait(f"{name} at places that lie on the host")
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    self.wait(f"{name} by a mask")
            here = [x for x in here if not any(x is index for index in args[1])]
        pointwise = torch.Tag.pointwise in func.tags
        for x in here:
            if x.dim() or not pointwise:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu:"
                    f" {name} of {[tuple(one.shape) for one in [*ours, *here]]}"
                )
        if func in _WAITS or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.wait(name)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse_in_capture(f"{name} draws random numbers")


_CPU = torch.device("cpu")


class _Operations(TorchDispatchMode):
    """Sees operations that make tensors of nothing, and those that move some to the device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.gpu._run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Turns `cuda` into the device that `_Operations` takes for it; backward gets a thread of its own."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward and threading.current_thread().name != "backward":
            return self._elsewhere(lambda: func(*args, **kwargs))
        if kwargs.get("device") in ("meta", torch.device("meta")):
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        args, kwargs = _mapped(torch.device, _told, (args, kwargs))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = _told(torch.device(kwargs["device"]))
        # what torch fills from the host it leaves empty on `meta`
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], OnGpu):
            to = kwargs.pop("device", _CPU)
            return func(*args, **kwargs).to(to)
        if func is torch.Tensor.new_tensor and isinstance(args[0], OnGpu):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(_told(PLACE))
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], OnGpu):
            args = (args[0], _listed(args[1]), *args[2:])
        if len(args) > 1 and func is torch.Tensor.to and isinstance(args[1], str):
            args = (args[0], _told(torch.device(args[1])), *args[2:])
        return func(*args, **kwargs)

    def _elsewhere(self, function: Callable[[], Any]) -> Any:
        failed: list[BaseException] = []

        def work() -> None:
            with self.gpu.modes():
                try:
                    function()
                except BaseException as error:  # noqa: BLE001 - raised again where backward was called
                    failed.append(error)

        thread = threading.Thread(target=work, name="backward")
        thread.start()
        thread.join()
        if failed:
            raise failed[0]


def _listed(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_listed(one) for one in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _told(device: torch.device) -> torch.device:
    return torch.device("meta") if device.type == "cuda" else device
