"""A book: the budget of one table, and everything that was spent of it, over all runs that charge it.

The file has one JSON object a line. The first line states the terms: the SHA-256 of the table's files, the unit of
privacy, the adjacency, epsilon and delta. Then follow charges and releases, in the order in which they were made; lines
are only ever added, each with a random `id`, by which results and releases name it. A file with a line that is none of
a book, or that ends within a line, is refused. A book is no protection against its owner: somebody who edits it can
remove charges, and an old copy is a valid book, which has forgotten what was spent since.

A charge is made before its runs start. It reserves their whole price and names each run: the folder and name of its
result. A release is noted before a result is published. It uses up one reservation of that run, so each reservation is
published at most once. Nothing is given back: a run that was killed, stopped early or refused later stays charged.

Guarantee: if every run on the table charges its book (`training/charging.py`), everything published of the table is
(epsilon, delta)-DP under the terms' adjacency and unit, apart from the records that no statement protects (test
records). `accounting/book_filter.py` has the proof, also for runs that were chosen after seeing earlier ones.

Several processes may charge a book at once. Each holds a lock (`flock`) on the file from reading to replacing it. A
new version is written beside the book, forced to disk and renamed. So a process that is killed at any moment leaves the
old or the new version. It has released nothing that the version on disk does not contain.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from dpsgd_cli import __version__
from dpsgd_cli.accounting import book_filter
from dpsgd_cli.accounting.adjacency import Adjacency, adjacency_label
from dpsgd_cli.accounting.book_filter import Price, Spending
from dpsgd_cli.accounting.mechanism import to_record
from dpsgd_cli.common.package_files import irregularity
from dpsgd_cli.common.text_format import count, epsilon_text, listed
from dpsgd_cli.errors import BudgetExceeded, DataError, RunError, UsageError
from dpsgd_cli.results.files import remove, write_whole

FORMAT = 1
_MOST_BYTES = 1 << 28
_MOST_NAMES = 4
_RESTORE = "restore the newest copy that you have, and charge what was released since; or start a new table"
Line = dict[str, Any]


@dataclass(frozen=True)
class BookTerms:
    """Terms of a book, fixed when it is created.

    `data`: SHA-256 by name of each file of the table. `unit`: the column that names users; None for single records.
    """

    data: Mapping[str, str]
    unit: str | None
    adjacency: Adjacency
    epsilon: float
    delta: float

    @property
    def limit(self) -> Price:
        return book_filter.limits(self.epsilon, self.delta)

    @property
    def protects(self) -> str:
        """The adjacency and the unit in words."""
        unit = None if self.unit is None else {"column": self.unit}
        return adjacency_label(self.adjacency, unit)


@dataclass(frozen=True)
class BookedRun:
    """A run that is to be charged: what it may release, in how many trials, and the records that it leaves out.

    `name` is that of its result in its folder; a run that is resumed has the name that was charged.
    """

    name: str
    spending: Spending
    trials: int
    left_out: str


@dataclass(frozen=True)
class Book:
    """A book that was read and checked: its header, charges and releases."""

    path: Path
    terms: BookTerms
    lines: tuple[Line, ...]

    @property
    def identity(self) -> str:
        """The header's id, which names this book."""
        identity: str = self.lines[0]["id"]
        return identity

    @property
    def charges(self) -> list[Line]:
        return [line for line in self.lines if line["kind"] == "charge"]

    @property
    def spent(self) -> list[Price]:
        """The price of each charge."""
        return [Price(line["mu_squared"], line["leak"]) for line in self.charges]

    @property
    def left(self) -> Price:
        return book_filter.left(self.terms.limit, self.spent)

    @property
    def left_out(self) -> str | None:
        """The records that all runs leave out; None before the first charge."""
        return self.charges[0]["left_out"] if self.charges else None

    def open(self, place: Path) -> dict[str, list[str]]:
        """Return the ids of charges by name of each run in the folder `place` that they still allow to publish."""
        here = str(place.resolve())
        return {name: own for (folder, name), own in self._open.items() if folder == here and own}

    @cached_property
    def _open(self) -> dict[tuple[str, str], list[str]]:
        found: dict[tuple[str, str], list[str]] = {}
        for line in self.lines[1:]:
            for name in line["runs"]:
                if line["kind"] == "charge":
                    found.setdefault((line["place"], name), []).append(line["id"])
                else:
                    found[line["place"], name].remove(line["of"])
        return found

    def released(self, charge: str) -> int:
        """Return how many runs of the charge with this id were published."""
        return sum(line.get("of") == charge for line in self.lines)


def create(path: Path, terms: BookTerms) -> Book:
    """Write a new book, readable by its owner only. Raises UsageError if there is a file of that name."""
    header = {"kind": "header", "format": FORMAT, **_named(), **asdict(terms)}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(path, f"{json.dumps(header)}\n", owner_only=True, replace=False)
    except FileExistsError:
        raise UsageError(f"{path}: is there already; a table has one book, so use it, or choose another name") from None
    _synchronise_folder(path)
    return read(path)


