"""`dpsgd train` as a user meets it: what is printed where, what every mistake says, and what a kill leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from tests.conftest import GRADIENT, OWN, WriteRecipe

ROOT = Path(__file__).resolve().parents[2]
POISSON = GRADIENT | {"batching": "poisson"}


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["train", *map(str, args)])


def test_a_divergence_fails_where_that_is_asked_for_once_the_result_is_there(
    write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    method = {"kind": "sgd", "batching": "full", "learning_rate": 1e38, "weight_decay": 1}
    recipe, out = write_recipe(method=method, privacy=None), tmp_path / "out"
    assert run(recipe, "--out", out).exit_code == 0
    for arguments in (("--out", out), ("--out", tmp_path / "new")):
        failed = run(recipe, *arguments, "--fail-on-divergence")
        assert failed.exit_code == 1
        assert "diverged (trial 0, 1), and --fail-on-divergence was given" in failed.stderr.splitlines()[-1]
        assert "  result  " in failed.stdout
    assert run(write_recipe(), "--out", out, "--fail-on-divergence").exit_code == 0


def test_a_second_time_shows_what_is_there(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    recipe = write_recipe(data={"path": "tiny.npz", "bounds": [0, 1]})
    first = run(recipe, "--out", tmp_path / "out")
    warning = "warning: the class labels were read from the data and are declared public"
    assert first.stderr.count(warning) == 1
    for again in (run(recipe, "--out", tmp_path / "out"), run(recipe, "--out", tmp_path / "out", "--resume")):
        assert (again.exit_code, again.stdout) == (0, first.stdout)
        assert "This recipe has been trained already; remove the directory to train it again." in again.stderr
        assert again.stderr.count(warning) == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    result = run(write_recipe(), "--dry-run", "--out", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.startswith("tiny: 3 epochs of 4 steps\n")
    assert "noise multiplier          " in result.stdout
    assert not (tmp_path / "out").exists()
    plain = run(write_recipe(method=POISSON | {"kind": "sgd"}, privacy=None), "--dry-run")
    assert (plain.exit_code, plain.stdout) == (0, "tiny: 3 epochs without privacy; there is nothing to price\n")


@pytest.mark.parametrize("how", [[], ["--dry-run"]])
def test_a_statement_that_says_little_is_a_warning(write_recipe: WriteRecipe, tmp_path: Path, how: list[str]) -> None:
    recipe = write_recipe(privacy={"schedule": {"kind": "uniform", "initial": 0.05}, "delta": 0.05}, epochs=3)
    result = run(recipe, "--out", tmp_path / "out", *how)
    assert result.exit_code == 0
    assert "warning: delta 0.05 is not below 1 / 48, the number of training records" in result.stderr
    assert re.search(r"warning: epsilon \d+\.\d{4} is above 100: it bounds next to nothing", result.stderr)
    usual = run(recipe, "--dry-run", "privacy.schedule.initial=2", "privacy.delta=0.001")
    assert (usual.exit_code, usual.stderr) == (0, "")


def test_a_dry_run_looks_for_the_method_of_a_user(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    own = {"method": POISSON | {"kind": "python", "file": "dying.py", "factory": "Dying"}}
    missing = run(write_recipe(**own), "--dry-run")
    assert missing.exit_code == 2 and "dying.py: no such Python file" in missing.stderr
    (tmp_path / "dying.py").write_text(METHOD)
    assert run(write_recipe(**own), "--dry-run").exit_code == 0
    wrong = run(write_recipe(**own), "--dry-run", "method.factory=os")
    assert wrong.exit_code == 2 and "dying.py: os is module, not a function" in wrong.stderr


METHOD = """
import os
from dpsgd_cli.methods.dp_sgd.run import DpSgd

class Dying(DpSgd):
    def run_epoch(self, epoch):
        if epoch == 3 and "SIGNAL" in os.environ:
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
        return super().run_epoch(epoch)
"""
DYING = {
    "method": POISSON | {"kind": "python", "file": "dying.py", "factory": "Dying", "optimizer": {"kind": "adam"}},
    "data": OWN | {"preprocess": [{"scale": {}}, {"pca": {"components": 3, "noise_multiplier": 8}}]},
    "runtime": {"device": "cpu", "threads": 1, "checkpoint_seconds": 0},
    "epochs": 6,
    "save_model": True,
}


def train_in_a_process(recipe: Path, out: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs the real command line in a process of its own, which can be killed."""
    command = [sys.executable, "-m", "dpsgd_cli", "train", str(recipe), "--out", str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, **options)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_killed_run_resumes_to_what_it_would_have_been(
    write_recipe: WriteRecipe, tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "dying.py").write_text(METHOD)
    recipe = write_recipe(**DYING)
    assert run(recipe, "--out", tmp_path / "whole").exit_code == 0
    (whole,) = (tmp_path / "whole").iterdir()

    killed = train_in_a_process(recipe, tmp_path / "out", env={**os.environ, "SIGNAL": str(int(number))})
    assert killed.stdout == ""
    if number == signal.SIGKILL:
        assert killed.returncode == -signal.SIGKILL
    else:
        assert killed.returncode == 128 + number
        kept = "3 of 6 epochs are kept: the same command with --resume continues there"
        assert killed.stderr == f"error: interrupted; {kept}\n"
    assert not (tmp_path / "out" / whole.name).exists()

    resumed = run(recipe, "--out", tmp_path / "out", "--resume")
    assert resumed.exit_code == 0
    assert resumed.stderr == "Continuing after epoch 3 of 6.\n"
    (continued,) = (tmp_path / "out").iterdir()
    for name in ("ledger.jsonl", "trials.csv", "history.csv", "model.safetensors", "recipe.yaml"):
        assert (continued / name).read_bytes() == (whole / name).read_bytes()
    one, other = (json.loads((at / "result.json").read_text()) for at in (continued, whole))
    assert one["privacy"] == other["privacy"]
    assert one["metrics"] == other["metrics"]


def test_a_small_training_imports_only_what_it_needs(tmp_path: Path) -> None:
    """matplotlib takes a processor second."""
    unused = ("matplotlib", "scipy.signal")
    code = (
        "import sys\nfrom dpsgd_cli.main import main\n"
        f"try: main(['train', 'quickstart', 'epochs=1', '--out', {str(tmp_path)!r}])\n"
        f"finally: print('loaded:', [name for name in {unused} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"
    assert next(tmp_path.glob("*/report.html")).read_text().count("<svg") == 2
