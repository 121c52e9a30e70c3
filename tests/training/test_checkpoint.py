"""Checkpoints: replaced whole, kept when a new one fails, for their owner only, and checked before use."""

from __future__ import annotations

import errno
import hashlib
import io
import os
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


def state_of(content: dict[str, Any]) -> bytes:
    """Return a state as `torch.save` writes it, and as a hand may put it into a checkpoint."""
    held = io.BytesIO()
    torch.save(content, held)
    return held.getvalue()


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "no state", "other version", "of older versions"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    version, digest, state = path.read_bytes().split(b"\n", 2)
    path.write_bytes(
        {
            "cut": path.read_bytes()[:-200],
            "text": b"a text",
            "empty": b"",
            "no state": b"\n".join([version, hashlib.sha256(b"").hexdigest().encode(), b""]),
            "other version": b"\n".join([b"checkpoint 0", digest, state]),
            "of older versions": state,
        }[damage]
    )
    with pytest.raises(RunError, match=r"(damaged checkpoint|by another version).*remove it and train again"):
        checkpoint.load(path)


@pytest.mark.parametrize("changed", [{"done": 2}, {"ledgers": [[]]}, {"method": {"values": torch.arange(4.0) + 1}}])
def test_a_checkpoint_that_was_edited_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    version, digest, _ = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([version, digest, state_of(CONTENT | changed)]))
    with pytest.raises(RunError, match=r"changed since it was written\); remove it and train again"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"done": 2}, {"done": 1.0}, {"ledgers": [[], []]}, {"trials": [2]}, {"more": None}, {"recipes": []},
        {"released": {"pca": [1.0]}}, {"history": [(0, {}, {"loss": [0.0]})]}, {"init_seeds": [7, 8]},
    ],
)  # fmt: skip
def test_a_checkpoint_that_is_of_no_run_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT | changed)
    with pytest.raises(RunError, match=r"damaged checkpoint \(.*\); remove it and train again"):
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
