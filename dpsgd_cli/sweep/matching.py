"""Recipes with matched terms for a comparison: equal budgets, seeds and test records, and on request equal data.

A recipe's plan solves for the number that the recipe leaves free, with its own sampler and adjacency. In a recipe with
fixed noise, the first noise multiplier is solved for. It moves all others; where it would not, one factor scales all.
The number of epochs stays: the number that the recipe names, or, if it trains until its budget is spent, the number
that its own budget affords. If neither is known before the run (adaptive noise, no own budget), the budget decides the
length. The recipe's label says which case applies.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.accounting.search import PRECISION, Interval, gap_of, solve_at_limit
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import DpsgdError, InfeasibleBudget, PrivacyError, UsageError
from dpsgd_cli.methods.private_selection import PrivateSelectionMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe, resolved
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results.evaluated import COINS, evaluated_on, tested_section
from dpsgd_cli.schedules.settings import Schedule, Uniform
from dpsgd_cli.training.plans import plan_and_outline

_FACTOR = Interval("factor of all noise multipliers", cheap=1e9, expensive=1e-6, start=1.0, precision=PRECISION)
# a scaled schedule's formula and its scaled values differ by rounding
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class SharedTerms:
    """Terms that all recipes of a comparison share; None keeps each recipe's own value."""

    epsilons: tuple[float, ...] = ()
    delta: float = 1e-5
    repeats: int | None = None
    folds: int | None = None
    data_of: str | None = None
    overrides: tuple[str, ...] = ()


def matched(sources: Sequence[str], terms: SharedTerms) -> list[tuple[str, float | None, LoadedRecipe]]:
    """Return each recipe at each budget, as label, epsilon (None: the recipe's own budget) and recipe.

    Raises RecipeError for a recipe that is invalid under these terms. Raises UsageError for a recipe given twice, or
    for tests on different records of the same data.
    """
    data = None if terms.data_of is None else load_recipe(terms.data_of)
    first = [(source, load_recipe(source, _shared(terms, data))) for source in sources]
    _check_equal_tests([(source, LoadedRecipe(one.recipe, (data or one).base, source)) for source, one in first])
    seeds = {loaded.recipe.seed for _, loaded in first if loaded.recipe.seed is not None}
    repeats = terms.repeats or max((loaded.recipe.repeats for _, loaded in first), default=1)
    booked = any(one.recipe.privacy is not None and one.recipe.privacy.book is not None for _, one in first)
    same = ["seed=null" if booked else f"seed={min(seeds, default=0)}", f"repeats={repeats}"]
    labels = _labels(first)
    found: list[tuple[str, float | None, LoadedRecipe]] = []
    for (source, loaded), label in zip(first, labels, strict=True):
        base = loaded.base if data is None else data.base
        if loaded.recipe.privacy is None or not terms.epsilons:
            again = load_recipe(source, [*_shared(terms, data), *same, *_seeded(loaded.recipe)])
            found.append((label, None, LoadedRecipe(again.recipe, base, source)))
            continue
        fixed = _fixed(LoadedRecipe(loaded.recipe, base, source))
        for epsilon in terms.epsilons:
            changes = [*_seeded(loaded.recipe), *_budget(loaded.recipe, epsilon, terms.delta)]
            changes += fixed.changes(epsilon, terms.delta) if isinstance(fixed, _Fixed) else []
            again = load_recipe(source, [*_shared(terms, data), *same, *changes])
            solved = fixed.label if isinstance(fixed, _Fixed) else fixed
            found.append((f"{label}{solved}", epsilon, LoadedRecipe(again.recipe, base, source)))
    return found


def _shared(terms: SharedTerms, data: LoadedRecipe | None) -> list[str]:
    """Return the overrides of all recipes; the recipe `data` gives the data section and its folds or test set."""
    folds = [] if terms.folds is None else [f"folds={terms.folds}"]
    if data is None:
        return [*folds, *terms.overrides]
    given = [f"data={json.dumps(resolved(data.recipe)['data'])}", *(folds or [f"folds={data.recipe.folds or 'null'}"])]
    return [*given, *terms.overrides]


def _check_equal_tests(recipes: Sequence[tuple[str, LoadedRecipe]]) -> None:
    """Raise UsageError before training if recipes would be tested on different records of the same data.

    Recipes for add-remove and for other adjacencies have different coins (`data/splits.py`) but are accepted: their
    guarantees differ, so no difference between them is stated.
    """
    known: dict[tuple[object, ...], dict[str, str]] = {}
    for source, loaded in recipes:
        files = {name: str((loaded.base / name).resolve()) for name in loaded.recipe.data.files}
        section = {key: value for key, value in tested_section(resolved(loaded.recipe)).items() if key != COINS}
        tested = evaluated_on(section, loaded.recipe.folds, files)
        ways = known.setdefault(tested.source, {})
        ways.setdefault(tested.records, source)
        if len(ways) > 1:
            told = " and ".join(f"{records} ({first})" for records, first in ways.items())
            raise UsageError(
                f"{tested.name} would be tested in different ways: {told}; give --folds K, or --data-of"
                f" {recipes[0][0]} for all to be tested as that one is"
            )


