"""Which way a training ends up with, by a clock that the test sets; no batch is lost or added twice on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dpsgd_cli.core import engine
from dpsgd_cli.core.clipping import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.core.engine import Quicker, Ways, adder
from dpsgd_cli.core.losses import cross_entropy
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.tensors import Rows
from dpsgd_cli.errors import ModelError

CPU = torch.device("cpu")
TRIED = engine._UNTIMED + engine._TIMED


class Timed:
    """Two ways that count their calls and take as long as they are told; the second may have no program."""

    def __init__(self, first: float, second: float, fails_at: int | None = None) -> None:
        self.now = 0.0
        self.calls = {"first": 0, "second": 0}
        self.seconds = {"first": first, "second": second}
        self.fails_at = fails_at

    def way(self, name: str) -> Callable[[Rows, Diagnostics], None]:
        def add(rows: Rows, seen: Diagnostics) -> None:
            del rows, seen
            if name == "second" and self.calls[name] == self.fails_at:
                raise ModelError("no compiler")
            self.calls[name] += 1
            # what a way prepares in its first calls must not count
            self.now += self.seconds[name] + (1000.0 if self.calls[name] <= engine._UNTIMED else 0.0)

        return add

    def run(self, calls: int, slow: float) -> Quicker:
        quicker = Quicker(self.way("first"), self.way("second"), slow, lambda: self.now)
        batch: Rows = (torch.zeros(1, 1, 1), torch.zeros(1, 1), None)
        for _ in range(calls):
            quicker(batch, Diagnostics(1, CPU))
        return quicker


@pytest.mark.parametrize(("second", "wanted"), [(0.9, "second"), (1.1, "first")])
def test_the_faster_way_is_kept(second: float, wanted: str) -> None:
    timed = Timed(1.0, second)
    timed.run(100, 1.0)
    assert timed.calls[wanted] == 100 - TRIED
    assert sum(timed.calls.values()) == 100


def test_quick_calls_are_left_as_they_are() -> None:
    timed = Timed(1.0, 0.1)
    timed.run(100, 1.01)
    assert timed.calls == {"first": 100, "second": 0}


@pytest.mark.parametrize("fails_at", [0, 2, TRIED + 5])
def test_the_first_goes_on_where_the_second_fails(fails_at: int) -> None:
    timed = Timed(1.0, 0.5, fails_at)
    timed.run(100, 1.0)
    assert timed.calls == {"first": 100 - fails_at, "second": fails_at}


def test_a_failure_of_the_first_is_told() -> None:
    timed = Timed(1.0, 0.5)
    failing = Quicker(timed.way("second"), timed.way("first"), 0.0, lambda: 0.0)
    timed.fails_at = 0
    with pytest.raises(ModelError, match="no compiler"):
        failing((torch.zeros(1, 1, 1), torch.zeros(1, 1), None), Diagnostics(1, CPU))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("compiles", [False, "auto"])
def test_on_a_cpu_steps_run_as_they_are(compiles: bool) -> None:
    """Bit for bit, and without a clock."""
    ours, theirs = (Pack(network, [0, 1], Place(CPU)) for _ in range(2))
    clipping = Clipping(torch.tensor([[0.5, 0.1]]))
    add = adder(ours, cross_entropy, clipping, Ways(compiles, True, 1 << 20, 1 << 30))
    assert not isinstance(add, Quicker)
    seen, wanted = Diagnostics(2, CPU), Diagnostics(2, CPU)
    for count in (3, 0, 5):
        generator = torch.Generator().manual_seed(count)
        rows = (torch.randn(2, count, 3, generator=generator), torch.zeros(2, count, dtype=torch.long), None)
        add(rows, seen)
        add_clipped_sums(theirs, rows, cross_entropy, clipping, wanted)
    assert torch.equal(ours.sums, theirs.sums)
    assert seen.sums() == wanted.sums()
    assert seen.sums()["examples"] == [8.0, 8.0]
