"""Copies of everything that can be reached from a value, so that two moments can be compared.

Values are followed by their attributes and items: containers with their keys, objects with `__dict__` and `__slots__`,
modules of torch, `functools.partial`, what `functools.lru_cache` holds, and functions by defaults, attributes and
closure. Functions of a user's own files are also followed by their globals, and classes of these by their attributes.

An object with memory that Python cannot read, such as a generator, an iterator, a file or a lock, is refused, unless
its type is known to keep nothing. Functions, classes and modules that other folders define are not followed.
"""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import io
import logging
import random
import re
import sys
import types
import typing
import weakref
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from datetime import date, time, timedelta, tzinfo
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _functorch

from dpsgd_cli.common.plugins import OWN_FILES
from dpsgd_cli.engine.apart import Passes
from dpsgd_cli.engine.layers import Described, Session
from dpsgd_cli.errors import ModelError

Parts = Iterable[tuple[str, Any]]


class OfAPass:
    """Stands for a tensor that a pass has left behind; it equals nothing, so it always counts as a change."""


def _copied(value: Tensor) -> Tensor | OfAPass:
    if _functorch.is_functorch_wrapped_tensor(value):
        return OfAPass()
    return value.detach().clone()


_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None)})
_LEAVES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Described, lambda value: None),
    (Tensor, _copied),
    (np.ndarray, lambda value: value.copy()),
    (torch.Generator, lambda value: value.get_state()),
    (np.random.Generator, lambda value: str(value.bit_generator.state)),
    (np.random.RandomState, lambda value: str(value.get_state())),
    (random.Random, lambda value: value.getstate()),
    ((*_SIMPLE, np.generic, torch.Size), lambda value: value),
    ((array.array, bytearray, memoryview), bytes),
    ((io.BytesIO, io.StringIO), lambda value: value.getvalue()),
    ((Decimal, date, time, timedelta, tzinfo, PurePath, re.Pattern, range, slice), repr),
)
"""Kinds of values that are compared whole, and how each is copied."""
_FIXED = (
    types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias, types.UnionType,
    types.EllipsisType, types.NotImplementedType, typing.TypeVar, typing.ParamSpec, np.dtype, np.ufunc, np.finfo,
    np.iinfo, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo,
    torch.jit.ScriptFunction, torch._ops.OpOverloadPacket, torch._ops.OpOverload, type(vars(io.IOBase)["_abc_impl"]),
    type(vars(namedtuple("_", "field"))["field"]),
)  # fmt: skip
"""Kinds of values that keep nothing but their attributes, if any; `repr` tells them apart."""
_OF_EVERY_CLASS = frozenset(
    {"__builtins__", "__annotations__", "__dict__", "__weakref__", "__doc__", "__spec__", "__loader__"}
)
"""Names of a class or module that Python itself sets."""
_OF_EVERY_LOGGER = frozenset(vars(logging.Logger("")))
_CACHE = functools._lru_cache_wrapper
_CODE = (type, types.FunctionType, types.ModuleType, _CACHE)
_HOLDERS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__func__", "__self__"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
}
"""Kinds of values of which all is known by these attributes."""
_MADE_BY_PYTHON = 1 << 9
"""Flag of classes that are made while a program runs (`Py_TPFLAGS_HEAPTYPE`)."""


