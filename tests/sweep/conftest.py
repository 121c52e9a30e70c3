"""Sweeps over a few rows of digits, small enough to train in a blink."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main

FAST = """\
  - {epochs: 1, repeats: 1, privacy.budget: null, privacy.delta: 1.0e-5, privacy.schedule: {kind: uniform, initial: 4}}
"""

Sweep = Callable[..., Result]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Writes a sweep of the quickstart recipe, made fast, with further blocks; runs it into `out` beside it."""

    def run(blocks: str, *arguments: str, out: str = "out") -> Result:
        file = tmp_path / "sweep.yaml"
        head = "name: tried\nrecipes: [quickstart]\n"
        file.write_text(f"{head}{blocks}" + ("" if "list:" in blocks else f"list:\n{FAST}"))
        return CliRunner().invoke(main, ["sweep", str(file), "--out", str(tmp_path / out), *arguments])

    return run
