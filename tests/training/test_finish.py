"""A run that was killed is finished: what is stated covers what could be seen."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from scipy.optimize import brentq
from scipy.stats import norm

from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import checkpoint, loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import GRADIENT, StopAt, Train, WriteRecipe
from tests.methods import test_pate

FULL: dict[str, Any] = {
    "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.5},
    "privacy": {"schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-3},
    "epochs": 6,
    "save_model": True,
}


def gaussian(steps: int, noise_multiplier: float = 4, delta: float = 1e-3) -> float:
    """Epsilon of Gaussian sums of all records, by the trade-off of two normals (Dong et al. 2022, Corollary 1)."""
    mu = math.sqrt(steps) / noise_multiplier

    def excess(epsilon: float) -> float:
        here = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(here - delta)

    return float(brentq(excess, 0, 100, xtol=1e-12))


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, args)])


def stopped(train: Train, recipe: Path, stop_at: StopAt, *overrides: str, epoch: int = 2, **options: Any) -> Path:
    """The checkpoint of a run that was interrupted after `epoch` epochs."""
    with pytest.raises(RunError, match=f"interrupted; {epoch} of"):
        train(recipe, *overrides, progress=stop_at(epoch, KeyboardInterrupt()), **options)
    (saved,) = (recipe.parent / "out").glob(".*.checkpoint")
    return saved


def finish(recipe: Path, *overrides: str) -> dict[str, Any]:
    """The result of the checkpoint, whose ledger is priced as it says, and which no checkpoint stands beside."""
    out = recipe.parent / "out"
    directory = loop.finish(resolve_auto(load_recipe(str(recipe), overrides)), loop.Options(out))
    assert not list(out.glob(".*.checkpoint"))
    document = store.read_whole(directory)
    privacy = document["privacy"]
    if privacy["accountant"] is not None:
        assert priced(directory, privacy["accountant"]) == pytest.approx(privacy["epsilon"], rel=1e-9)
    return document


def priced(source: Path, accountant: str) -> float:
    """What `account` says of one trial."""
    answered = run("account", source, "--accountant", accountant, "--format", "json")
    assert answered.exit_code == 0, answered.stderr
    (row,) = json.loads(answered.stdout)
    return float(row["epsilon"])


def test_what_is_stated_is_what_was_spent(train: Train, write_recipe: WriteRecipe, stop_at: StopAt) -> None:
    recipe = write_recipe(**FULL)
    saved = stopped(train, recipe, stop_at)
    assert saved.is_file()
    document = finish(recipe)
    assert document["privacy"]["epsilon"] == pytest.approx(gaussian(2), rel=1e-6)
    assert [row["epochs"] for row in document["trials"]] == [2, 2]
    assert document["warnings"][0] == "training was stopped after 2 of at most 6 epochs"
    said = document["privacy"]["declarations"][-1]
    assert "The statement is of these epochs." in said and "from an error message is outside of the statement" in said


def test_pate_is_finished_once_its_student_learns(tmp_path: Path, stop_at: StopAt) -> None:
    """All of its releases are in its first epoch: the others only use them."""
    recipe = test_pate.recipe(tmp_path / "made")
    for epoch in (1, 2):
        with pytest.raises(RunError, match=f"interrupted; {epoch} of"):
            loop.run(
                resolve_auto(load_recipe(str(recipe))),
                loop.Options(recipe.parent / "out", epoch > 1, stop_at(epoch, KeyboardInterrupt())),
            )
        if epoch == 1:
            with pytest.raises(RunError, match="its student has learnt nothing yet; continue it with --resume"):
                finish(recipe)
    document = finish(recipe)
    whole = store.read_whole(loop.run(resolve_auto(load_recipe(str(recipe))), loop.Options(tmp_path / "whole")))
    assert document["privacy"]["epsilon"] == whole["privacy"]["epsilon"]


def test_without_a_checkpoint_there_is_nothing_to_finish(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    result = run("train", write_recipe(), "--finish", "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "there is no such checkpoint, so there is nothing to finish; train without --finish" in result.stderr


@pytest.mark.parametrize("other", ["--resume", "--dry-run"])
def test_finishing_trains_nothing(write_recipe: WriteRecipe, other: str) -> None:
    result = run("train", write_recipe(), "--finish", other)
    assert result.exit_code == 2 and "--finish trains nothing" in result.stderr


KILLED_IN_THE_FOURTH = """
import os, signal, sys
from dpsgd_cli.main import main
from dpsgd_cli.methods.dp_sgd.run import DpSgd

made = DpSgd.step

def step(self, epoch, number, seen):
    made(self, epoch, number, seen)
    if epoch == 3:
        os.kill(os.getpid(), signal.SIGKILL)

DpSgd.step = step
main(sys.argv[1:])
"""


def test_a_killed_run_is_priced_finished_and_used(write_recipe: WriteRecipe) -> None:
    """The checkpoint holds three epochs; of the fourth nothing was released."""
    privacy = {"schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-3}
    method = GRADIENT | {"batching": "poisson"}
    recipe = write_recipe(method=method, privacy=privacy, epochs=6, save_model=True, seed=None)
    out = recipe.parent / "out"
    arguments = ["train", str(recipe), "--out", str(out), "runtime.checkpoint_seconds=0"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_IN_THE_FOURTH, *arguments], capture_output=True, check=False, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL and killed.stdout == b""
    (saved,) = out.glob(".*.checkpoint")
    told = checkpoint.load(saved)
    assert told is not None and (told["done"], told["epochs"]) == (3, 6)
    finished = run("train", recipe, "--finish", "--out", out)
    assert finished.exit_code == 0, finished.stderr
    (directory,) = (path for path in out.iterdir() if path.name.startswith("tiny-"))
    alone = run("account", recipe, "--epochs", "3", "--accountant", "pld", "--format", "json")
    assert float(json.loads(alone.stdout)[0]["epsilon"]) == pytest.approx(priced(directory, "pld"), rel=1e-9)
    predicted = run("predict", directory, recipe.parent / "tiny.npz")
    assert predicted.exit_code == 0 and len(predicted.stdout.splitlines()) == 49
    again = run("train", recipe, "--finish", "--out", out)
    assert again.exit_code == 0 and "trained already" in again.stderr


def test_a_method_that_chooses_without_a_filter_is_charged_for_its_plan(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    """A user's own method may have ended by what it released."""
    (tmp_path / "own.py").write_text("from dpsgd_cli.methods.dp_sgd.run import DpSgd as Own\n")
    own = GRADIENT | {"kind": "python", "file": "own.py", "factory": "Own", "batching": "poisson"}
    privacy = {"budget": {"epsilon": 4, "delta": 1e-3}, "schedule": {"kind": "uniform", "initial": 3}}
    recipe = write_recipe(method=own, privacy=privacy, epochs=5)
    whole = priced(recipe, "pld")
    stopped(train, recipe, stop_at)
    assert finish(recipe)["privacy"]["epsilon"] == pytest.approx(whole, rel=1e-6)


def test_a_budget_that_nothing_was_taken_from_yet_is_charged() -> None:
    """That nothing was released may have been chosen, too."""
    plan, _ = loop.plan_recipe(resolve_auto(load_recipe("lee2018/dp-agd", ["data.name=breast-cancer"])))
    assert plan is not None
    (entry,) = plan.rest([], 1)
    assert (entry.release.count, entry.budget_cap) == (0, plan.budget_cap)
    assert plan.rest([entry], 1) == []
