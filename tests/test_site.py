"""The site: it builds without a warning, every link of every page leads somewhere, and nothing comes from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from dpsgd_cli.common.sections import Section
from dpsgd_cli.main import COMMANDS
from dpsgd_cli.recipe.check import json_schema
from dpsgd_cli.recipe.schema import Recipe

pytest.importorskip("mkdocs", reason="the site needs the packages of `pip install '.[docs]'` (make venv)")

from docs.generate import reference
from docs.generate.gallery import EXHIBITS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, with stand-ins for what the gallery's commands make (`make docs` runs them)."""
    made = tmp_path_factory.mktemp("gallery")
    for exhibit in EXHIBITS:
        file = made / exhibit.made.replace("*", "x")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("<svg></svg>" if file.suffix != ".md" else "# An audit\n")
    built = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "DPSGD_GALLERY": str(made), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return built


def pointed_to(page: Path) -> list[tuple[str, Path, str]]:
    """Return (link, file, fragment) of every link, picture and script of a page within the site."""
    found = []
    for link in re.findall(r"(?:href|src)=\"?([^\" >]+)", re.sub(r"<code>.*?</code>", "", page.read_text("utf-8"))):
        if re.match(r"(https?|mailto|data|javascript):", link):
            continue
        path, _, fragment = link.partition("#")
        found.append((link, (page.parent / unquote(path.partition("?")[0])).resolve() if path else page, fragment))
    return found


def test_every_link_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    ids = {page: set(re.findall(r"\bid=\"?([^\" >]+)", page.read_text("utf-8"))) for page in site.rglob("*.html")}
    broken, count = [], 0
    for page in ids:
        if page.name == "404.html" or (page.parent.name == "gallery" and page.name not in ("index.html", "audit.html")):
            continue
        for link, file, fragment in pointed_to(page):
            count += 1
            file = file / "index.html" if file.is_dir() else file
            if not file.is_file() or (fragment and file in ids and unquote(fragment) not in ids[file] | {"__skip"}):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == [] and count > 1000


def test_every_page_of_docs_is_in_the_navigation_and_every_command_in_the_reference(site: Path) -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"[\w./-]+\.md\b", text))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - listed == set()
    assert isinstance(yaml.safe_load(text)["nav"], list)
    commands = (site / "reference" / "commands.html").read_text("utf-8")
    assert [name for name in COMMANDS if f'id="dpsgd-{name}"' not in commands] == []


def test_every_key_has_a_meaning_a_type_a_default_a_bearing_on_the_guarantee_and_an_example() -> None:
    """Each section of the schema has a table, and each key a row of it in which no cell is empty."""
    schema = json_schema(Recipe)
    wanted = {
        (title, key) for title, section in [("Recipe", schema), *schema["$defs"].items()]
        for key in section.get("properties", {})
    }  # fmt: skip
    told = reference.told()
    assert wanted - set(told) == set()
    bare = [(key, row) for key, row in told.items() if len(row) != 6 or "" in row]
    assert bare == [] and len(wanted) > 250
    assert [key for key, row in told.items() if row[-1].endswith(": x`")] == [], "a text without an example"


def every_section(section: type[Section]) -> Iterator[type[Section]]:
    """Yield a class and all its subclasses."""
    yield section
    for inner in section.__subclasses__():
        yield from every_section(inner)
