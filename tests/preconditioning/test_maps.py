"""Roots of noisy matrices, and rows that share one matrix, against rows that were written out."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.preconditioning.maps import BlockMap, Preconditioner, cut_of, spread
from dpsgd_cli.preconditioning.marginals import MapBlock

R, N, D = 2, 30, 5


def made(seed: int = 0) -> tuple[Preconditioner, torch.Tensor]:
    rng = np.random.default_rng(seed)
    cuts = [cut_of(np.diag([900.0, 40, 3, 0, -2]) + 0.1 * trial, 1.0 + 3 * trial) for trial in range(R)]
    assert [cut.shape[1] for cut in cuts] == [2, 2]
    x = torch.from_numpy(rng.standard_normal((N, D))).float()
    x[3] = 0
    return Preconditioner(cuts), x


def root(cut: torch.Tensor) -> torch.Tensor:
    return torch.eye(len(cut)) - cut @ cut.T


def test_a_root_is_the_inverse_root_of_what_stands_out_of_noise_and_half_of_its_spread() -> None:
    rng = np.random.default_rng(1)
    basis, scale = np.linalg.qr(rng.standard_normal((D, D)))[0], 3.0
    reach = scale * math.sqrt(2 * D)
    values = np.array([900.0, 1.25 * reach, 0.9 * reach, 0, -2 * reach])
    moments = [(900 + math.sqrt(900**2 - reach**2)) / 2, reach, 0, 0, 0]  # 1.25 = 1 + 1 / 4
    expected = basis @ np.diag(np.sqrt(reach / 2 / (np.array(moments) + reach / 2))) @ basis.T
    found = root(cut_of(basis @ np.diag(values) @ basis.T, scale))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6)


def test_what_noise_made_of_a_moment_is_undone() -> None:
    """A direction of moment m in 600 x 600 noise is seen as m + s^2 / (4 m), and cut as one of m."""
    from dpsgd_cli.preconditioning.second_moments import with_noise

    size, scale = 600, 1.0
    reach = scale * math.sqrt(2 * size)
    matrix = np.zeros((size, size))
    matrix[0, 0] = 2 * reach
    cut = cut_of(with_noise(matrix, lambda v: v + scale * np.random.default_rng(0).standard_normal(len(v))), scale)
    lengths = torch.linalg.vector_norm(cut, dim=0)
    assert float(lengths.max() ** 2) == pytest.approx(1 - math.sqrt(1 / (1 + 4)), rel=0.02)


@pytest.mark.parametrize("beyond", [3, 70, 299])
def test_of_a_large_matrix_only_what_stands_out_is_looked_for(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same root as of all eigenvalues, however many do: more than are asked for at first, or all of them."""
    rng, scale = np.random.default_rng(3), 2.0
    basis, reach = np.linalg.qr(rng.standard_normal((300, 300)))[0], spread(300, 2.0)
    values = np.concatenate([np.linspace(1.1, 40, beyond), np.linspace(-0.9, 0.9, 300 - beyond)]) * reach
    matrix = basis @ np.diag(values) @ basis.T
    whole = cut_of(matrix, scale)
    monkeypatch.setattr("dpsgd_cli.preconditioning.maps._WHOLE_UP_TO", 299)
    few = cut_of(matrix, scale)
    assert few.shape == whole.shape == (300, beyond)
    np.testing.assert_allclose(root(few).numpy(), root(whole).numpy(), atol=1e-5)


