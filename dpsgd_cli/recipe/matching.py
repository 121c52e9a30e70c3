"""Recipes made comparable: the same budget, the same seeds and folds, if wanted the same data.

What a recipe leaves free is solved for by its own plan, on its own sampler and adjacency: the noise where a number of
epochs is given, the number of epochs where the noise is. Not here: that solution (`privacy/plan.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dpsgd_cli.errors import UsageError
from dpsgd_cli.recipe import schema
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe, resolved


@dataclass(frozen=True)
class Terms:
    """What all recipes of a comparison share; None leaves what each recipe says."""

    epsilons: tuple[float, ...] = ()
    delta: float = 1e-5
    repeats: int | None = None
    folds: int | None = None
    data_of: str | None = None
    overrides: tuple[str, ...] = ()


def matched(sources: Sequence[str], terms: Terms) -> list[tuple[str, float | None, LoadedRecipe]]:
    """Every recipe at every budget: its label, its epsilon (None: as it is) and itself.

    Raises RecipeError for a recipe that does not stand these terms, UsageError for the same recipe twice.
    """
    data = None if terms.data_of is None else load_recipe(terms.data_of)
    first = [(source, load_recipe(source, _shared(terms, data))) for source in sources]
    seeds = {loaded.recipe.seed for _, loaded in first if loaded.recipe.seed is not None}
    repeats = terms.repeats or max((loaded.recipe.repeats for _, loaded in first), default=1)
    same = [f"seed={min(seeds, default=0)}", f"repeats={repeats}"]
    labels = _labels(first)
    found = []
    for (source, loaded), label in zip(first, labels, strict=True):
        for epsilon in terms.epsilons if loaded.recipe.privacy is not None and terms.epsilons else (None,):
            budget = [] if epsilon is None else _budget(loaded.recipe, epsilon, terms.delta)
            again = load_recipe(source, [*_shared(terms, data), *same, *_seeded(loaded.recipe), *budget])
            base = loaded.base if data is None else data.base
            found.append((label, epsilon, LoadedRecipe(again.recipe, base, source)))
    return found


def _shared(terms: Terms, data: LoadedRecipe | None) -> list[str]:
    given = [] if data is None else [f"data={json.dumps(resolved(data.recipe)['data'])}"]
    given += [] if terms.folds is None else [f"folds={terms.folds}"]
    return [*given, *terms.overrides]


def _seeded(recipe: schema.Recipe) -> list[str]:
    """Pairs need seeds, so the noise of a comparison is reproducible."""
    return ["privacy.noise_source=seeded"] if recipe.privacy is not None else []


def _budget(recipe: schema.Recipe, epsilon: float, delta: float) -> list[str]:
    privacy = recipe.privacy
    assert privacy is not None
    changes = [f"privacy.budget={{epsilon: {epsilon!r}, delta: {delta!r}}}"]
    if privacy.delta is not None:
        changes.append("privacy.delta=null")
    if privacy.budget_covers != "total":
        changes.append("privacy.budget_covers=total")
    schedule = privacy.schedule
    fixed = isinstance(getattr(schedule, "initial", None), float) and recipe.epochs != "until-budget"
    if fixed and "auto" not in schedule.model_dump().values():
        changes.append("privacy.schedule.initial=auto")
    return changes


def _labels(recipes: Sequence[tuple[str, LoadedRecipe]]) -> list[str]:
    names = [loaded.recipe.name for _, loaded in recipes]
    labels = [name if names.count(name) == 1 else source for name, (source, _) in zip(names, recipes, strict=True)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice; a comparison needs different recipes")
    return labels
