"""Every baseline against a slow reference, and its release against what the ledger says of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy.optimize import minimize
from scipy.stats import norm
from sklearn.svm import LinearSVC

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import total_rho
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.engine.losses import Logistic
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.errors import InfeasibleBudget, PrivacyError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.dp_agd import AdaptivePlan
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.methods.perturbation import ObjectivePerturbation, moved_by_one, noise_of, rate_of_descent
from dpsgd_cli.methods.privgene import PrivGene
from dpsgd_cli.methods.risks import newton
from dpsgd_cli.methods.risks.constants import Constants, problem_constants
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import Silent, context, points, recipe, run, signed

BUDGET = {"budget": {"epsilon": 2.0, "delta": 1e-5}}
REGRESSION = {"path": "small.csv", "target": "y", "task": "regression"}


def made(kind: str, **changes: Any) -> Recipe:
    method = {"kind": kind, **changes.pop("method", {})}
    return recipe(method, **{"privacy": BUDGET, **changes})


def mean_loss(w: np.ndarray, z: np.ndarray, l2: float) -> float:
    return float(np.logaddexp(0, -z @ w).mean() + l2 / 2 * w @ w)


def test_objective_perturbation_minimises_the_perturbed_objective() -> None:
    one = made("objective-perturbation", repeats=2)
    method = create(context(one))
    assert isinstance(method, ObjectivePerturbation)
    run(method)
    z, known = signed(one), problem_constants(one, math.sqrt(5))
    assert known.lipschitz == pytest.approx(math.sqrt(5))
    assert known.smoothness == pytest.approx(5 / 4)
    first, noise = 0.999 * 2.0, noise_of(known, 60, 5, 2.0, 1e-5)
    empty = torch.empty(5, dtype=torch.float64)
    b = SeededStreams(1).normal("objective", 0, empty).numpy().copy()
    # Kifer, Smith and Thakurta 2012, Algorithm 1, at what is left of epsilon and delta
    b *= math.sqrt(5) * math.sqrt(8 * math.log(2 / (0.999 * 1e-5)) + 4 * first) / first
    curvature = max(60 * 0.01, 2 * (5 / 4) / first)

    def perturbed(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -z @ w).sum() + curvature / 2 * w @ w + b @ w)

    best = minimize(perturbed, np.zeros(5), method="BFGS", options={"gtol": 1e-8}).x
    found = method.output[1].numpy() - SeededStreams(1).normal("objective-rest", 0, empty).numpy() * noise.output
    assert np.allclose(found, best, atol=1e-5)
    # the half of 1e-6 L that the search may leave, and the rounding of taking the rest away again
    left = -(z / (1 + np.exp(z @ found))[:, None]).sum(axis=0) + curvature * found + b
    assert np.linalg.norm(left) <= 0.5e-6 * math.sqrt(5) + 1e-12
    mechanism = method.context.ledgers[1].entries[0].release.mechanism
    assert isinstance(mechanism, ApproximateDP)
    stated = accountants.get("basic-composition").epsilon(method.context.ledgers[1].releases, 1e-5)
    assert stated == 2.0


@pytest.mark.parametrize("epsilon", [0.01, 0.4, 1.0, 8.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.01])
def test_objective_perturbation_adds_what_each_half_of_its_proof_needs(epsilon: float, delta: float) -> None:
    """By SciPy's normal tail: determinant and density each stay within e^(eps1/2), but for delta1; then the rest."""
    known = Constants(lipschitz=3.0, smoothness=2.0, strong_convexity=0.0, feature_bound=1.0)
    noise = noise_of(known, 1000, 5, epsilon, delta)
    shift, first = 3.0 / noise.tilt, 0.999 * epsilon
    assert math.log1p(2.0 / noise.curvature) <= first / 2
    assert norm.sf((first / 2 - shift**2 / 2) / shift) <= 0.999 * delta
    # two points within g / k of the same one are up to 2 g / k apart: Balle and Wang 2018, Theorem 8
    mu, rest = 2 * noise.gradient / noise.curvature / noise.output, epsilon / 1000
    spent = norm.cdf(mu / 2 - rest / mu) - math.exp(rest) * norm.cdf(-mu / 2 - rest / mu)
    assert spent == pytest.approx(delta / 1000, rel=1e-4)
    # which costs next to nothing beside b, of which w* moves by 1 / k
    assert noise.output < 0.002 * noise.tilt / noise.curvature


