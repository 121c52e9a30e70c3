"""Recipes as cases: the price of a recipe's plan, and Lecture 9's demands, without reading data and without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dpsgd_cli import data
from dpsgd_cli.account.cases import BATCH_SIZE, Case, Target
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
from dpsgd_cli.methods.lectures.price import PublicProblem, lecture_9_demand
from dpsgd_cli.methods.private_selection.settings import PrivateSelectionMethod
from dpsgd_cli.methods.risks.constants import constants_of
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.recipe.schema import Privacy, Recipe
from dpsgd_cli.results.evaluated import run_of
from dpsgd_cli.results.guarantee import ADAPTIVE, EXPERIMENT, unit_words
from dpsgd_cli.schedules.settings import Schedule
from dpsgd_cli.training.plans import feature_bound, plan_and_outline, training_records


@dataclass(frozen=True)
class RecipeCase(Case):
    """One planned trial of a recipe. `wanted_delta` replaces the recipe's own delta unless it is None."""

    loaded: LoadedRecipe
    recipe: Recipe
    wanted_delta: float | None = None
    together: int | None = None

    @property
    def label(self) -> str:  # type: ignore[override]
        """The recipe's name."""
        return self.recipe.name

    @property
    def described(self) -> str:  # type: ignore[override]
        """Description of the plan, or of the error if planning fails."""
        try:
            plan = self.plan
        except (PrivacyError, UsageError) as error:
            return f"{self.recipe.name}: as it stands, {error}"
        other = len(plan.preprocessing_releases)
        beside = f", {count(other, 'private release')} beside the steps" if other else ""
        steps = count(plan.sampling.steps_per_epoch, "step")
        length = f"{count(len(plan.epochs), 'epoch')} of {steps}" if plan.epochs else "adaptive"
        noise = "" if plan.correlated is None else f", noise {noise_text(plan.correlated)}"
        batches = f"{plan.sampling.batching} batches{noise}{beside}"
        return f"{self.recipe.name}: {length}, {batches}, delta {self.delta:g}{unit_words(self.recipe.data.unit)}"

    @property
    def delta(self) -> float:  # type: ignore[override]
        """Delta at which epsilon is stated."""
        stated = self.wanted_delta or self._privacy.delta or getattr(self._privacy.budget, "delta", None)
        return stated if stated is not None else self.plan.delta

    @property
    def batching(self) -> str:  # type: ignore[override]
        """Batching of the recipe's method."""
        return self.recipe.method.batching

    @cached_property
    def plan(self) -> Plan:
        """Plan of the recipe. Raises UsageError for an open length without a budget, and the errors of planning."""
        privacy = self._privacy
        endless = isinstance(self.recipe.method, Gradient) and not isinstance(self.recipe.epochs, int)
        if privacy.budget is None and endless:
            raise UsageError(f"{self.label}: without a budget its length is open; give --epochs")
        return self._planned()

    def _planned(self, priced_by: Accountant | None = None) -> Plan:
        plan, _ = plan_and_outline(replace(self.loaded, recipe=self.recipe), priced_by)
        assert plan is not None
        return plan

    def own_trials(self) -> int:
        return self.recipe.trials

    def each_trial(self) -> list[list[list[Release]]]:
        held_out = list(self.plan.held_out)
        return [[self.plan.priced_releases, *([held_out] if held_out else [])]]

    def why_apart(self, trials: int) -> str | None:
        return why_apart([run_of(replace(self.loaded, recipe=self.recipe), trials)])

    def uncovered(self) -> list[str]:
        return uncovered_steps(self.recipe.data, self.recipe.adjacency, self.loaded.base)

    def own_remarks(self) -> list[str]:
        return [f"{self.label}: {EXPERIMENT}"] if self.recipe.seed is not None else []

    def has_held_out(self) -> bool:
        return bool(self.plan.held_out)

    def spends_a_budget(self) -> bool:
        return self.plan.budget_cap is not None or not self.plan.epochs

    def each_curve(self) -> list[list[list[Release]]]:
        if self.spends_a_budget():
            raise UnsupportedMechanism(f"{self.label} has no curve by epoch: {ADAPTIVE}")
        epochs = [list(releases) for releases in self.plan.epochs]
        if epochs:
            epochs[0] = [*self.plan.preprocessing_releases, *epochs[0]]
        return [epochs]

    def parameters(self) -> dict[str, bool]:
        method = self.recipe.method
        if not isinstance(method, Gradient) or isinstance(method, PrivateSelectionMethod) or self._schedule.adaptive:
            return {}
        sampled = BATCHINGS[method.batching].sampled and method.batch_size is not None
        size = {BATCH_SIZE: True} if sampled and method.largest_batch is None else {}
        numbers = {path: not number.increasing for path, number in self._schedule.numbers().items()}
        return numbers | {"epochs": True} | size

    def most_in_a_batch(self) -> int | None:
        return training_records(self.recipe, data.outline(self.recipe.data, self.loaded.base))

    def afforded(self, parameter: str, target: Target, accountant: Accountant) -> float:
        """Return the value that the recipe's plan gives to `parameter` as `auto` (epochs: until the budget is spent).

        For the batch size, search for the value.
        """
        if parameter == BATCH_SIZE:
            return super().afforded(parameter, target, accountant)
        trials = self.together or 1
        if target.rho is None:
            budget: Limit = EpsilonBudget(epsilon=target.limit, delta=self.delta)
        else:
            budget = RhoBudget(rho=_share(target.limit, trials))
        priced_by = accountant if trials == 1 else RepeatedAccountant(accountant, trials)
        recipe = self._with_privacy(budget=budget, delta=self.delta)
        if parameter == "epochs":
            asked = recipe.changed(epochs="until-budget")
            return float(replace(self, recipe=asked)._planned(priced_by).most_epochs)
        free = self._schedule.with_number(parameter, "auto")
        asked = replace(self, recipe=recipe)._with_privacy(schedule=free)
        solved = replace(self, recipe=asked)._planned(priced_by).schedule
        assert solved is not None
        return float(solved.number_at(parameter))

    def with_value(self, parameter: str, value: float) -> Case:
        """Return a copy of the case with `parameter` set to `value`; UsageError for a parameter it does not have.

        Planning the copy raises UnsupportedMechanism for a value whose schedule runs out of noise.
        """
        # without the budget, so that a solver may try what does not fit
        freed = {} if self._privacy.budget is None else {"budget": None, "delta": self.delta}
        if parameter == "epochs":
            recipe = self._with_privacy(**freed).changed(epochs=int(value))
        elif parameter == BATCH_SIZE:
            method = self.recipe.method.changed(batch_size=int(value))
            recipe = self._with_privacy(**freed).changed(method=method)
        elif parameter in self.parameters():
            number = int(value) if self._schedule.numbers()[parameter].whole else float(value)
            recipe = self._with_privacy(schedule=self._schedule.with_number(parameter, number), **freed)
        else:
            raise UsageError(f"schedule {self._schedule.kind} has no parameter {parameter}")
        return replace(self, recipe=recipe)

    def budget(self) -> Target:
        own = self._privacy.budget
        if isinstance(own, RhoBudget):
            return Target(rho=own.rho)
        return Target(epsilon=own.epsilon) if own is not None else Target()

    @property
    def _privacy(self) -> Privacy:
        if self.recipe.privacy is None:
            raise PrivacyError(
                f"{self.label}: method {self.recipe.method.kind} has no privacy section: nothing to price"
            )
        return self.recipe.privacy

    @property
    def _schedule(self) -> Schedule:
        return self._privacy.schedule

    def _with_privacy(self, **changes: object) -> Recipe:
        return self.recipe.changed(privacy=self._privacy.changed(**changes))


def read_recipe(source: str, overrides: Sequence[str], delta: float | None, epochs: int | None) -> RecipeCase:
    """Return the case of `source`, a recipe file or the name of a shipped recipe."""
    extra = [] if epochs is None else [f"epochs={epochs}"]
    loaded = load_recipe(source, [*overrides, *extra])
    return RecipeCase(loaded, loaded.recipe, delta)


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
    assert outline.input_shape is not None
    lipschitz = constants_of(model, bound).lipschitz
    weights = math.prod(outline.input_shape) + model.has_bias
    records = training_records(recipe, outline)
    problem = PublicProblem(records, weights, lipschitz, model.radius, model.l2)
    demand = lecture_9_demand(problem, error, budget.epsilon, budget.delta)
    return {
        "recipe": recipe.name,
        "excess_risk": error,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "lipschitz": lipschitz,
        "weights": weights,
        "steps": demand.steps,
        "records": demand.records,
        "records_available": records,
    }
