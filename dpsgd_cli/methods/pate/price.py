"""The plan of PATE: from a rule of aggregation and a number of queries to releases, noise and a price.

Guarantee. What leaves a run is a function of the answers of at most `queries` queries and of public records, so its
price is theirs. Where every query costs the same, their number is fixed beforehand and the releases are the bound.
Where answers cost and queries may go without (`AggregationRule.is_adaptive`), a filter of mu^2 admits each charge
before it is made, and what it never lets pass is the bound, whatever was answered (Smith and Thakurta 2022): the
budget, or what all queries would cost if all were answered (at most `answers` of them), whichever is less.

Not here: what a rule releases (`methods/pate/settings.py`), training (`methods/pate/run.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.additive import total_mu_squared
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.budget import Filter, GaussianFilter, format_budget, mu_squared_left, over_budget
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, Threshold
from dpsgd_cli.accounting.plan import Facts, Plan
from dpsgd_cli.accounting.search import Interval, solve_at_limit
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.experiment import Experiment, Privacy
from dpsgd_cli.methods.pate.settings import AggregationRule, PateMethod

# The cap is above what all queries cost by more than the rounding of their sum.
_ABOVE = 1 + 1e-9


@dataclass(frozen=True)
class VotingPlan(Plan):
    """Plan of a PATE run. `most` is the largest mu^2 that the filter admits, if answers are chosen; else None."""

    aggregation: AggregationRule | None = None
    queries: int = 0
    answers: int = 0
    most: float | None = None

    @property
    def budget_cap(self) -> GaussianSum | None:
        if self.most is None:
            return None
        multiplier = self.most**-0.5
        while 1 / multiplier**2 < self.most:
            multiplier = math.nextafter(multiplier, 0.0)
        return GaussianSum(multiplier, self.sampling.adjacency, label="budget")

    def _filter(self) -> Filter:
        return super()._filter() if self.most is None else GaussianFilter(self.most)


def pate(recipe: Experiment, facts: Facts) -> Plan:
    """Return the plan of a PATE recipe.

    Raises PrivacyError if no guarantee covers it, and InfeasibleBudget if not all queries fit.
    """
    method, privacy = recipe.method, recipe.required_privacy
    assert isinstance(method, PateMethod)
    if method.teachers.count > facts.records:
        raise PrivacyError(
            f"method.teachers.count is {method.teachers.count}, more than the {count(facts.records, 'training record')}"
        )
    if (method.queries or 0) > facts.public_records:
        raise PrivacyError(f"method.queries is {method.queries}, but {facts.public_records} records are public")
    return _Draft(recipe, method, privacy, facts, recipe.adjacency).plan()


def _check_has_mu(counted: Sequence[Release]) -> None:
    """Raise PrivacyError for a release that a filter of mu^2 cannot count: names of categories, which cost a delta."""
    if any(isinstance(release.mechanism, Threshold) for release in counted):
        raise PrivacyError(
            "method.aggregation chooses what to answer within a budget in mu^2, and names of private categories cost a"
            " delta; state the categories, use aggregation gnmax or lnmax, or give privacy.budget_covers: training"
        )


@dataclass(frozen=True)
class _Draft:
    """A plan in the making."""

    recipe: Experiment
    method: PateMethod
    privacy: Privacy
    facts: Facts
    adjacency: Adjacency

    def plan(self) -> VotingPlan:
        rule = self._solved()
        asked = self._worst(rule)
        draft = self.recipe.planned(
            VotingPlan,
            self.facts,
            is_adaptive=rule.is_adaptive,
            postprocessing_epochs=self.method.student.epochs,
            aggregation=rule,
            queries=self._queries,
            answers=self._answers,
        )
        if rule.is_adaptive:
            _check_has_mu(self._counted)
            draft = replace(draft, most=self._most(rule))
        else:
            self._check_fits(rule, [*self._counted, *asked])
            draft = replace(draft, epochs=(tuple(asked),))
        return replace(draft, accountant=self._named_accountant(draft))

    @property
    def _queries(self) -> int:
        return self.method.queries or self.facts.public_records

    @property
    def _answers(self) -> int:
        return min(self._queries, getattr(self.method.aggregation, "answers", None) or self._queries)

    def _worst(self, rule: AggregationRule) -> list[Release]:
        """Return the releases of all queries if as many as allowed are answered."""
        charges = ((rule.asked(self.adjacency), self._queries), (rule.answered(self.adjacency), self._answers))
        return [Release(mechanism, times) for mechanism, times in charges if mechanism is not None]

    @property
    def _counted(self) -> Sequence[Release]:
        """The releases other than votes that the budget counts."""
        return self.facts.preprocessing_releases if self.privacy.budget_covers == "total" else ()

    def _solved(self) -> AggregationRule:
        """Return the rule, with `noise: auto` replaced by the least noise that fits the budget."""
        rule, budget = self.method.aggregation, self.privacy.budget
        if rule.noise != "auto":
            return rule
        if budget is None:
            raise PrivacyError("method.aggregation.noise: auto is the least for a budget: give privacy.budget")

        def gap(noise: float) -> float:
            tried = rule.changed(noise=noise)
            return over_budget(budget, self._judge(tried), [*self._counted, *self._worst(tried)])

        found = solve_at_limit(gap, Interval("noise", cheap=1e9, expensive=1e-6, start=40.0))
        if found is None:
            raise InfeasibleBudget(
                f"no noise brings {count(self._queries, 'query', 'queries')} within {format_budget(budget)}; ask fewer,"
                " or raise the budget"
            )
        return rule.changed(noise=found)

    def _judge(self, rule: AggregationRule) -> Accountant:
        """Return the accountant that checks the budget: the exact one for Gaussians if all releases are Gaussian."""
        if all(isinstance(release.mechanism, GaussianSum) for release in self._worst(rule)):
            return accountants.get("gaussian")
        return BestAccountant() if self.privacy.accountant == "auto" else accountants.get(self.privacy.accountant)

    def _check_fits(self, rule: AggregationRule, counted: Sequence[Release]) -> None:
        budget = self.privacy.budget
        if over_budget(budget, self._judge(rule), counted) > 0:
            raise InfeasibleBudget(
                f"{count(self._queries, 'query', 'queries')} cost more than {format_budget(budget)}; ask fewer"
                " (method.queries), raise method.aggregation's noise (auto finds the least), or raise the budget"
            )

    def _most(self, rule: AggregationRule) -> float:
        """Return the largest mu^2 that the filter admits: the cost of all counted releases, or the budget if less."""
        if self.privacy.accountant not in ("auto", "gaussian"):
            raise PrivacyError(
                f"method pate with {self.method.aggregation.kind} chooses what to answer as it goes, which only the"
                f" filter of accountant gaussian enforces, not {self.privacy.accountant}; use auto"
            )
        worst = _ABOVE * (total_mu_squared(self._counted) + total_mu_squared(self._worst(rule)))
        if self.privacy.budget is None:
            return worst
        budgeted = mu_squared_left(self.privacy.budget, ())
        first = [Release(one) for one in (rule.asked(self.adjacency), rule.answered(self.adjacency)) if one is not None]
        if total_mu_squared([*self._counted, *first]) > budgeted:
            raise InfeasibleBudget(
                f"one answered query costs more than {format_budget(self.privacy.budget)}; raise method.aggregation's"
                " noise"
            )
        return min(worst, budgeted)

    def _named_accountant(self, plan: VotingPlan) -> str:
        """Return the name of the accountant that states epsilon: the recipe's, or the one with the least bound."""
        if self.privacy.accountant != "auto" and not plan.is_adaptive:
            return self.privacy.accountant
        exact = all(isinstance(release.mechanism, GaussianSum) for release in plan.priced_releases)
        return "gaussian" if exact else BestAccountant().best(plan.priced_releases, plan.delta)[1]
