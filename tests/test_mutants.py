"""The lists of mutants fit the code as it is, and the runner tells a killed mutant from one that survives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.run import ROOT, Mutant, read_mutants

LISTS = ROOT / "tests" / "mutants"


def test_every_change_can_be_made_and_none_is_listed_twice() -> None:
    """Which fails when the code has moved on: say in the list what stands there now."""
    every = read_mutants(ROOT)  # which refuses a test that does not exist
    wrong = [(m.told, reason) for m in every if (reason := m.stale(ROOT)) is not None]
    wrong += [
        (m.told, "no such test file") for m in every for t in m.tests if not (ROOT / t.partition("::")[0]).is_file()
    ]
    assert not wrong
    places = [(mutant.file, mutant.place, mutant.replace, mutant.by) for mutant in every]
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
            "__init__.py:\n  - ['', '2.0', '1.0', test_scale]\n  - ['', '2.0', '3.0', test_scale_of_another_process]\n"
        ),
        "tests/mutants/alive.yaml": "__init__.py:\n  - ['', sum, mean, test_scale]\n",
        "tests/mutants/stale.yaml": "__init__.py:\n  - ['', '= ', '=', test_scale.py]\n",
        "tests/mutants/broken.yaml": "__init__.py:\n  - ['', SCALE =, SCALE (, 'test_scale.py::test_scale']\n",
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("['', x, y]", "needs a place, what stands there, what replaces it and a test"),
        ("['', 2, y, test_x]", "needs a place"),
        ("['', x, y, test_gone]", r"one\.yaml, x\.py: there are 0 tests test_gone, not one"),
    ],
)
def test_a_line_that_is_no_mutant_is_named(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / "one.yaml").write_text(f"x.py:\n  - {line}\n")
    with pytest.raises(ValueError, match=said):
        read_mutants(tmp_path)


def test_a_place_is_changed_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def f(self):\n        return 1\n\n\ndef f():\n    return 1\n")
    Mutant("a.yaml", "a.py", "A.f", "1", "2", ()).apply(tmp_path)
    assert (
        tmp_path / "a.py"
    ).read_text() == "class A:\n    def f(self):\n        return 2\n\n\ndef f():\n    return 1\n"
    assert Mutant("a.yaml", "a.py", "A.g", "1", "2", ()).stale(tmp_path) == "the place is not there, or there twice"
    assert Mutant("a.yaml", "gone.py", "", "x", "y", ()).stale(tmp_path) == "there is no such file"
