"""The GPU's benchmark runs from end to end, in a rehearsal on a CPU with tiny shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

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