def _seeded(recipe: Recipe) -> list[str]:
    """Return the override for seeded noise: paired comparisons need seeds. No book covers them, so one unpairs."""
    if recipe.privacy is None:
        return []
    return [f"privacy.noise_source={'seeded' if recipe.privacy.book is None else 'secure'}"]


def _budget(recipe: Recipe, epsilon: float, delta: float) -> list[str]:
    privacy = recipe.privacy
    assert privacy is not None
    changes = [f"privacy.budget={{epsilon: {epsilon!r}, delta: {delta!r}}}"]
    if privacy.delta is not None:
        changes.append("privacy.delta=null")
    if privacy.budget_covers != "total":
        changes.append("privacy.budget_covers=total")
    return changes


def _fixed(loaded: LoadedRecipe) -> _Fixed | str:
    """Return the recipe's fixed noise, to be solved for at a budget; else label text: empty, or "length solved"."""
    recipe = loaded.recipe
    assert recipe.privacy is not None
    schedule = recipe.privacy.schedule
    if schedule.adaptive or isinstance(recipe.method, PrivateSelectionMethod):
        return " (length solved)"
    if schedule.free_numbers():
        return ""
    try:
        plan, _ = plan_and_outline(loaded)
    except DpsgdError:
        # if the error does not concern the old budget, planning at the new budget raises it again
        plan = None
    if not isinstance(recipe.epochs, int) and (plan is None or not plan.epochs):
        return " (length solved)"
    return _Fixed(schedule, recipe.epochs, plan)


@dataclass(frozen=True)
class _Fixed:
    """Fixed noise of a recipe, its epochs, and its plan at its own budget (None if planning fails)."""

    schedule: Schedule
    epochs: int | str
    plan: Plan | None

    @property
    def label(self) -> str:
        """Label text for tables."""
        length = (
            "" if self.plan is None or isinstance(self.epochs, int) else f"{count(len(self.plan.epochs), 'epoch')}, "
        )
        noise = "all noise scaled" if self._is_scaled else "first noise solved"
        return f" ({length}{'noise solved' if isinstance(self.schedule, Uniform) else noise})"

    def changes(self, epsilon: float, delta: float) -> list[str]:
        """Return overrides that free or scale the noise for this budget."""
        length = [f"epochs={len(self.plan.epochs)}"] if self.plan is not None else []
        schedule = self._scaled(epsilon, delta) if self._is_scaled else None
        schedule = schedule or self.schedule.with_number(next(iter(self.schedule.numbers())), "auto")
        return [f"privacy.schedule={schedule.model_dump_json(exclude_none=True)}", *length]

    @property
    def _is_scaled(self) -> bool:
        """True if all noise is scaled: solving for the first multiplier alone may fail if the others do not follow."""
        return self.plan is not None and not self.schedule.follows_initial

    def _scaled(self, epsilon: float, delta: float) -> Schedule | None:
        """Return the schedule scaled to the budget; None if no factor fits, which planning then explains."""
        assert self.plan is not None
        try:
            factor = least_factor(self.plan, epsilon, delta)
        except PrivacyError:
            return None
        return self.schedule.scaled(factor)


def _labels(recipes: Sequence[tuple[str, LoadedRecipe]]) -> list[str]:
    names = [loaded.recipe.name for _, loaded in recipes]
    labels = [name if names.count(name) == 1 else source for name, (source, _) in zip(names, recipes, strict=True)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice; a comparison needs different recipes")
    return labels


def least_factor(plan: Plan, epsilon: float, delta: float) -> float:
    """Return the least factor f > 0 such that `plan`, with all noise multipliers times f, costs `epsilon` at `delta`.

    Guarantee: by the plan's accountant it costs no more, including private preprocessing, whose noise stays. A factor
    smaller by 1e-7 of it would cost more.
    Raises InfeasibleBudget if no factor is enough, UnsupportedMechanism as the accountant does.
    """

    def scaled(factor: float) -> list[Release]:
        releases = [*plan.preprocessing_releases]
        for release in (release for epoch in plan.epochs for release in epoch):
            mechanism = release.mechanism
            assert isinstance(mechanism, GaussianSum)
            releases.append(Release(mechanism.scaled(factor), release.count))
        return releases

    accountant = accountants.get(plan.accountant)
    found = solve_at_limit(lambda factor: gap_of(accountant.epsilon(scaled(factor), delta), epsilon), _FACTOR)
    if found is None:
        raise InfeasibleBudget(
            f"{accountant.name}: no {_FACTOR.name} up to {_FACTOR.cheap:g} satisfies epsilon {epsilon:g} at delta"
            f" {delta:g}; raise epsilon or delta, or take fewer steps"
        )
    return found * _ROUNDING
