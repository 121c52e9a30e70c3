"""What a file holds: its SHA-256, and that an answer is used again only while the file is the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.data import fingerprint

OLD = 1_600_000_000 * 10**9


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file last written long ago."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 10))
    os.utime(path, ns=(OLD, OLD))
    return path


def counted(path: Path, question: str = "?") -> tuple[dict[str, Any], int]:
    """The answer, and how often the file was read for it."""
    reads = 0

    def read() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {"size": path.stat().st_size}

    return fingerprint.found(path, question, read), reads


def test_an_answer_is_used_again_while_the_file_is_the_same(file: Path) -> None:
    assert counted(file)[1] == 1
    assert counted(file)[1] == 0
    assert counted(file, "another question")[1] == 1
    before = fingerprint.sha256(file)
    with file.open("r+b") as changed:
        changed.write(b"changed")
    os.utime(file, ns=(OLD, OLD + 1))
    assert counted(file)[1] == 1 and fingerprint.sha256(file) != before


def test_a_file_that_was_just_written_is_read_again(file: Path) -> None:
    os.utime(file)
    assert [counted(file)[1] for _ in range(2)] == [1, 1]
