"""What signals do to a run: SIGTERM is Ctrl-C; once, for a process among several; afterwards all is as before."""

from __future__ import annotations

import os
import signal

import pytest

from dpsgd_cli.failures import SIGNALS, exit_code, heed_no_more, kill_is_interrupt


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
