"""A sweep that is killed at random moments and started again loses nothing, repeats nothing, and ends the same.

The moments are random by a fixed seed, but what the process does at them is not, so every assertion must hold at
whatever moment.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.results import store

KILLS = 20
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWEEP = """\
name: killed
recipes: [quickstart]
grid:
  method.learning_rate: [0.5, 1, 2]
  privacy.clipping.norm: [0.3, 1]
  epochs: [30, 40]
zip:
  repeats: [1]
  runtime.checkpoint_seconds: [0]
  privacy.budget: [null]
  privacy.schedule: [{kind: uniform, initial: 4}]
  privacy.delta: [1.0e-5]
most_trials: 2
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )


def whole(out: Path, files: list[str]) -> None:
    """Every visible file belongs to a complete result or is a file of the sweep, and every JSON file can be read."""
    for name in files:
        path = out / name
        if path.parent != out:
            assert store.is_complete(path.parent)
            assert {file.name for file in path.parent.iterdir()} == set(store.FILES)
        if name.endswith(".json"):
            json.loads(path.read_text())


@pytest.fixture
def sweep(tmp_path: Path) -> list[str]:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    return ["sweep", str(file)]


@pytest.mark.long
def test_kills_lose_nothing_and_repeat_nothing(sweep: list[str], tmp_path: Path) -> None:
    lines = run(str(HERE / "killing.py"), str(KILLS), "7", str(tmp_path), *sweep).stdout
    undisturbed, *reports = [json.loads(line) for line in lines.splitlines()]
    assert sum(report["end"] == "killed" for report in reports) == KILLS
    assert {report["end"] for report in reports} | {undisturbed["end"]} == {"killed", "exit 0"}
    cells = results(undisturbed)
    assert len(cells) == 12 * len(store.FILES)
    for name in dict.fromkeys(report["folder"] for report in reports):
        seen = [report for report in reports if report["folder"] == name]
        for before, after in itertools.pairwise(seen):
            whole(tmp_path / name, list(before["seen"]))
            assert results(before).items() <= results(after).items()
        assert results(seen[-1]).keys() == cells.keys()
        same_folders(tmp_path / name, tmp_path / "undisturbed")


def results(report: dict[str, Any]) -> dict[str, list[int]]:
    """Files of result directories, with their identity."""
    return {name: identity for name, identity in report["seen"].items() if "/" in name}


def same_folders(one: Path, other: Path) -> None:
    """The same names, nothing hidden left over, and the same table to the byte."""
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    (table,) = one.glob("*.table.csv")
    assert table.read_bytes() == (other / table.name).read_bytes()
