"""A device that is not the host, made of the host: tensors that say they are on `cuda:0` and compute real numbers.

One rule is held: no operation mixes tensors of both sides, and within `no_asking()` nothing asks the device for a
number (`item`, `tolist`, a mask's size, a copy to the host). Its tensors are torch's meta tensors with a CPU tensor
inside (fake tensors refuse `cuda` in a CPU build), so every operation of eager code, autograd's included, is seen.

Not here: time, streams, memory, kernels and their rounding, which only a real GPU has (`test_gpu.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
PLACE, META, HOST = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
# operations whose result's shape or value the host must know
_ASKS = {
    aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten._unique2.default,
    aten.bincount.default, aten.equal.default,
}  # fmt: skip
_MOVES = {aten._to_copy.default, aten.copy_.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Elsewhere(Tensor):
    """A tensor on the device; `numbers` holds them."""

    numbers: Tensor
    device = property(lambda self: PLACE)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: Tensor, rule: Rule) -> Elsewhere:
        shape = torch.empty_strided(numbers.size(), numbers.stride(), dtype=numbers.dtype, device=META)
        return torch.Tensor._make_subclass(cls, shape)

    def __init__(self, numbers: Tensor, rule: Rule) -> None:
        self.numbers, self.rule = numbers, rule

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        rule = next(x.rule for x in tree_leaves((args, kwargs)) if isinstance(x, Elsewhere))
        return rule.run(func, args, kwargs or {})

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def tolist(self) -> Any:
        self.rule.asked("tolist")
        return self.numbers.tolist()


class Rule:
    """Runs operations on the numbers inside, and raises where they mix sides or ask when they must not.

    Counted are operations (`ran`, and `named` by name), questions (`waits`), the bytes that operations read and write
    on the device (`touched`; views touch none), those that come from the host (`sent`) or go there (`fetched`).
    """

    def __init__(self) -> None:
        self.silent = False
        self.ran = 0
        self.named: Counter[str] = Counter()
        self.waits = 0
        self.touched = 0
        self.sent = 0
        self.fetched = 0

    @contextmanager
    def no_asking(self) -> Iterator[None]:
        """Whatever asks the device for a number is an error."""
        self.silent = True
        try:
            yield
        finally:
            self.silent = False

    def asked(self, what: str) -> None:
        self.waits += 1
        if self.silent:
            raise RuntimeError(f"the host waits for the device: {what}")

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        to = kwargs.get("device")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if isinstance(x, Elsewhere)]
        if not there and (to is None or to.type != "meta"):
            return func(*args, **kwargs)
        self._check(func, args, to, [x for x in tensors if not isinstance(x, Elsewhere)])
        self.ran += 1
        self.named[func.overloadpacket.__name__] += 1
        if func is aten.set_.source_Tensor:
            args[0].numbers = args[1].numbers.detach()
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        inside = {id(x.numbers): x for x in there}
        args_, kwargs_ = tree_map(lambda x: x.numbers if isinstance(x, Elsewhere) else x, (args, kwargs))
        if func is aten.bmm.dtype:  # which the host lacks
            func, args_ = aten.bmm.default, tuple(x.to(args_[2]) for x in args_[:2])
        found = func(*args_, **(kwargs_ if to is None else kwargs_ | {"device": HOST}))
        to_host = func is aten._to_copy.default and to is not None and to.type == "cpu"
        if to_host or (func is aten.copy_.default and not isinstance(args[0], Elsewhere)):
            return args[0] if func is aten.copy_.default else found

        def put(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return inside[id(x)] if id(x) in inside else Elsewhere(x, self)

        if func in _MOVES:
            self.sent += _bytes([x for x in tensors if not isinstance(x, Elsewhere)])
        if not any(x.alias_info and not x.alias_info.is_write for x in func._schema.returns):
            self.touched += _bytes([x.numbers for x in there]) + _bytes(tree_leaves(found))
        return tree_map(put, found)

    def _check(self, func: Any, args: Any, to: torch.device | None, here: list[Tensor]) -> None:
        if func in _MOVES:
            down = to is not None and to.type == "cpu" if func is aten._to_copy.default else args[0].device == HOST
            if down:
                self.fetched += _bytes([x.numbers for x in tree_leaves(args) if isinstance(x, Elsewhere)])
                self.asked(f"{func} to the host")
            return
        if func in _INDEXED:
            for index in [index for index in args[1] if index is not None]:
                if index.dtype == torch.bool or not isinstance(index, Elsewhere):
                    self.asked(f"{func} by a mask, or at places that lie on the host")
                here = [x for x in here if x is not index]
        if func in _ASKS:
            self.asked(str(func))
        for x in here:
            if x.dim() or torch.Tag.pointwise not in func.tags:
                raise RuntimeError(f"tensors on cuda:0 and cpu meet in {func}")


def _bytes(found: list[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in found if isinstance(x, Tensor))


class _Operations(TorchDispatchMode):
    """Sees operations that make tensors of nothing, and those that move some to the device."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.rule.run(func, args, kwargs or {})


class _Calls(TorchFunctionMode):
    """Turns `cuda` into the device that `_Operations` takes for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: _told(x) if isinstance(x, torch.device) else x, (args, kwargs or {}))
        if isinstance(kwargs.get("device"), str):
            kwargs["device"] = _told(torch.device(kwargs["device"]))
        # what torch fills from the host it leaves empty on `meta`
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Elsewhere):
            to = kwargs.pop("device", HOST)
            return func(*args, **kwargs).to(to)
        if func is torch.Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(META)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Elsewhere):
            args = (args[0], _listed(args[1]), *args[2:])
        return func(*args, **kwargs)


def _listed(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(_listed(one) for one in index)
    return torch.tensor(index, dtype=None if index else torch.long) if isinstance(index, list) else index


def _told(device: torch.device) -> torch.device:
    return META if device.type == "cuda" else device


class _Generator(torch.Generator):
    """A generator of the host, wherever it is said to be."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, HOST)  # type: ignore[call-arg]


@contextmanager
def installed(patch: pytest.MonkeyPatch) -> Iterator[Rule]:
    """As long as the context lasts, `cuda` means a device that is not the host."""
    rule = Rule()
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda *_: None,
        "mem_get_info": lambda *_: (1 << 34, 1 << 34),
    }
    for name, function in stand_ins.items():
        patch.setattr(torch.cuda, name, function)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    with _Operations(rule), _Calls():
        yield rule
