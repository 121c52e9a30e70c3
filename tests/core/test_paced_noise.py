from __future__ import annotations

import torch

from dpsgd_cli.core.paced_noise import PacedNoise
from dpsgd_cli.core.streams import SeededStreams


def source(seeds: list[int]) -> PacedNoise:
    return PacedNoise([SeededStreams(seed) for seed in seeds], "test", 3, torch.empty(0, dtype=torch.float64))


def test_a_trials_draws_do_not_depend_on_when_others_draw() -> None:
    together, alone = source([1, 2]), source([2])
    mine = []
    for turn in range(200):
        drawn = together.draw([0, 1] if turn % 3 == 0 else [1])
        mine.append(drawn[-1].clone())
    assert torch.equal(torch.stack(mine), torch.cat([alone.draw([0]) for _ in range(200)]))


def test_no_draw_is_given_twice_and_a_resumed_source_goes_on() -> None:
    first = source([5])
    drawn = torch.cat([first.draw([0]) for _ in range(150)])
    assert len({tuple(row.tolist()) for row in drawn}) == 150
    again = source([5])
    again.resume([100])
    assert torch.equal(torch.cat([again.draw([0]) for _ in range(50)]), drawn[100:])
