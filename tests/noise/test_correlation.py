"""Noise that is kept from step to step, against the matrix that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import toeplitz
from torch import Tensor

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.correlation import StepNoise, step_noise
from dpsgd_cli.noise.price import Correlation, Toeplitz, Tree, optimised, square_root
from dpsgd_cli.noise.run import NoiseSource

CPU = torch.device("cpu")


class Given(NoiseSource):
    """Noise that a test gives, of a step or of every step."""

    def __init__(self, fresh: Tensor) -> None:
        self.fresh = fresh

    def draw(self, step: int) -> Tensor:
        return self.fresh


def impulses(correlation: Correlation, steps: int) -> np.ndarray:
    """C^-1 (or what sums of nodes come to), column by column: what the normal of one step adds to every other."""
    columns = []
    for at in range(steps):
        noise = step_noise([correlation], 1, CPU)
        found = []
        for step in range(steps):
            sums = torch.zeros(1, 1, dtype=torch.float64)
            noise.add(sums, step, Given(torch.full((1, 1), float(step == at))), torch.ones(1, 1), None)
            found.append(float(sums))
        columns.append(found)
    return np.array(columns).T


@given(bands=st.integers(1, 9), best=st.booleans(), period=st.sampled_from([None, 7, 12]))
@settings(max_examples=20)
def test_multiplied_by_the_banded_matrix_it_is_fresh_noise(bands: int, best: bool, period: int | None) -> None:
    """C has columns of norm at most 1, nothing `bands` or more below its diagonal, and none across two periods."""
    weights = optimised(bands, 24) if best else square_root(bands)
    inverse = impulses(Toeplitz(period, weights), 24)
    size = period or 24
    column = np.array([*weights, *[0.0] * 24])[:size]
    blocks = np.kron(np.eye(24 // size + 1), toeplitz(column, np.zeros(size)))[:24, :24]
    np.testing.assert_allclose(blocks @ inverse, np.eye(24), atol=1e-12)
    strategy = np.linalg.inv(inverse)
    assert np.linalg.norm(strategy, axis=0).max() <= 1 + 1e-12
    assert np.abs(np.tril(strategy, -bands)).max() < 1e-12 and np.abs(np.triu(strategy, 1)).max() < 1e-12


@pytest.mark.parametrize("steps", [1, 2, 5, 8, 13])
def test_sums_of_tree_noise_are_sums_of_nodes(steps: int) -> None:
    """Sums of the first t steps hold the nodes of t's binary digits; with the nodes a record moves by norm 1 at most.

    A node's normal is drawn at its last leaf. A leaf's gradient, over sqrt(h), is in every used node above it.
    """
    tree = Tree(steps)
    sums = np.tril(np.ones((steps, steps))) @ impulses(tree, steps)
    root = tree.levels**0.5
    above = np.zeros(steps)
    for node, column in enumerate(sums.T):
        size = (node + 1) & -(node + 1)
        expected = np.zeros(steps)
        expected[node : min(node + size, steps)] = root
        np.testing.assert_allclose(column, expected, atol=1e-12)
        above[node + 1 - size : node + 1] += 1
    assert np.sqrt(above.max()) / root <= 1 + 1e-12
    assert np.diag(sums @ sums.T) == pytest.approx(tree.variances(steps))


def steps_of(noise: StepNoise, normals: Tensor, scale: Tensor, first: int = 0) -> Tensor:
    found = []
    for step, fresh in enumerate(normals, start=first):
        sums = torch.zeros(fresh.shape, dtype=torch.float64)
        noise.add(sums, step, Given(fresh), scale, None)
        found.append(sums)
    return torch.stack(found)


SHAPES: dict[str, list[Correlation]] = {
    "banded": [Toeplitz(None, square_root(4)), Toeplitz(None, optimised(7, 30)), Toeplitz(None, (1.0,))],
    "toeplitz": [Toeplitz(9, square_root(9))] * 3,
    "tree": [Tree(9)] * 3,
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("stop", [1, 5, 9, 14])
def test_noise_goes_on_where_it_was_alone_and_in_a_pack(kind: str, stop: int) -> None:
    """Stopped in the middle of a band, a cycle or an epoch; trials of other weights beside it."""
    shapes, normals, scale = SHAPES[kind], torch.randn(20, 3, 5), torch.tensor([[1.0], [2.0], [0.5]])
    whole = steps_of(step_noise(shapes, 5, CPU), normals, scale)
    first = step_noise(shapes, 5, CPU)
    steps_of(first, normals[:stop], scale)
    kept = first.state()
    steps_of(first, normals[stop:], scale, stop)  # what is kept is a copy
    second = step_noise(shapes, 5, CPU)
    second.load_state(kept)
    assert torch.equal(steps_of(second, normals[stop:], scale, stop), whole[stop:])
    for trial in range(3):
        own = slice(trial, trial + 1)
        alone = steps_of(step_noise(shapes[own], 5, CPU), normals[:, own], scale[own])
        torch.testing.assert_close(alone, whole[:, own], rtol=1e-12, atol=1e-12)


def test_a_step_is_never_left_out_or_made_twice() -> None:
    noise = step_noise([Toeplitz(None, square_root(3))], 2, CPU)
    fresh, one = Given(torch.ones(1, 2)), torch.ones(1, 1)
    noise.add(torch.zeros(1, 2, dtype=torch.float64), 0, fresh, one, None)
    for step in (0, 2):
        with pytest.raises(RuntimeError, match="that of step 1 is next"):
            noise.add(torch.zeros(1, 2, dtype=torch.float64), step, fresh, one, None)


def test_kinds_of_noise_do_not_share_a_pack() -> None:
    for shapes in ([Tree(3), None], [Tree(3), Toeplitz(3, square_root(3))], [Tree(3), Tree(4)]):
        with pytest.raises(PrivacyError, match="share one kind"):
            step_noise(shapes, 2, CPU)
