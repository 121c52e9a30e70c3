"""State of a model other than its trained parameters: snapshots, and the detection of changes by a pass.

Covered: buffers of every dtype, frozen parameters, and the plain attributes of every submodule, looked through
recursively (numbers, text, tensors, arrays, generators, lists, tuples, sets, dicts, and objects by their attributes).
Also covered: the global generators of torch (CPU and the current GPU), NumPy and `random`; and of the user's own files
(those that a recipe names, and what they import from the same folders) the globals, the attributes of classes, and the
default arguments, attributes and closures of functions.

Not found: what code of other folders keeps, files, sockets, threads. Nor what own files keep in objects whose class
another folder defines (a namespace, a module of torch), in a `functools.partial`, or behind `functools.lru_cache`.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsgd_cli.common.plugins import OWN_FILES, own_modules
from dpsgd_cli.engine.apart import Passes
from dpsgd_cli.engine.layers import Described, Layer, Session

State = dict[str, Any]


def _copied(value: Tensor) -> Tensor | str:
    try:
        return value.detach().clone()
    except RuntimeError:  # a tensor of a transform that has ended
        return "a tensor of a pass"


_PACKAGE = f"{__name__.partition('.')[0]}."
_LEAVES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Described, lambda value: None),
    (Tensor, _copied),
    (np.ndarray, lambda value: value.copy()),
    (torch.Generator, lambda value: value.get_state()),
    (np.random.Generator, lambda value: str(value.bit_generator.state)),
    (np.random.RandomState, lambda value: str(value.get_state())),
    (random.Random, lambda value: value.getstate()),
    ((bool, int, float, complex, str, bytes, type(None), np.generic, torch.Size), lambda value: value),
)
"""Kinds of values that are compared whole, and how each is copied."""
_KEEPING = (
    *(kind for kinds, _ in _LEAVES[1:] for kind in (kinds if isinstance(kinds, tuple) else (kinds,))),
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
)
"""Kinds of values of a user's code that may keep something of an example."""
_OWN = frozenset(
    {
        "source",
        "session",
        "values",
        "sums",
        "bound",
        "products",
        "clone",
        "inputs",
        "gradients",
        "found",
        "_told",
        "parameters_of",
    }
)
"""Attributes of the package's layers that passes change, or that are covered separately; not of a user's modules."""


def held(model: nn.Module) -> State:
    """Return copies of all covered state by name: `MODULE.ATTRIBUTE`, `MODULE.ATTRIBUTE[KEY]` or a generator's name."""
    found: State = {
        "torch's global generator": torch.get_rng_state(),
        "NumPy's global generator": pickle.dumps(np.random.get_state()),
        "the generator of `random`": random.getstate(),
    }
    found |= of_code(type(module).forward for module in model.modules() if _is_own(type(module)))
    if torch.cuda.is_initialized():
        found["torch's global generator of the GPU"] = torch.cuda.get_rng_state()
    for name, module in _modules(model):
        seen: set[int] = set()
        for kind in ("_buffers", "_parameters"):
            for own, tensor in vars(module)[kind].items():
                found |= _leaves(f"{name}.{own}".strip("."), tensor, seen)
        for own, value in vars(module).items():
            if own not in ("_modules", "_buffers", "_parameters") and own not in _overwritten(module):
                found |= _leaves(f"{name}.{own}".strip("."), value, seen)
    return found


def of_code(functions: Iterable[Any] = ()) -> State:
    """Return copies of what the user's own files keep, by name: globals, classes, and what functions carry.

    `functions` are looked at too, with the globals of their files, which a second loading of a file replaces.
    """
    spaces = [(f"{Path(str(module.__file__)).name}: ", vars(module)) for module in own_modules()]
    found: State = {}
    seen: set[int] = set()
    for function in functions:
        space = getattr(function, "__globals__", {})
        where = f"{Path(str(space.get('__file__', ''))).name}: "
        spaces.append((where, space))
        found |= _of_function(f"{where}{getattr(function, '__name__', 'a function')}", function, seen)
    for where, space in spaces:
        if id(space) in seen:
            continue
        seen.add(id(space))
        for name, value in list(space.items()):
            if name.startswith("__"):
                continue
            if isinstance(value, FunctionType) and value.__globals__ is space:
                found |= _of_function(f"{where}{name}", value, seen)
            elif isinstance(value, type) and value.__module__ == space.get("__name__"):
                for own, held_by in list(vars(value).items()):
                    if isinstance(held_by, _KEEPING) and not own.startswith("__"):
                        found |= _leaves(f"{where}{name}.{own}", held_by, seen)
                    elif isinstance(held_by, FunctionType):
                        found |= _of_function(f"{where}{name}.{own}", held_by, seen)
            elif isinstance(value, _KEEPING) or type(value).__module__ == space.get("__name__"):
                found |= _leaves(f"{where}{name}", value, seen)
    return found


def _of_function(name: str, function: Any, seen: set[int]) -> State:
    """Return copies of the default arguments, the attributes and the closure of a function."""
    cells = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # not filled yet
            cells.append(cell.cell_contents)
    kept = [getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None), vars(function), cells]
    return {
        key: leaf
        for own in kept
        for part in (own.values() if isinstance(own, dict) else own or ())
        if isinstance(part, _KEEPING)
        for key, leaf in _leaves(name, part, seen).items()
    }


def _overwritten(module: nn.Module) -> frozenset[str]:
    """Return attributes that every pass sets before it reads them; only for the package's own modules and torch's."""
    if isinstance(module, nn.RNNBase):
        return frozenset({"_flat_weights", "_flat_weight_refs"})
    ours = type(module).__module__.startswith(_PACKAGE)
    named: frozenset[str] = getattr(type(module), "OVERWRITTEN", frozenset()) if ours else frozenset()
    return named | _OWN if isinstance(module, Layer) else named


def changed(before: State, after: State) -> str | None:
    """Return the name of the first item that differs between two states, or None."""
    for name in (*before, *(name for name in after if name not in before)):
        if name not in before or name not in after or not _same(before[name], after[name]):
            return name
    return None


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith(OWN_FILES)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with its name."""
    yield from model.named_modules()


def _leaves(name: str, value: Any, seen: set[int]) -> State:
    """Return copies of the leaves of `value` by name; `seen` holds the ids of visited containers."""
    for kinds, copied in _LEAVES:
        if isinstance(value, kinds):
            return {name: copied(value)}
    if id(value) in seen or isinstance(value, nn.Module | Session | Passes | type):
        return {}
    seen.add(id(value))
    parts: dict[Any, Any] = {}
    if isinstance(value, dict):
        parts = {f"{name}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple | deque):
        parts = {f"{name}[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, set | frozenset):
        return {name: sorted(map(repr, value))}
    elif hasattr(value, "__dict__") and not callable(value):
        parts = {f"{name}.{own}": part for own, part in vars(value).items()}
    # type and number of parts, so that a replaced or emptied container is detected
    found: State = {name: (type(value).__name__, len(parts))}
    for own, part in parts.items():
        found |= _leaves(own, part, seen)
    return found


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        try:
            alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
            return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
        except RuntimeError:  # a tensor of a transform that has ended
            return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return bool(one == other or (one != one and other != other))
