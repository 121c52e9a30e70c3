"""A book's file: what it counts, which edits it notices, and that neither kills nor other processes lose a charge."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.accounting.book_filter import Spending
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import BudgetExceeded, DataError, RunError, UsageError
from dpsgd_cli.results import book as books
from dpsgd_cli.results.book import Book, BookedRun, BookTerms

TERMS = BookTerms({"patients.csv": "ab" * 32}, None, "add-remove", 3.0, 1e-5)
# mu^2 of a book of epsilon 3 at 0.9e-5 is 0.5117 (tests/accounting/test_book_filter.py)
HALF = 0.24
ROOT = Path(__file__).parents[2]


def run(name: str, mu_squared: float, left_out: str = "tested on 20%", trials: int = 1) -> BookedRun:
    release = Release(GaussianSum(mu_squared**-0.5, "add-remove"), trials)
    return BookedRun(name, Spending((release,)), trials, left_out)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    books.create(tmp_path / "a.book", TERMS)
    return tmp_path / "a.book"


def reserve(path: Path, *runs: BookedRun, use_open: bool = False) -> None:
    books.reserve(path, path.parent, runs, use_open, "train")


def spent(path: Path) -> float:
    return sum(price.mu_squared for price in books.read(path).spent)


def test_a_new_book_is_empty_readable_by_its_owner_only_and_never_replaced(path: Path) -> None:
    book = books.read(path)
    assert (book.terms, book.charges, book.left_out) == (TERMS, [], None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="is there already"):
        books.create(path, TERMS)
    other = books.create(path.with_name("b.book"), TERMS)
    assert other.identity != book.identity


def test_all_trials_of_all_runs_are_charged_before_what_would_pass_is_refused(path: Path) -> None:
    reserve(path, run("r1", 0.1, trials=2), run("r2", 0.05))
    assert spent(path) == pytest.approx(0.25, rel=1e-12)
    assert [line["trials"] for line in books.read(path).charges] == [3]
    before = path.read_bytes()
    with pytest.raises(BudgetExceeded, match=r"a\.book: this would pass .* nothing was started"):
        reserve(path, run("r3", 0.27))
    with pytest.raises(BudgetExceeded):
        reserve(path, run("r3", 0.1), run("r4", 0.17))
    assert path.read_bytes() == before
    reserve(path, run("r3", 0.26))
    assert books.read(path).left.mu_squared == pytest.approx(0.5117 - 0.51, abs=1e-4)


def test_the_first_charge_may_fill_the_book_and_no_other_may(path: Path) -> None:
    """mu^2 0.5231 is epsilon 3 at delta 1e-5 itself, above what the filter admits."""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def over(mu: float) -> float:
        delta = norm.cdf(mu / 2 - 3 / mu) - 20.085536923187668 * norm.cdf(-mu / 2 - 3 / mu)
        return float(delta - 1e-5)

    most = float(brentq(over, 0.1, 2, xtol=1e-14)) ** 2
    assert most > books.read(path).terms.limit.mu_squared
    with pytest.raises(BudgetExceeded):
        reserve(path, run("r1", most * (1 + 1e-6)))
    reserve(path, run("r1", most * (1 - 1e-6)))
    left = books.read(path).left
    assert (left.mu_squared, left.leak) == (0, 0)
    with pytest.raises(BudgetExceeded):
        reserve(path, run("r2", 1e-9))
    second = path.with_name("b.book")
    books.create(second, TERMS)
    reserve(second, run("r1", 1e-6))
    with pytest.raises(BudgetExceeded):
        reserve(second, run("r2", most * (1 - 1e-5)))


def test_a_reservation_is_published_once(path: Path) -> None:
    reserve(path, run("r1", 0.1))
    assert list(books.read(path).open(path.parent)) == ["r1"]
    assert books.read(path).open(path.parent / "elsewhere") == {}
    books.release(path, path.parent, ["r1"])
    assert books.read(path).open(path.parent) == {}
    with pytest.raises(RunError, match="published already"):
        books.release(path, path.parent, ["r1"])
    with pytest.raises(RunError, match="published already"):
        books.release(path, path.parent / "elsewhere", ["r1"])


def test_only_what_goes_on_uses_an_open_reservation(path: Path) -> None:
    reserve(path, run("r1", 0.1))
    reserve(path, run("r1", 0.1), run("r2", 0.05), use_open=True)
    assert spent(path) == pytest.approx(0.15, rel=1e-12)
    reserve(path, run("r1", 0.1))
    assert spent(path) == pytest.approx(0.25, rel=1e-12)
    books.release(path, path.parent, ["r1", "r2"])
    reserve(path, run("r1", 0.1), use_open=True)  # the second reservation of it
    assert spent(path) == pytest.approx(0.25, rel=1e-12)
    books.release(path, path.parent, ["r1"])
    reserve(path, run("r1", 0.1), use_open=True)
    assert spent(path) == pytest.approx(0.35, rel=1e-12)


def test_all_runs_leave_out_the_same_records(path: Path) -> None:
    with pytest.raises(UsageError, match="leave out the same records"):
        reserve(path, run("r1", 0.1), run("r2", 0.1, "tested on 30%"))
    reserve(path, run("r1", 0.1))
    with pytest.raises(UsageError, match=r"tested on 20%; tested on 30%"):
        reserve(path, run("r2", 0.1, "tested on 30%"))
    assert spent(path) == pytest.approx(0.1, rel=1e-12)


def _changed(line: str, **values: Any) -> str:
    return json.dumps(json.loads(line) | values)


EDITS: dict[str, Callable[[list[str]], list[str]]] = {
    "terms below the charges": lambda lines: [_changed(lines[0], epsilon=1.0), *lines[1:]],
    "no header": lambda lines: lines[1:],
    "a release twice": lambda lines: [*lines, lines[-1]],
    "no JSON": lambda lines: [*lines[:-1], "{"],
    "a list": lambda lines: [*lines[:-1], "[]"],
    "empty": lambda lines: [],
    "of another format": lambda lines: [_changed(lines[0], format=2), *lines[1:]],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_book_is_refused(path: Path, edit: Callable[[list[str]], list[str]]) -> None:
    reserve(path, run("r1", 0.1))
    reserve(path, run("r2", 0.2))
    books.release(path, path.parent, ["r2"])
    path.write_text("".join(f"{line}\n" for line in edit(path.read_text().splitlines())))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"a\.book"):
        books.read(path)
    with pytest.raises(DataError, match=r"a\.book"):
        reserve(path, run("r3", 1e-6))
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_torn_book_is_refused(path: Path, cut: int) -> None:
    reserve(path, run("r1", 0.1))
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"cut short"):
        books.read(path)


def _forged(path: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    "values",
    [
        {"mu_squared": -0.1},
        {"mu_squared": float("nan")},
        {"mu_squared": float("inf")},
        {"mu_squared": "0"},
        {"mu_squared": 0.6},
        {"leak": 2e-6},
        {"leak": None},
        {"runs": []},
        {"runs": [1]},
        {"kind": "gift"},
        {"left_out": 3},
    ],
    ids=str,
)
def test_impossible_amounts_are_refused(path: Path, values: dict[str, Any]) -> None:
    reserve(path, run("r1", 0.1))
    _forged(path, lambda lines: lines[1].update(values))
    with pytest.raises(DataError, match=r"a\.book"):
        books.read(path)


def test_a_release_without_a_charge_and_a_charge_without_terms_are_refused(path: Path) -> None:
    reserve(path, run("r1", 0.1))
    books.release(path, path.parent, ["r1"])
    kept = path.read_bytes()
    _forged(path, lambda lines: lines[2].update(runs=["r2"]))
    with pytest.raises(DataError, match="none of a book"):
        books.read(path)
    path.write_bytes(kept)
    _forged(path, lambda lines: lines[0].pop("adjacency"))
    with pytest.raises(DataError, match="no header"):
        books.read(path)


def test_an_old_copy_is_a_valid_book_that_has_forgotten(path: Path) -> None:
    """No file can tell that it is old: the page on budgets says so. A result that names a missing charge can."""
    old = path.read_bytes()
    reserve(path, run("r1", 0.1))
    path.write_bytes(old)
    assert books.read(path).charges == []


def test_a_book_has_one_name(path: Path) -> None:
    link = path.with_name("link.book")
    link.symlink_to(path)
    reserve(link, run("r1", 0.1))
    assert link.is_symlink() and spent(path) == pytest.approx(0.1)
    os.link(path, path.with_name("hard.book"))
    with pytest.raises(UsageError, match="several names"):
        reserve(path, run("r2", 0.1))
    with pytest.raises(UsageError, match="no such book"):
        reserve(path.with_name("none.book"), run("r1", 0.1))


PROCESS = """
import os, signal, sys, time
from pathlib import Path
from dpsgd_cli.results import book as books, files
from tests.results.test_book import reserve, run
path, name, moment = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
replace = os.replace
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
def after(*names):
    replace(*names)
    die()
