"""Failures of a run that are not bugs of dpsgd: memory, disk, an interruption, the Python files of a recipe.

SIGTERM is treated like Ctrl-C, which leaves a checkpoint; only the exit codes differ. `errors.py` has the errors that
need no further explanation, and `training/loop.py` saves what is left of a run.
"""

from __future__ import annotations

import contextlib
import errno
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from dpsgd_cli.errors import DpsgdError, RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[A-Za-z]+)")


@contextlib.contextmanager
def explained(own_code: Sequence[Path], kept: Callable[[], str]) -> Iterator[None]:
    """Turn the failures of a run into a RunError that ends with the text of `kept()`, which saves what can be saved.

    `own_code` are the Python files that the recipe names; an error that passes through them is reported as theirs.
    Errors of `dpsgd_cli.errors` and bugs of dpsgd pass unchanged.
    """
    try:
        yield
    except BaseException as error:
        why = reason(error, own_code)
        if why is None:
            raise
        told = RunError(f"{why}; {kept()}")
        if isinstance(error, KeyboardInterrupt):
            told.exit_code = exit_code(error)
        raise told from error


def reason(error: BaseException, own_code: Sequence[Path] = ()) -> str | None:
    """Return why a run ended, in words for the user; None for errors that `explained` passes on."""
    if isinstance(error, DpsgdError):
        return None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    # torch's own errors are RuntimeErrors
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_MEMORY)):
        asked = _ASKED.search(str(error))
        amount = f" (asked for {asked[1]})" if asked else ""
        return f"out of memory{amount}: lower runtime.micro_batch or repeats, or use a larger machine"
    line = _own_line(error, own_code)
    if line is not None and isinstance(error, Exception | SystemExit):
        return f"{line}: {type(error).__name__}: {error}"
    if isinstance(error, OSError):
        named = f"{error.filename}: " if error.filename else ""
        advice = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
        return f"{named}{error.strerror or error}{advice}"
    return None


def _own_line(error: BaseException, own_code: Sequence[Path]) -> str | None:
    """Return `file:line` of the last frame in one of the recipe's own files; None if there is none."""
    own = {path.resolve() for path in own_code}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() in own]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def stops_everything(error: BaseException) -> bool:
    """Return True if other runs would fail alike: an interruption, or a place where files cannot be written."""
    return isinstance(error, RunError) and isinstance(error.__cause__, KeyboardInterrupt | OSError)


class Killed(KeyboardInterrupt):
    """An interruption by SIGTERM."""


def exit_code(interruption: KeyboardInterrupt) -> int:
    """Return the exit code that shells and schedulers expect: 128 plus the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(interruption, Killed) else signal.SIGINT)


@contextlib.contextmanager
def kill_is_interrupt(once: bool = False) -> Iterator[None]:
    """Make SIGTERM raise Killed, a KeyboardInterrupt, inside the block (in the main thread, where signals arrive).

    `once`: only the first SIGTERM or SIGINT raises, and later ones are ignored. A launcher of several processes sends
    its own after the terminal's, while the checkpoint is being written.
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
    """Ignore interruptions from now on, in the main thread, because the run is already ending."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
