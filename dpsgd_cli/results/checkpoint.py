"""Checkpoints of a run that is not finished: one file, replaced whole, removed when the result is written.

A checkpoint holds the weights, everything else that continuing needs, and the ledgers, so that a resumed run
can neither forget nor repeat a release. Not here: what a method's state is (`methods/`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from dpsgd_cli.errors import RunError

VERSION = 1


def place(directory: Path) -> Path:
    """The checkpoint file of the run whose result will be `directory`."""
    return directory.with_name(f".{directory.name}.checkpoint")


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path`; a failure leaves the old one in place."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        torch.save({"version": VERSION, **content}, temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`, None when there is none; RunError when it cannot be used."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise RunError(f"{path}: damaged checkpoint ({type(error).__name__}); remove it and train again") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunError(f"{path}: written by another version; remove it and train again")
    return content
