"""Checkpoints of a run that is not finished: one file, replaced whole, removed when the result is written.

A checkpoint holds the weights, everything else that continuing needs, and the ledgers, so that a resumed run
can neither forget nor repeat a release. It holds non-private diagnostics too, so only its owner can read it.
It says its own SHA-256, so that one which was damaged, or edited without care, is not continued: what is charged and
what is trained belong together. That is no signature: who means to can write the sum anew.
Several runs of one recipe may share the place: each writes a file of its own and moves it there, so what lies
there is always one run's whole checkpoint. Not here: what goes into it (`trials.py`).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpsgd_cli import __version__
from dpsgd_cli.errors import RunError
from dpsgd_cli.results.files import write_whole

VERSION = f"5, dpsgd {__version__}"


def place(directory: Path) -> Path:
    """The checkpoint file of the run whose result will be `directory`."""
    return directory.with_name(f".{directory.name}.checkpoint")


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    """`content` with its SHA-256: made where the content is, and checked by `load`."""
    return {**content, "sha256": _sum(content)}


def _sum(content: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for part in _parts(content):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Bytes that tell any two contents apart: every part is preceded by its kind and size."""
    if isinstance(value, Tensor):
        # a clone: of no or one number, contiguous() leaves a stride of 0, which no view takes
        flat = value.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
        yield f"{flat.dtype} {tuple(value.shape)} ".encode()
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, dict):
        yield f"dict {len(value)} ".encode()
        for key, part in value.items():
            yield from _parts(key)
            yield from _parts(part)
    elif isinstance(value, list | tuple):
        yield f"list {len(value)} ".encode()
        for part in value:
            yield from _parts(part)
    else:
        text = repr(value).encode()
        yield f"{type(value).__name__} {len(text)} ".encode()
        yield text


def save(path: Path, content: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` by `sealed` content.

    A failure, which is an OSError that names it, leaves the old one in place.
    """
    # in memory first: where a file cannot grow, torch's own writer ends with an error about itself
    packed = io.BytesIO()
    torch.save({"version": VERSION, **content}, packed)
    write_whole(path, packed.getvalue(), owner_only=True)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`, None when there is none; RunError when it cannot be used."""
    if not path.is_file():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        raise RunError(f"{path}: damaged checkpoint ({type(error).__name__}); remove it and train again") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise RunError(f"{path}: written by another version of dpsgd; use that one, or remove it and train again")
    own = {key: part for key, part in content.items() if key not in ("version", "sha256")}
    if content.get("sha256") != _sum(own):
        raise RunError(f"{path}: damaged checkpoint (changed since it was written); remove it and train again")
    return own
