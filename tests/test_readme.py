"""Every command of the README is run, in order, in an empty folder, as a new user would; what it and the map of the
house point to exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)

# These make virtual environments or install packages: `make check` itself is the test of the first, and
# tests/test_packaging.py of the second.
INSTALLERS = ("make train", "pip install -c constraints.txt .")


def commands() -> list[str]:
    """Shell commands in order; one that spans lines inside quotes is one command."""
    found = []
    for language, text in BLOCKS:
        if language == "sh":
            pending = ""
            for line in text.splitlines():
                pending = f"{pending}\n{line}" if pending else line
                if pending.count('"') % 2 == 0 and not pending.endswith("\\"):
                    found.append(re.sub(r"\s{2,}#.*$", "", pending))
                    pending = ""
    return found


def test_the_readme_is_at_most_a_page_and_a_half() -> None:
    assert len(README.splitlines()) <= 115


def test_installers_are_known_commands() -> None:
    assert [command for command in commands() if command in INSTALLERS] == list(INSTALLERS)
    assert re.search(r"^train: ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_every_other_command_works_as_written(tmp_path: Path) -> None:
    for language, text in BLOCKS:
        if language == "yaml":
            header = re.match(r"# (\S+\.yaml):", text)
            assert header is not None, "a YAML block of the README must begin with its file name"
            (tmp_path / header[1]).write_text(text, encoding="utf-8")
    shim = tmp_path / "bin"
    shim.mkdir()
    for name, arguments in (("dpsgd", "-m dpsgd_cli"), ("python", "")):
        (shim / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n', encoding="utf-8")
        (shim / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{shim}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = [command for command in commands() if command not in INSTALLERS]
    for command in ran:
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert list(tmp_path.glob("results/patients-*/result.json"))


@pytest.mark.parametrize("name", ["recipes/", "datasets/", "benchmarks/README.md"])
def test_the_readme_points_to_what_exists(name: str) -> None:
    assert f"`{name}`" in README
    assert (ROOT / name).exists()


def test_every_path_on_the_map_of_the_house_exists_and_every_room_is_on_it() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    named = re.findall(r"`([\w.]+/[\w./]*|[\w.]+\.(?:py|md|toml))`", text)
    assert [name for name in named if not any((ROOT / home / name).exists() for home in ("", "dpsgd_cli"))] == []
    rooms = {f"{path.name}/" for path in (ROOT / "dpsgd_cli").iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(named)
