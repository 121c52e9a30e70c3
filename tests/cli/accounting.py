"""`dpsgd account` asked from a test, and a recipe on MNIST's public sizes to ask about."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from dpsgd_cli.main import main

SCHEDULES = {
    "time": "{kind: time, initial: 10, decay: 0.05}",
    "step": "{kind: step, initial: 10, decay: 0.6, period: 10}",
    "exponential": "{kind: exponential, initial: 10, decay: 0.01}",
    "polynomial": "{kind: polynomial, initial: 10, final: 2, decay: 3, period: 100}",
    "uniform": "{kind: uniform, initial: 8}",
}


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["account", *args])


def rows(*args: str) -> dict[str, dict[str, Any]]:
    """The JSON answer by accountant."""
    result = run(*args, "--format", "json")
    assert result.exit_code == 0, result.stderr
    return {row["accountant"]: row for row in json.loads(result.stdout)}


def table(*args: str) -> list[dict[str, str]]:
    """A CSV answer."""
    result = run(*args)
    assert result.exit_code == 0, result.stderr
    return list(csv.DictReader(io.StringIO(result.stdout)))


def recipe(folder: Path, schedule: str, extra: str = "") -> str:
    """A recipe of which only the sizes of the data are asked."""
    path = folder / "recipe.yaml"
    path.write_text(f"""\
name: shuffled
data: {{name: mnist}}
model: {{kind: mlp, hidden: [10]}}
method: {{kind: dp-sgd, batching: shuffle, batch_size: 600}}
privacy:
  schedule: {schedule}
  budget: {{rho: 0.78125}}
  delta: 1e-5
{extra}""")
    return str(path)
