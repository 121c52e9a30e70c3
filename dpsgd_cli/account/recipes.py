"""Recipes as cases: the price of a recipe's plan, and Lecture 9's demands, without reading data and without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpsgd_cli import data
from dpsgd_cli.account.cases import BATCH_SIZE, Case, Epochs, Target, noise_facts, noise_words
from dpsgd_cli.accounting.accountants import Accountant, Derived
from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.accounting.budget import EpsilonBudget, Limit, RhoBudget
from dpsgd_cli.accounting.joint_composition import why_apart
from dpsgd_cli.accounting.mechanism import Release
from dpsgd_cli.accounting.plan import Plan, noise_text
from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.preparation import uncovered_steps
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import PrivacyError, UnsupportedMechanism, UsageError
from dpsgd_cli.methods.dp_sgd.settings import Gradient
from dpsgd_cli.methods.experiment import Privacy
from dpsgd_cli.methods.lectures import PublicProblem, lecture_9_demand
from dpsgd_cli.methods.private_selection import PrivateSelectionMethod
from dpsgd_cli.methods.risks.constants import constants_of
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results.earlier import earlier_of
from dpsgd_cli.results.evaluated import run_of
from dpsgd_cli.results.guarantee import ADAPTIVE, EXPERIMENT, unit_words
from dpsgd_cli.schedules.settings import NoiseSchedule, Schedule
from dpsgd_cli.training.plans import feature_bound, plan_and_outline, training_records
from dpsgd_cli.users.settings import PERSON


def read_recipe(source: str, overrides: Sequence[str], delta: float | None, epochs: int | None) -> Case:
    """Return the case of `source`, a recipe file or the name of a shipped recipe; of one planned trial."""
    extra = [] if epochs is None else [f"epochs={epochs}"]
    loaded = load_recipe(source, [*overrides, *extra])
    return of_recipe(loaded, delta)


def of_recipe(loaded: LoadedRecipe, delta: float | None = None) -> Case:
    """Return the case of one planned trial. `delta` replaces the recipe's own delta unless it is None.

    A plan that fails is told to the reader, and raised where its releases are asked for: another value of a parameter
    may have one.
    """
    recipe = loaded.recipe
    plan, problem = None, None
    try:
        plan = _planned(loaded)
    except (PrivacyError, UsageError) as error:
        problem = error
    privacy = _privacy_of(recipe)
    own = privacy.budget
    stated = delta or privacy.delta or getattr(privacy.budget, "delta", None)
    if stated is None:
        if problem is not None:
            raise problem
        assert plan is not None
        stated = plan.delta
    is_budget = plan is not None and (plan.budget_cap is not None or not plan.epochs)

    def planned() -> Plan:
        if problem is not None:
            raise problem
        assert plan is not None
        return plan

    def made() -> list[list[list[Release]]]:
        held_out = list(planned().held_out)
        return [[planned().priced_releases, *([held_out] if held_out else [])]]

    def by_epoch() -> list[Epochs]:
        if is_budget:
            raise UnsupportedMechanism(f"{recipe.name} has no curve by epoch: {ADAPTIVE}")
        epochs = [list(releases) for releases in planned().epochs]
        if epochs:
            epochs[0] = [*planned().preprocessing_releases, *epochs[0]]
        return [epochs]

    return Case(
        label=recipe.name,
        about=f"{recipe.name}: as it stands, {problem}" if plan is None else _described(recipe, plan, stated),
        batching=recipe.method.batching,
        delta=stated,
        made=made,
        epochs=by_epoch,
        apart=lambda trials: why_apart([run_of(loaded, trials)]),
        unit=None if recipe.data.unit is None else PERSON,
        records=None if plan is None else plan.sampling.records,
        own_trials=recipe.trials,
        told=(f"{recipe.name}: {EXPERIMENT}",) if recipe.seed is not None else (),
        uncovered=tuple(uncovered_steps(recipe.data, recipe.adjacency, loaded.base)),
        is_budget=is_budget,
        start=None if (earlier := earlier_of(loaded)) is None else earlier.record,
        budget=Target(own.epsilon) if isinstance(own, EpsilonBudget) else Target(rho=None if own is None else own.rho),
        parameters=_parameters(recipe, privacy.schedule),
        changed=lambda parameter, value: of_recipe(_changed(loaded, parameter, value, stated), delta),
        plans=lambda *asked: _solved(loaded, stated, *asked),
    )


def _planned(loaded: LoadedRecipe, priced_by: Accountant | None = None) -> Plan:
    """Return the plan. Raises UsageError for an open length without a budget, and the errors of planning."""
    recipe = loaded.recipe
    endless = isinstance(recipe.method, Gradient) and not isinstance(recipe.epochs, int)
    if _privacy_of(recipe).budget is None and endless:
        raise UsageError(f"{recipe.name}: without a budget its length is open; give --epochs")
    plan, _ = plan_and_outline(loaded, priced_by)
    assert plan is not None
    return plan


def _described(recipe: Recipe, plan: Plan, delta: float) -> str:
    other = len(plan.preprocessing_releases)
    beside = f", {count(other, 'private release')} beside the steps" if other else ""
    steps = count(plan.sampling.steps_per_epoch, "step")
    length = f"{count(len(plan.epochs), 'epoch')} of {steps}" if plan.epochs else "adaptive"
    noise = noise_words(noise_facts([plan.releases]))
    noise += "" if plan.correlated is None else f", noise {noise_text(plan.correlated)}"
    batches = f"{plan.sampling.batching} batches{noise}{beside}"
    return f"{recipe.name}: {length}, {batches}, delta {delta:g}{unit_words(recipe.data.unit)}"


def _privacy_of(recipe: Recipe) -> Privacy:
    if recipe.privacy is None:
        raise PrivacyError(f"{recipe.name}: method {recipe.method.kind} has no privacy section: nothing to price")
    return recipe.privacy


def _parameters(recipe: Recipe, schedule: Schedule) -> dict[str, bool]:
    method = recipe.method
    if not isinstance(method, Gradient) or isinstance(method, PrivateSelectionMethod) or schedule.adaptive:
        return {}
    sampled = BATCHINGS[method.batching].sampled and method.batch_size is not None
    size = {BATCH_SIZE: True} if sampled else {}
    numbers = {path: not number.increasing for path, number in schedule.numbers().items()}
    return numbers | {"epochs": True} | size


def _changed(loaded: LoadedRecipe, parameter: str, value: float, delta: float) -> LoadedRecipe:
    """Return the recipe with `parameter` set to `value`; UsageError for a parameter it does not have.

    Planning it raises UnsupportedMechanism for a value whose schedule runs out of noise.
    """
    recipe = loaded.recipe
    privacy, schedule = _privacy_of(recipe), _privacy_of(recipe).schedule
    if parameter not in _parameters(recipe, schedule):
        raise UsageError(f"schedule {schedule.kind} has no parameter {parameter}")
    # without the budget, so that a solver may try what does not fit
    freed: dict[str, Any] = {} if privacy.budget is None else {"budget": None, "delta": delta}
    if parameter == "epochs":
        changes: dict[str, Any] = {"epochs": int(value)}
    elif parameter == BATCH_SIZE:
        changes = {"method": recipe.method.changed(batch_size=int(value))}
    else:
        number = int(value) if schedule.numbers()[parameter].whole else float(value)
        changes, freed = {}, freed | {"schedule": schedule.with_number(parameter, number)}
    return replace(loaded, recipe=recipe.changed(privacy=privacy.changed(**freed), **changes))


def _solved(
    loaded: LoadedRecipe, delta: float, parameter: str, target: Target, accountant: Accountant, trials: int
) -> float:
    """Return the value that the recipe's plan gives to `parameter` as `auto` (epochs: until the budget is spent)."""
    if target.rho is None:
        budget: Limit = EpsilonBudget(epsilon=target.limit, delta=delta)
    else:
        budget = RhoBudget(rho=_share(target.limit, trials))
    priced_by = accountant if trials == 1 else RepeatedAccountant(accountant, trials)
    privacy = _privacy_of(loaded.recipe).changed(budget=budget, delta=delta)
    if parameter == "epochs":
        asked = loaded.recipe.changed(privacy=privacy, epochs="until-budget")
        return float(_planned(replace(loaded, recipe=asked), priced_by).most_epochs)
    free = privacy.schedule.with_number(parameter, "auto")
    asked = loaded.recipe.changed(privacy=privacy.changed(schedule=free))
    solved = _planned(replace(loaded, recipe=asked), priced_by).schedule
    assert isinstance(solved, NoiseSchedule)
    return float(solved.number_at(parameter))


