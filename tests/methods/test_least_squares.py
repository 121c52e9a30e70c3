"""DP least squares against NumPy and SciPy: the solution, what one record moves, what noise is added."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize

from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine import models
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.methods.least_squares import DpLeastSquares
from dpsgd_cli.preconditioning.price import joint_sensitivity, weight_of
from dpsgd_cli.recipe.schema import Recipe
from tests.methods.small_problem import recipe
from tests.methods.test_drawn_once import Closed

N, D, K, RHO = 50, 3, 4, 0.5


def made(**changes: Any) -> Recipe:
    privacy = {"budget": {"rho": RHO}, "delta": 1e-5} | changes.pop("privacy", {})
    method = {"kind": "dp-least-squares", **changes.pop("method", {})}
    return recipe(method, **{"model": {"kind": "linear"}, "privacy": privacy, **changes})


def started(one: Recipe, x: np.ndarray, y: np.ndarray, bound: float, outputs: int = K) -> DpLeastSquares:
    place = Placement(torch.device("cpu"), torch.float64)
    table = Table.load(x, y, False, place.device, place.dtype)
    if one.folds is not None:
        table = table.with_folds(torch.from_numpy(Keys.of_places([len(y)]).folds(one.folds, one.repeats, seed=0)))
    pack = Pack(models.builder(one.model, (x.shape[1],), outputs, Path()), [0] * one.trials, place, True)
    plan = plan_for(one, Facts(len(table), feature_bound=bound))
    streams = tuple(SeededStreams((one.seed or 0) + trial) for trial in range(one.trials))
    ledgers = tuple(plan.ledger() for _ in streams)
    context = Context(
        recipes=(one,) * one.trials,
        plans=(plan,) * one.trials,
        ledgers=ledgers,
        streams=streams,
        pack=pack,
        table=table,
        loss=cross_entropy,
        most_rows=9,
        base=Path(),
        feature_bound=bound,
    )
    return DpLeastSquares(context)


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((N, D)), rng.integers(K, size=N)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("folds", [None, 5])
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_with_the_same_noise_it_is_ridge_regression(adjacency: str, bias: bool, folds: int | None, task: str) -> None:
    share, changes = 0.4, dict[str, Any]()
    if task == "regression":
        changes["data"] = {"path": "s.csv", "target": "y", "task": "regression", "target_bounds": [0, 9]}
    model, privacy = {"kind": "linear", "bias": bias}, {"adjacency": adjacency}
    one = made(model=model, method={"share": share}, privacy=privacy, folds=folds, repeats=2, **changes)
    x, y = problem()
    targets = np.eye(K)[y]
    if task == "regression":
        y = x @ [1.0, -1.5, 0.7] - 0.2
        y[3] = 7.0
        targets = np.clip(y, -1, 1)[:, None]
    outputs, bound = targets.shape[1], math.sqrt(D + bias)
    method = started(one, x, y, bound, outputs)
    method.run_epoch(0)
    weight = math.sqrt((1 - share) / share)
    moved = math.sqrt(1 + weight**2)
    if adjacency == "replace-one":  # weight^2 = 1.5 is below 2
        moved = math.sqrt(2 + 2 * weight**2 + weight**4 / 2)
    scale, width = moved / math.sqrt(2 * RHO), D + bias
    rows = (np.hstack([x, np.ones((N, 1))]) if bias else x) / bound
    for trial in range(one.trials):
        own = np.ones(N, bool)
        if method.context.table.held_out is not None:
            own = ~method.context.table.held_out[:, trial].numpy()
        count = width * (width + 1) // 2 + width * outputs
        draws = SeededStreams(trial).normal("least-squares", 0, torch.empty(count).double()).numpy()
        matrix, noise = rows[own].T @ rows[own], iter(draws.tolist())
        for i in range(width):
            for j in range(i, width):
                matrix[i, j] += scale * next(noise) / (1 if i == j else math.sqrt(2))
                matrix[j, i] = matrix[i, j]
        products = rows[own].T @ targets[own] + np.array(list(noise)).reshape(width, outputs) * scale / weight
        values, vectors = np.linalg.eigh(matrix)
        ridge = 0.25 * scale * math.sqrt(2 * width)
        solved = vectors @ np.diag(1 / (np.maximum(values, 0) + ridge)) @ vectors.T @ products / bound
        expected = np.concatenate([solved[:D].T.reshape(-1), solved[D]]) if bias else solved.T.reshape(-1)
        np.testing.assert_allclose(method.output[trial].numpy(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("share", [0.3, 1 / 3, 0.5])
@pytest.mark.parametrize("adjacency", ["add-remove", "zero-out", "replace-one"])
def test_the_joint_sensitivity_is_the_most_that_any_record_moves(adjacency: Adjacency, share: float) -> None:
    """The most that SciPy finds over rows and targets of two records, written as what the mechanism releases."""
    weight = weight_of(share)

    def part(v: np.ndarray) -> np.ndarray:
        u, y = (one / max(1.0, float(np.linalg.norm(one))) for one in (v[:2], v[2:]))
        upper = [u[0] * u[0], math.sqrt(2) * u[0] * u[1], u[1] * u[1]]
        return np.concatenate([upper, weight * np.outer(u, y).ravel()])

    def moved(v: np.ndarray) -> float:
        other = part(v[4:]) if adjacency == "replace-one" else 0.0
        return -float(np.linalg.norm(part(v[:4]) - other))

    starts = np.random.default_rng(0).normal(0, 2, (10, 8))
    found = max(
        -optimize.minimize(moved, start, method="Nelder-Mead", options={"maxiter": 4000}).fun for start in starts
    )
    assert found == pytest.approx(joint_sensitivity(adjacency, weight), rel=1e-3)
    assert found <= joint_sensitivity(adjacency, weight) * (1 + 1e-9)


@pytest.mark.parametrize("adjacency", ["add-remove", "zero-out", "replace-one"])
def test_the_joint_sensitivity_bounds_squared_targets_too(adjacency: Adjacency) -> None:
    """Largest moves among drawn records of norm 1 and one-hot targets; under add-remove they reach the bound."""
    rng, weight, squares = np.random.default_rng(0), weight_of(0.5), 0.7
    u, v = (one / np.linalg.norm(one, axis=1, keepdims=True) for one in rng.normal(size=(2, 4000, 2)))

    def parts(rows: np.ndarray, at: int) -> np.ndarray:
        y = np.eye(2)[at]
        upper = np.stack([rows[:, 0] ** 2, math.sqrt(2) * rows[:, 0] * rows[:, 1], rows[:, 1] ** 2], axis=1)
        products = (rows[:, :, None] * y).reshape(len(rows), -1)
        return np.hstack([upper, weight * products, np.tile(squares * y**2, (len(rows), 1))])

    other = parts(v, 1) if adjacency == "replace-one" else 0.0
    worst = np.linalg.norm(parts(u, 0) - other, axis=1).max()
    bound = joint_sensitivity(adjacency, weight, squares)
    # records with other classes have no common product, so a replaced one stays below
    least = math.sqrt(2 + 2 * weight**2 + 2 * squares**2) if adjacency == "replace-one" else bound
    assert worst == pytest.approx(least, rel=1e-3) and worst <= bound * (1 + 1e-9)


def test_rows_beyond_their_bound_and_targets_that_are_no_numbers_move_no_more_than_others() -> None:
    """A is of rows at most 1 and Z of targets at most 1, whatever a record says."""
    x, y = problem()
    one = made(data={"path": "s.csv", "target": "y", "task": "regression", "target_bounds": [0, 1]})
    targets = y / K
    odd, wild = x.copy(), targets.copy()
    odd[5], wild[5], wild[6] = [1e300, 4.0, -9.0], math.inf, math.nan
    method = started(one, odd, wild, math.sqrt(D + 1), 1)
    rest = started(one, np.delete(x, [5, 6], 0), np.delete(targets, [5, 6]), math.sqrt(D + 1), 1)
    for more, less in zip(method._exact(0), rest._exact(0), strict=True):
        assert np.linalg.norm(more - less) <= 2


@pytest.mark.parametrize("budget", [{"rho": RHO}, {"epsilon": 1.0, "delta": 1e-5}])
def test_the_whole_budget_is_one_release(budget: dict[str, float]) -> None:
    x, y = problem()
    method = started(made(privacy={"budget": budget, "delta": 1e-5}), x, y, 2.0)
    method.run_epoch(0)
    (entry,) = method.context.ledgers[0].entries
    mechanism = entry.release.mechanism
    assert isinstance(mechanism, GaussianSum) and mechanism.label == "least-squares"
    expected = 1.0 if "rho" in budget else 3.7304
    assert mechanism.noise_multiplier == pytest.approx(expected, rel=1e-4)


def test_features_without_a_public_bound_are_refused() -> None:
    with pytest.raises(PrivacyError, match="add unit-norm"):
        plan_for(made(), Facts(10))


def test_nothing_is_drawn_before_the_first_step() -> None:
    context = replace(started(made(), *problem(), bound=2.0).context, streams=(Closed(),))
    method = DpLeastSquares(context)
    with pytest.raises(AssertionError, match="was drawn"):
        method.run_epoch(0)