class Reach:
    """Collects copies by name in `found`; what was visited once is not visited again.

    `own` are the names of modules of a user's own files, besides those that recipes name.
    """

    def __init__(self, own: Iterable[str] = ()) -> None:
        self.found: dict[str, Any] = {}
        self._own = frozenset(own)
        # held, so that no other object gets the same id
        self._seen: dict[int, tuple[Any, str]] = {}

    def skip(self, value: Any, name: str) -> None:
        """Take `value` as visited, by this name."""
        self._seen[id(value)] = value, name

    def add(self, name: str, value: Any) -> None:
        """Copy `value` and all that can be reached from it. Raises ModelError for what cannot be looked into."""
        waiting = [(name, value)]
        while waiting:
            name, value = waiting.pop()
            if type(value) in _SIMPLE:
                self._put(name, value)
            elif id(value) in self._seen:
                self._put(name, self._seen[id(value)][1])
            elif not issubclass(type(value), Session | Passes):
                self.skip(value, name)
                waiting += reversed([*self._parts(name, value)])

    def add_space(self, space: dict[str, Any]) -> None:
        """Copy what the globals of a file hold."""
        if id(space) not in self._seen:
            self.skip(space, "globals")
            file = Path(str(space.get("__file__", ""))).name
            for name, value in list(space.items()):
                if name not in _OF_EVERY_CLASS:
                    self.add(f"{file}: {name}", value)

    def _put(self, name: str, copy: Any) -> None:
        while name in self.found:
            name += "'"
        self.found[name] = copy

    def _is_own(self, name: Any) -> bool:
        return isinstance(name, str) and (name.startswith(OWN_FILES) or name in self._own)

    def _is_elsewhere(self, value: Any) -> bool:
        """Return True for a function or class that a module of another folder holds by its name."""
        home = getattr(value, "__module__", None)
        if not isinstance(home, str) or self._is_own(home) or home not in sys.modules:
            return False
        for name in (value.__qualname__, value.__name__):
            found: Any = sys.modules[home]
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return True
        return False

    def _parts(self, name: str, value: Any) -> Parts:
        """Copy `value` itself, and return what it holds, by name."""
        kind = type(value)  # `isinstance` would believe what an object says of its class
        yield from self._attributes(name, value)
        for kinds, copied in _LEAVES:
            if issubclass(kind, kinds):
                self._put(name, copied(value))
                if issubclass(kind, np.ndarray) and value.dtype.hasobject:
                    yield from ((f"{name}[{at}]", part) for at, part in enumerate(value.flat))
                if issubclass(kind, Tensor) and not issubclass(kind, Described) and value.is_leaf:
                    yield f"{name}.grad", value.grad
                return
        if issubclass(kind, _FIXED):
            self._put(name, repr(value))
        elif issubclass(kind, dict | list | tuple | deque | set | frozenset | types.MappingProxyType):
            yield from self._items(name, value)
        elif issubclass(kind, _CODE):
            yield from self._of_code(name, value)
        elif issubclass(kind, types.BuiltinFunctionType | types.MethodWrapperType):
            self._put(name, value.__name__)
            yield name, value.__self__
        elif issubclass(kind, weakref.ref):
            yield name, value()
        elif kind in _HOLDERS:
            yield from ((name, getattr(value, part)) for part in _HOLDERS[kind])
        elif not _is_readable(kind):
            raise ModelError(
                f"{name} is of type {kind.__name__}, which cannot be looked into, so nobody can tell what it keeps of a"
                " record for later ones; do without it, or make it where it is used"
            )

    def _attributes(self, name: str, value: Any) -> Parts:
        """Return the attributes of an object, and its class where that is a user's own."""
        kind = type(value)
        if self._is_own(kind.__module__):
            yield f"{name}'s class", kind
        if issubclass(kind, _CODE) or (kind in _HOLDERS and kind is not functools.partial):
            return
        if issubclass(kind, _FIXED) and kind is not torch.jit.ScriptFunction:
            return
        if kind in (type(Path()), type(PurePath())):  # they cache their text
            return
        held = _dict_of(value)
        if issubclass(kind, logging.Logger):
            held = {own: part for own, part in held.items() if own not in _OF_EVERY_LOGGER}
        if held and not issubclass(kind, nn.Module):
            self._put(name, (kind.__name__, len(held)))
        yield from ((f"{name}.{own}", part) for own, part in list(held.items()))
        for own, slot in _slots(kind):
            with contextlib.suppress(AttributeError):  # not filled
                yield f"{name}.{own}", slot.__get__(value)

    def _items(self, name: str, value: Any) -> Parts:
        """Copy type, length and order of a container, and return its keys and items."""
        kind = type(value).__name__
        if isinstance(value, dict | types.MappingProxyType):
            pairs = list(dict(value).items() if isinstance(value, types.MappingProxyType) else dict.items(value))
            self._put(name, (kind, len(pairs), hash(tuple(key for key, _ in pairs))))
            yield from ((f"{name}[{key!r}]", part) for key, part in pairs)
            yield from ((f"{name}'s keys", key) for key, _ in pairs if type(key) not in _SIMPLE)
            return
        base: Any = next(one for one in (list, tuple, deque, set, frozenset) if isinstance(value, one))
        items = list(base.__iter__(value))
        if isinstance(value, set | frozenset):
            items.sort(key=repr)
        if all(type(part) in _SIMPLE for part in items):
            self._put(name, (kind, tuple(map(type, items)), tuple(items)))
            return
        self._put(name, (kind, len(items)))
        yield from ((f"{name}[{at}]", part) for at, part in enumerate(items))

    def _of_code(self, name: str, value: Any) -> Parts:
        """Return what a class, a function, a cache of a function or a module holds."""
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            # one that was made by hand is an object like any other
            made = value.__spec__ is None and value.__name__ != "__main__" and not self._is_own(value.__name__)
            elsewhere = not made
        elif issubclass(kind, type):
            elsewhere = not self._is_own(value.__module__)
        else:
            elsewhere = self._is_elsewhere(value)
        if elsewhere:
            self._put(name, id(value))
            return
        yield from self._named(name, vars(value))
        if issubclass(kind, types.FunctionType):
            self._put(name, id(value.__code__))
            yield name, value.__defaults__
            yield name, value.__kwdefaults__
            for cell in value.__closure__ or ():
                with contextlib.suppress(ValueError):  # not filled yet
                    yield name, cell.cell_contents
            if self._is_own(value.__globals__.get("__name__")):
                self.add_space(value.__globals__)
        elif kind is _CACHE:
            self._put(name, tuple(value.cache_info()))
            yield from ((name, part) for part in gc.get_referents(value) if not _is_link(part))

    def _named(self, name: str, held: Any) -> Iterator[tuple[str, Any]]:
        yield from ((f"{name}.{own}", part) for own, part in list(held.items()) if own not in _OF_EVERY_CLASS)


def _is_link(part: Any) -> bool:
    """Return True for the lists by which a cache finds what it holds; it names its keys and results itself."""
    some = next(iter(part.values()), None) if type(part) is dict else part
    return type(some).__name__ == "_lru_list_elem"


def _dict_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, whatever its class says of `__dict__`."""
    for base in type(value).__mro__:
        place = vars(base).get("__dict__")
        if isinstance(place, types.GetSetDescriptorType | types.MemberDescriptorType):
            held: dict[str, Any] | None = place.__get__(value)
            return held or {}
    held = getattr(value, "__dict__", {})
    return held if isinstance(held, dict) else {}


def _slots(kind: type) -> list[tuple[str, Any]]:
    """Return the places of `__slots__` in a class; classes of C have others, which may be shorter than a word."""
    bases = [base for base in kind.__mro__ if base.__flags__ & _MADE_BY_PYTHON]
    every = [item for base in bases for item in vars(base).items() if item[0][:2] != "__"]
    return [(name, slot) for name, slot in every if isinstance(slot, types.MemberDescriptorType)]


def _is_readable(kind: type) -> bool:
    """Return True if attributes make up all of an object's memory, by its size; `copyreg` checks the same."""
    places = len(_slots(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__itemsize__ == 0 and kind.__basicsize__ <= object.__basicsize__ + places * tuple.__itemsize__
