"""`dpsgd data`: list, fetch and verify the data sets that have a card. Thin: the work is in `dpsgd_cli/data/`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import click

from dpsgd_cli.data import catalog, download, readers
from dpsgd_cli.data.card import Card
from dpsgd_cli.errors import DataError


@click.group(name="data", short_help="List, fetch and verify data sets.")
def command() -> None:
    """List, fetch and verify data sets.

    Files lie in $DPSGD_DATA/<data set>/, or in the user's cache directory when DPSGD_DATA is not set.

    Example: dpsgd data fetch mnist
    """


@command.command(name="list")
def list_command() -> None:
    """Show every data set, and whether its files are here.

    Example: dpsgd data list
    """
    cards = [catalog.load_card(name) for name in catalog.names()]
    rows = [("NAME", "RECORDS", "FEATURES", "CLASSES", "FILES", "WHAT")]
    for card in cards:
        count = sum(file.records for file in card.files if file.holds != "labels")
        layout = card.layout
        rows.append(
            (card.name, f"{count:,}", str(layout.features), str(len(card.labels)), _state(card), card.description)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"files lie in {catalog.folder()}", err=True)


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def fetch(names: tuple[str, ...]) -> None:
    """Download a data set, going on where an earlier download was cut off.

    Files that are already there with the right content are kept; every file is checked against its card's SHA-256.

    Example: dpsgd data fetch mnist
    """
    for card in [catalog.load_card(name) for name in names]:
        written = download.fetch(card, download.Manner())
        for path in written:
            click.echo(f"{card.name}: fetched {path}")
        if not written:
            where = "comes with scikit-learn" if card.reader.kind == "bundled" else "is complete"
            click.echo(f"{card.name}: {where}, nothing to fetch")


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
def verify(names: tuple[str, ...]) -> None:
    """Read a data set's files and check them against the card's SHA-256 sums.

    Example: dpsgd data verify mnist
    """
    problems: list[str] = []
    for card in [catalog.load_card(name) for name in names]:
        checks = _checks(card)
        if not any(catalog.locate(card, file) for file in card.files) and card.reader.kind != "bundled":
            problems.append(f"data set {card.name} is not in {catalog.folder()}; run `dpsgd data fetch {card.name}`")
            checks = {}
        for name, check in checks.items():
            problem = _problem(check)
            click.echo(f"{card.name}: {name}: {'ok' if problem is None else 'NOT ok'}")
            problems += [] if problem is None else [problem]
    if problems:
        raise DataError("\n".join(problems))


def _checks(card: Card) -> dict[str, Callable[[], object]]:
    """For each file, what reads it and raises DataError when it is not right."""
    if card.reader.kind == "bundled":
        return {card.files[0].name: functools.partial(readers.read, card)}
    return {file.name: functools.partial(catalog.read_content, card, file) for file in card.files}


def _problem(check: Callable[[], object]) -> str | None:
    try:
        check()
    except DataError as error:
        return str(error)
    return None


def _state(card: Card) -> str:
    if card.reader.kind == "bundled":
        return "bundled"
    found = sum(catalog.locate(card, file) is not None for file in card.files)
    return "here" if found == len(card.files) else "not fetched" if found == 0 else f"{found} of {len(card.files)}"
