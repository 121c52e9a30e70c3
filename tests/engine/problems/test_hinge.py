"""The optimum of the hinge against a linear program, liblinear, and its own certificate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn.svm import LinearSVC

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine.losses import Hinge
from dpsgd_cli.methods.risks.optimum import Optimum, optimum
from dpsgd_cli.methods.risks.risk import LinearRisk
from dpsgd_cli.methods.risks.rows import SignedRows

N, D = 120, 3


def problem(folds: int | None = None) -> tuple[SignedRows, np.ndarray, np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    y = (x[:, 0] + 0.7 * torch.randn(N, generator=generator, dtype=torch.float64) > 0.2).long()
    out = None if folds is None else torch.from_numpy(Keys.of_places([N]).folds(folds, 1, seed=0))
    return SignedRows.load(x, y, False, bias=True, held_out=out), x.numpy(), y.numpy()


def objective(z: np.ndarray, w: np.ndarray, curvature: float) -> float:
    return float(np.maximum(0, 1 - z @ w).sum() + curvature / 2 * w @ w)


def found(rows: SignedRows, curvature: float, radius: float = math.inf) -> Optimum:
    """The optimum of the sum of losses plus `curvature` / 2 |w|^2."""
    mean = optimum(LinearRisk(rows, Hinge()), curvature / int(rows.counts), radius)
    return Optimum(mean.values, mean.objective * int(rows.counts), mean.gap * int(rows.counts))


@pytest.mark.parametrize("curvature", [0.3, 5.0, 100.0])
def test_the_optimum_is_that_of_liblinear(curvature: float) -> None:
    rows, x, y = problem()
    own = found(rows, curvature)
    ones = np.hstack([x, np.ones((N, 1))])
    peer = LinearSVC(C=1 / curvature, loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**6).fit(ones, y)
    best = objective(rows.z.numpy(), peer.coef_[0], curvature)
    assert own.objective == pytest.approx(best, abs=2e-6 * N)
    assert 0 <= own.gap <= 1e-6 * N
    assert own.objective == pytest.approx(objective(rows.z.numpy(), own.values, curvature))


def test_a_ball_binds_and_is_certified_without_curvature() -> None:
    rows, _, _ = problem()
    own = found(rows, 0.0, 0.8)
    assert np.linalg.norm(own.values) <= 0.8 * (1 + 1e-12)
    assert 0 <= own.gap <= 1e-5 * N
    # no other weights of the ball are better than the certificate says
    others = np.random.default_rng(2).normal(size=(2000, D + 1))
    near = own.values + 0.1 * others
    near = near * np.minimum(1, 0.8 / np.linalg.norm(near, axis=1, keepdims=True))
    assert min(objective(rows.z.numpy(), w, 0.0) for w in near) >= own.objective - own.gap


def test_a_wide_ball_reaches_the_optimum_of_the_linear_program() -> None:
    rows, _, _ = problem()
    own = found(rows, 0.0, 50.0)
    costs = np.concatenate([np.zeros(D + 1), np.ones(N)])
    bounds = [(None, None)] * (D + 1) + [(0, None)] * N
    exact = linprog(costs, A_ub=np.hstack([-rows.z.numpy(), -np.eye(N)]), b_ub=-np.ones(N), bounds=bounds)
    assert own.objective == pytest.approx(exact.fun, abs=1e-5 * N)
    assert own.objective - own.gap <= exact.fun + 1e-9


def test_a_fold_is_its_own_problem() -> None:
    rows, _, _ = problem(folds=2)
    assert rows.weights is not None
    for trial, (curvature, radius) in enumerate([(1.0, math.inf), (10.0, 0.5)]):
        own = SignedRows(rows.z[rows.weights[:, trial] > 0], None, rows.norms[rows.weights[:, trial] > 0])
        masked = found(rows.of_trial(trial), curvature, radius)
        assert masked.objective == pytest.approx(found(own, curvature, radius).objective, abs=2e-6 * N)
        assert masked.gap <= 1e-5 * N


def test_separable_records_have_no_loss_in_a_wide_ball() -> None:
    x = torch.tensor([[-1.0], [1.0], [2.0]], dtype=torch.float64)
    own = found(SignedRows.load(x, torch.tensor([0, 1, 1]), False, bias=True), 0.0, 10.0)
    assert own.objective == pytest.approx(0, abs=1e-6)
    assert 0 <= own.gap <= 3e-6


def test_without_curvature_or_ball_nothing_is_certified() -> None:
    rows, _, _ = problem()
    assert found(rows, 0.0).gap == math.inf
