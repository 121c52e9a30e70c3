"""Noise of a pack: per trial, never repeated, of unit variance, and independent of the pack around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from dpsgd_cli.engine.streams import SecureStreams, SeededStreams
from dpsgd_cli.noise.run import NoiseSource, TrialNoise, add_noise

CPU = torch.device("cpu")
LEAST = 1e-6


def source(seeds: list[int], size: int, dtype: torch.dtype = torch.float64) -> NoiseSource:
    return NoiseSource([SeededStreams(seed) for seed in seeds], size, CPU, dtype)


@pytest.mark.parametrize(("size", "steps"), [(1, 70), (7, 130), (9000, 59), (300_000, 2)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_trial_draws_the_same_alone_and_in_a_pack(size: int, steps: int, threads: int) -> None:
    """Over more steps than a block holds, whichever threads fill it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seeds = list(range(20 if size < 1000 else 5))
        pack, alone = source(seeds, size), source([3], size)
        for step in range(steps):
            assert torch.equal(pack.draw(step)[3], alone.draw(step)[0])
    finally:
        torch.set_num_threads(before)


def test_threads_change_nothing() -> None:
    before = torch.get_num_threads()
    try:
        drawn = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            drawn.append(source([0, 1], 50_000).draw(12).clone())
        assert torch.equal(*drawn)
    finally:
        torch.set_num_threads(before)


def test_no_trial_step_or_coordinate_shares_a_normal() -> None:
    """4 trials x 200 steps x 11 coordinates, several blocks: 8800 different float64 numbers."""
    noise = source([0, 1, 2, 10**12], 11)
    values = torch.stack([noise.draw(step).clone() for step in range(200)])
    assert len(values.unique()) == values.numel()


def test_trials_steps_and_blocks_are_independent() -> None:
    """Correlations of 1500 coordinates between all pairs of 3 trials x 70 steps; noise shared by a tenth is found.

    r sqrt(n) is standard normal; the bound holds for all 21,945 pairs with probability 1 - 1e-6.
    """
    noise, size = source([0, 1, 2], 1500), 1500
    drawn = torch.stack([noise.draw(step).clone() for step in range(70)]).reshape(-1, size).numpy()
    bound = stats.norm.isf(LEAST / 2 / (210 * 209 / 2))
    scores = drawn @ drawn.T / np.sqrt(size)
    np.fill_diagonal(scores, 0.0)
    assert np.abs(scores).max() < bound
    drawn[5] += 0.2 * drawn[190]
    assert abs(drawn[5] @ drawn[190]) / np.sqrt(size) > bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_variance_is_one_and_not_two_thirds_or_three_halves_of_it(dtype: torch.dtype) -> None:
    """Chi-square on 2 x 50 x 200 draws: accepts with probability 1 - 1e-6, rejects scales 2/3 and 3/2."""
    noise = source([5, 6], 200, dtype)
    values = torch.stack([noise.draw(step).clone() for step in range(50)]).double()

    def accepted(scale: float) -> bool:
        total = float((values * scale).square().sum())
        return bool(min(stats.chi2.cdf(total, values.numel()), stats.chi2.sf(total, values.numel())) > LEAST / 2)

    assert accepted(1.0)
    assert not accepted(2 / 3) and not accepted(3 / 2)


def test_seeded_noise_can_be_asked_for_again_in_any_order() -> None:
    first = source([4], 9)
    drawn = {step: first.draw(step).clone() for step in (0, 64, 65, 3, 200)}
    resumed = source([4], 9)
    for step in (200, 3, 65, 64, 0, 3):
        assert torch.equal(resumed.draw(step), drawn[step])


@pytest.mark.parametrize("again", [5, 4, 0])
def test_secure_noise_is_never_given_twice(again: int) -> None:
    noise = NoiseSource([SecureStreams(), SecureStreams()], 9, CPU, torch.float32)
    noise.draw(2)
    noise.draw(5)
    with pytest.raises(RuntimeError, match=f"step {again} was drawn before"):
        noise.draw(again)
    assert noise.draw(6).shape == (2, 9)


def test_secure_noise_differs_between_trials_steps_and_runs() -> None:
    values = []
    for _ in range(2):
        noise = NoiseSource([SecureStreams(), SecureStreams()], 9, CPU, torch.float64)
        values += [noise.draw(step).clone() for step in range(70)]
    assert len(torch.stack(values).unique()) == 2 * 70 * 2 * 9


def test_noise_meets_the_sum_before_it_is_rounded() -> None:
    """Half of float32's ulp and a little more moves a sum up; rounded first, nothing moves."""
    sums = torch.full((1, 1), 2.0**24, dtype=torch.float64)
    add_noise(sums, torch.full((1, 1), 0.5 + 2.0**-26, dtype=torch.float64), torch.full((1, 1), 2.0), None)
    assert float(sums.float()) == 2.0**24 + 2
    add_noise(sums, torch.full((1, 1), 0.5), torch.full((1, 1), -1.0), None)
    assert float(sums) == 2.0**24 + 0.5 + 2.0**-25


def paced(seeds: list[int]) -> TrialNoise:
    return TrialNoise([SeededStreams(seed) for seed in seeds], "test", 3, torch.empty(0, dtype=torch.float64))


def test_a_trials_draws_do_not_depend_on_when_others_draw() -> None:
    together, alone = paced([1, 2]), paced([2])
    mine = []
    for turn in range(200):
        drawn = together.draw([0, 1] if turn % 3 == 0 else [1])
        mine.append(drawn[-1].clone())
    assert torch.equal(torch.stack(mine), torch.cat([alone.draw([0]) for _ in range(200)]))


def test_no_draw_is_given_twice_and_a_resumed_source_goes_on() -> None:
    first = paced([5])
    drawn = torch.cat([first.draw([0]) for _ in range(150)])
    assert len({tuple(row.tolist()) for row in drawn}) == 150
    again = paced([5])
    again.resume([100])
    assert torch.equal(torch.cat([again.draw([0]) for _ in range(50)]), drawn[100:])
