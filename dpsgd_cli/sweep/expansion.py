"""Expansion of a sweep file into cells: every combination of settings, each a checked recipe of its own.

Problems of all cells are reported together, each at the line of the sweep file or recipe that it comes from.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpsgd_cli.common import interrupts
from dpsgd_cli.common.yaml_tree import Node, Problem, SourceLocation, from_plain, read_tree, undotted
from dpsgd_cli.errors import DpsgdError, PrivacyError, RecipeError, UsageError
from dpsgd_cli.recipe import loading
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.overrides import apply_overrides, write
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.sweep.settings import Draw, LoadedSweep, Random, in_order
from dpsgd_cli.training.plans import resolve_auto

MOST_CELLS = 100_000
Setting = tuple[str, Node]


@dataclass(frozen=True)
class Cell:
    """One recipe of a sweep or a comparison.

    `settings` are the values that distinguish it from the others, as shown to people. If an `auto` setting could not be
    resolved, `loaded` is the recipe as written and `error` says why.
    """

    number: int
    loaded: loading.SettledRecipe | loading.LoadedRecipe
    settings: dict[str, Any] = field(default_factory=dict)
    error: DpsgdError | None = None

    @property
    def settled(self) -> loading.SettledRecipe:
        """The recipe to plan and train. Raises the cell's error if it has one."""
        if self.error is not None:
            raise self.error
        assert isinstance(self.loaded, loading.SettledRecipe)
        return self.loaded

    @property
    def directory(self) -> str:
        """The name of its result directory."""
        return f"{self.loaded.recipe.name}-{loading.recipe_hash(self.loaded.recipe)}"

    @property
    def trials(self) -> int:
        return self.loaded.recipe.trials

    @property
    def label(self) -> str:
        """The settings as text."""
        return ", ".join(f"{key}={json.dumps(value)}" for key, value in self.settings.items()) or "the only cell"


def cell_of(number: int, loaded: loading.LoadedRecipe, settings: dict[str, Any]) -> Cell:
    """Return the cell of a recipe with every `auto` setting resolved, or with the error of doing so."""
    try:
        if loaded.recipe.privacy is not None and loaded.recipe.privacy.start is not None:
            raise PrivacyError(
                "privacy.start: the price of several results with one start is not proved; train each alone"
            )
        return Cell(number, resolve_auto(loaded), settings)
    except DpsgdError as error:
        if interrupts.stops_everything(error):
            raise
        return Cell(number, loaded, settings, error)


@dataclass(frozen=True)
class _Base:
    """A recipe before the axes are written into it."""

    source: str
    file: Path
    tree: Node


def expand(loaded: LoadedSweep) -> list[Cell]:
    """Return all cells, without duplicates, in the order of the file. Raises one RecipeError for all problems."""
    bases = _bases(loaded)
    combinations = _combinations(loaded, bases)
    problems: list[Problem] = []
    cells: dict[str, Cell] = {}
    told = _told_apart_by(combinations)
    for base, settings in combinations:
        recipe, wrong = _recipe(base, settings, loaded.overrides)
        problems += wrong
        if recipe is None:
            continue
        if loaded.sweep.seeds == "distinct" and len(combinations) > 1:
            recipe = _with_own_seed(recipe)
        shown = {"recipe": base.source} if len(bases) > 1 else {}
        shown |= {key: node.plain() for key, node in settings if key in told}
        loaded_cell = loading.LoadedRecipe(recipe, loading.start_of_paths(base.file, recipe), base.source)
        cell = cell_of(len(cells), loaded_cell, shown)
        cells.setdefault(cell.directory, cell)
    if problems:
        raise RecipeError(in_order(problems))
    return list(cells.values())


def shard_of(cells: Sequence[Cell], shard: tuple[int, int]) -> list[Cell]:
    """Return shard `(i, n)` with 1 <= i <= n: every n-th cell from the i-th. Shards need not communicate."""
    index, count = shard
    return list(cells[index - 1 :: count])


def parse_shard(text: str | None) -> tuple[int, int]:
    """Return the numbers of `I/N`; (1, 1) for None. Raises UsageError unless 1 <= I <= N."""
    if text is None:
        return 1, 1
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
        return int(index), int(count)
    raise UsageError(f"--shard {text}: write I/N with 1 <= I <= N, for example 1/4")


