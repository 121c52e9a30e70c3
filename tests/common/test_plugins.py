"""Attributes of a user's Python file, and what is said when there are none."""

from __future__ import annotations

from pathlib import Path

from dpsgd_cli.common.plugins import load_attribute


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(f"value = {number}\n")
    assert [load_attribute(tmp_path / str(number) / "own.py", "value") for number in (1, 2)] == [1, 2]
