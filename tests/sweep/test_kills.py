"""A sweep that is killed at random moments and started again loses nothing, repeats nothing, and ends the same.

`make test-kill` kills 20 times; otherwise it is twice. The moments are random by a fixed seed, but what the process
does at them is not, so every assertion must hold at whatever moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpsgd_cli.results import store

KILLS = int(os.environ.get("DPSGD_KILLS", "2"))
LONGEST = "1.5"  # seconds until a kill: about as long as half of the small sweep takes
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SWEEP = """\
name: killed
recipes: [quickstart]
grid:
  method.learning_rate: [0.5, 1, 2]
  privacy.clipping.norm: [0.3, 1]
  epochs: [{epochs}]
zip:
  repeats: [1]
  runtime.checkpoint_seconds: [0]
  privacy.budget: [null]
  privacy.schedule: [{{kind: uniform, initial: 4}}]
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
    file.write_text(SWEEP.format(epochs="2, 3" if KILLS <= 2 else ", ".join(map(str, range(2, 22)))))
    return ["sweep", str(file)]


def test_kills_lose_nothing_and_repeat_nothing(sweep: list[str], tmp_path: Path) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    lines = run(str(HERE / "killing.py"), str(KILLS), "7", LONGEST, str(killed), str(undisturbed), *sweep).stdout
    *reports, end, other = [json.loads(line) for line in lines.splitlines()]
    assert [report["end"] for report in reports] == ["killed"] * KILLS
    assert (end["end"], other["end"]) == ("exit 0", "exit 0")
    results: dict[str, list[int]] = {}
    for report in [*reports, end]:
        whole(killed, list(report["seen"]))
        now = {name: identity for name, identity in report["seen"].items() if "/" in name}
        assert {name: now.get(name) for name in results} == results
        results = now
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in undisturbed.iterdir())
    (table,) = killed.glob("*.table.csv")
    assert table.read_bytes() == (undisturbed / table.name).read_bytes()
    assert len(table.read_text().splitlines()) == 1 + sum(path.is_dir() for path in killed.iterdir())