def _bases(loaded: LoadedSweep) -> list[_Base]:
    bases = []
    listed = loaded.tree.child("recipes")
    assert listed is not None
    problems: list[Problem] = []
    for index, source in enumerate(loaded.sweep.recipes):
        beside = loaded.base / source
        try:
            path = beside if beside.is_file() else loading.find_recipe(source)
            name = str(path) if beside.is_file() else source
            tree, wrong = read_tree(loading.read_text(path, name), SourceLocation(name, 1))
        except RecipeError as error:
            problems += [Problem(listed.nearest((index,)).place, ("recipes", index), text) for text in error.problems]
            continue
        problems += wrong
        if tree is not None:
            bases.append(_Base(source, path, tree))
    if problems:
        raise RecipeError(in_order(problems))
    return bases


def _combinations(loaded: LoadedSweep, bases: Sequence[_Base]) -> list[tuple[_Base, list[Setting]]]:
    axes = list(_axes(loaded))
    count = len(bases) * math.prod(map(len, axes))
    if count > MOST_CELLS:
        raise RecipeError(f"{loaded.source}: {count} cells, more than {MOST_CELLS}; use random samples or fewer values")
    return [
        (base, [setting for choice in chosen for setting in choice])
        for base in bases
        for chosen in itertools.product(*axes)
    ]


def _told_apart_by(combinations: Sequence[tuple[_Base, list[Setting]]]) -> set[str]:
    """Return the keys that have more than one value, or that only some combinations set."""
    values: dict[str, set[str]] = {}
    for _, settings in combinations:
        given = {key: json.dumps(node.plain()) for key, node in settings}
        for key in values.keys() | given.keys():
            values.setdefault(key, set()).add(given.get(key, "not set"))
    return {key for key, found in values.items() if len(found) > 1}


def _axes(loaded: LoadedSweep) -> Iterator[list[list[Setting]]]:
    """Yield each axis as a list of choices; a choice sets one key or several."""
    tree, sweep = loaded.tree, loaded.sweep
    for key in sweep.grid:
        yield [[(key, node)] for node in tree.nearest(("grid", key)).value]
    if sweep.zip:
        columns = [[(key, node) for node in tree.nearest(("zip", key)).value] for key in sweep.zip]
        yield [list(row) for row in zip(*columns, strict=True)]
    if sweep.listed:
        yield [list(node.value.items()) for node in tree.nearest(("list",)).value]
    if sweep.random is not None:
        yield _samples(sweep.random, tree)


def _samples(settings: Random, tree: Node) -> list[list[Setting]]:
    import numpy as np

    random = np.random.Generator(np.random.Philox(settings.seed))
    return [
        [
            (key, from_plain(_draw(draw, random), tree.nearest(("random", "keys", key)).place))
            for key, draw in settings.keys.items()
        ]
        for _ in range(settings.samples)
    ]


def _draw(draw: Draw, random: Any) -> Any:
    """Return one random value. Real numbers are rounded to six significant digits, which a person can write down."""
    if draw.choice is not None:
        return draw.choice[int(random.integers(len(draw.choice)))]
    if draw.integers is not None:
        return int(random.integers(draw.integers[0], draw.integers[1] + 1))
    if draw.uniform is not None:
        return float(f"{random.uniform(*draw.uniform):.6g}")
    assert draw.log_uniform is not None
    return float(f"{math.exp(random.uniform(*map(math.log, draw.log_uniform))):.6g}")


def _recipe(base: _Base, settings: Sequence[Setting], overrides: Sequence[str]) -> tuple[Recipe | None, list[Problem]]:
    tree = base.tree.copy()
    problems = []
    for key, node in settings:
        problem = write(tree, undotted(key)[0], node.copy())
        problems += [problem] if problem is not None else []
    problems += apply_overrides(tree, overrides)
    recipe, wrong = validate(tree, Recipe)
    return recipe, problems + wrong


def _with_own_seed(recipe: Recipe) -> Recipe:
    """Return the recipe with its own seed plus a multiple of 2^20 that a hash of its content gives."""
    if recipe.seed is None:
        return recipe
    content = json.dumps(loading.resolved(recipe), sort_keys=True)
    own = int.from_bytes(hashlib.sha256(content.encode()).digest()[:5], "big")
    return recipe.changed(seed=recipe.seed + (own << 20))
