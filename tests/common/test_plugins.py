"""Attributes of a user's Python file, and what is said when there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsgd_cli.common.plugins import load_attribute
from dpsgd_cli.errors import RecipeError


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "own.py").write_text(f"value = {number}\n")
    assert [load_attribute(tmp_path / str(number) / "own.py", "value") for number in (1, 2)] == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "wanted", "message"),
    [
        ("own.py", "build = 1", "biuld", "has no attribute 'biuld'; did you mean build?"),
        ("own.py", "build = 1", "zzz", "has no attribute 'zzz'$"),
        ("own.py", "1 / 0", "build", "running the file failed: ZeroDivisionError: division by zero"),
        ("own.py", "def f(:", "build", "running the file failed: SyntaxError"),
        ("own.py", "import no_such_module_at_all", "build", "running the file failed: ModuleNotFoundError"),
        ("own.txt", "build = 1", "build", "not a Python file"),
    ],
)
def test_says_what_is_wrong(tmp_path: Path, name: str, text: str, wanted: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=message) as raised:
        load_attribute(tmp_path / name, wanted)
    assert str(tmp_path / name) in str(raised.value)