def read(path: Path) -> Book:
    """Return the book at `path`. Raises DataError if it is no book, or ends within a line."""
    if (why := irregularity(path)) is not None:
        raise DataError(f"{path}: {why}")
    _check_exists(path)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: larger than any book")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read the book: {error}") from None
    return _checked(path, text)


def reserve(path: Path, place: Path, runs: Sequence[BookedRun], use_open: bool, kind: str) -> None:
    """Charge the book for `runs`, whose results will be in the folder `place`, all or none.

    With `use_open`, a run that an earlier charge still allows to publish is not charged again: it is that run that goes
    on. `kind` says in the book what was started. When this returns, the charge is on the disk. Raises BudgetExceeded if
    it does not fit, UsageError if the runs leave out other records than earlier ones, and DataError for a damaged book.
    """
    with _locked(path) as book:
        known = set(book.open(place)) if use_open else set()
        new = [run for run in runs if run.name not in known]
        ways = dict.fromkeys([*([] if book.left_out is None else [book.left_out]), *(run.left_out for run in new)])
        if len(ways) > 1:
            raise UsageError(
                f"{path}: runs of one book leave out the same records, and these do not: {'; '.join(ways)}. What one"
                " measures without noise, another would train on; give all the same test and validation records"
            )
        if new:
            _append(book, _charge(book, place, new, kind))


def _charge(book: Book, place: Path, runs: Sequence[BookedRun], kind: str) -> Line:
    spending = sum((run.spending for run in runs), Spending())
    alone, price = spending.epsilon(book.terms.delta), spending.price(book.left.leak)
    limit = book.terms.limit
    if not book_filter.fits(limit, book.spent, price):
        if book.charges or not alone <= book.terms.epsilon:
            raise BudgetExceeded(_too_much(book, price, alone))
        price = limit
    return {
        "kind": "charge",
        "what": kind,
        **_named(),
        "version": __version__,
        "place": str(place.resolve()),
        "runs": [run.name for run in runs],
        "trials": sum(run.trials for run in runs),
        "left_out": runs[0].left_out,
        "epsilon": alone if math.isfinite(alone) else None,
        **asdict(price),
        "releases": [to_record(release) for release in (*spending.releases, *spending.held_out)],
    }


def _too_much(book: Book, price: Price, alone: float) -> str:
    terms, left = book.terms, book.left
    next_run = epsilon_text(book_filter.epsilon_of_next(left.mu_squared, terms.delta))
    needed = "more than can be bounded" if math.isinf(price.mu_squared) else f"mu^2 {price.mu_squared:.6g}"
    return (
        f"{book.path}: this would pass the book's budget, epsilon {epsilon_text(terms.epsilon)} at delta"
        f" {terms.delta:g}, so nothing was started. It needs {needed} and leak {price.leak:.3g} (by itself epsilon"
        f" {epsilon_text(alone)}); {left.mu_squared:.6g} and {left.leak:.3g} are left, one run of epsilon {next_run}"
        f" with full or shuffled batches. Lower privacy.budget, repeats, or the number of cells"
    )


def release(path: Path, place: Path, names: Sequence[str]) -> None:
    """Note that the runs called `names` in the folder `place` are about to be published: all or none.

    Raises RunError if no charge allows that: another process published the run in the meantime.
    """
    with _locked(path) as book:
        allowed = book.open(place)
        gone = [name for name in names if name not in allowed]
        if gone:
            raise RunError(
                f"{book.path}: what was charged for {listed(gone)} was published already, so it is not published again;"
                " train it again, which is charged again"
            )
        for name in names:
            line = {"kind": "release", **_named(), "place": str(place.resolve())}
            book = _append(book, line | {"runs": [name], "of": allowed[name][0]})


def named(path: Path, place: Path, name: str) -> dict[str, str | None]:
    """Return what a result says of its charge: the ids of the book and of the charge that allows to publish it."""
    book = read(path)
    return {"book": book.identity, "charge": book.open(place).get(name, [None])[0]}


def document(book: Book) -> dict[str, Any]:
    """Return the terms, the charges and what is left, as JSON values."""
    left, delta = book.left, book.terms.delta
    charges = [line | {"published": book.released(line["id"])} for line in book.charges]
    return {
        "book": book.identity,
        "last": book.lines[-1]["id"],
        **asdict(book.terms),
        "left_out": book.left_out,
        "limit": asdict(book.terms.limit),
        "left": asdict(left),
        "epsilon_of_next": book_filter.epsilon_of_next(left.mu_squared, delta) if charges else book.terms.epsilon,
        "epsilon_of_ten": book_filter.epsilon_of_next(left.mu_squared, delta, 10),
        "charges": charges,
    }


