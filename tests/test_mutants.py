"""The lists of mutants fit the code as it is, and the runner tells a killed mutant from one that survives."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.run import ROOT, read_mutants

LISTS = ROOT / "tests" / "mutants"
EVERY = read_mutants(LISTS)


@cache
def names_in(file: str) -> set[str]:
    """Names of the test functions of a file; empty where there is no such file."""
    path = ROOT / file
    parsed = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in ast.walk(parsed) if isinstance(node, ast.FunctionDef)}


def test_every_change_can_be_made_and_every_test_it_names_exists() -> None:
    """Which fails when the code has moved on: say in the list what stands there now."""
    wrong = [(m.told, reason) for m in EVERY if (reason := m.stale(ROOT)) is not None]
    for mutant in EVERY:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            if not names_in(file) or (name and name.partition("[")[0] not in names_in(file)):
                wrong.append((mutant.told, f"there is no test {test}"))
    assert not wrong


def test_no_change_is_listed_twice() -> None:
    places = [(mutant.file, mutant.replace, mutant.by) for mutant in EVERY]
    assert len(places) == len(set(places)) > 0


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A package of one constant, its test, and a list of mutants."""
    for name, text in {
        "dpsgd_cli/__init__.py": "SCALE = 2.0\nLABEL = 'sum'\n",
        "tests/test_scale.py": (
            "import subprocess, sys\n"
            "import dpsgd_cli\n"
            "def test_scale():\n    assert dpsgd_cli.SCALE == 2.0\n"
            "def test_scale_of_another_process():\n"
            "    code = 'import dpsgd_cli; print(dpsgd_cli.SCALE)'\n"
            "    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd='/')"
            ".stdout == '2.0\\n'\n"
        ),
        "tests/mutants/killed.yaml": (
            "- {file: dpsgd_cli/__init__.py, replace: '2.0', by: '1.0', tests: [tests/test_scale.py::test_scale]}\n"
            "- {file: dpsgd_cli/__init__.py, replace: '2.0', by: '3.0',\n"
            "   tests: [tests/test_scale.py::test_scale_of_another_process]}\n"
        ),
        "tests/mutants/alive.yaml": (
            "- {file: dpsgd_cli/__init__.py, replace: sum, by: mean, tests: [tests/test_scale.py::test_scale]}\n"
        ),
        "tests/mutants/stale.yaml": (
            "- {file: dpsgd_cli/__init__.py, replace: '= ', by: '=', tests: [tests/test_scale.py::test_scale]}\n"
        ),
        "tests/mutants/broken.yaml": (
            "- {file: dpsgd_cli/__init__.py, replace: 'SCALE =', by: 'SCALE (',\n"
            "   tests: [tests/test_scale.py::test_scale]}\n"
        ),
        "tests/mutants/missing.yaml": (
            "- {file: dpsgd_cli/__init__.py, replace: '2.0', by: '4.0', tests: [tests/test_scale.py::test_gone]}\n"
        ),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def judged(tree: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(LISTS / "run.py"), "--root", str(tree), "--workers", "2", *words]
    run = subprocess.run(command, capture_output=True, text=True)
    assert not run.stderr
    return run.returncode, run.stdout


def test_killed_mutants_pass_in_this_process_and_in_those_that_a_test_starts(tree: Path) -> None:
    assert judged(tree, "killed.yaml") == (0, "2 of 2 mutants killed, 0 not\n")
    assert (tree / "dpsgd_cli" / "__init__.py").read_text() == "SCALE = 2.0\nLABEL = 'sum'\n"


def test_what_survives_is_stale_or_breaks_the_package_fails(tree: Path) -> None:
    code, said = judged(tree, "killed.yaml", "alive.yaml", "stale.yaml", "broken.yaml")
    assert code == 1
    assert "SURVIVES dpsgd_cli/__init__.py (alive.yaml)\n    - sum\n    + mean\n" in said
    assert "STALE dpsgd_cli/__init__.py (stale.yaml)" in said
    assert "occurs 2 times, not once" in said
    assert "BROKEN dpsgd_cli/__init__.py (broken.yaml)" in said
    assert said.endswith("2 of 5 mutants killed, 3 not\n")


def test_a_test_that_does_not_exist_fails(tree: Path) -> None:
    code, said = judged(tree, "missing.yaml")
    assert code == 1
    assert "test_gone" in said