def test_objective_perturbation_is_private_where_the_density_is_known() -> None:
    """One weight: w*'s density follows from b's by the change of variables. Its ratio between neighbours stays below
    e^eps wherever |b| is no larger than the proof allows."""
    epsilon, delta, bound = 1.0, 1e-3, 1.0
    known = problem_constants(made("objective-perturbation", model={"kind": "convex"}), bound)
    noise = noise_of(known, 5, 5, epsilon, delta)
    curvature, scale = noise.curvature, noise.tilt
    assert curvature == pytest.approx(2 * 0.25 / 0.999)
    x = np.array([0.3, -0.8, 1.0, -0.5])
    grid = np.linspace(-30, 30, 20001)

    def log_density(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slope = -(z[:, None] / (1 + np.exp(z[:, None] * grid))).sum(axis=0)
        half = 1 / (1 + np.exp(-z[:, None] * grid))
        second = (z[:, None] ** 2 * half * (1 - half)).sum(axis=0) + curvature
        b = -(slope + curvature * grid)
        return -(b**2) / (2 * scale**2) + np.log(second), b

    (with_it, b), (without, _) = log_density(x), log_density(x[:-1])
    covered = np.abs(b) <= scale * math.sqrt(2 * math.log(2 / delta))
    assert covered.sum() > 1000
    assert np.abs(with_it - without)[covered].max() <= epsilon
    # with a third of the noise the same region is not covered any more
    shift = (b**2 - (b - 1.0 / (1 + np.exp(grid))) ** 2)[covered] / (2 * (scale / 3) ** 2)
    assert np.abs(shift).max() > epsilon


@pytest.mark.parametrize("radius", [None, 1.0])
def test_objective_perturbation_refuses_the_squared_loss(radius: float | None) -> None:
    """Its gradient is unbounded outside a ball, and the minimiser lies anywhere: one record moved 473 to 521."""
    model = {"kind": "convex", "loss": "squared", "target_bound": 5.0, "radius": radius}
    with pytest.raises(PrivacyError, match=r"model\.radius is no help: use a loss other than squared"):
        plan_for(made("objective-perturbation", data=REGRESSION, model=model), Facts(60, feature_bound=1.0))


def test_objective_perturbation_refuses_a_radius_that_it_would_not_keep() -> None:
    with pytest.raises(PrivacyError, match=r"model.radius 2 would not be kept: leave it out"):
        plan_for(made("objective-perturbation", model={"kind": "convex", "radius": 2.0}), Facts(60, feature_bound=1.0))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"kind": "convex", "radius": 2.0}},
        {"model": {"kind": "convex", "loss": "squared", "radius": 2.0, "target_bound": 5.0}, "data": REGRESSION},
    ],
)
def test_objective_perturbation_itself_refuses_what_its_plan_does(changes: dict[str, Any]) -> None:
    """Handed the plan of a recipe that is allowed, it still looks at its own."""
    allowed, other = context(made("objective-perturbation")), made("objective-perturbation", **changes)
    with pytest.raises(PrivacyError, match=r"model\.radius"):
        create(replace(allowed, recipes=(other,)))


def test_no_row_is_longer_than_the_public_bound() -> None:
    """sqrt(5) bounds rows of [0, 1]; a record outside is shrunk to it, and not by a float's rounding more or less."""
    x, y = points()
    method = create(context(made("objective-perturbation"), data=(10 * x, y)))
    assert isinstance(method, ObjectivePerturbation)
    assert method.rows.z.dtype == torch.float64
    assert float(method.rows.z.norm(dim=1).max()) == pytest.approx(math.sqrt(5), rel=1e-15)


@pytest.mark.parametrize("key", ["tolerance", "most_steps"])
def test_how_near_the_minimiser_is_no_choice_of_the_recipe(key: str) -> None:
    with pytest.raises(ValidationError, match=key):
        made("objective-perturbation", method={key: 10})