if moment == "locked":
    books._charge = die
elif moment == "slow":
    charge = books._charge
    def later(*given):
        time.sleep(0.3)
        return charge(*given)
    books._charge = later
elif moment == "written":
    os.replace = die
elif moment == "replaced":
    os.replace = after
reserve(path, run(name, float(sys.argv[4])))
if moment == "reserved":
    die()
books.release(path, path.parent, [name])
"""


def start(path: Path, name: str, moment: str, mu_squared: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROCESS, str(path), name, moment, str(mu_squared)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("moment", "charged"), [("locked", False), ("written", False), ("replaced", True), ("reserved", True)]
)
def test_a_process_that_is_killed_leaves_a_whole_book(path: Path, moment: str, charged: bool) -> None:
    """The lock is free again, and what the next one writes removes what was left beside the book."""
    reserve(path, run("r0", 0.1))
    killed = start(path, "r1", moment, 0.2)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert spent(path) == pytest.approx(0.3 if charged else 0.1)
    assert list(books.read(path).open(path.parent)) == (["r0", "r1"] if charged else ["r0"])
    reserve(path, run("r2", 0.05))
    assert spent(path) == pytest.approx(0.35 if charged else 0.15)
    assert [file.name for file in path.parent.iterdir()] == ["a.book"]


def test_of_processes_at_once_as_many_get_in_as_fit(path: Path) -> None:
    started = [start(path, f"r{number}", "slow", HALF) for number in range(5)]
    said = [process.communicate()[1] for process in started]
    ended = [process.returncode for process in started]
    assert sorted(ended) == [0, 0, 1, 1, 1], said
    assert all("BudgetExceeded" in text for text, code in zip(said, ended, strict=True) if code)
    assert spent(path) == pytest.approx(2 * HALF)
    book: Book = books.read(path)
    assert [book.released(line["id"]) for line in book.charges] == [1, 1]


def test_a_lock_on_a_file_that_was_replaced_meanwhile_is_taken_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[bool] = []
    flock = fcntl.flock

    def slow(handle: int, how: int) -> None:
        if not locked:  # another process is quicker
            locked.append(False)
            reserve(path, run("r1", 0.3))
        flock(handle, how)
        locked.append(os.path.samestat(os.fstat(handle), path.stat()))

    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(BudgetExceeded):
        reserve(path, run("r2", 0.3))
    assert locked == [False, True, False, True]
    assert spent(path) == pytest.approx(0.3)


def test_a_charge_is_on_the_disk_before_the_call_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def note_sync(handle: int) -> None:
        fsync(handle)
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")

    def note_replace(*names: Any) -> None:
        replace(*names)
        done.append("replaced")

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_replace)
    reserve(path, run("r1", 0.1))
    assert done == ["file", "replaced", "folder"]
