"""Lecture 15, Algorithm 3, against a loop over its steps; and the theorems beside the practice."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.batching.run import FixedSampler
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods import lectures
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.dp_sgd.fixed import LectureSgd
from dpsgd_cli.noise.run import NoiseSource
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import Silent, context, points, recipe, run, signed


def picked(sampler: FixedSampler, step: int) -> int:
    rows = sampler.batch(step).rows
    assert rows is not None
    return int(rows[0, 0])


def made(model: dict[str, Any] | None = None, **changes: Any) -> Recipe:
    method = {
        "kind": "dp-sgd",
        "batching": "fixed",
        "batch_size": 1,
        "learning_rate": "theorem",
        **changes.pop("method", {}),
    }
    problem = {"kind": "convex", "radius": 1.5, **(model or {})}
    clipping = {"kind": "flat", "norm": math.sqrt(5)}
    privacy = {"budget": {"epsilon": 5.0, "delta": 1e-5}, "clipping": clipping, **changes.pop("privacy", {})}
    return recipe(method, **{"model": problem, "privacy": privacy, "epochs": 3, **changes})


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_with_the_same_draws_it_is_the_algorithm(l2: float) -> None:
    one = made({"l2": l2}, repeats=2)
    method = create(context(one))
    assert isinstance(method, LectureSgd)
    run(method)
    plan = method.plans[1]
    scale = plan.noise_multipliers[0] * 2 * math.sqrt(5)
    noise = NoiseSource([SeededStreams(1)], 5, torch.device("cpu"), torch.float64)
    picks = FixedSampler([SeededStreams(1)], 60, 1)
    z, w = signed(one), np.zeros(5)
    lead = 1 / l2 if l2 else 2 * 1.5 / math.sqrt(5 + 5 * scale**2)
    for t in range(3 * 60):
        row = z[picked(picks, t)]
        g = -row / (1 + math.exp(row @ w)) + noise.draw(t)[0].numpy() * scale + l2 * w
        w = w - lead / ((t + 1) ** (1.0 if l2 else 0.5)) * g
        w = w / max(1, np.linalg.norm(w) / 1.5)
    assert np.allclose(method.output[1].numpy(), w)


def test_every_step_is_charged_as_a_record_drawn_from_all() -> None:
    method = create(context(made()))
    run(method)
    releases = method.context.ledgers[0].releases
    assert [(r.count, r.mechanism.batching, r.mechanism.sampling_rate) for r in releases] == [(180, "fixed", 1 / 60)]  # type: ignore[union-attr]
    assert accountants.get("pld").epsilon(releases, 1e-5) == pytest.approx(5.0, rel=1e-3)


def test_other_adjacencies_are_refused() -> None:
    with pytest.raises(PrivacyError, match="replace-one"):
        context(made(privacy={"adjacency": "add-remove"}))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e30])
def test_one_record_is_clipped_to_half_of_the_sensitivity_that_the_ledger_records(scale: float) -> None:
    """By hand: -y x / (1 + e^(y w.x)), shortened to C = 0.2, of the record that was drawn; noise is scaled by 2 C."""
    x, y = points()
    one = made(privacy={"clipping": {"kind": "flat", "norm": 0.2}}, method={"learning_rate": 0.1})
    method = create(context(one, data=(scale * x, y)))
    assert isinstance(method, LectureSgd)
    w = np.array([0.3, -0.2, 0.1, 0.4, -0.5]) / scale
    method.context.pack.values.copy_(torch.from_numpy(w))
    z, picks = signed(one, (scale * x, y)), FixedSampler([SeededStreams(0)], 60, 1)
    clipped = 0
    for step in range(60):
        method.context.pack.sums.zero_()
        method.add_sums(0, step, Diagnostics(1, torch.device("cpu")))
        row = z[picked(picks, step)]
        own = -row / (1 + np.exp(row @ w))
        clipped += int(np.linalg.norm(own) > 0.2)
        own = own / max(1, np.linalg.norm(own) / 0.2)
        assert np.allclose(method.context.pack.sums[0].numpy(), own, rtol=1e-9)
    assert clipped > 50
    method.spend(0, 0)
    mechanism = method.context.ledgers[0].entries[0].release.mechanism
    assert isinstance(mechanism, GaussianSum)
    assert mechanism.sensitivity == 2 * 0.2


@pytest.mark.parametrize("kind", ["gd", "dp-gd"])
def test_the_bound_of_lecture_9_holds_for_what_was_measured(kind: str) -> None:
    privacy = (
        None if kind == "gd" else {"budget": {"epsilon": 5.0, "delta": 1e-5}, "clipping": {"kind": "flat", "norm": 3}}
    )
    one = recipe(
        {"kind": kind, "learning_rate": "theorem", "averaging": {"kind": "all"}},
        model={"kind": "convex", "radius": 1.5},
        privacy=privacy,
        epochs=50,
        repeats=20,
    )
    method = create(context(one))
    run(method)
    theory = method.findings()
    assert theory is not None
    gaps = [row["excess_risk"] for row in theory.measured]
    assert {row["theorem"] for row in theory.claimed} == {"Lecture 9, Theorem 1"}
    assert min(gaps) >= -1e-9
    assert np.mean(gaps) <= theory.claimed[0]["excess_risk_bound"]


def test_a_theorem_is_not_claimed_where_its_conditions_fail() -> None:
    clipped = recipe(
        {"kind": "dp-gd", "learning_rate": "theorem", "averaging": {"kind": "all"}},
        model={"kind": "convex", "radius": 1.5},
        privacy={"budget": {"epsilon": 5.0, "delta": 1e-5}, "clipping": {"kind": "flat", "norm": 1.0}},
        epochs=5,
    )
    method = create(context(clipped))
    run(method)
    assert method.findings() is None
    last = recipe({"kind": "gd"}, model={"kind": "convex", "radius": 1.5}, privacy=None, epochs=5)
    assert create(context(last)).findings() is None


def test_the_measured_excess_risk_is_over_the_optimum_in_the_ball() -> None:
    from scipy.optimize import minimize

    one = recipe(
        {"kind": "gd", "averaging": {"kind": "all"}}, model={"kind": "convex", "radius": 0.5}, privacy=None, epochs=4
    )
    method = create(context(one, streams=[Silent(0)]))
    run(method)
    z = signed(one, points())

    def risk(w: np.ndarray) -> float:
        return float(np.log1p(np.exp(-z @ w)).mean())

    ball = {"type": "ineq", "fun": lambda w: 0.25 - w @ w}
    best = minimize(risk, np.full(5, 0.1), constraints=[ball], method="SLSQP", options={"ftol": 1e-12}).fun
    theory = method.findings()
    assert theory is not None
    measured = theory.measured[0]
    assert measured["excess_risk"] == pytest.approx(risk(method.output[0].numpy()) - best, abs=1e-6)


def hinge_problem() -> Recipe:
    return recipe(
        {"kind": "gd", "averaging": {"kind": "all"}},
        model={"kind": "convex", "radius": 1000.0, "loss": "hinge"},
        privacy=None,
        epochs=4,
    )


def test_the_excess_risk_of_the_hinge_is_over_its_linear_program() -> None:
    from scipy.optimize import linprog

    one = hinge_problem()
    method = create(context(one, streams=[Silent(0)]))
    run(method)
    z = signed(one, points())
    count, size = z.shape
    costs, bounds = np.concatenate([np.zeros(size), np.ones(count)]), [(None, None)] * size + [(0, None)] * count
    exact = linprog(costs, A_ub=np.hstack([-z, -np.eye(count)]), b_ub=-np.ones(count), bounds=bounds).fun / count
    reached = float(np.maximum(0, 1 - z @ method.output[0].numpy()).mean())
    theory = method.findings()
    assert theory is not None
    measured = theory.measured[0]
    assert 0 <= measured["optimum_gap"] <= 1e-4
    assert measured["excess_risk"] == pytest.approx(reached - exact, abs=1e-4)
    assert measured["excess_risk"] <= reached - exact + 1e-9


def test_an_optimum_that_is_not_certain_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lectures, "_LEAST_CERTAIN", -1.0)
    method = create(context(hinge_problem(), streams=[Silent(0)]))
    run(method)
    theory = method.findings()
    assert theory is not None
    measured = theory.measured[0]
    assert measured["excess_risk"] is None
    assert "not known exactly enough" in measured["reason"]
