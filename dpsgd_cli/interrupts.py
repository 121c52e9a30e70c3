"""A polite kill (SIGTERM) is treated as Ctrl-C, which leaves a checkpoint. Not here: what is left (`experiment.py`)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def kill_is_interrupt() -> Iterator[None]:
    """While inside, SIGTERM raises KeyboardInterrupt (in the main thread, where signals arrive)."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
