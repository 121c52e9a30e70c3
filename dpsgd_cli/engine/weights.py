"""Tensors of a user's model that are not drawn from the recipe's seed: loaded from a file, or declared by name.

A tensor that was computed from private records would invalidate the privacy statement, and no ledger would show it. So
a model is built twice with one seed and once with another. A tensor must be equal in both builds of one seed. A tensor
that is equal for both seeds must be constant (one value throughout), come from `model.weights.file`, or be named in
`model.weights.constant`. Tensors and arrays in plain attributes have no name to declare and must be buffers.

Not detected: numbers in lists, closures, globals and files that the model reads in a pass; a tensor that mixes loaded
numbers with ones drawn from the seed.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path

from dpsgd_cli.common.plugins import in_memory
from dpsgd_cli.common.text_format import similar
from dpsgd_cli.engine.settings import Weights
from dpsgd_cli.errors import DataError, ModelError

Builder = Callable[[], nn.Module]
_SEED = 1
_SEEDS = 40
"""How many seeds tell what is drawn from what is the same by chance: a coin is so once in 2^39."""


def read(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from a `.safetensors` file, a `.pt` or `.pth` file with a dict of tensors, or from memory.

    Raises DataError if the file is missing or holds anything else. No code in a file is run.
    """
    if (given := in_memory(path)) is not None:
        return dict(given.held)
    if not path.is_file():
        raise DataError(f"model.weights.file: {path} does not exist; the path is relative to the recipe")
    try:
        if path.suffix == ".safetensors":
            found = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"model.weights.file: {path} cannot be read as weights: {said}") from None
    if not isinstance(found, dict) or not all(isinstance(one, Tensor) for one in found.values()):
        raise DataError(f"model.weights.file: {path} is no dict of tensors; save `model.state_dict()`")
    return found


def load(module: nn.Module, tensors: dict[str, Tensor], file: str, key: str = "model.weights.file") -> None:
    """Copy `tensors` into the parameters and buffers of the same names; others stay unchanged.

    `key`: of the recipe, which names `file`. Raises ModelError for a name that the model lacks, or for another shape.
    """
    own = held(module)
    for name, value in tensors.items():
        if name not in own:
            near = similar(name, list(own))
            hint = f"; did you mean {near}?" if near else ""
            raise ModelError(f"{key}: {file} holds {name}, which the model does not have{hint}")
        if own[name].shape != value.shape:
            raise ModelError(
                f"{key}: {name} is {tuple(value.shape)} in {file} and {tuple(own[name].shape)} in the"
                " model; leave it out of the file, or build the model to fit"
            )
        with torch.no_grad():
            own[name].copy_(value)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by name, including those that a state dict omits."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def redrawn(module: nn.Module) -> nn.Module:
    """Return a copy of `module` whose parameters are drawn anew, by the `reset_parameters()` of each part.

    Raises ModelError for a part without one, or whose own leaves a parameter as it was: its numbers would stay.
    """
    made = copy.deepcopy(module)
    for name, part in reversed(list(made.named_modules())):
        draw = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        own = [p for p in part.parameters(recurse=False) if p.is_floating_point()]
        with torch.no_grad():
            for p in own:
                p.fill_(torch.nan)
            if draw is not None:
                draw()
        if any(bool(p.isnan().any()) for p in own):
            raise ModelError(
                f"{name or 'the model'}: {type(part).__name__} has no reset_parameters() that draws all of its own"
                " parameters, so their numbers would be those that the module came with; write one, or give a function"
                ' that builds the module; weights="public" keeps the numbers, and declares that no private record'
                " shaped them"
            )
    return made


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of the safetensors file of `tensors`."""
    plain = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
    return hashlib.sha256(save(plain)).hexdigest()


def seeded(build: Builder, seed: int) -> nn.Module:
    """Build a module under a seed of torch's generator for the CPU, whose state is restored afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed also writes down a stack for each kind of device
        return build()


def check_declared(build: Builder, weights: Weights | None, loaded: Sequence[str], seed: int = _SEED) -> None:
    """Raise ModelError, with all names, for tensors not drawn from the seed, not constant and not declared.

    `loaded` names the tensors that come from `weights.file`.
    """
    first, again, other = (seeded(build, one) for one in (seed, seed, seed + 1))
    ours, twice, theirs = held(first), held(again), held(other)
    constant = [] if weights is None else weights.constant
    problems = []
    for name in constant:
        if name not in ours:
            near = similar(name, list(ours))
            hint = f"; did you mean {near}?" if near else ""
            problems.append(f"model.weights.constant: the model has no parameter or buffer {name}{hint}")
    for name, value in ours.items():
        if not _equal(value, twice.get(name)):
            problems.append(
                f"{name} differs between two builds of one seed: it is not drawn from torch's generator, so nobody can"
                " say what shaped it; draw it by torch.nn.init, or load it by model.weights.file"
            )
        elif name in loaded or name in constant:
            continue
        elif same := _same_for_every_seed(name, value, theirs.get(name), build, seed):
            part = "" if same == value.numel() else f" in {same:,} of its {value.numel():,} numbers"
            problems.append(
                f"{name} is the same for every seed{part} and no constant: load it by model.weights {{file: ...,"
                " public: true} (from Python: give the module, with weights='public'), or, where code computes it,"
                f" declare model.weights {{constant: [{name}], public: true}}"
            )
    problems += [
        f"{name} is a tensor or array in a plain attribute, which nothing declares or keeps; use register_buffer"
        for name in _hidden(first)
    ]
    if problems:
        raise ModelError("\n".join(problems))


def _same_for_every_seed(name: str, value: Tensor, other: Tensor | None, build: Builder, seed: int) -> int:
    """Return how many numbers of a tensor no seed changes, if those are not all equal, else 0.

    Rows that were trained elsewhere may stand beside new ones in one tensor. `other` is that of `seed` + 1; as long as
    numbers are left that may be the same by chance, further seeds are tried.
    """
    same = torch.ones_like(value, dtype=torch.bool)
    for further in range(1, _SEEDS):
        if other is None or other.shape != value.shape:
            return 0
        same &= value == other
        if _one_value(value[same]):
            return 0
        if bool(same.all()):
            break
        other = held(seeded(build, seed + 1 + further)).get(name)
    return int(same.sum())


def _equal(one: Tensor, other: Tensor | None) -> bool:
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def _one_value(x: Tensor) -> bool:
    """Return True if all entries of a tensor are equal; at most one number could then depend on records."""
    return x.numel() < 2 or bool((x == x.reshape(-1)[0]).all())


def _hidden(module: nn.Module) -> Iterator[str]:
    """Yield names of plain attributes, or parts of them, that are tensors or arrays but no parameters or buffers."""
    known = {id(x) for x in held(module).values()}
    for name, part in module.named_modules():
        for own, value in vars(part).items():
            if own.startswith(("_parameters", "_buffers", "_modules")):
                continue
            for path, leaf in tree_leaves_with_path(value):
                tensor = isinstance(leaf, Tensor | np.ndarray) and id(leaf) not in known
                if tensor and not _one_value(torch.as_tensor(leaf)):
                    yield f"{name}.{own}{keystr(path)}".strip(".")