def lines_of(book: Book) -> list[str]:
    """Return what was spent, by which runs, and what is left, for a person."""
    terms, limit = book.terms, book.terms.limit
    said = [
        f"{book.path}: epsilon {epsilon_text(terms.epsilon)} at delta {terms.delta:g}, {terms.protects}",
        *(f"  table      {name}, SHA-256 {found[:16]}..." for name, found in terms.data.items()),
        f"  held out   {book.left_out or 'not yet fixed: the first run fixes it for all runs'}",
        f"  book       {book.identity}, last entry {book.lines[-1]['id']}",
    ]
    for line in book.charges:
        share, epsilon = line["mu_squared"] / limit.mu_squared, line["epsilon"]
        alone = "no epsilon alone" if epsilon is None else f"alone epsilon {epsilon_text(epsilon)}"
        done = f"{book.released(line['id'])} of {len(line['runs'])} published"
        names = [name.partition(":")[0] for name in line["runs"]]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        runs = f"{', '.join(names[:_MOST_NAMES])}{more}"
        begin = f"  {line['time'][:16]}  {line['what']:<7} {runs}, {count(line['trials'], 'trial')}"
        said.append(f"{begin}: {alone}, {share:.1%} of the budget; {done}")
    mu_squared = math.fsum(one.mu_squared for one in book.spent)
    leak = math.fsum(one.leak for one in book.spent)
    told = document(book)
    one, ten = epsilon_text(told["epsilon_of_next"]), epsilon_text(told["epsilon_of_ten"])
    return [
        *said,
        f"  spent      {mu_squared / limit.mu_squared:.1%} of the budget (mu^2 {mu_squared:.6g} of"
        f" {limit.mu_squared:.6g}), {leak / limit.leak:.1%} of what runs may use of delta",
        f"  left       one run of epsilon {one}, or ten of epsilon {ten} each, at delta {terms.delta:g} with full or"
        " shuffled batches; runs with sampled batches cost more than their epsilon",
    ]


def _append(book: Book, line: Line) -> Book:
    """Add a line and replace the file; return the new book. The caller holds the lock."""
    content = "".join(f"{json.dumps(one)}\n" for one in (*book.lines, line))
    remove(book.path)  # what killed processes left
    write_whole(book.path, content, owner_only=True)
    _synchronise_folder(book.path)
    return _checked(book.path, content)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[Book]:
    """Read the book under a lock that no other process holds. A process that ends in any way gives its lock back."""
    try:
        import fcntl
    except ImportError:
        raise UsageError("books need file locks (fcntl), which this system does not have") from None
    _check_exists(path)
    place = path.resolve()
    while True:
        handle = os.open(place, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            status = os.fstat(handle)
            if not os.path.samestat(status, os.stat(place)):
                continue  # replaced while this process waited
            if status.st_nlink > 1:
                raise UsageError(f"{path}: has several names (hard links); under all but one it would stay as it is")
            yield read(place)
            return
        finally:
            os.close(handle)


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise UsageError(f"{path}: no such book; `dpsgd budget create` makes one")


def _synchronise_folder(path: Path) -> None:
    handle = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checked(path: Path, text: str) -> Book:
    *texts, rest = text.split("\n")
    if rest:
        raise DataError(f"{path}: ends within a line; the book was cut short: {_RESTORE}")
    lines = [_line(path, number, own) for number, own in enumerate(texts, start=1)]
    terms = _terms(path, lines[0] if lines else {})
    book = Book(path, terms, tuple(lines))
    try:
        for line in book.lines[1:]:
            _check_line(line)
        whole = book._open is not None and book_filter.fits(terms.limit, book.spent, Price(0.0, 0.0))
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: a line is none of a book ({type(error).__name__}: {error}); {_RESTORE}") from None
    if not whole:
        raise DataError(f"{path}: its charges pass its own budget: {_RESTORE}")
    return book


def _line(path: Path, number: int, text: str) -> Line:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        raise DataError(f"{path}:{number}: no line of a book; {_RESTORE}")
    return line


def _terms(path: Path, header: Line) -> BookTerms:
    if header.get("kind") != "header" or header.get("format") != FORMAT:
        raise DataError(f"{path}: no book, or one of another version of dpsgd; `dpsgd budget create` makes one")
    try:
        terms = BookTerms(*(header[name] for name in ("data", "unit", "adjacency", "epsilon", "delta")))
        if not (isinstance(header["id"], str) and 0 < terms.epsilon < math.inf and 0 < terms.delta < 1 and terms.data):
            raise ValueError(terms)
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{path}:1: no header of a book; {_RESTORE}") from None
    return terms


def _check_line(line: Line) -> None:
    """Raise ValueError, KeyError or TypeError for a line that is neither a charge nor a release."""
    if not line["runs"] or not all(isinstance(name, str) for name in (*line["runs"], line["place"], line["id"])):
        raise ValueError("runs")
    if line["kind"] == "charge":
        amounts = (line["mu_squared"], line["leak"])
        if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in amounts):
            raise ValueError("amount")
        if not isinstance(line["left_out"], str):
            raise ValueError("left_out")
    elif line["kind"] != "release":
        raise ValueError("kind")


def _named() -> dict[str, str]:
    """Return a new line's id and time."""
    return {"id": secrets.token_hex(8), "time": datetime.now(UTC).isoformat(timespec="seconds")}
