"""Filter on a command's output that removes instructions to the terminal.

Column names, class labels, keys, file names and answers of servers come from other people. A terminal obeys escape
sequences in them: it moves the cursor, sets the title, pastes. Bidirectional overrides show text in another order.
`only_visible` filters stdout and stderr during a command, so that no message has to take care of this.
`common/text_format.py` quotes a single value on one line.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from dpsgd_cli.common.text_format import visible


class Filtered:
    """A text stream that writes `visible` text to another stream, `unfiltered`."""

    def __init__(self, stream: Any) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        self.unfiltered.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def only_visible() -> Iterator[None]:
    """Filter stdout and stderr until the block ends."""
    out, err = Filtered(sys.stdout), Filtered(sys.stderr)
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        # click replaces a stream whose reader has gone; keep that replacement
        if sys.stdout is out:
            sys.stdout = out.unfiltered
        if sys.stderr is err:
            sys.stderr = err.unfiltered


def for_bars() -> Any:
    """Return stderr for a progress bar, which moves the cursor. The caller passes the bar's texts through `visible`."""
    return getattr(sys.stderr, "unfiltered", sys.stderr)


@contextlib.contextmanager
def waiting(what: str, patience: float = 2.0) -> Iterator[None]:
    """Show on a terminal what has been running for more than `patience` seconds, and for how long, until it is done."""
    stream, done = for_bars(), threading.Event()
    if not stream.isatty():
        yield
        return

    def tell() -> None:
        start, wait = time.monotonic(), patience
        while not done.wait(wait):
            stream.write(f"\r{visible(what)}: {time.monotonic() - start:.0f} s ")
            stream.flush()
            wait = 1.0

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    started = time.monotonic()
    try:
        yield
    finally:
        done.set()
        teller.join()
        if time.monotonic() - started > patience:
            stream.write("\r\033[K")
            stream.flush()


SILENT: dict[str, Any] = {"over": "ignore", "invalid": "ignore", "divide": "ignore"}
"""Arguments of `np.errstate` for reading and transforming private rows: a warning could reveal single records."""
