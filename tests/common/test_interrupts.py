"""A run that is stopped ends with one message, no half-written result, and what was trained."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpsgd_cli.common.interrupts import SIGNALS, exit_code, heed_no_more, kill_is_interrupt
from dpsgd_cli.errors import RunError
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.training import checkpoint
from tests.conftest import StopAt, Train, WriteRecipe, left_in
from tests.training.test_loop import METHOD


def failing(*outcomes: OSError | None) -> Callable[[int], None]:
    """An fsync that fails as told, one outcome a call, and as the last one from there on."""
    told = itertools.chain(outcomes, itertools.repeat(outcomes[-1]))

    def fsync(descriptor: int) -> None:
        error = next(told)
        if error is not None:
            raise error

    return fsync


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_an_error_in_an_own_file_is_named_with_its_line(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    (tmp_path / "bad.py").write_text(METHOD + "        if epoch == 1:\n            raise ValueError('no luck')\n")
    own = {"kind": "python", "file": "bad.py", "factory": "Halved", "batching": "poisson", "batch_size": 12}
    with pytest.raises(RunError, match=r"bad\.py:9: ValueError: no luck; 1 of 3 epochs are kept"):
        train(write_recipe(method=own))


def test_a_disk_that_is_full_for_the_result_leaves_the_training_in_a_checkpoint(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(save_model=True)
    whole = train(recipe, out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(None, None, FULL, None))
        with pytest.raises(RunError, match=r"\.\w+: No space left on device; free some space; 3 of 3 epochs"):
            train(recipe)
    assert left_in(tmp_path / "out") == {".tiny-"}
    continued = train(recipe, resume=True)
    assert (continued / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert left_in(tmp_path / "out") == {"tiny"}


def test_a_full_disk_keeps_the_last_checkpoint(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(None, FULL))
        with pytest.raises(RunError, match=r"checkpoint: No space left on device; free some space; 1 of 4 epochs are"):
            train(recipe, "runtime.checkpoint_seconds=0")
    (saved,) = (tmp_path / "out").iterdir()
    content = checkpoint.load(saved)
    assert content is not None
    assert content["done"] == 1
    whole = train(recipe, out=tmp_path / "whole")
    assert (train(recipe, resume=True) / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


def test_a_second_interrupt_while_the_checkpoint_is_written_leaves_the_first_whole(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(epochs=4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(None, KeyboardInterrupt()))  # type: ignore[arg-type]
        with pytest.raises(RunError, match="interrupted; 1 of 4 epochs are kept"):
            train(recipe, "runtime.checkpoint_seconds=0")
    (saved,) = (tmp_path / "out").iterdir()
    content = checkpoint.load(saved)
    assert content is not None
    assert content["done"] == 1


def test_an_interrupt_before_the_first_epoch_ended_leaves_nothing(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DpSgd, "privatise", interrupted)
    with pytest.raises(RunError, match=r"^interrupted; nothing was written$"):
        train(write_recipe())
    assert left_in(tmp_path / "out") == set()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to"
                     " allocate 400000000000000 bytes. Error code 12 (Cannot allocate memory)"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        MemoryError("Unable to allocate 9 TiB"),
    ],
)  # fmt: skip
def test_too_little_memory_is_a_message_and_keeps_what_was_trained(
    train: Train, write_recipe: WriteRecipe, error: Exception, stop_at: StopAt
) -> None:
    with pytest.raises(RunError, match=r"out of memory.*: lower runtime\.micro_batch or repeats.*; 2 of 3 epochs are"):
        train(write_recipe(), progress=stop_at(2, error))


def test_a_bug_of_ours_keeps_its_type(train: Train, write_recipe: WriteRecipe, stop_at: StopAt) -> None:
    with pytest.raises(ZeroDivisionError):
        train(write_recipe(), progress=stop_at(1, ZeroDivisionError()))


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_polite_kill_is_an_interruption_each_time() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with kill_is_interrupt():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            with pytest.raises(KeyboardInterrupt) as raised:
                send(number)
            assert exit_code(raised.value) == 128 + number
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("first", SIGNALS)
def test_one_of_several_processes_is_interrupted_once(first: signal.Signals) -> None:
    """What the launcher sends after it does not disturb the writing of a checkpoint."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with kill_is_interrupt(once=True):
        with pytest.raises(KeyboardInterrupt) as raised:
            send(first)
        assert exit_code(raised.value) == 128 + first
        for number in SIGNALS:
            send(number)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_run_that_ends_already_heeds_no_more() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with kill_is_interrupt(once=True):
        heed_no_more()
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)
        for number in SIGNALS:
            send(number)
    assert [signal.getsignal(number) for number in SIGNALS] == before
