"""Every baseline against a slow reference, and its release against what the ledger says of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.svm import LinearSVC

from dpsgd_cli.core.noise import NoiseSource
from dpsgd_cli.core.problems.linear import LinearRisk
from dpsgd_cli.core.streams import SeededStreams, Streams
from dpsgd_cli.errors import PrivacyError, RunError
from dpsgd_cli.methods import create
from dpsgd_cli.methods.objective_perturbation import ObjectivePerturbation, noise_scale
from dpsgd_cli.methods.privgene import PrivGene
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.zcdp import total_rho
from dpsgd_cli.privacy.adaptive import AdaptivePlan
from dpsgd_cli.privacy.lipschitz import problem_constants
from dpsgd_cli.privacy.mechanism import ApproximateDP, GaussianSum, PureDP
from dpsgd_cli.privacy.stability import moved_by_one, rate_of_descent
from dpsgd_cli.recipe import schema
from tests.methods.small_problem import Silent, context, points, recipe, run, signed

BUDGET = {"budget": {"epsilon": 2.0, "delta": 1e-5}}


def made(kind: str, **changes: Any) -> schema.Recipe:
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
    empty = torch.empty(5, dtype=torch.float64)
    promised = method.promised[1]
    b = SeededStreams(1).normal("objective", 0, empty).numpy() * noise_scale(known, 2.0, promised.delta)
    curvature = max(60 * 0.01, 2 * (5 / 4) / 2.0)

    def perturbed(w: np.ndarray) -> float:
        return float(np.logaddexp(0, -z @ w).sum() + curvature / 2 * w @ w + b @ w)

    best = minimize(perturbed, np.zeros(5), method="BFGS", options={"gtol": 1e-8}).x
    assert np.allclose(method.output[1].numpy(), best, atol=1e-5)
    mechanism = method.context.ledgers[1].entries[0].release.mechanism
    assert isinstance(mechanism, ApproximateDP)
    stated = accountants.get("basic-composition").epsilon(method.context.ledgers[1].releases, 1e-5)
    assert stated == 2.0


def test_objective_perturbation_is_private_where_the_density_is_known() -> None:
    """One weight: w's density follows from b's by the change of variables. Its ratio between neighbours stays below
    e^eps wherever |b| is no larger than the proof allows."""
    epsilon, delta, curvature, bound = 1.0, 1e-3, 2 * 0.25 / 1.0, 1.0
    known = problem_constants(made("objective-perturbation", model={"kind": "convex"}), bound)
    scale = noise_scale(known, epsilon, delta)
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


def test_a_solver_that_did_not_converge_is_an_error_and_releases_nothing() -> None:
    method = create(context(made("objective-perturbation", method={"most_steps": 1, "tolerance": 1e-14})))
    with pytest.raises(RunError, match="exact minimiser"):
        run(method)
    assert float(method.output.abs().max()) == 0


@pytest.mark.parametrize(
    ("kind", "model", "message"),
    [
        ("objective-perturbation", {"loss": "hinge"}, "smooth"),
        ("output-perturbation", {"loss": "hinge"}, "smooth"),
    ],
)
def test_conditions_are_checked(kind: str, model: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        create(context(made(kind, model={"kind": "convex", **model})))


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


@pytest.mark.parametrize(("kind", "accountant"), [("sgd-ma", "rdp-markov"), ("sgd-adv", "strong-composition")])
def test_sgd_baselines_draw_poisson_batches_and_meet_the_budget_by_their_accountant(kind: str, accountant: str) -> None:
    one = made(kind, method={"batch_size": 20, "learning_rate": 0.5}, epochs=3)
    method = create(context(one))
    run(method)
    releases = method.context.ledgers[0].releases
    assert [(r.count, r.mechanism.batching, r.mechanism.sampling_rate) for r in releases] == [(9, "poisson", 1 / 3)]  # type: ignore[union-attr]
    assert accountants.get(accountant).epsilon(releases, 1e-5) == pytest.approx(2.0, rel=1e-3)
    sizes = {method.sampler.batch(step).rows.shape[1] for step in range(9)}  # type: ignore[attr-defined]
    assert len(sizes) > 1
