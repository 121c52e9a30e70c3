"""Attacks by the law of what is released: numbers from brute force, and the power that the laws allow."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from dpsgd_cli import data
from dpsgd_cli.accounting.mechanism import PureDP
from dpsgd_cli.audit import choices, outputs
from dpsgd_cli.audit.findings import QUICK
from dpsgd_cli.audit.stage import at_audit_size, build_canaries, without_folds
from dpsgd_cli.audit.statistics import Errors
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.methods.perturbation.run import ObjectivePerturbation
from dpsgd_cli.methods.risks.losses import Logistic
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.training.plans import plan_of, resolve_auto
from tests.audit.planted import ONCE, PRECONDITIONED, audited


@pytest.mark.parametrize(("share", "times"), [(0.5, 1), (0.5, 4), (0.3, 5)])
def test_choices_together_cost_what_all_their_outcomes_say(share: float, times: int) -> None:
    odds = share / (1 - share) * math.exp(0.7)
    own, other = odds / (1 + odds), share
    found = choices.composed(0.7, share, times, 1e-3)
    beyond = 0.0
    for outcome in itertools.product((True, False), repeat=times):
        p, q = (math.prod(r if fell else 1 - r for fell in outcome) for r in (own, other))
        beyond += max(0.0, p - math.exp(found) * q)
    assert beyond == pytest.approx(1e-3, rel=1e-3)


def test_the_exponential_mechanism_is_found_to_range_by_its_epsilon_and_not_by_more() -> None:
    """200,000 draws: the bound's own width is 2 * 2.24 * (4 / 200,000)^(1/2) = .02."""
    errors = choices._errors(PureDP(1.0, "add-remove"), choices.Choosing("exponential", 8, 200_000), 4)
    assert 0.95 < choices.odds_ratio(errors, 0.95) < 1.0
    assert choices.odds_ratio(Errors(0, 10, 10, 10), 0.95) == 0.0
    above, below = stats.beta.ppf(0.975, 501, 500), stats.beta.ppf(0.975, 301, 700)
    expected = math.log((1 - below) / below * (1 - above) / above)
    assert choices.odds_ratio(Errors(500, 1000, 300, 1000), 0.95) == pytest.approx(expected, rel=1e-9)


def test_noise_of_votes_passes_a_gap_as_often_as_said() -> None:
    for scale in (1.0, 1.5):
        laplace = stats.laplace(scale=scale)
        two = integrate.quad(lambda x: laplace.pdf(x) * laplace.cdf(1 - x), -60, 60, points=[0, 1])[0]  # noqa: B023
        assert choices._two_laplace(scale) == pytest.approx(two, abs=1e-6)
        assert choices._one_laplace(scale) == pytest.approx(laplace.cdf(1), abs=1e-12)
        assert choices._one_normal(scale) == pytest.approx(stats.norm.cdf(1, scale=scale), abs=1e-12)


def sides(recipe: str, overrides: list[str], trials: int) -> list[outputs._Side]:
    loaded = load_recipe(recipe, [*overrides, f"repeats={trials}"])
    outline = dataclasses.replace(data.outline(loaded.recipe.data, loaded.base), train_records=12, files=(12,))
    outline = dataclasses.replace(outline, input_shape=(3,))
    plan = plan_of(resolve_auto(loaded), outline)
    assert plan is not None
    return [outputs._side(resolve_auto(loaded), outline, plan, present) for present in (True, False)]


def test_the_density_of_a_minimiser_is_that_of_its_random_term_and_a_jacobian() -> None:
    """By gradients and Hessians of autograd; what neighbours share is left out of both."""
    both = sides("lee2018/objective-perturbation", ONCE, 3)
    weights, logs = both[0].weights, []
    for side in both:
        method = side.trials.method
        assert isinstance(method, ObjectivePerturbation) and isinstance(method.loss, Logistic)
        noise, rows = outputs._noise(method), method.rows
        kept = rows.z if rows.weights is None else rows.z[rows.weights[:, 0] > 0]
        assert len(kept) == 12 - (side is both[1])

        def objective(w: torch.Tensor) -> torch.Tensor:
            margins = kept @ w  # noqa: B023
            return torch.nn.functional.softplus(-margins).sum() + noise.curvature / 2 * (w @ w)  # noqa: B023

        for w in weights:
            tilt = torch.autograd.functional.jacobian(objective, w)
            hessian = torch.autograd.functional.hessian(objective, w)
            logs.append(float(torch.logdet(hessian) - tilt @ tilt / (2 * noise.tilt**2)))
    expected = np.array(logs[:3]) - np.array(logs[3:])
    found = outputs._density(both[0], weights) - outputs._density(both[1], weights)
    assert np.allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)


def test_two_means_are_told_apart_as_well_as_their_law_allows() -> None:
    sharper = [*ONCE, "privacy.budget.epsilon=8", "method.steps=30"]
    found = audited(sharper, recipe="lee2018/output-perturbation", trials=800)
    (row,) = [one for one in found["findings"] if one["tier"] == "A"]
    allowed = float(row["found"].rpartition(" ")[2])
    assert not found["refuted"] and 0.4 * allowed < found["lower_bounds"]["B"] < allowed < found["claim"]["epsilon"]


def aimed(overrides: list[str]) -> LoadedRecipe:
    return without_folds(resolve_auto(load_recipe("quickstart", overrides)))


@pytest.mark.parametrize("kind", ["full", "poisson"])
def test_a_step_moves_a_canarys_coordinate_by_what_was_worked_out_beforehand(kind: str) -> None:
    """A root lets other canaries through a little: hundredths of a sensitivity."""
    poisson = "method={kind: dp-sgd, batch_size: 144, learning_rate: 1, preconditioner: {kind: second-moment}}"
    loaded = aimed(PRECONDITIONED if kind == "full" else [poisson, "privacy.budget.epsilon=6", "epochs=2"])
    outline = data.outline(loaded.recipe.data, loaded.base)
    plan = plan_of(resolve_auto(loaded), outline)
    assert plan is not None
    apart = []

    class Compared(Watch):
        def released(self, epoch: int, step: int, exact: torch.Tensor, mean: torch.Tensor) -> None:
            made = self.staged
            assert made.vectors is not None
            batch = self._batch
            drawn = made.inside if batch is None else made.inside & self._members(batch, made.places)
            expected = made.vectors.gradients()[0] * drawn[..., None]
            seen = np.stack([exact[:, columns].numpy() for columns in made.columns], axis=2)
            apart.append(float(np.abs(seen - expected).max()) / made.plan.sensitivity)
            assert float(np.linalg.norm(expected, axis=2).max()) > 0.5 * made.plan.sensitivity
            super().released(epoch, step, exact, mean)

    watch = Compared()
    made = build_canaries(
        at_audit_size(resolve_auto(loaded), outline, plan, dataclasses.replace(QUICK, trials=3)), watch
    )
    watch.begin(made)
    for epoch in range(2):
        made.trials.method.run_epoch(epoch)
    assert apart and max(apart) < 0.05
