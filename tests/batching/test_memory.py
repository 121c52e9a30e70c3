from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from dpsgd_cli.batching.memory import rows_that_fit, trials_that_fit
from dpsgd_cli.engine.packing import Pack, Placement, elements_per_row
from dpsgd_cli.noise.run import BLOCK_ELEMENTS


def test_trials_that_fit_fall_with_their_size_and_never_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 GiB: 12 GiB hold 13 trials of 20 million parameters, at twelve numbers of 4 bytes each."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 6 << 20, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert [trials_that_fit(size, 1000, gpu=None) for size in (10, 20_000_000, 10**12)] == [64, 13, 1]


def test_a_trial_of_half_the_memory_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 numbers of 4 bytes a parameter: 100 parameters and the least block of noise in 40 MB, half of which count."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 10_000, "SC_PAGE_SIZE": 4096}.__getitem__)
    numbers = 9 * 100 + BLOCK_ELEMENTS + 16 * 7
    assert trials_that_fit(100, 7, gpu=None) == 10_000 * 4096 // 2 // (4 * numbers) == 9


def test_rows_that_fit_take_no_more_than_a_quarter_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = Pack(lambda: nn.Linear(10, 2), [0, 1], Placement(torch.device("cpu")))
    x = torch.zeros(4, 10)
    whole = rows_that_fit(pack, x)
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert rows_that_fit(pack, x) == 64 * 4096 // 16 // (2 * elements_per_row(pack, x)) < whole
