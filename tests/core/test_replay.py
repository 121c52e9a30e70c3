"""Sums from replayed programs are those of running every step, whatever changed between them.

No GPU is needed: a stand-in for a captured graph runs the same function again and writes into the tensors of its
first run, as a graph does. What only a GPU can show is in `test_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpsgd_cli.core import replay
from dpsgd_cli.core.clipping import Clipping, Diagnostics, Found, add_clipped_sums
from dpsgd_cli.core.losses import cross_entropy
from dpsgd_cli.core.noise import NoiseSource
from dpsgd_cli.core.packing import Pack, Place
from dpsgd_cli.core.replay import Replayer
from dpsgd_cli.core.streams import SeededStreams
from dpsgd_cli.core.tensors import Rows

CPU = torch.device("cpu")


class Tape:
    """Captures as a GPU does: fixed places in, fixed places out. Counts what it was asked for."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, function: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        self.captured += 1
        losses, squares = function()

        def again() -> None:
            self.replayed += 1
            new_losses, new_squares = function()
            losses.copy_(new_losses)
            if squares is not None and new_squares is not None:
                squares.copy_(new_squares)

        return again, (losses, squares)


def network() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def rows(seed: int, count: int, masked: bool = False) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, count, 1, 5, generator=generator)
    mask = torch.rand(2, count, generator=generator) < 0.7 if masked else None
    return x, torch.randint(0, 3, (2, count), generator=generator), mask


def made(clips: bool = True) -> tuple[Pack, Clipping | None]:
    pack = Pack(network, [0, 1], Place(CPU, torch.float64))
    return pack, Clipping(torch.tensor([[0.5, 0.1]], dtype=torch.float64)) if clips else None


def double(batch: Rows) -> Rows:
    return batch[0].double(), batch[1], batch[2]


@pytest.mark.parametrize("clips", [True, False])
def test_replays_follow_new_batches_and_new_weights(clips: bool) -> None:
    (fast, clipping), (slow, _), tape = made(clips), made(clips), Tape()
    replayer = Replayer(fast, cross_entropy, clipping, tape)
    ours, theirs = Diagnostics(2, CPU), Diagnostics(2, CPU)
    for step, (count, masked) in enumerate([(4, False), (4, False), (3, True), (4, False), (3, True), (4, True)]):
        batch = double(rows(step, count, masked))
        replayer.add(batch, ours)
        add_clipped_sums(slow, batch, cross_entropy, clipping, theirs)
        torch.testing.assert_close(fast.sums, slow.sums, rtol=1e-12, atol=1e-14)
        for pack in (fast, slow):
            pack.values.sub_(0.1 * pack.sums)
            if step % 2:
                pack.sums.zero_()
    for name, values in theirs.sums().items():
        assert ours.sums()[name] == pytest.approx(values)
    assert (tape.captured, tape.replayed) == (3, 6)


def test_noise_is_new_at_every_replay() -> None:
    """Equal batches and weights: what differs between steps is the noise, and it is that of the step."""
    (pack, clipping), tape = made(), Tape()
    replayer, batch = Replayer(pack, cross_entropy, clipping, tape), double(rows(0, 4))
    noise = NoiseSource([SeededStreams(0), SeededStreams(1)], pack.size, CPU, torch.float64)
    alone = NoiseSource([SeededStreams(0), SeededStreams(1)], pack.size, CPU, torch.float64)
    replayer.add(batch, Diagnostics(2, CPU))
    exact, released = pack.sums.clone(), []
    for step in range(130):
        pack.sums.zero_()
        replayer.add(batch, Diagnostics(2, CPU))
        pack.sums.add_(noise.draw(step))
        torch.testing.assert_close(pack.sums - exact, alone.draw(step))
        released.append(pack.sums.clone())
    drawn = torch.stack(released) - exact
    assert len({float(value) for value in drawn.flatten()}) == drawn.numel()


def test_an_empty_batch_adds_nothing_and_captures_nothing() -> None:
    (pack, clipping), tape = made(), Tape()
    Replayer(pack, cross_entropy, clipping, tape).add(double(rows(0, 0)), Diagnostics(2, CPU))
    assert not pack.sums.any()
    assert tape.captured == 0


def test_capturing_leaves_sums_alone() -> None:
    (pack, clipping), (other, _) = made(), made()
    pack.sums.fill_(2.0)
    batch = double(rows(0, 4))
    Replayer(pack, cross_entropy, clipping, Tape()).add(batch, Diagnostics(2, CPU))
    add_clipped_sums(other, batch, cross_entropy, clipping, Diagnostics(2, CPU))
    torch.testing.assert_close(pack.sums - 2.0, other.sums)


def test_what_cannot_be_captured_runs_as_it_is() -> None:
    def refuse(function: Callable[[], Found]) -> tuple[Callable[[], None], Found]:
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    (pack, clipping), (other, _) = made(), made()
    replayer, batch = Replayer(pack, cross_entropy, clipping, refuse), double(rows(0, 4))
    for _ in range(2):
        replayer.add(batch, Diagnostics(2, CPU))
        add_clipped_sums(other, batch, cross_entropy, clipping, Diagnostics(2, CPU))
    torch.testing.assert_close(pack.sums, other.sums)


def test_shapes_beyond_the_most_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_MOST_GRAPHS", 2)
    (pack, clipping), (other, _), tape = made(), made(), Tape()
    replayer = Replayer(pack, cross_entropy, clipping, tape)
    for count in (1, 2, 3, 4, 3):
        batch = double(rows(count, count))
        replayer.add(batch, Diagnostics(2, CPU))
        add_clipped_sums(other, batch, cross_entropy, clipping, Diagnostics(2, CPU))
    torch.testing.assert_close(pack.sums, other.sums)
    assert tape.captured == 2


def test_a_stale_batch_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a replay that is not given the new batch differs."""
    (pack, clipping), (other, _) = made(), made()
    replayer = Replayer(pack, cross_entropy, clipping, Tape())
    replayer.add(double(rows(0, 4)), Diagnostics(2, CPU))
    monkeypatch.setattr(Tensor, "copy_", lambda self, *_: self)
    replayer.add(double(rows(1, 4)), Diagnostics(2, CPU))
    monkeypatch.undo()
    for seed in (0, 1):
        add_clipped_sums(other, double(rows(seed, 4)), cross_entropy, clipping, Diagnostics(2, CPU))
    assert not torch.allclose(pack.sums, other.sums)
