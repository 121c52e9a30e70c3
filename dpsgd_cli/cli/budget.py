"""Command `dpsgd budget`: create and show the book of a table. The file and its rules are in `results/book.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import click

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.errors import UsageError

BOOK = click.option(
    "--book",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Budget book of the table, which is charged before anything is released; short for privacy.book=PATH.",
)


def with_book(overrides: tuple[str, ...], book: Path | None) -> tuple[str, ...]:
    """Return the overrides of a command with its option `--book`, whose path starts from the current folder."""
    return overrides if book is None else (*overrides, f"privacy.book={json.dumps(str(book.resolve()))}")


@click.group(name="budget")
def command() -> None:
    """A budget for a table, over all its runs.

    A book is a file that counts what was spent on one table. `train`, `sweep` and `compare` charge it with --book
    before they release anything, and refuse what would pass its budget. The sum holds also if you choose each run after
    having seen the last.

    A book forgets what a copy or an older version of it does not hold, and counts only runs that name it: keep one
    book for each table, in one place, with whoever answers for the table.

    \b
    Examples:
      dpsgd budget create patients.book --data patients.csv --epsilon 3 --delta 1e-5
      dpsgd train patients.yaml --book patients.book
      dpsgd budget show patients.book
    """


@command.command()
@click.argument("book", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--data", "files", type=click.Path(path_type=Path, exists=True, dir_okay=False), multiple=True,
              required=True, help="File of the table; again for every other file that recipes read (test records,"
              " labels, users).")  # fmt: skip
@click.option("--epsilon", type=click.FloatRange(0, min_open=True), required=True, help="Budget of all runs together.")
@click.option("--delta", type=click.FloatRange(0, 1, min_open=True, max_open=True), required=True,
              help="At this delta; a tenth of it is for runs with sampled batches.")  # fmt: skip
@click.option("--adjacency", type=click.Choice(get_args(Adjacency)), default="add-remove", show_default=True,
              help="Which tables count as neighbours, in all runs.")  # fmt: skip
@click.option("--unit", metavar="COLUMN", help="Protect all rows of a user together: privacy.unit.column of all runs.")
def create(book: Path, files: tuple[Path, ...], epsilon: float, delta: float, adjacency: Any, unit: str | None) -> None:
    """Begin the book of a table. Its terms are fixed from then on.

    The table is known by the SHA-256 of its files: a changed table has another book.

    \b
    Example:
      dpsgd budget create patients.book --data patients.csv --epsilon 3 --delta 1e-5
    """
    from dpsgd_cli.data.fingerprint import sha256
    from dpsgd_cli.results import book as books

    if not epsilon < float("inf"):
        raise UsageError("--epsilon must be finite")
    hashes = {str(path): sha256(path) for path in files}
    if len(set(hashes.values())) < len(files):
        raise UsageError("two of the files of --data are the same; name each file of the table once")
    made = books.create(book, books.BookTerms(hashes, unit, adjacency, epsilon, delta))
    click.echo("\n".join(books.lines_of(made)))


@command.command()
@click.argument("book", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--format",
    "layout",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Of the answer.",
)
def show(book: Path, layout: str) -> None:
    """Say what was spent, by which runs, and what is left.

    \b
    Example:
      dpsgd budget show patients.book
    """
    from dpsgd_cli.results import book as books

    found = books.read(book)
    told = "\n".join(books.lines_of(found))
    click.echo(told if layout == "table" else json.dumps(books.document(found), indent=2))
