"""Batches drawn ahead are the batches drawn one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpsgd_cli.core import ahead
from dpsgd_cli.core.ahead import AheadSampler
from dpsgd_cli.core.sampling import Batch, FullSampler, PoissonSampler, Sampler, ShuffleSampler, SingleSampler
from dpsgd_cli.core.streams import SeededStreams

CPU = torch.device("cpu")
STREAMS = [SeededStreams(3), SeededStreams(4)]
SAMPLERS = {
    "poisson": lambda: PoissonSampler(STREAMS, 50, 7),
    "poisson-one": lambda: PoissonSampler(STREAMS[:1], 50, 7),
    "nearly-empty": lambda: PoissonSampler(STREAMS, 1000, 1),
    "shuffle": lambda: ShuffleSampler(STREAMS, 50, 7),
    "single": lambda: SingleSampler(STREAMS, 50),
}


def records(batch: Batch) -> list[list[int]]:
    """The records of each trial, padding taken away."""
    rows = np.asarray(batch.rows)
    mask = np.ones(rows.shape, dtype=bool) if batch.mask is None else np.asarray(batch.mask)
    return [row[own].tolist() for row, own in zip(rows, mask, strict=True)]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("room", [1, 100, 1 << 21])
def test_each_step_has_its_own_records(name: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_NUMBERS_AT_ONCE", room)
    sampler: Sampler = SAMPLERS[name]()
    drawn = AheadSampler(SAMPLERS[name](), CPU)
    assert drawn.steps_per_epoch == sampler.steps_per_epoch
    for step in range(3 * min(sampler.steps_per_epoch, 10)):
        assert records(drawn.batch(step)) == records(sampler.batch(step))


def test_steps_may_be_asked_for_from_anywhere() -> None:
    drawn, sampler = AheadSampler(SAMPLERS["poisson"](), CPU), SAMPLERS["poisson"]()
    for step in (20, 3, 3, 21, 0):
        assert records(drawn.batch(step)) == records(sampler.batch(step))


def test_sizes_that_vary_by_chance_have_few_widths() -> None:
    sampler = AheadSampler(PoissonSampler(STREAMS, 10_000, 100), CPU)
    batches = [sampler.batch(step) for step in range(300)]
    assert len({batch.rows.shape[1] for batch in batches if batch.rows is not None}) <= 4
    assert all(batch.mask is not None for batch in batches)


def test_batches_of_known_sizes_are_not_padded() -> None:
    sampler = AheadSampler(SAMPLERS["shuffle"](), CPU)
    widths = [np.asarray(sampler.batch(step).rows).shape[1] for step in range(8)]
    assert widths == [7] * 7 + [1]
    assert all(sampler.batch(step).mask is None for step in range(8))


def test_every_record_stays_every_record() -> None:
    assert AheadSampler(FullSampler(), CPU).batch(0) == Batch(rows=None)


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 100, 511, 513, 4096])
def test_a_width_is_rounded_up_by_a_sixteenth_at_most(width: int) -> None:
    assert max(1, width) <= ahead._rounded_up(width) <= max(1, width * 17 / 16)