def test_iterations_that_do_not_converge_give_way_to_all_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration finds nothing of 300 eigenvalues that lie close together."""
    matrix = np.diag(np.linspace(5.0, 6.0, 300))
    whole, eigsh = cut_of(matrix, 0.2), partial(scipy.sparse.linalg.eigsh, maxiter=1)
    with pytest.raises(scipy.sparse.linalg.ArpackNoConvergence):
        eigsh(matrix, 64)
    monkeypatch.setattr(scipy.sparse.linalg, "eigsh", eigsh)
    monkeypatch.setattr("dpsgd_cli.preconditioning.maps._WHOLE_UP_TO", 299)
    assert torch.equal(cut_of(matrix, 0.2), whole)


def test_the_spread_is_that_of_the_eigenvalues_of_noise_alone() -> None:
    """The largest eigenvalue of 400 x 400 noise is within 10% of the edge of the semicircle."""
    from dpsgd_cli.preconditioning.second_moments import with_noise

    draws = np.random.default_rng(0).standard_normal(400 * 401 // 2)
    largest = np.linalg.eigvalsh(with_noise(np.zeros((400, 400)), lambda v: v + 7.0 * draws)).max()
    assert spread(400, 7.0) == pytest.approx(largest, rel=0.1)


@pytest.mark.parametrize("size", [20, 700])
def test_no_row_is_longer_than_one(size: int) -> None:
    """In float64, of rows along directions that the root shrinks most, and among them."""
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    cut = cut_of(basis @ np.diag(np.logspace(0, 6, size)) @ basis.T, 1.0)
    along = basis.T * 10.0 ** rng.integers(-6, 6, (size, 1))
    x = torch.from_numpy(np.vstack([along, rng.random((size, size))])).float()
    one, exact = Preconditioner([cut]), torch.eye(size).double() - cut.double() @ cut.double().T
    factors = one.factors(x, False)[0].double()
    lengths = torch.linalg.vector_norm((x.double() @ exact) * factors.unsqueeze(1), dim=1)
    assert lengths.max() <= 1 + 1e-7 and lengths.min() > 0.99
    units = torch.linalg.vector_norm(one.units(x[None]).double(), dim=-1)
    assert units.max() <= 1 + 1e-6 and units.min() > 0.99


def test_weights_through_the_root_are_the_model_on_rows_with_factors() -> None:
    one, x = made()
    flat = torch.randn(R, 3 * D + 3, generator=torch.Generator().manual_seed(0))
    published = one.through(flat, 3 * D)
    table = Table(x, torch.arange(N) % 3, False, factors=one.factors(x, False))
    rows, labels, _ = table.every(2, N)
    units = one.units(x[None])[:, 2:]
    for trial in range(R):
        own, new = flat[trial, : 3 * D].view(3, D), published[trial, : 3 * D].view(3, D)
        expected = units[trial] @ own.T + flat[trial, 3 * D :]
        assert torch.allclose(rows[trial] @ new.T + published[trial, 3 * D :], expected, atol=1e-5)
    assert labels[0].tolist() == table.y[2:].tolist()
    numbers = torch.tensor([[0, 7], [9, 3]])
    (found, _, _), *_ = table.chunks(Batch(numbers), 5)
    for trial in range(R):
        factors = table.factors[trial, numbers[trial]] if table.factors is not None else None
        assert factors is not None
        assert torch.equal(found[trial], x[numbers[trial]] * factors.unsqueeze(1))


def test_rows_of_their_own_have_factors_of_their_own() -> None:
    one, x = made()
    own = torch.stack([x, 2 * x.flip(0)])
    factors = one.factors(own, True)
    assert torch.equal(factors[0], one.factors(x, False)[0])
    assert torch.allclose(factors[1, :-4], one.factors(x, False)[1].flip(0)[:-4] / 2)


@pytest.mark.parametrize("size", [1e-42, 2.6e-23, 1e-19, 1e19, 1e30])
def test_rows_whose_squares_are_no_numbers_are_not_longer_than_one_either(size: float) -> None:
    """In float32 the square of 2.6e-23 is 0 and that of 3e-23 is not: 2,000 of these would seem as short as one."""
    one = Preconditioner([torch.zeros(2000, 1)])
    x = torch.full((2, 2000), size)
    x[:, 0] *= 1.2
    factors = one.factors(x, False)[0].double()
    assert torch.linalg.vector_norm(x.double() * factors.unsqueeze(1), dim=1).max() <= 1
    assert torch.linalg.vector_norm(one.units(x[None]).double(), dim=-1).max() <= 1


def test_rows_that_are_nought_or_no_numbers_stay_so() -> None:
    one, x = made()
    x[5, 1], x[6, 0] = torch.nan, torch.inf
    rows = Table(x, torch.zeros(N), False, factors=one.factors(x, False)).every(0, N)[0]
    for found in (rows, one.units(x[None])):
        assert (found[:, 3] == 0).all()
        assert not torch.isfinite(found[:, 5:7]).all(dim=-1).any()


def maps(trials: int = R) -> tuple[BlockMap, np.ndarray]:
    """Maps of 5 features in two blocks, and the same written out, (R, 5, 5)."""
    rng = np.random.default_rng(5)
    parts = [(np.array([0, 2, 4]), np.array([0, 2])), (np.array([4, 1, 3]), np.array([4, 1, 3]))]
    blocks = [[MapBlock(i, o, rng.standard_normal((len(i), len(o)))) for i, o in parts] for _ in range(trials)]
    written = np.zeros((trials, D, D))
    for trial, own in enumerate(blocks):
        for block in own:
            written[trial][np.ix_(block.inputs, block.outputs)] = block.matrix
    return BlockMap.of(blocks, torch.empty(0)), written


def test_blocks_are_a_matrix_that_was_written_out() -> None:
    """Rows, their lengths, weights on their way back, and sums."""
    made, written = maps()
    rng = np.random.default_rng(6)
    x, flat = rng.standard_normal((N, D)), rng.standard_normal((R, 2 * D + 2))
    rows = np.einsum("nd,rde->rne", x, written)
    np.testing.assert_allclose(made.units(torch.from_numpy(x)[None]).numpy(), rows, atol=1e-12)
    table = Table(torch.from_numpy(x), torch.zeros(N), False)
    np.testing.assert_allclose(made.lengths(table).numpy(), np.linalg.norm(rows, axis=2), rtol=1e-9)
    weights, bias = flat[:, : 2 * D].reshape(R, 2, D), flat[:, 2 * D :]
    through, back = (move(torch.from_numpy(flat), 2 * D).numpy() for move in (made.through, made.back))
    np.testing.assert_allclose(through[:, : 2 * D].reshape(R, 2, D), weights @ written.transpose(0, 2, 1), atol=1e-12)
    np.testing.assert_allclose(back[:, : 2 * D].reshape(R, 2, D), weights @ written, atol=1e-12)
    for found in (through, back):
        np.testing.assert_array_equal(found[:, 2 * D :], bias)


def test_no_row_of_blocks_is_longer_than_its_bound() -> None:
    """In exact arithmetic, of float32 rows that the map sends almost to 0; and the bound is close."""
    made, written = maps(1)
    near = np.linalg.solve(written[0].T, 1e-9 * np.random.default_rng(7).standard_normal((D, N)))
    x = torch.from_numpy(near.T).float()
    exact = [
        math.sqrt(sum(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(row, column, strict=True)) ** 2
                      for column in written[0].T))
        for row in x.numpy()
    ]  # fmt: skip
    found = made.lengths(Table(x, torch.zeros(N), False))[0].numpy()
    assert (found >= np.array(exact)).all() and (found <= np.array(exact) * 1.001).all()
