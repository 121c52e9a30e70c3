"""Checkpoints: replaced whole, kept when a new one fails, for their owner only, and checked before use."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.errors import RunError
from dpsgd_cli.results import checkpoint

CONTENT = checkpoint.sealed(
    {"done": 3, "method": {"values": torch.arange(4.0)}, "history": [(0, {"accuracy": [0.5]}, {})]}
)


def test_a_checkpoint_is_read_back(tmp_path: Path) -> None:
    path = checkpoint.place(tmp_path / "toy-1")
    assert checkpoint.load(path) is None
    checkpoint.save(path, CONTENT)
    found = checkpoint.load(path)
    assert found is not None
    assert (found["done"], found["history"]) == (3, [(0, {"accuracy": [0.5]}, {})])
    torch.testing.assert_close(found["method"]["values"], torch.arange(4.0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_were_cut_from_an_array_are_sealed_as_what_they_are() -> None:
    none, one = torch.from_numpy(np.zeros((5, 2), np.int64)[[]][:, 0]), torch.tensor(7).expand(1)[::1]
    assert (none.stride(), one.stride()) == ((0,), (0,))
    assert checkpoint.sealed({"rows": none})["sha256"] == checkpoint.sealed({"rows": torch.zeros(0).long()})["sha256"]
    assert checkpoint.sealed({"rows": one})["sha256"] == checkpoint.sealed({"rows": torch.tensor([7])})["sha256"]


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
        checkpoint.save(path, checkpoint.sealed({"done": 4}))
    assert getattr(failure.value, "filename", str(path)) == str(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_without_room_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as failure:
        checkpoint.save(tmp_path / "gone" / "c", CONTENT)
    assert failure.value.filename == str(tmp_path / "gone" / "c")


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "not a dict", "other version"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, CONTENT)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    elif damage in ("text", "empty"):
        path.write_text("a text" if damage == "text" else "")
    else:
        torch.save([1] if damage == "not a dict" else {"version": "0"}, path)
    with pytest.raises(RunError, match=r"(damaged checkpoint|written by another version).*remove it and train again"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"done": 2},
        {"done": 3.0},
        {"method": {"values": torch.arange(4.0) + 1}},
        {"method": {"values": torch.arange(4.0).reshape(2, 2)}},
        {"history": []},
        {"more": None},
        {"sha256": None},
    ],
)
def test_a_checkpoint_that_was_edited_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, {**CONTENT, **changed})
    with pytest.raises(RunError, match=r"changed since it was written\); remove it and train again"):
        checkpoint.load(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    path, touched = tmp_path / "c", tmp_path / "touched"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (touched,))

    torch.save({"version": checkpoint.VERSION, "bomb": Bomb()}, path)
    with pytest.raises(RunError, match="damaged checkpoint"):
        checkpoint.load(path)
    assert not touched.exists()
