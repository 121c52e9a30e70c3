"""Command `dpsgd data`: list, fetch and verify the data sets that have a card. The work is in `dpsgd_cli/data/`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from dpsgd_cli.common.text_format import suggested
from dpsgd_cli.data import card_files, card_readers, cards
from dpsgd_cli.data.cards import Card, read_card
from dpsgd_cli.errors import DataError, UsageError

_CARDS = click.option(
    "--cards", type=click.Path(path_type=Path, exists=True, file_okay=False), help="A folder of cards of your own."
)


def _cards(names: tuple[str, ...], folder: Path | None) -> list[Card]:
    """Return the named cards, or all cards without names: shipped ones, or those in `folder`.

    Raises UsageError for a name that `folder` does not have.
    """
    if folder is None:
        return [cards.load_card(name) for name in names or cards.names()]
    known = cards.own_cards(folder)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no card {unknown[0]!r} in {folder}{suggested(unknown[0], known)}")
    return [read_card(known[name]) for name in names or known]


@click.group(name="data", short_help="List, fetch and verify data sets.")
def command() -> None:
    """List, fetch and verify data sets.

    Files lie in $DPSGD_DATA/<data set>/, or in the user's cache directory when DPSGD_DATA is not set. Cards of your own
    (`--cards`; in a recipe, `data.name` is their path) follow the same rules as the shipped ones.

    Example: dpsgd data fetch mnist
    """


@command.command(name="list")
@_CARDS
def list_command(cards: Path | None) -> None:
    """Show every data set, and whether its files are here.

    Example: dpsgd data list
    """
    rows = [("NAME", "RECORDS", "FEATURES", "CLASSES", "FILES", "WHAT")]
    for card in _cards((), cards):
        count = sum(card.records(file) for file in card.files if file.holds != "labels")
        layout = card.layout
        rows.append(
            (card.name, f"{count:,}", str(layout.features), str(len(card.labels)), _state(card), card.description)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    click.echo(f"files lie in {card_files.folder()}", err=True)


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_CARDS
def fetch(names: tuple[str, ...], cards: Path | None) -> None:
    """Download a data set.

    Files that are already there with the right content are kept; every file is checked against its card's SHA-256.

    Example: dpsgd data fetch mnist
    """
    for card in _cards(names, cards):
        written = card_files.fetch(card)
        for path in written:
            click.echo(f"{card.name}: fetched {path}")
        if not written:
            where = "comes with scikit-learn" if card.reader.kind == "bundled" else "is complete"
            click.echo(f"{card.name}: {where}, nothing to fetch")


@command.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_CARDS
def verify(names: tuple[str, ...], cards: Path | None) -> None:
    """Read a data set's files and check them against the card's SHA-256 sums.

    Example: dpsgd data verify mnist
    """
    problems: list[str] = []
    for card in _cards(names, cards):
        checks: dict[str, Callable[[], object]] = {
            file.name: functools.partial(card_files.read_content, card, file) for file in card.files
        }
        if card.reader.kind == "bundled":
            checks = {card.files[0].name: functools.partial(card_readers.read, card)}
        if not any(card_files.locate(card, file) for file in card.files) and card.reader.kind != "bundled":
            problems.append(f"data set {card.name} is not in {card_files.folder()}; run `dpsgd data fetch {card.name}`")
            checks = {}
        for name, check in checks.items():
            try:
                check()
                click.echo(f"{card.name}: {name}: ok")
            except DataError as error:
                click.echo(f"{card.name}: {name}: NOT ok")
                problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))


def _state(card: Card) -> str:
    if card.reader.kind == "bundled":
        return "bundled"
    found = sum(card_files.locate(card, file) is not None for file in card.files)
    return "here" if found == len(card.files) else "not fetched" if found == 0 else f"{found} of {len(card.files)}"
