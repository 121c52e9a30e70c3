"""State of a model other than its trained parameters: snapshots, and the detection of changes by a pass.

Covered: buffers of every dtype, frozen parameters, and the plain attributes of every submodule, looked through
recursively (numbers, text, tensors, arrays, generators, lists, tuples, sets, dicts, and objects by their attributes).

Not found: what code keeps elsewhere (globals, classes, closures, files, threads).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
        "own",
        "_told",
        "parameters_of",
    }
)
"""Attributes of the package's layers that passes change, or that are covered separately; not of a user's modules."""


def held(model: nn.Module) -> State:
    """Return copies of all covered state by name: `MODULE.ATTRIBUTE` or `MODULE.ATTRIBUTE[KEY]`."""
    found: State = {}
    for name, module in model.named_modules():
        seen: set[int] = set()
        for kind in ("_buffers", "_parameters"):
            for own, tensor in vars(module)[kind].items():
                found |= _leaves(f"{name}.{own}".strip("."), tensor, seen)
        for own, value in vars(module).items():
            if own not in ("_modules", "_buffers", "_parameters") and own not in _overwritten(module):
                found |= _leaves(f"{name}.{own}".strip("."), value, seen)
    return found


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
