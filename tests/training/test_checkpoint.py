"""Checkpoints: replaced whole, kept when a new one fails, for their owner only, and checked before use."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsgd_cli.errors import RunError
from dpsgd_cli.training import checkpoint

LINE = '{"trial": 0, "seed": 0, "phase": "train", "epoch": 0, "mechanism": "gaussian", "noise_multiplier": 1.0}'
CONTENT: dict[str, Any] = {
    "hash": ["0123abcd"], "recipes": ["name: toy\n"], "trials": [1], "data": {}, "code": {},
    "done": 1, "epochs": 9, "ledgers": [[LINE]],
    "released": {}, "init_seeds": [7], "train_seconds": 0.5, "method": {"values": torch.arange(4.0)},
    "history": [(0, {"accuracy": [0.5]}, {name: [0.0] for name in checkpoint.COUNTS})],
}  # fmt: skip


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(type(error)) as failure:
        checkpoint.save(path, CONTENT | {"done": 4})
    assert getattr(failure.value, "filename", str(path)) == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def rewritten(
    path: Path, change: Callable[[dict[str, Any]], Any] = lambda head: head, state: bytes | None = None
) -> None:
    """Edit a checkpoint as a hand would: its sums stay."""
    with zipfile.ZipFile(path) as file:
        held = {name: file.read(name) for name in file.namelist()}
    head = change(json.loads(held["released.json"]))
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("released.json", json.dumps(head))
        file.writestr("state.pt", held["state.pt"] if state is None else state)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "no head", "not a dict", "other version"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage in ("text", "empty"):
        path.write_text("a text" if damage == "text" else "")
    elif damage == "no head":
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("other", "")
    else:
        rewritten(path, lambda head: [1] if damage == "not a dict" else head | {"version": "0"})
    with pytest.raises(RunError, match=r"(damaged checkpoint|by another version).*remove it and train again"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"done": 2}, {"done": 1.0}, {"ledgers": [[]]}, {"trials": [2]},
        {"more": None}, {"sha256": None}, {"state_sha256": "0" * 64},
    ],
)  # fmt: skip
def test_a_checkpoint_that_was_edited_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    rewritten(path, lambda head: head | changed)
    with pytest.raises(RunError, match=r"changed since it was written\); remove it and train again"):
        checkpoint.load(path)


def test_a_state_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "c", tmp_path / "d"
    checkpoint.save(path, CONTENT)
    checkpoint.save(other, CONTENT | {"method": {"values": torch.arange(4.0) + 1}})
    rewritten(path, state=zipfile.ZipFile(other).read("state.pt"))
    with pytest.raises(RunError, match=r"changed since it was written\); remove it and train again"):
        checkpoint.load(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path, touched = tmp_path / "c", tmp_path / "touched"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (touched,))

    checkpoint.save(path, CONTENT | {"method": {"bomb": Bomb()}})
    with pytest.raises(RunError, match="damaged checkpoint"):
        checkpoint.load(path)
    assert not touched.exists()
