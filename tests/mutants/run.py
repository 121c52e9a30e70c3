"""Changes of single privacy-critical places, each of which its tests must notice: `make mutants`.

Every `*.yaml` beside this file holds the mutants of a room of `dpsgd_cli/`, by file, one a line:

    noise/run.py:
      - [NoiseSource.draw, what stands there, what a careless hand might write, test_that_fails_then, ...]

The place is a function or class, or "" for a whole file; what stands there occurs exactly once in it. A test is named
by its function, and by its file too (`noise/test_run.py::test_name`) where several have that name, or by a file.

The tests run on an unchanged copy of the tree, where all must pass, and then on copies with one change each, where at
least one of those named must fail. What passes survives. A copy is a process that was forked when everything but the
package was imported, which saves two seconds each.

Not here: mutants (the lists), whether lists are well-formed (`tests/test_mutants.py` looks on every run).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
_PACKAGE = "dpsgd_cli"
_WARM = ("numpy", "pandas", "scipy.optimize", "scipy.stats", "sklearn", "torch", "pydantic", "click", "hypothesis")
_FEW = 5  # take less time than everything that they might import
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
# plain: to explain how two large arrays differ takes minutes
_QUICKLY = ("-x", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--assert=plain", "--tb=short", "-m", "")
_LIMIT_SECONDS = 600.0
_MOST_MEMORY = 8 << 30
_ALL_PASSED, _SOME_FAILED = 0, 1  # of pytest; everything else means that no test was judged


@dataclass(frozen=True)
class Mutant:
    """One change of one place of a file, and the tests that must notice it. `source` is the list that it stands in."""

    source: str
    file: str
    place: str
    replace: str
    by: str
    tests: tuple[str, ...]

    @property
    def told(self) -> str:
        place = f"{self.file}::{self.place}" if self.place else self.file
        return f"{place} ({self.source})\n    - {_indented(self.replace)}\n    + {_indented(self.by)}"

    def stale(self, root: Path) -> str | None:
        """Why the change cannot be made in the tree `root`; None where it can."""
        if not (root / self.file).is_file():
            return "there is no such file"
        parts = self._parts(root)
        if parts is None:
            return "the place is not there, or there twice"
        found = parts[1].count(self.replace)
        if found != 1:
            return f"what it replaces occurs {found} times, not once"
        return "it changes nothing" if self.replace == self.by else None

    def apply(self, root: Path) -> None:
        before, place, after = self._parts(root) or ("", "", "")
        (root / self.file).write_text(before + place.replace(self.replace, self.by) + after, encoding="utf-8")

    def _parts(self, root: Path) -> tuple[str, str, str] | None:
        """The text before the place, of it, and after it; None where it is not there once."""
        text = (root / self.file).read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        spans = _places(text).get(self.place, ())
        if len(spans) != 1:
            return None
        first, last = spans[0]
        return "".join(lines[: first - 1]), "".join(lines[first - 1 : last]), "".join(lines[last:])


@cache
def _places(text: str) -> dict[str, list[tuple[int, int]]]:
    """First and last line, decorators included, of what each dotted name stands for; "" is all."""
    found = defaultdict[str, list[tuple[int, int]]](list, {"": [(1, text.count("\n") + 1)]})

    def look(tree: ast.AST, within: str) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min(part.lineno for part in (node, *node.decorator_list))
                found[within + node.name].append((first, node.end_lineno or first))
                look(node, f"{within}{node.name}.")
            else:
                look(node, within)

    look(ast.parse(text), "")
    return found


@dataclass(frozen=True)
class Outcome:
    """How pytest ended (its exit code, negative for a signal, None for the time limit), and what it printed."""

    code: int | None
    output: str


def read_mutants(root: Path) -> list[Mutant]:
    """Every mutant of the lists of `root`; ValueError for a line that is none or names no test."""
    files = defaultdict[str, list[str]](list)
    for path in sorted((root / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                files[node.name].append(path.relative_to(root).as_posix())

    def test(name: str) -> str:
        file, _, function = name.rpartition("::") if ".py::" in name else ("", "", name)
        if function.endswith(".py"):
            return f"tests/{function}"
        found = [path for path in files[function.partition("[")[0]] if not file or path == f"tests/{file}"]
        if len(found) != 1:
            raise ValueError(f"there are {len(found)} tests {name}, not one")
        return f"{found[0]}::{function}"

    found = []
    for path in sorted((root / "tests" / "mutants").glob("*.yaml")):
        for file, lines in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            for line in lines:
                if len(line) < 4 or not all(isinstance(part, str) for part in line):
                    raise ValueError(
                        f"{path.name}: {line!r} needs a place, what stands there, what replaces it and a test"
                    )
                place, replace, by, *tests = line
                try:
                    found.append(Mutant(path.name, f"{_PACKAGE}/{file}", place, replace, by, tuple(map(test, tests))))
                except ValueError as error:
                    raise ValueError(f"{path.name}, {file}: {error}") from None
    return found


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n      ")


class Copies:
    """Tests in forked processes, one to a copy of the tree, as many at once as `workers`."""

    def __init__(self, root: Path, folder: Path, workers: int) -> None:
        self._free: list[Path] = []
        for number in range(workers):
            copy = folder / str(number) / "tree"
            shutil.copytree(root, copy, ignore=_LEFT_OUT)
            # by content: a change within one second that keeps the size would not show in the time of a file
            compiled = "import compileall, py_compile as p, sys; compileall.compile_dir(sys.argv[1], quiet=1,"
            compiled += " invalidation_mode=p.PycInvalidationMode.CHECKED_HASH)"
            subprocess.run([sys.executable, "-c", compiled, str(copy)], check=True)
            _check_imported(copy)
            self._free.append(copy)
        self._running: dict[int, tuple[int, Path, Mutant | None, float]] = {}

    def run(self, jobs: Sequence[tuple[Mutant | None, Sequence[str]]], done: Callable[[int, Outcome], None]) -> None:
        """The tests of every job on a copy with its mutant; `done` is told of each, in whatever order they end."""
        waiting = list(enumerate(jobs))
        while waiting or self._running:
            while waiting and self._free:
                number, (mutant, tests) = waiting.pop(0)
                self._begin(number, mutant, tests)
            for pid in list(self._running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    done(*self._end(pid, os.waitstatus_to_exitcode(status)))
                elif time.monotonic() > self._running[pid][3]:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    done(*self._end(pid, None))
            time.sleep(0.05)

    def _begin(self, number: int, mutant: Mutant | None, tests: Sequence[str]) -> None:
        copy = self._free.pop()
        kept = None if mutant is None else (copy / mutant.file).read_bytes()
        if mutant is not None and kept is not None:
            (copy.parent / "kept").write_bytes(kept)
            mutant.apply(copy)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _test(copy, [*_QUICKLY, *tests])
        self._running[pid] = (number, copy, mutant, time.monotonic() + _LIMIT_SECONDS * (1 if mutant else 6))

    def _end(self, pid: int, code: int | None) -> tuple[int, Outcome]:
        number, copy, mutant, _ = self._running.pop(pid)
        if mutant is not None:
            shutil.move(copy.parent / "kept", copy / mutant.file)
        self._free.append(copy)
        return number, Outcome(code, (copy.parent / "output").read_text(encoding="utf-8", errors="replace"))


def _environment(copy: Path) -> dict[str, str]:
    """What processes that a test starts go by, too."""
    return {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "CI": "1"}


def _check_imported(copy: Path) -> None:
    """Nothing would be tested if a process that a test starts found the package elsewhere."""
    code = f"import {_PACKAGE}; print({_PACKAGE}.__file__)"
    environment = os.environ | _environment(copy)
    run = subprocess.run([sys.executable, "-c", code], cwd="/", env=environment, capture_output=True, text=True)
    if not run.stdout.startswith(str(copy)):
        raise RuntimeError(f"{_PACKAGE} is imported from {run.stdout.strip() or run.stderr}, not from {copy}")


def _test(copy: Path, arguments: list[str]) -> None:
    """Run pytest in this process, which was forked for it, and end."""
    code = -1
    try:
        os.setsid()
        with open(copy.parent / "output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        os.chdir(copy)
        os.environ.update(_environment(copy))
        sys.dont_write_bytecode = True
        # a changed loop may never end, and hold more and more
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, resource.RLIM_INFINITY))
        sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
        import pytest

        package = importlib.import_module(_PACKAGE)
        assert str(package.__file__).startswith(str(copy)), f"{package.__file__} is not in {copy}"
        code = int(pytest.main(arguments))
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
        import traceback

        traceback.print_exc()
        code = 3
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(text: str) -> None:
    print(text, flush=True)


def judge(mutants: Sequence[Mutant], root: Path, workers: int, tell: Callable[[str], None] = _say) -> int:
    """How many mutants survive, are stale, or name a test that does not pass without them; each is told."""
    bad = 0
    usable = []
    for mutant in mutants:
        reason = mutant.stale(root)
        if reason is None:
            usable.append(mutant)
        else:
            bad += 1
            tell(f"STALE {mutant.told}\n    {reason}")

    def look(number: int, outcome: Outcome) -> None:
        nonlocal bad
        verdict = _verdict(outcome)
        if verdict is not None:
            bad += 1
            tell(f"{verdict[0]} {usable[number].told}\n    {verdict[1]}: {', '.join(usable[number].tests)}")

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = Copies(root, Path(folder).resolve(), workers)
        if not _unchanged_pass(copies, sorted({test for mutant in usable for test in mutant.tests}), workers, tell):
            return bad + 1
        copies.run([(mutant, mutant.tests) for mutant in usable], look)
    tell(f"{len(mutants) - bad} of {len(mutants)} mutants killed, {bad} not")
    return bad


def _unchanged_pass(copies: Copies, tests: list[str], workers: int, tell: Callable[[str], None]) -> bool:
    """Whether every test passes, none of them skipped, on the tree as it is."""
    parts = [part for part in (tests[first::workers] for first in range(workers)) if part]
    good = True

    def look(number: int, outcome: Outcome) -> None:
        nonlocal good
        if outcome.code != _ALL_PASSED or " skipped" in outcome.output.rpartition("\n")[0].rpartition("\n")[2]:
            good = False
            tell(f"BROKEN without any change, tests are missing, skipped or fail:\n{outcome.output[-4000:]}")

    copies.run([(None, part) for part in parts], look)
    return good


def _verdict(outcome: Outcome) -> tuple[str, str] | None:
    """What is wrong with a mutant that its tests ended with so; None where it was killed."""
    if outcome.code == _SOME_FAILED:
        return None
    if outcome.code == _ALL_PASSED:
        return "SURVIVES", "no test fails"
    if outcome.code is None:
        return "ENDLESS", f"not over after {_LIMIT_SECONDS:g} s"
    return "BROKEN", f"no test was judged (pytest ended with {outcome.code}; {outcome.output.strip()[-500:]!r})"


def _warm_up(modules: Iterable[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    assert _PACKAGE not in sys.modules


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Change privacy-critical places one by one; the tests must notice.")
    parser.add_argument("words", nargs="*", help="only mutants whose list, file or change contain one of these")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--root", type=Path, default=ROOT, help="another tree with lists in its tests/mutants")
    chosen = parser.parse_args(arguments)
    mutants = read_mutants(chosen.root)
    if chosen.words:
        mutants = [m for m in mutants if any(w in f"{m.source} {m.told}" for w in chosen.words)]
    if not mutants:
        print("no mutant of that name", file=sys.stderr)
        return 1
    if len(mutants) > _FEW:
        _warm_up(_WARM)
    return 1 if judge(mutants, chosen.root, max(1, min(chosen.workers, len(mutants)))) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    sys.exit(main())
