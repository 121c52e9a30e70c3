"""The GPU's benchmark runs from end to end, in a rehearsal on a CPU with tiny shapes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from benchmarks.rule import worse

ROOT = Path(__file__).parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_every_mode_of_dpsgd_has_a_row() -> None:
    done = run("--device", "cpu", "--tiny", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    for mode in ("float32", "float32, compiled", "tf32", "bfloat16"):
        assert f"| dpsgd {mode} |" in done.stdout
    assert "| torch.func |" in done.stdout
    assert "\n| 1000 |" in done.stdout


def test_without_a_gpu_nothing_is_said_to_be_measured() -> None:
    if not torch.cuda.is_available():
        done = run()
        assert done.returncode == 1
        assert done.stderr == "no GPU here: nothing was measured\n"
        assert done.stdout == ""


@pytest.mark.parametrize(("key", "sign"), [("points", 1), ("loss", -0.01)])
@pytest.mark.parametrize(("fall", "said"), [(0.2, 0), (2.0, 1)])
def test_a_larger_budget_that_does_worse_is_told(key: str, sign: float, fall: float, said: int) -> None:
    """Beyond noise; a fall of targets by points, of classes by log loss; another candidate's is none of the rule's."""
    other = "loss" if key == "points" else "points"
    values = {0.1: 50.0, 1.0: 52.0, 8.0: 52.0 - fall}
    rows = [
        {"table": "t", "epsilon": epsilon, "candidate": name, key: sign * (value if name == "the rule" else -value),
         other: math.nan if key == "points" else 1.0, f"{key} error": 0.01 * abs(sign), f"{other} error": 0.0}
        for name in ("the rule", "another") for epsilon, value in values.items()
    ]  # fmt: skip
    found = worse(pd.DataFrame(rows))
    assert len(found) == said and all("at 8" in line and "at 1" in line for line in found)