def test_a_budget_that_doubles_do_not_resolve_is_refused() -> None:
    """At 1e-11 the gradient that was found is 65 times what was promised, in 60 digits; at 1e-6 far below it."""
    known = Constants(1.0, 0.25, 0.0, 1.0)
    assert noise_of(known, 1000, 5, 1e-6, 1e-5).gradient == pytest.approx(1e-6)
    with pytest.raises(InfeasibleBudget, match="rounding a gradient hides"):
        noise_of(known, 1000, 5, 1e-11, 1e-5)


def test_rounding_is_far_below_where_the_search_ends() -> None:
    """The gradient at 200,000 records against extended precision, in units of g = 1e-6 L."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200_000, 4, generator=generator, dtype=torch.float64)
    rows = SignedRows.load(x, (torch.rand(200_000, generator=generator) < 0.5).long(), residual=False, bias=True)
    w = torch.randn(1, 5, generator=generator, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    found = newton.Tilted(rows, Logistic(), one, 0 * w).gradient(rows.z, rows.z @ w.T, w)[0].numpy()
    z = rows.z.numpy().astype(np.longdouble)
    exact = -(z / (1 + np.exp(z @ w[0].numpy()))[:, None]).sum(axis=0) + w[0].numpy()
    assert np.linalg.norm((found - exact).astype(float)) < 0.01 * 1e-6 * math.sqrt(5)


def test_a_search_that_newton_leaves_unfinished_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether something is released is no function of the records: another method ends what Newton's does not."""
    whole, cut = (create(context(made("objective-perturbation", repeats=2))) for _ in range(2))
    run(whole)
    monkeypatch.setattr(newton, "_NEWTON_STEPS", 1)
    run(cut)
    assert torch.allclose(cut.output, whole.output, atol=1e-5)
    assert not torch.equal(cut.output, whole.output)


def test_conditions_name_missing_bounds_and_other_adjacencies() -> None:
    with pytest.raises(PrivacyError, match="public bound"):
        problem_constants(made("output-perturbation"), None)
    with pytest.raises(PrivacyError, match="add-remove"):
        context(made("objective-perturbation", privacy={**BUDGET, "adjacency": "replace-one"}))


@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_output_perturbation_is_descent_and_then_noise(l2: float) -> None:
    one = made("output-perturbation", method={"steps": 7}, model={"kind": "convex", "l2": l2}, repeats=2)
    method = create(context(one))
    run(method)
    z, known = signed(one), problem_constants(one, math.sqrt(5))
    w, rate = np.zeros(5), rate_of_descent(known, 60)
    for _ in range(7):
        w = w - rate * (-(z / (1 + np.exp(z @ w))[:, None]).mean(axis=0) + l2 * w)
    mechanism = method.context.ledgers[1].entries[0].release.mechanism
    assert isinstance(mechanism, GaussianSum)
    assert mechanism.sensitivity == pytest.approx(moved_by_one(known, 60, 7))
    noise = NoiseSource([SeededStreams(1)], 5, torch.device("cpu"), torch.float64).draw(0)[0].numpy()
    assert np.allclose(method.output[1].numpy(), w + noise * mechanism.noise_multiplier * mechanism.sensitivity)
    stated = accountants.get("gaussian").epsilon(method.context.ledgers[1].releases, 1e-5)
    assert stated == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("l2", [0.0, 0.5])
def test_no_record_moves_descent_further_than_its_sensitivity(l2: float) -> None:
    """Worst of random data sets and records, n fixed; and the bound is not loose by more than a hundred."""
    known = problem_constants(made("output-perturbation", model={"kind": "convex", "l2": l2}), math.sqrt(5))
    steps, records = 20, 60
    rate, worst = rate_of_descent(known, records), 0.0
    for seed in range(30):
        x, y = points(records + 1, 4, seed)
        z = np.hstack([x, np.ones((records + 1, 1))]) * (2 * y - 1)[:, None]
        ends = []
        for own in (z, z[1:]):
            w = np.zeros(5)
            for _ in range(steps):
                w = w - rate * (-(own / (1 + np.exp(own @ w))[:, None]).sum(axis=0) / records + l2 * w)
            ends.append(w)
        worst = max(worst, float(np.linalg.norm(ends[0] - ends[1])))
    assert 0.01 * moved_by_one(known, records, steps) < worst <= moved_by_one(known, records, steps)


