"""What a terminal shows of work that takes long."""

from __future__ import annotations

import io
import sys
import time

import pytest

from dpsgd_cli.common.terminal import waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_is_told_and_only_of_what_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, seconds, told in ((Terminal(), 0.1, True), (Terminal(), 0.0, False), (io.StringIO(), 0.1, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with waiting("pld", patience=0.03):
            time.sleep(seconds)
        assert ("pld: 0 s" in stream.getvalue()) is told
        assert told is stream.getvalue().endswith("\r\033[K")
