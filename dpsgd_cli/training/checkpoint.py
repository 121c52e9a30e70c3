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
from typing import Any

from dpsgd_cli import __version__
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.files import write_whole

VERSION = f"checkpoint 8, dpsgd {__version__}"
ENDING = ".checkpoint"
_AGAIN = "remove it and train again"


def place(directory: Path) -> Path:
    """Return the path of the checkpoint of the run whose result will be `directory`."""
    return directory.with_name(f".{directory.name}{ENDING}")


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` by `content` (`start.Trials.checkpoint`).

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
        content: dict[str, Any] = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    except Exception as error:
        raise damaged(type(error).__name__) from error
    return content