@pytest.mark.parametrize(
    ("adjacency", "records", "moved"),
    [("add-remove", slice(0, 59), 1.0), ("replace-one", slice(0, 60), 2.0), ("zero-out", slice(0, 60), 1.0)],
)
def test_output_perturbation_counts_what_its_adjacency_moves(adjacency: str, records: slice, moved: float) -> None:
    """One step of a loss of slope -1 at 0, the longest record gone, turned round or null: moved by eta L / n times
    1, 2 and 1, as `z` says by itself. N stays the public 60."""
    one = made("output-perturbation", method={"steps": 1}, model={"kind": "convex", "loss": "huber-svm"},
               privacy={**BUDGET, "adjacency": adjacency})  # fmt: skip
    x, y = points()
    x[59] = 1.0
    other_x, other_y = x[records].copy(), y[records].copy()
    if adjacency == "replace-one":
        other_y[59] = 1 - other_y[59]
    if adjacency == "zero-out":
        other_x[59] = np.nan
    quiet = [create(context(one, streams=[Silent(0)], data=data)) for data in ((x, y), (other_x, other_y))]
    quiet[1].context = replace(quiet[1].context, table=quiet[0].context.table)
    for method in quiet:
        run(method)
    distance = float((quiet[0].output - quiet[1].output).norm())
    (entry,) = quiet[0].context.ledgers[0].entries
    assert isinstance(entry.release.mechanism, GaussianSum)
    rate = 1 / (5.0 * (1 + 1 / 60))  # 1 / (beta (1 + 1/n)), beta = B^2 / (2 h) with B^2 = 5, h = 1/2
    assert distance == pytest.approx(moved * rate * math.sqrt(5) / 60, rel=1e-9)
    assert entry.release.mechanism.sensitivity == pytest.approx(distance, rel=1e-9)


def test_steps_of_output_perturbation_do_not_drift_apart() -> None:
    """The map of a step has slope 1 - eta (beta (1 + 1/n) + lambda) where the loss is steepest: never below 0."""
    known = Constants(lipschitz=1.0, smoothness=3.0, strong_convexity=0.5, feature_bound=1.0)
    for records in (1, 2, 60):
        # so many records, and one more, of one direction z with phi'' |z|^2 = beta each, over a public number of them
        slopes = [
            1 - rate_of_descent(known, records) * (3.0 * there / records + 0.5) for there in (records, records + 1)
        ]
        assert min(slopes) >= -1e-12
        assert max(slopes) <= 1 - rate_of_descent(known, records) * 0.5


