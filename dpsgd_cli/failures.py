"""What a run may fail of that is no bug of ours: memory, disk, an interruption, the Python files of a recipe.

Not here: the errors that say everything themselves (`errors.py`), how an exit code is given (`main.py`).
"""

from __future__ import annotations

import contextlib
import errno
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from dpsgd_cli.errors import DpsgdError, RunError
from dpsgd_cli.interrupts import exit_code

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?[A-Za-z]+)")


@contextlib.contextmanager
def explained(own_code: Sequence[Path], kept: Callable[[], str]) -> Iterator[None]:
    """Turn what a run may fail of into a RunError that ends with `kept()`, which saves what can be saved.

    `own_code` are the Python files that the recipe names: an error that passes through them is theirs. Errors of
    `dpsgd_cli.errors` and bugs of ours pass unchanged.
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
    """Why a run ended, in words for the user; None for what `explained` passes on."""
    if isinstance(error, DpsgdError):
        return None
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if _is_memory(error):
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


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def _own_line(error: BaseException, own_code: Sequence[Path]) -> str | None:
    """`file:line` of the last frame that lies in one of the recipe's own files."""
    own = {path.resolve() for path in own_code}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() in own]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


def stops_everything(error: BaseException) -> bool:
    """Whether an error says that no other run would do better: an interruption, or a place that takes no files."""
    return isinstance(error, RunError) and isinstance(error.__cause__, KeyboardInterrupt | OSError)
