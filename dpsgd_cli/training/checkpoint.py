"""Checkpoints of an unfinished run: one file, replaced as a whole, removed when the result is written.

The file is a line with its version, a line with the SHA-256 of the rest, and the state that `torch.save` wrote: the
charges, the weights and everything else that a resumed run needs, so that it neither forgets nor repeats a release.
The state includes non-private diagnostics, so that only its owner can read the file.

One hash covers charges and trained state, which belong together. A run does not continue from a damaged or carelessly
edited file. The hash does not authenticate the file: somebody who edits it on purpose can compute it again.

Several runs of one recipe may share the path. Each writes its own file and moves it there, so that the path always
holds the whole checkpoint of one run. `training/start.py` decides what a checkpoint contains.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dpsgd_cli import __version__
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.files import write_whole

VERSION = f"checkpoint 8, dpsgd {__version__}"
ENDING = ".checkpoint"
_AGAIN = "remove it and train again"
Sums = dict[str, list[float]]
COUNTS = ("loss", "examples", "norm", "clipped", "nonfinite")
"""Keys of `Diagnostics.sums`, summed over every epoch."""


class _Content(BaseModel):
    """Releases of the finished epochs of R trials, and the state after them.

    `hash`, `recipes` (resolved) and `trials` have one entry per recipe that trains together; `ledgers` has one per
    trial, in lines of `ledger.jsonl`. `data` has the SHA-256 of each file. The code that restores `method` and
    `released` checks their tensors.
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
    released: dict[str, Any]
    init_seeds: list[int]
    train_seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    method: dict[str, Any]
    history: list[tuple[int, Sums, Sums]]


def place(directory: Path) -> Path:
    """Return the path of the checkpoint of the run whose result will be `directory`."""
    return directory.with_name(f".{directory.name}{ENDING}")


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` by `content`, the fields of `_Content`.

    Raises an OSError that names the file on failure; the old checkpoint then stays.
    """
    import torch

    # in memory first: on a full disk, torch's own writer raises an error that hides the cause
    state = io.BytesIO()
    torch.save(content, state)
    digest = hashlib.sha256(state.getbuffer()).hexdigest()
    write_whole(path, f"{VERSION}\n{digest}\n".encode() + state.getvalue(), owner_only=True)


def load(path: Path) -> dict[str, Any] | None:
    """Load the checkpoint at `path`; None if there is none. Raises RunError if it cannot be used."""
    import torch

    if not path.is_file():
        return None

    def damaged(why: str) -> RunError:
        return RunError(f"{path}: damaged checkpoint ({why}); {_AGAIN}")

    try:
        version, digest, state = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError) as error:
        raise damaged(type(error).__name__) from None
    if version != VERSION.encode():
        raise RunError(f"{path}: written by another version of dpsgd; use that one, or {_AGAIN}")
    if hashlib.sha256(state).hexdigest().encode() != digest:
        raise damaged("changed since it was written")
    try:
        content = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
        _Content.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise damaged(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except Exception as error:
        raise damaged(type(error).__name__) from error
    recipes, own = len(content["hash"]), sum(content["trials"])
    per_trial = {len(content["ledgers"]), len(content["init_seeds"])}
    per_trial |= {len(column) for _, *both in content["history"] for one in both for column in one.values()}
    fits = {len(content["recipes"]), len(content["trials"])} == {recipes} and per_trial == {own}
    fits = fits and len(content["history"]) == content["done"]
    if not fits or any(not counts.keys() >= set(COUNTS) for _, _, counts in content["history"]):
        raise damaged(f"its lists are not of {recipes} recipes, {own} trials and {content['done']} epochs")
    if not all(isinstance(held, torch.Tensor) for held in content["released"].values()):
        raise damaged("released preprocessing is no tensor")
    found: dict[str, Any] = content
    return found
