"""Noise that is kept from step to step, against the matrix that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.correlation import StepNoise, step_noise
from dpsgd_cli.noise.price import NoiseStrategy
from dpsgd_cli.noise.run import NoiseSource
from tests.noise.test_price import made, matrix, strange

CPU = torch.device("cpu")


class Given(NoiseSource):
    """Noise that a test gives, of a step or of every step."""

    def __init__(self, fresh: Tensor) -> None:
        self.fresh = fresh

    def draw(self, step: int) -> Tensor:
        return self.fresh


def impulses(own: NoiseStrategy, steps: int) -> np.ndarray:
    """C^-1, column by column: what the normal of one step adds to every other."""
    columns = []
    for at in range(steps):
        noise = step_noise([own], 1, CPU)
        found = []
        for step in range(steps):
            sums = torch.zeros(1, 1, dtype=torch.float64)
            noise.add(sums, step, Given(torch.full((1, 1), float(step == at))), torch.ones(1, 1), None)
            found.append(float(sums))
        columns.append(found)
    return np.array(columns).T


@pytest.mark.parametrize("bands", [1, 2, 7])
def test_multiplied_by_the_matrix_it_is_fresh_noise(bands: int) -> None:
    """C has columns of norm at most 1, and nothing `bands` or more below its diagonal."""
    for own in (made(bands, 6, 3), strange(18)):
        inverse = impulses(own, 18)
        np.testing.assert_allclose(matrix(own) @ inverse, np.eye(18), atol=1e-10)
        strategy = np.linalg.inv(inverse)
        assert np.linalg.norm(strategy, axis=0).max() <= 1 + 1e-10
        assert np.abs(np.triu(strategy, 1)).max() < 1e-10
        assert np.abs(np.tril(strategy, -own.reach)).max() < 1e-10


def steps_of(noise: StepNoise, normals: Tensor, scale: Tensor, first: int = 0) -> Tensor:
    found = []
    for step, fresh in enumerate(normals, start=first):
        sums = torch.zeros(fresh.shape, dtype=torch.float64)
        noise.add(sums, step, Given(fresh), scale, None)
        found.append(sums)
    return torch.stack(found)


SHAPES = [made(4, 20), made(6, 20), NoiseStrategy(20)]


@pytest.mark.parametrize("stop", [1, 5, 9, 14])
def test_noise_goes_on_where_it_was_alone_and_in_a_pack(stop: int) -> None:
    """Stopped in the middle of a band, a cycle or an epoch; trials of other weights beside it."""
    shapes, normals, scale = SHAPES, torch.randn(20, 3, 5), torch.tensor([[1.0], [2.0], [0.5]])
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
    noise = step_noise([made(3, 9)], 2, CPU)
    fresh, one = Given(torch.ones(1, 2)), torch.ones(1, 1)
    noise.add(torch.zeros(1, 2, dtype=torch.float64), 0, fresh, one, None)
    for step in (0, 2):
        with pytest.raises(RuntimeError, match="that of step 1 is next"):
            noise.add(torch.zeros(1, 2, dtype=torch.float64), step, fresh, one, None)


def test_kinds_of_noise_do_not_share_a_pack() -> None:
    with pytest.raises(PrivacyError, match="share one kind"):
        step_noise([made(3, 9), None], 2, CPU)
