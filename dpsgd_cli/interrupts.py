"""A polite kill (SIGTERM) is treated as Ctrl-C, which leaves a checkpoint; only the exit code tells which it was.

Not here: what is left (`experiment.py`).
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Killed(KeyboardInterrupt):
    """SIGTERM came."""


def exit_code(interruption: KeyboardInterrupt) -> int:
    """What shells and schedulers know it by: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Killed) else signal.SIGINT)


@contextlib.contextmanager
def kill_is_interrupt(once: bool = False) -> Iterator[None]:
    """While inside, SIGTERM raises Killed, a KeyboardInterrupt (in the main thread, where signals arrive).

    `once`: the first signal does, and all after it are ignored. A launcher of several processes sends its own after
    the terminal's, while the checkpoint is being written.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if once:
            heed_no_more()
        raise Killed if number == signal.SIGTERM else KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS if once else (signal.SIGTERM,):
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heed_no_more() -> None:
    """Ignore interruptions from here on, if this is the main thread: the run is ending already."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