class RepeatedAccountant(Derived, stated=False):
    """Accountant for `trials` published trials, given the releases of one of them."""

    def __init__(self, accountant: Accountant, trials: int) -> None:
        super().__init__(accountant)
        self._trials = trials
        self.name = f"{trials} x {accountant.name}"  # type: ignore[misc]

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        return self.accountant.epsilon(self._all(releases), delta)

    def delta(self, releases: Sequence[Release], epsilon: float) -> float:
        return self.accountant.delta(self._all(releases), epsilon)

    def _all(self, releases: Sequence[Release]) -> list[Release]:
        return [Release(release.mechanism, release.count * self._trials) for release in releases]


def _share(rho: float, trials: int) -> float:
    """Return the largest rho per trial such that `trials` trials cost at most `rho` in total."""
    share = rho / trials
    return math.nextafter(share, 0.0) if trials * share > rho else share


def demands_of(sources: Sequence[str], overrides: Sequence[str], error: float) -> list[dict[str, Any]]:
    """Return the steps and records of Lecture 9, section 7, for each recipe; UsageError without a recipe."""
    if not sources:
        raise UsageError("--excess-risk is about a convex recipe: name one")
    return [demand_of(load_recipe(source, overrides), error) for source in sources]


def demand_of(loaded: LoadedRecipe, error: float) -> dict[str, Any]:
    """Return the steps T and records n at which Lecture 9's algorithm has expected excess risk of at most `error`.

    Raises UsageError unless the recipe is a convex problem in a ball, PrivacyError without feature bounds or a budget
    of epsilon and delta.
    """
    recipe, model = loaded.recipe, loaded.recipe.model
    if not isinstance(model, ConvexModel) or model.radius is None:
        raise UsageError(f"{recipe.name}: Lecture 9 is about model.kind: convex with a radius; give model.radius=R")
    budget = recipe.privacy.budget if recipe.privacy is not None else None
    if not isinstance(budget, EpsilonBudget):
        raise PrivacyError(f"{recipe.name}: Lecture 9 is about a budget of epsilon and delta; give privacy.budget")
    outline = data.outline(recipe.data, loaded.base)
    bound = feature_bound(recipe, outline)
    if bound is None:
        raise PrivacyError(f"{recipe.name}: nothing public bounds the features; scale by bounds, or add unit-norm")
    lipschitz = constants_of(model, bound).lipschitz
    weights = math.prod(outline.input_shape) + model.has_bias
    records = training_records(recipe, outline)
    problem = PublicProblem(records, weights, lipschitz, model.radius, model.l2)
    steps, enough = lecture_9_demand(problem, error, budget.epsilon, budget.delta)
    return {
        "recipe": recipe.name,
        "excess_risk": error,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "lipschitz": lipschitz,
        "weights": weights,
        "steps": steps,
        "records": enough,
        "records_available": records,
    }
