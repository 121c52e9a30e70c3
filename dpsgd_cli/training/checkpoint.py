"""Checkpoints of an unfinished run: one file, replaced as a whole, removed when the result is written.

The file is a zip of two members. `released.json` holds the charges; `dpsgd account` reads it without torch. `state.pt`
holds the weights and everything else that a resumed run needs, so that it neither forgets nor repeats a release. The
state includes non-private diagnostics, so that only its owner can read the file.

`released.json` holds the SHA-256 of `state.pt` and of itself, because charges and trained state belong together. A run
does not continue from a damaged or carelessly edited file. The hashes do not authenticate the file: somebody who edits
it on purpose can recompute them.

Several runs of one recipe may share the path. Each writes its own file and moves it there, so that the path always
holds the whole checkpoint of one run. `training/start.py` decides what a checkpoint contains.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dpsgd_cli import __version__
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.files import write_whole

VERSION = f"7, dpsgd {__version__}"
ENDING = ".checkpoint"
_RELEASED, _STATE = "released.json", "state.pt"
_AGAIN = "remove it and train again"
Sums = dict[str, list[float]]
COUNTS = ("loss", "examples", "norm", "clipped", "nonfinite")
"""Keys of `Diagnostics.sums`, summed over every epoch."""


class Charges(BaseModel):
    """Releases of the finished epochs of R trials.

    `hash`, `recipes` (resolved) and `trials` have one entry per recipe that trains together; `ledgers` has one per
    trial, in lines of `ledger.jsonl`. `data` has the SHA-256 of each file.
    """

    model_config = ConfigDict(strict=True, extra="forbid")
    hash: list[str]
    recipes: list[str]
    trials: list[Annotated[int, Field(ge=1)]]
    data: dict[str, str]
    code: dict[str, str]
    done: Annotated[int, Field(ge=1)]
    epochs: Annotated[int, Field(ge=1)]
    ledgers: Annotated[list[list[str]], Field(min_length=1)]


class _State(BaseModel):
    """Content of `state.pt`. The code that restores `method` and `released` checks their tensors."""

    model_config = ConfigDict(strict=True, extra="forbid")
    released: dict[str, Any]
    init_seeds: list[int]
    train_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    method: dict[str, Any]
    history: list[tuple[int, Sums, Sums]]


_STATE_FIELDS = TypeAdapter(_State)


def place(directory: Path) -> Path:
    """Return the path of the checkpoint of the run whose result will be `directory`."""
    return directory.with_name(f".{directory.name}{ENDING}")


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` by `content`: the fields of `Charges`, and the state.

    Raises an OSError that names the file on failure; the old checkpoint then stays.
    """
    import torch

    # in memory first: on a full disk, torch's own writer raises an error that hides the cause
    state, packed = io.BytesIO(), io.BytesIO()
    torch.save({name: part for name, part in content.items() if name not in Charges.model_fields}, state)
    head = {name: part for name, part in content.items() if name in Charges.model_fields}
    head |= {"version": VERSION, "state_sha256": hashlib.sha256(state.getbuffer()).hexdigest()}
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr(_RELEASED, json.dumps(head | {"sha256": _sum(head)}))
        file.writestr(_STATE, state.getbuffer())
    write_whole(path, packed.getvalue(), owner_only=True)


def load(path: Path) -> dict[str, Any] | None:
    """Load the checkpoint at `path`; None if there is none. Raises RunError if it cannot be used."""
    import torch

    if not path.is_file():
        return None
    released, state_sha256 = _released(path)
    packed = _member(path, _STATE)
    if hashlib.sha256(packed).hexdigest() != state_sha256:
        raise RunError(f"{path}: damaged checkpoint (changed since it was written); {_AGAIN}")
    try:
        state = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        _STATE_FIELDS.validate_python(state)
    except ValidationError as error:
        raise RunError(f"{path}: damaged checkpoint ({_first(error)}); {_AGAIN}") from None
    except Exception as error:
        raise RunError(f"{path}: damaged checkpoint ({type(error).__name__}); {_AGAIN}") from error
    own = sum(released.trials)
    columns = [column for _, *both in state["history"] for one in both for column in one.values()]
    if not all(isinstance(held, torch.Tensor) for held in state["released"].values()):
        raise RunError(f"{path}: damaged checkpoint (released preprocessing is no tensor); {_AGAIN}")
    fits = len(state["init_seeds"]) == own and len(state["history"]) == released.done
    fits = fits and all(counts.keys() >= set(COUNTS) for _, _, counts in state["history"])
    if not fits or any(len(column) != own for column in columns):
        raise RunError(f"{path}: damaged checkpoint (its state is not that of {own} trials); {_AGAIN}")
    return released.model_dump() | state


def _released(path: Path) -> tuple[Charges, str]:
    """Read the releases in the checkpoint at `path` and the SHA-256 of the state that belongs to them."""
    try:
        head = json.loads(_member(path, _RELEASED))
    except (ValueError, RecursionError):
        raise RunError(f"{path}: damaged checkpoint ({_RELEASED} is no JSON); {_AGAIN}") from None
    if not isinstance(head, dict) or head.get("version") != VERSION:
        raise RunError(f"{path}: written by another version of dpsgd; use that one, or {_AGAIN}")
    told = head.pop("sha256", None)
    if told != _sum(head):
        raise RunError(f"{path}: damaged checkpoint (changed since it was written); {_AGAIN}")
    del head["version"]
    state_sha256 = head.pop("state_sha256", None)
    try:
        released = Charges.model_validate(head)
    except ValidationError as error:
        raise RunError(f"{path}: damaged checkpoint ({_first(error)}); {_AGAIN}") from None
    recipes, own = len(released.hash), sum(released.trials)
    if {len(released.recipes), len(released.trials)} != {recipes} or len(released.ledgers) != own:
        raise RunError(
            f"{path}: damaged checkpoint (its lists are not of {recipes} recipes and {own} trials); {_AGAIN}"
        )
    return released, str(state_sha256)


def _member(path: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(path) as file:
            if file.getinfo(name).compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed")
            return file.read(name)
    except (zipfile.BadZipFile, OSError, KeyError, ValueError, NotImplementedError, EOFError, RuntimeError) as error:
        raise RunError(f"{path}: damaged checkpoint ({type(error).__name__}); {_AGAIN}") from None


def _sum(head: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(head, sort_keys=True).encode()).hexdigest()


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