def test_squared_descent_stays_in_its_ball_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """L = (R B + Y) B holds inside only: no gradient is taken outside, and none is longer."""
    model = {"kind": "convex", "loss": "squared", "radius": 0.5, "target_bound": 5.0}
    one = made("output-perturbation", method={"steps": 20}, data=REGRESSION, model=model)
    x, y = points()
    method = create(context(one, data=(x, 100.0 * (2 * y - 1))))
    seen: list[torch.Tensor] = []
    taken = LinearRisk.gradient_sums_at

    def watched(self: LinearRisk, values: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        seen.append(values.norm(dim=1))
        return taken(self, values, norms)

    monkeypatch.setattr(LinearRisk, "gradient_sums_at", watched)
    run(method)
    assert len(seen) == 20
    assert 0.5 * (1 - 1e-9) < float(torch.cat(seen).max()) <= 0.5 * (1 + 1e-12)
    assert problem_constants(one, math.sqrt(5)).lipschitz == pytest.approx((0.5 * math.sqrt(5) + 5.0) * math.sqrt(5))


def test_privgene_charges_each_choice_and_spends_the_budget() -> None:
    one = made("privgene", method={"rounds": 3, "population": 12, "survivors": 2}, repeats=2)
    method = create(context(one))
    assert isinstance(method, PrivGene)
    run(method)
    plan = method.context.plans[0]
    assert isinstance(plan, AdaptivePlan)
    for ledger in method.context.ledgers:
        mechanisms = [entry.release.mechanism for entry in ledger.entries]
        assert len(mechanisms) == 3 * 2 + 1
        assert all(isinstance(m, PureDP) and m.source == "exponential" for m in mechanisms)
        assert 0.999 * plan.rho_total < total_rho(ledger.releases) <= plan.rho_total
    assert not torch.equal(method.output[0], method.output[1])


def test_privgene_with_a_huge_budget_finds_a_better_vector_than_the_majority() -> None:
    one = made(
        "privgene",
        method={"rounds": 25, "population": 60, "survivors": 4},
        privacy={"budget": {"epsilon": 1e6, "delta": 1e-5}},
    )
    method = create(context(one))
    run(method)
    assert isinstance(method, PrivGene)
    missed = float(LinearRisk(method.rows, method.loss).misses(method.output)[0])
    commoner = min(int(points()[1].sum()), 60 - int(points()[1].sum()))
    assert missed < commoner


@pytest.mark.parametrize("loss", ["logistic", "huber-svm", "hinge"])
def test_non_private_is_the_optimum_of_each_fold(loss: str) -> None:
    one = made("non-private", privacy=None, folds=3, model={"kind": "convex", "l2": 0.05, "loss": loss})
    method = create(context(one))
    run(method)
    z, out = signed(one), method.context.table.held_out
    assert out is not None

    def risk(w: np.ndarray, own: np.ndarray) -> float:
        if loss == "logistic":
            return mean_loss(w, own, 0.05)
        t = own @ w
        if loss == "hinge":
            return float(np.maximum(0, 1 - t).mean() + 0.025 * w @ w)
        return float((np.clip(1.5 - t, 0, 1) ** 2 / 2 + np.maximum(0.5 - t, 0)).mean() + 0.025 * w @ w)

    for trial in range(3):
        own = z[~out[:, trial].numpy()]
        if loss == "hinge":
            peer = LinearSVC(C=1 / (0.05 * len(own)), loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**6)
            signs = np.sign(own[:, -1])
            best = risk(peer.fit(own * signs[:, None], signs).coef_[0], own)
        else:
            best = minimize(risk, np.zeros(5), args=(own,), method="BFGS").fun
        assert risk(method.output[trial].numpy(), own) == pytest.approx(best, abs=1e-5 if loss == "hinge" else 1e-6)
    assert method.context.ledgers[0].entries == []


def test_majority_is_the_sign_of_a_noisy_count() -> None:
    x, y = points()
    commoner = 1.0 if 2 * y.sum() > len(y) else -1.0
    exact = create(context(made("majority", privacy=None)))
    run(exact)
    assert exact.output[0].tolist() == [0, 0, 0, 0, commoner]
    quiet = create(context(made("majority"), streams=[Silent(0)]))
    run(quiet)
    assert quiet.output[0, -1] == commoner
    (entry,) = quiet.context.ledgers[0].entries
    assert entry.release.mechanism == PureDP(2.0, "add-remove", "laplace", "count")
    # balanced classes and a small epsilon: noise decides, either way (fails falsely with probability 2^-39)
    y = np.arange(60) % 2
    streams: list[Streams] = [SeededStreams(seed) for seed in range(40)]
    drawn = create(context(made("majority", repeats=40), streams=streams, data=(x, y)))
    run(drawn)
    assert set(drawn.output[:, -1].tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("accountant", ["rdp-markov", "strong-composition"])
def test_dp_sgd_draws_poisson_batches_and_meets_the_budget_by_the_accountant_it_names(accountant: str) -> None:
    budget = {"budget": {"epsilon": 2.0, "delta": 1e-5}, "accountant": accountant}
    one = made("dp-sgd", method={"batch_size": 20, "learning_rate": 0.5}, epochs=3, privacy=budget)
    method = create(context(one))
    run(method)
    releases = method.context.ledgers[0].releases
    assert [(r.count, r.mechanism.batching, r.mechanism.sampling_rate) for r in releases] == [(9, "poisson", 1 / 3)]  # type: ignore[union-attr]
    assert accountants.get(accountant).epsilon(releases, 1e-5) == pytest.approx(2.0, rel=1e-3)
    sizes = {method.batches.sampler.batch(step).rows.shape[1] for step in range(9)}  # type: ignore[attr-defined]
    assert len(sizes) > 1
