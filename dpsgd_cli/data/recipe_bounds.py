"""A recipe's public bounds in the place of a card's: a narrower interval is a longer feature after scaling.

How well a private method learns depends on the scale of its features, and a card's bounds are generous. Whoever knows
better ones from outside the data declares them in `data.bounds`; values outside are clamped when the table is read,
record by record, so that the bounds hold whatever the records are.

Not here: finding cards (`catalog.py`), bounds of a user's own files (`own_table.py`).
"""

from __future__ import annotations

import numpy as np

from dpsgd_cli.data import catalog
from dpsgd_cli.data.card import Card, CardColumn
from dpsgd_cli.data.step import suggest
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data

_SOURCE = "declared in the recipe"


def card_of(data: Data) -> Card:
    """The card that a recipe names, with the recipe's bounds; raises DataError for columns that can have none."""
    assert data.name is not None
    card = catalog.load_card(data.name)
    if not isinstance(data.bounds, dict):
        return card
    known = {name: column for name, column in card.features.items() if column.bounds is not None}
    problems = [
        f"data.bounds names {name!r}, which is no numeric column of {card.name}{suggest(name, known)}"
        for name in data.bounds
        if name not in known
    ]
    if problems:
        raise DataError("\n".join(problems))
    own = {name: CardColumn(bounds=pair, source=_SOURCE) for name, pair in data.bounds.items()}
    return card.model_copy(update={"columns": {**(card.columns or {}), **own}})


def declared(card: Card) -> dict[str, tuple[float, float]]:
    """The bounds that a recipe gave, by column, in the card's order."""
    found = {name: column.bounds for name, column in card.features.items() if column.source == _SOURCE}
    return {name: pair for name, pair in found.items() if pair is not None}


def clamp(card: Card, x: np.ndarray) -> None:
    """Move every value of a declared column of rows x (N, D) inside its bounds, in place."""
    names = list(card.features)
    for name, (low, high) in declared(card).items():
        column = x[:, names.index(name)]
        np.clip(column, low, high, out=column)
