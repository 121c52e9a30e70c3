"""The optimum of the hinge against a linear program, liblinear, and its own certificate."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn.svm import LinearSVC

from dpsgd_cli.data.splits import Keys
from dpsgd_cli.methods.risks.optimum import minimise_hinge
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


def tensor(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("curvature", [0.3, 5.0, 100.0])
def test_the_optimum_is_that_of_liblinear(curvature: float) -> None:
    rows, x, y = problem()
    found = minimise_hinge(rows, tensor(curvature), tensor(math.inf), 1e-7 * N)
    ones = np.hstack([x, np.ones((N, 1))])
    peer = LinearSVC(C=1 / curvature, loss="hinge", fit_intercept=False, tol=1e-10, max_iter=10**6).fit(ones, y)
    best = objective(rows.z.numpy(), peer.coef_[0], curvature)
    assert float(found.objective[0]) == pytest.approx(best, abs=2e-6 * N)
    assert 0 <= float(found.gap[0]) <= 1e-6 * N
    assert float(found.objective[0]) == pytest.approx(objective(rows.z.numpy(), found.values[0].numpy(), curvature))


def test_a_ball_binds_and_is_certified_without_curvature() -> None:
    rows, _, _ = problem()
    found = minimise_hinge(rows, tensor(0.0), tensor(0.8), 1e-6 * N)
    assert float(found.values.norm()) <= 0.8
    assert 0 <= float(found.gap[0]) <= 1e-5 * N
    # no other weights of the ball are better than the certificate says
    others = torch.randn(2000, D + 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    near = found.values + 0.1 * others
    near = near * (0.8 / near.norm(dim=1, keepdim=True)).clamp(max=1)
    least = min(objective(rows.z.numpy(), w, 0.0) for w in near.numpy())
    assert least >= float(found.objective[0] - found.gap[0])


def test_a_wide_ball_reaches_the_optimum_of_the_linear_program() -> None:
    rows, _, _ = problem()
    found = minimise_hinge(rows, tensor(0.0), tensor(50.0), 1e-6 * N)
    costs = np.concatenate([np.zeros(D + 1), np.ones(N)])
    bounds = [(None, None)] * (D + 1) + [(0, None)] * N
    exact = linprog(costs, A_ub=np.hstack([-rows.z.numpy(), -np.eye(N)]), b_ub=-np.ones(N), bounds=bounds)
    assert float(found.objective[0]) == pytest.approx(exact.fun, abs=1e-5 * N)
    assert float(found.objective[0] - found.gap[0]) <= exact.fun + 1e-9


def test_trials_have_their_own_folds_and_curvatures() -> None:
    rows, _, _ = problem(folds=2)
    found = minimise_hinge(rows, tensor(1.0, 10.0), tensor(math.inf, 0.5), 1e-6 * N)
    assert rows.weights is not None
    for trial, (curvature, radius) in enumerate([(1.0, math.inf), (10.0, 0.5)]):
        own = SignedRows(rows.z[rows.weights[:, trial] > 0], None, rows.norms[rows.weights[:, trial] > 0])
        alone = minimise_hinge(own, tensor(curvature), tensor(radius), 1e-6 * N)
        assert float(found.objective[trial]) == pytest.approx(float(alone.objective[0]), abs=2e-6 * N)
        assert float(found.gap[trial]) <= 1e-5 * N


def test_separable_records_have_no_loss_in_a_wide_ball() -> None:
    x = torch.tensor([[-1.0], [1.0], [2.0]], dtype=torch.float64)
    found = minimise_hinge(
        SignedRows.load(x, torch.tensor([0, 1, 1]), False, bias=True), tensor(0.0), tensor(10.0), 1e-6
    )
    assert float(found.objective[0]) == pytest.approx(0, abs=1e-6)
    assert 0 <= float(found.gap[0]) <= 1e-6


def test_without_curvature_or_ball_nothing_is_certified() -> None:
    rows, _, _ = problem()
    assert float(minimise_hinge(rows, tensor(0.0), tensor(math.inf), 1e-6 * N).gap[0]) == math.inf
