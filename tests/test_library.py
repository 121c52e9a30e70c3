"""dpsgd from Python: the same results as from the command line, light to import, and a notebook that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import dpsgd_cli as dpsgd
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.main import main
from tests.conftest import WriteRecipe

ROOT = Path(__file__).resolve().parent.parent


def test_importing_loads_nothing_and_account_no_torch() -> None:
    program = (
        "import sys, dpsgd_cli as dpsgd\n"
        "heavy = {'torch', 'pandas', 'numpy', 'click', 'pydantic'} & set(sys.modules)\n"
        "rows = dpsgd.account(noise_multiplier=4, sampling_rate=0.01, steps=100, accountant=['rdp'])\n"
        "from dpsgd_cli.account import answers\n"
        "again = dpsgd.account(noise_multiplier=4, sampling_rate=0.01, steps=100, accountant='rdp')\n"
        "print(heavy, 'torch' in sys.modules, rows == again, len(rows))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "set() False True 1"


def test_training_predicting_and_measuring(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    changes = {"privacy.budget.epsilon": 2, "epochs": 2}
    told: list[str] = []
    result = dpsgd.train(write_recipe(), changes, out=tmp_path / "out", say=told.append)
    assert result.privacy["epsilon"] <= 2 == result.privacy["budget"]["epsilon"]
    loaded = dpsgd.load(result.directory)
    assert (loaded.metrics, loaded.trials) == (result.metrics, result.trials)
    assert "test_accuracy" in str(result)
    x = np.load(tmp_path / "tiny.npz")["x_test"]
    predicted, shares = result.predict(x, trial=1), result.probabilities(x, trial=1)
    assert predicted.tolist() == shares.idxmax(axis=1).tolist()
    outputs = result.module(1)(result.inputs(x, 1))
    assert shares.to_numpy() == pytest.approx(torch.softmax(outputs.double(), dim=1).detach().numpy())
    means = {name: found["mean"] for name, found in result.evaluate().items()}
    assert means == {name: result.metrics[f"test_{name}"]["mean"] for name in means}
    beside = {name: found["baseline"] for name, found in result.evaluate().items() if name != "loss"}
    assert beside == {name: result.metrics[f"constant_{name}"]["mean"] for name in beside}
    np.savez(tmp_path / "new.npz", x=x, y=np.load(tmp_path / "tiny.npz")["y_test"])
    assert result.evaluate(tmp_path / "new.npz") == result.evaluate()
    assert result.predict(str(tmp_path / "new.npz"), trial=1).tolist() == predicted.tolist()
    with pytest.raises(RecipeError, match="did you mean epochs"):
        dpsgd.train(tmp_path / "tiny.yaml", {"epoch": 2})


def run(*args: object) -> Any:
    return CliRunner().invoke(main, [*map(str, args)])


def test_the_commands_predict_and_evaluate(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    result = dpsgd.train(write_recipe(), {"epochs": 2}, out=tmp_path / "out")
    x = np.load(tmp_path / "tiny.npz")["x_test"]
    np.save(tmp_path / "new.npy", x)
    plain = run("predict", result.directory, tmp_path / "new.npy")
    assert plain.stdout.splitlines() == ["prediction", *map(str, result.predict(x))]
    assert plain.stderr == "by the model of trial 0 of 2; --trial chooses another\n"
    out = tmp_path / "made" / "answers.csv"
    whole = run("predict", result.directory, tmp_path / "new.npy", "--probabilities", "--trial", 1, "--out", out)
    assert (whole.exit_code, whole.stdout) == (0, "")
    assert out.read_text().splitlines()[0] == "prediction,probability_0,probability_1,probability_2"
    measured = run("evaluate", result.directory)
    assert "its own test records" in measured.stdout and "declares public" in measured.stdout
    np.savez(tmp_path / "new.npz", x=x, y=np.load(tmp_path / "tiny.npz")["y_test"])
    other = json.loads(run("evaluate", result.directory, tmp_path / "new.npz", "--format", "json").stdout)
    assert other["metrics"]["accuracy"]["mean"] == result.metrics["test_accuracy"]["mean"]
    assert other["note"].startswith("measured without noise: the guarantee does not cover these records")
    for args, said in (((tmp_path, "x.csv"), "not a result directory"), ((result.directory, "x.csv"), "no such file")):
        refused = run("predict", *args)
        assert refused.exit_code == 2 and said in refused.stderr


def test_the_notebook_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs/data-frames.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) >= 5 and not any(cell.get("outputs") for cell in notebook["cells"])
    known: dict[str, Any] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), known)
    assert known["result"].privacy["epsilon"] <= 2 and known["model"].score is not None
    assert set(known["largest"]["column"]) == set(known["bounds"])
    assert "would choose by scores" in known["refused"]
