"""State of a model other than its trained parameters: snapshots, and the detection of changes by a pass.

Covered: buffers of every dtype, frozen parameters, the attributes of every submodule, and of the user's own files
(those that a recipe names, and what they import from the same folders) the globals, classes and functions, all with
everything that can be reached from them (`reach.py`). Also covered: the global generators of torch (CPU and the current
GPU), NumPy and `random`. A tensor of a pass that is still held after it counts as a change.

Not found: what code of other folders keeps in its own globals, classes and functions, files, sockets, threads.
"""

from __future__ import annotations

import functools
import pickle
import random
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsgd_cli.common.plugins import OWN_FILES, own_modules
from dpsgd_cli.engine.layers import Layer
from dpsgd_cli.engine.reach import OfAPass, Reach

State = dict[str, Any]


_PACKAGE = f"{__name__.partition('.')[0]}."
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


def held(model: nn.Module, beside: Any = None) -> State:
    """Return copies of all covered state by name: `MODULE.ATTRIBUTE`, `MODULE.ATTRIBUTE[KEY]` or a generator's name.

    `beside` is the package's own object that watches the model, and is not looked into.
    """
    found: State = {
        "torch's global generator": torch.get_rng_state(),
        "NumPy's global generator": pickle.dumps(np.random.get_state()),
        "the generator of `random`": random.getstate(),
    }
    if torch.cuda.is_initialized():
        found["torch's global generator of the GPU"] = torch.cuda.get_rng_state()
    own = own_modules()
    reach = Reach(one.__name__ for one in own)
    reach.skip(beside, "the package")
    modules = list(model.named_modules())
    for name, module in modules:
        reach.skip(module, name)
    _add_code(reach, own, (type(module).forward for _, module in modules if _is_own(type(module))))
    for name, module in modules:
        held_by = [vars(module)["_buffers"], vars(module)["_parameters"]]
        left_out = {"_modules", "_buffers", "_parameters", *_overwritten(module)}
        held_by.append({own: value for own, value in vars(module).items() if own not in left_out})
        for own, value in (item for part in held_by for item in part.items()):
            reach.add(f"{name}.{own}".strip("."), value)
    return found | reach.found


def of_code(functions: Iterable[Any] = ()) -> State:
    """Return copies of what the user's own files keep, by name: globals, classes, and what functions carry.

    `functions` are looked at too, with the globals of their files, which a second loading of a file replaces.
    Raises ModelError for an object that cannot be looked into.
    """
    own = own_modules()
    reach = Reach(one.__name__ for one in own)
    _add_code(reach, own, functions)
    return reach.found


def _add_code(reach: Reach, own: Iterable[ModuleType], functions: Iterable[Any]) -> None:
    for function in functions:
        inner = function.func if isinstance(function, functools.partial) else function
        file = Path(str(getattr(inner, "__globals__", {}).get("__file__", ""))).name
        reach.add(f"{file}: {getattr(inner, '__name__', type(inner).__name__)}", function)
    for module in own:
        reach.add_space(vars(module))


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


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or isinstance(one, OfAPass):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        try:
            return alike and torch.equal(one.nan_to_num(), other.nan_to_num())
        except RuntimeError:  # of a kind that cannot be compared
            return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    return bool(one == other or (one != one and other != other))
