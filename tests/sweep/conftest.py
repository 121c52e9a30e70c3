"""Sweeps over a few rows of digits, small enough to train in a blink."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main

FAST = """\
  - {epochs: 1, repeats: 1, privacy.budget: null, privacy.delta: 1.0e-5, privacy.schedule: {kind: uniform, initial: 4}}
"""

GRID = "grid: {method.learning_rate: [1, 2], privacy.clipping.norm: [0.5, 1]}\n"
SECURE = ("seed=null", "privacy.noise_source=secure")
Sweep = Callable[..., Result]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def table(out: Path) -> list[dict[str, str]]:
    (file,) = out.glob("*.table.csv")
    with file.open(newline="") as content:
        return list(csv.DictReader(content))


def result(out: Path) -> dict[str, Any]:
    (file,) = out.glob("*.result.json")
    content: dict[str, Any] = json.loads(file.read_text())
    return content


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Writes a sweep of the quickstart recipe, made fast, with further blocks; runs it into `out` beside it."""

    def run(blocks: str, *arguments: str, out: str = "out") -> Result:
        file = tmp_path / "sweep.yaml"
        head = "name: tried\nrecipes: [quickstart]\n"
        file.write_text(f"{head}{blocks}" + ("" if "list:" in blocks else f"list:\n{FAST}"))
        return CliRunner().invoke(main, ["sweep", str(file), "--out", str(tmp_path / out), *arguments])

    return run
