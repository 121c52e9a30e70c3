"""What a command writes to the terminal: text in which nothing is an instruction to it.

Column names, class labels, keys, file names and what a server answers come from files of other people. A terminal obeys
escape sequences in them: it moves the cursor, sets the title, pastes. Bidirectional overrides show text in another
order. `only_visible` puts a filter before stdout and stderr for the length of a command, so that no message has to
remember it.

Not here: how a message quotes one foreign value on one line (`common/text_format.py`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from dpsgd_cli.common.text_format import visible


class Filtered:
    """A text stream that writes `visible` text to another, which is its `unfiltered`."""

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
        # click replaces a stream whose reader has gone; that replacement stays
        if sys.stdout is out:
            sys.stdout = out.unfiltered
        if sys.stderr is err:
            sys.stderr = err.unfiltered


def for_bars() -> Any:
    """stderr for a progress bar, which moves the cursor; whoever draws one passes its texts through `visible`."""
    return getattr(sys.stderr, "unfiltered", sys.stderr)
