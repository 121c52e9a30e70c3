"""Every command and snippet of the README and of `docs/` is run, in order, in an empty folder, as a new user would;
what they and the map of the house point to exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEED_TRANSFORMERS = ("docs/fine-tuning.md",)
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """`tests.documents --serve`, which reads pages in processes of their own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.documents", "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as started:
        yield started
        assert started.stdin is not None
        started.stdin.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_works_as_written(page: str, server: subprocess.Popen[str], tmp_path: Path) -> None:
    if page in NEED_TRANSFORMERS and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers and peft: pip install 'dpsgd[transformers]'")
    shim = tmp_path / "bin"
    shim.mkdir()
    for name, arguments in (("dpsgd", "-m dpsgd_cli"), ("python", "")):
        (shim / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n', encoding="utf-8")
        (shim / name).chmod(0o755)
    here, said = tmp_path / "here", tmp_path / "said.txt"
    here.mkdir()
    path = f"{shim}{os.pathsep}{os.environ['PATH']}"
    assert server.stdin is not None and server.stdout is not None
    print(json.dumps([str(ROOT / page), str(here), path, str(said)]), file=server.stdin, flush=True)
    commands = int(server.stdout.readline())
    assert commands >= 0, said.read_text(encoding="utf-8")
    if page != "docs/glossary.md":
        assert commands >= 2, "a page without commands is read by nobody"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_points_to_what_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    place = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    # tests/test_site.py follows links to pages that are made with the site
    links = [link for link in links if not link.startswith(("reference/", "gallery/"))]
    named = re.findall(r"`((?:recipes|datasets|benchmarks|docs|tests|dpsgd_cli)/[\w./-]*)`", text)
    assert [link for link in links if not (place / link).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_path_on_the_map_of_the_house_exists_and_every_room_is_on_it() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    named = re.findall(r"`([\w.]+/[\w./]*|[\w.]+\.(?:py|md|toml))`", text)
    assert [name for name in named if not any((ROOT / home / name).exists() for home in ("", "dpsgd_cli"))] == []
    rooms = {f"{path.name}/" for path in (ROOT / "dpsgd_cli").iterdir() if (path / "__init__.py").is_file()}
    assert rooms <= set(named)
