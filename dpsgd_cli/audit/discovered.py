"""Tiers C and D on private bounds and categories: the noise of the counts, and what one record adds to them.

Records are random, with worst cases among them, and a user has up to the most rows that are used, alike or all
different. Of the recipe's own file only the columns are used. The recipe's own step counts the records. The noise is
drawn as in training.
"""

from __future__ import annotations

import math

import numpy as np

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, Adjacency
from dpsgd_cli.audit.findings import Finding, by_p_value, exact_finding
from dpsgd_cli.audit.statistics import too_little_noise
from dpsgd_cli.data import preparation
from dpsgd_cli.data.dataset import Layout
from dpsgd_cli.data.discover import Discover
from dpsgd_cli.discovery.run import code
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams, Streams
from dpsgd_cli.noise import run as noise
from dpsgd_cli.recipe.loading import SettledRecipe

_RECORDS = 40
_DRAWS = 20_000
_CLOSE = 1 + 1e-9
_NUMBERS = (0.0, 1.0, -1.0, 2.0**-20, 2.0**40, 1e300, -1e300, 5e-324, math.inf, math.nan)


def compare(loaded: SettledRecipe) -> list[Finding]:
    """Return the findings about the recipe's private bounds and categories; none if it has no private column."""
    recipe = loaded.recipe
    if not recipe.data.private_columns:
        return []
    steps, layouts = preparation.planned_steps(recipe.data, recipe.adjacency, loaded.base)
    step, layout = steps[0], layouts[0]
    assert isinstance(step, Discover)
    streams: Streams = SecureStreams() if recipe.seed is None else SeededStreams(recipe.seed)
    return [_sensitivity(step, layout, recipe.adjacency), _noise(step, layout, streams)]


def records(layout: Layout, count: int, seed: int = 5) -> np.ndarray:
    """Return random records (N, D), float64, as a table is read: numbers, codes of three texts, and public values."""
    random, columns = np.random.default_rng(seed), []
    for column in layout.columns or ():
        if column.private == "categories":
            columns.append(np.array([code(text) for text in "abc"])[random.integers(3, size=count)])
        elif column.private == "bounds":
            columns.append(random.lognormal(3, 2, count))
        else:
            columns.append(np.floor(random.random(count) * len(column.values or "01")))
    return np.stack(columns, axis=1)


def _sensitivity(step: Discover, layout: Layout, adjacency: Adjacency) -> Finding:
    """Compare counts with and without, or with either of two, hard records, or users with hard rows."""
    rows, mechanism = records(layout, _RECORDS), step.release
    assert mechanism is not None
    alone = code("alone")
    hard = np.array([
        [alone if column.private == "categories" else number for column in layout.columns or ()] for number in _NUMBERS
    ])  # fmt: skip
    users = [np.repeat(one[None], own, axis=0) for one in hard for own in {1, step.most_rows}]
    users += [rows[:1], np.full_like(rows[:1], np.nan), hard[np.arange(step.most_rows) % len(hard)]]
    sets = [_counted(step, np.vstack([rows, own]), layout, len(own)) for own in users]
    others = sets if NEIGHBOURS[adjacency].replaced else [_counted(step, rows, layout, 0)]
    moved = max(_apart(one, other) for one in sets for other in others) / mechanism.sensitivity
    return exact_finding("D", "counts of private columns", f"moved by {moved:.6f} sensitivities at most", "at most 1",
                 not moved <= _CLOSE)  # fmt: skip


def _counted(step: Discover, rows: np.ndarray, layout: Layout, last: int) -> dict[tuple[str, object], float]:
    """Return all counts of rows, the `last` of which are one user's; every other row is a user."""
    keys = np.minimum(np.arange(len(rows)), len(rows) - last)
    made = step.counts(rows, layout, preparation.shares_of(keys, step.most_rows))
    found: dict[tuple[str, object], float] = {}
    for name, own in made.numbers.items():
        found |= {(name, cell): count for cell, count in enumerate(own.tolist())}
    for name, (counts, texts) in made.codes.items():
        found |= {(name, text): count for text, count in zip(texts, counts.tolist(), strict=True)}
    return found


def _apart(one: dict[tuple[str, object], float], other: dict[tuple[str, object], float]) -> float:
    return math.sqrt(math.fsum((one.get(key, 0) - other.get(key, 0)) ** 2 for key in one.keys() | other.keys()))


def _noise(step: Discover, layout: Layout, streams: Streams) -> Finding:
    """Compare the noise of all counts with the ledger's."""
    mechanism, seen = step.release, list[np.ndarray]()
    assert mechanism is not None
    learn = step.learn(records(layout, _RECORDS), layout)

    def noised(exact: np.ndarray) -> np.ndarray:
        noisy = noise.gaussian(streams, "preprocess-0", len(seen), exact, mechanism, _RECORDS)
        seen.append((noisy - exact) / (mechanism.noise_multiplier * mechanism.sensitivity))
        return noisy

    while sum(map(len, seen)) < _DRAWS:
        learn(noised)
    drawn = np.concatenate(seen)
    squares = float(np.square(drawn).sum())
    told = f"{math.sqrt(squares / len(drawn)):.4f} times the ledger's ({len(drawn):,} draws)"
    return by_p_value("C", "noise of private columns", told, "1", too_little_noise(squares, len(drawn)))
