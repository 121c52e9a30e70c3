"""From a recipe to a result: what is stated is what was spent, and the files say all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.errors import InfeasibleBudget, RunError
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop, start
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import GRADIENT, OWN, PCA, Replaced, StopAt, Train, WriteRecipe, left_in, table

FILES = {"recipe.yaml", "result.json", "trials.csv", "history.csv", "ledger.jsonl"}


def test_what_lies_about_is_mentioned(train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt) -> None:
    recipe = write_recipe()
    said: list[str] = []
    with pytest.raises(RunError, match="1 of 3"):
        train(recipe, resume=True, say=said.append, progress=stop_at(1, KeyboardInterrupt()))
    assert len(said) == 1
    assert said[0].startswith("There is no checkpoint ") and said[0].endswith("training starts from the beginning.")
    said.clear()
    train(recipe, say=said.append)
    assert len(said) == 1
    assert "is left from a run that was stopped; it is ignored and will be replaced" in said[0]
    assert left_in(tmp_path / "out") == {"tiny"}


def test_charges_come_before_releases(train: Train, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    spend, prepare, privatise = Ledger.spend, data.prepare, DpSgd.privatise

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(f"charge {kwargs.get('phase', 'train')}" if name == "charge" else name)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(Ledger, "spend", logged("charge", spend))
    monkeypatch.setattr(start, "data", Replaced(data, prepare=logged("prepare", prepare)))
    monkeypatch.setattr(DpSgd, "privatise", logged("step", privatise))
    train(write_recipe(data=OWN | {"preprocess": PCA}, method=GRADIENT | {"batching": "poisson", "batch_size": 24}))
    expected = ["charge before"] * 2 + ["prepare"]
    expected += [*["charge train"] * 2, "step", "step"] * 3
    assert log == expected


def test_a_budget_that_does_not_cover_the_preprocessing_reads_no_data(
    train: Train, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*_: Any) -> None:
        raise AssertionError("the data were read")

    monkeypatch.setattr(start, "data", Replaced(data, prepare=prepare))
    recipe = write_recipe(data=OWN | {"preprocess": PCA}, privacy={"budget": {"epsilon": 0.1, "delta": 1e-3}})
    with pytest.raises(InfeasibleBudget, match="private preprocessing alone spends the budget"):
        train(recipe)
    assert not (recipe.parent / "out").exists()


def test_the_documented_keys_are_there_and_files_are_complete(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(write_recipe())
    assert {path.name for path in directory.iterdir()} == FILES
    document = json.loads((directory / "result.json").read_text())
    private = {"epsilon", "delta", "rho", "adjacency", "accountant", "bound", "declarations"}
    assert private <= set(document["privacy"])
    assert (document["privacy"]["adjacency"], document["privacy"]["bound"]) == ("add-remove", "upper")
    for metric in document["metrics"].values():
        assert set(metric) == {"mean", "std", "ci95", "n"}
        assert metric["n"] == 2
    assert {"test_accuracy", "test_loss", "nonprivate_train_accuracy"} <= set(document["metrics"])
    assert {"nonprivate_train_seconds", "steps", "nonprivate_examples_per_second"} <= set(document["timing"])
    provenance = {"version", "git", "torch", "device", "seed", "noise_source", "data_sha256"}
    assert provenance <= set(document["provenance"])
    assert (document["provenance"]["seed"], document["provenance"]["noise_source"]) == (0, "seeded")
    assert list(document["provenance"]["nonprivate_data_sha256"]) == ["tiny.npz"]
    assert document["provenance"]["data_sha256"] == {}
    assert len(document["trials"]) == 2
    assert "The number of training records is public: 48." in document["privacy"]["declarations"]


def test_without_privacy_nothing_is_claimed(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(write_recipe(method=GRADIENT | {"kind": "sgd", "batching": "shuffle"}, privacy=None))
    privacy = store.read_document(directory)["privacy"]
    assert privacy.pop("declarations") == []
    assert set(privacy) >= {"epsilon", "delta", "rho", "adjacency", "accountant", "bound"}
    assert set(privacy.values()) == {None}
    assert (directory / "ledger.jsonl").read_text() == ""
    assert {row["epsilon"] for row in table(directory, "trials.csv")} == {""}


def test_evaluations_are_as_often_as_asked_and_at_the_end(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(write_recipe(epochs=5), "runtime.evaluate_every=2", "repeats=1")
    evaluated = [row["epoch"] for row in table(directory, "history.csv") if row["test_accuracy"] != ""]
    assert evaluated == ["1", "3", "4"]
    (last,) = table(directory, "trials.csv")
    assert last["test_accuracy"] == table(directory, "history.csv")[-1]["test_accuracy"]


def test_a_training_that_diverged_has_no_metrics_and_says_so(train: Train, write_recipe: WriteRecipe) -> None:
    method = {"kind": "sgd", "batching": "full", "learning_rate": 1e38, "weight_decay": 1}
    directory = train(write_recipe(method=method, privacy=None, epochs=10))
    document = store.read_document(directory)
    told = {name: metric["mean"] for name, metric in document["metrics"].items() if not name.startswith("constant_")}
    assert set(told.values()) == {None} and document["diverged"] == [0, 1]
    assert any("2 of 2 trials diverged (trial 0, 1)" in warning for warning in document["warnings"])
    assert {row["test_accuracy"] for row in table(directory, "trials.csv")} == {""}
    assert table(directory, "history.csv")[-1]["test_loss"] == ""


def test_a_result_is_not_made_again_unless_its_files_changed(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    recipe = write_recipe()
    directory = train(recipe)
    before = (directory / "result.json").read_bytes()
    said: list[str] = []
    assert train(recipe, say=said.append, progress=stop_at(1, AssertionError("trained again"))) == directory
    stored = dict(np.load(tmp_path / "tiny.npz"))
    (tmp_path / "tiny.npz").unlink()
    assert train(recipe, say=said.append) == directory
    assert said == ["tiny.npz is no longer there, so it could not be compared with what the result was made from."]
    np.savez(tmp_path / "tiny.npz", **{**stored, "y": stored["y"][::-1]})
    with pytest.raises(RunError, match=r"was made from another content of tiny\.npz; remove the directory"):
        train(recipe)
    assert (directory / "result.json").read_bytes() == before
    assert train(recipe, out=tmp_path / "other").parent == tmp_path / "other"


MODEL = """
import torch

def build(shape, outputs, width=2):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(shape[0], width), torch.nn.Tanh(),
                               torch.nn.Linear(width, outputs))
"""
METHOD = """
from dpsgd_cli.methods.dp_sgd.run import DpSgd

class Halved(DpSgd):
    def privatise(self, epoch, step):
        super().privatise(epoch, step)
        self.context.pack.sums.mul_(0.5)
"""


def test_own_python_files_are_run_recorded_and_compared(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path
) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "halved.py").write_text(METHOD)
    model = {"kind": "python", "file": "net.py", "arguments": {"width": 5}}
    own = GRADIENT | {"kind": "python", "file": "halved.py", "factory": "Halved", "batching": "poisson"}
    recipe = write_recipe(model=model, method=own, save_model=True)
    directory = train(recipe)
    document = store.read_document(directory)
    assert set(document["provenance"]["code_sha256"]) == {"net.py", "halved.py"}
    for name in ("net.py", "halved.py"):
        assert f"The code of {name} is trusted" in "\n".join(document["privacy"]["declarations"])
    assert read_model(directory)["trial-0/1.weight"].shape == (5, 4)

    halved = GRADIENT | {"kind": "dp-sgd", "batching": "poisson", "learning_rate": 0.25}
    assert_same_weights(directory, train(write_recipe(model=model, method=halved, save_model=True, name="reference")))

    (tmp_path / "halved.py").write_text(METHOD.replace("0.5", "0.25"))
    with pytest.raises(RunError, match=r"another content of halved\.py"):
        train(write_recipe(model=model, method=own, save_model=True))


UNCLIPPED = {
    "no clipping": "    def begin(self):\n        super().begin()\n        self.clipping = None\n",
    "no clipping of its own sums": (
        "    def add_sums(self, epoch, step, seen):\n        for rows in self.pieces(step):\n"
        "            add_clipped_sums(self.context.pack, rows, self.context.loss, None, seen)\n"
    ),
    "longer bounds": (
        "    def begin(self):\n        super().begin()\n"
        "        self.clipping = replace(self.clipping, norms=3 * self.clipping.norms)\n"
    ),
    "a factor of one": (
        "    def begin(self):\n        super().begin()\n"
        "        self.clipping = replace(self.clipping, factors=lambda bounds, norms: norms / norms)\n"
    ),
}


@pytest.mark.parametrize("base", ["DpSgd", "DpGd"])
@pytest.mark.parametrize("change", UNCLIPPED.values(), ids=UNCLIPPED)
def test_a_method_that_does_not_clip_ends_the_run(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, change: str, base: str
) -> None:
    """Its noise is charged for the bound of the recipe. The fast paths of full batches are checked, too."""
    file = {"DpSgd": "dp_sgd.run", "DpGd": "dp_gd"}[base]
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\n\nfrom dpsgd_cli.clipping.run import add_clipped_sums\n"
        f"from dpsgd_cli.methods.{file} import {base}\n\n\nclass Own({base}):\n{change}"
    )
    batching = "full" if base == "DpGd" else "poisson"
    own = GRADIENT | {"kind": "python", "file": "own.py", "factory": "Own", "batching": batching}
    own |= {} if base == "DpSgd" else {"batch_size": None}
    own = {key: value for key, value in own.items() if value is not None}
    budget = {"epsilon": 4, "delta": 1e-3}
    recipe = write_recipe(method=own, privacy={"budget": budget, "clipping": {"kind": "flat", "norm": 1e-3}})
    with pytest.raises(RunError, match=r"noise is charged for 0\.001|times as long as its clip bound"):
        train(recipe)


def read_model(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(str(directory / "model.safetensors"))
    return found


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = read_model(one), read_model(other)
    assert first.keys() == second.keys()
    for name in first:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=1e-5)


def test_a_saved_model_loads_into_the_plain_module(train: Train, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """The file's weights, in a module made without this package, give the accuracy of the table."""
    sections: dict[str, Any] = {
        "method": {"kind": "dp-sgd", "batching": "full", "averaging": {"kind": "ema"}},
        "model": {"kind": "mlp", "hidden": [6], "activation": "tanh"},
        "epochs": 20,
        "save_model": True,
    }
    stored = np.load(tmp_path / "tiny.npz")
    x, y = torch.tensor(stored["x_test"], dtype=torch.float32), torch.tensor(stored["y_test"])
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    for repeats in (1, 2):
        directory = train(write_recipe(**sections, repeats=repeats))
        found = read_model(directory)
        for trial, row in enumerate(table(directory, "trials.csv")):
            prefix = f"trial-{trial}/" if repeats > 1 else ""
            plain.load_state_dict(
                {name.removeprefix(prefix): v for name, v in found.items() if name.startswith(prefix)}
            )
            outputs = plain(x).detach()
            assert float((outputs.argmax(dim=1) == y).float().mean()) == pytest.approx(float(row["test_accuracy"]))
            chances = outputs.double().softmax(dim=1).numpy()
            for name, wanted in {
                "balanced_accuracy": sklearn.metrics.balanced_accuracy_score(y, chances.argmax(axis=1)),
                "f1": sklearn.metrics.f1_score(y, chances.argmax(axis=1), average="macro"),
                "auc": sklearn.metrics.roc_auc_score(y, chances, multi_class="ovr"),
                "log_loss": sklearn.metrics.log_loss(y, chances),
            }.items():
                assert float(row[f"test_{name}"]) == pytest.approx(wanted, abs=1e-6)
            assert float(row["constant_accuracy"]) == pytest.approx(float(y.bincount().max()) / len(y))
            loss = torch.nn.functional.cross_entropy(outputs, y)
            assert float(loss) == pytest.approx(float(row["test_loss"]), abs=1e-5)


def test_a_regression_is_reported_in_its_own_unit(train: Train, write_recipe: WriteRecipe, tmp_path: Path) -> None:
    """Whatever the unit: the same model of targets that are the same but for it, with errors in it."""
    rng = np.random.default_rng(0)
    x = rng.random((80, 3))
    y = 3000 + 500 * x.sum(axis=1)
    found = {}
    for unit in (1.0, 1000.0):
        np.savez(tmp_path / f"{unit:g}.npz", x=x[20:], y=y[20:] / unit, x_test=x[:20], y_test=y[:20] / unit)
        data: dict[str, Any] = {"path": f"{unit:g}.npz", "bounds": [0, 1], "task": "regression"}
        data |= {"target_bounds": [2000 / unit, 6000 / unit]}
        directory = train(write_recipe(data=data, save_model=True, repeats=1))
        (row,) = table(directory, "trials.csv")
        bias, weight = sorted(read_model(directory).values(), key=lambda tensor: tensor.dim())
        outputs = (x[:20] @ weight.double().numpy()[0] + float(bias)) * 2000 + 4000
        wanted = {
            "mae": sklearn.metrics.mean_absolute_error(y[:20], outputs) / unit,
            "rmse": sklearn.metrics.root_mean_squared_error(y[:20], outputs) / unit,
            "r2": sklearn.metrics.r2_score(y[:20], outputs),
        }
        for name, value in wanted.items():
            assert float(row[f"test_{name}"]) == pytest.approx(value, rel=1e-4)
        found[unit] = {name: float(row[f"test_{name}"]) for name in (*wanted, "loss")}
    assert found[1.0]["mae"] == pytest.approx(1000 * found[1000.0]["mae"], rel=1e-4)
    assert found[1.0]["loss"] == pytest.approx(found[1000.0]["loss"], rel=1e-4)


def test_two_runs_of_one_recipe_do_not_disturb_each_other(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    """One run overtakes the other, both with checkpoints at every epoch; the first result stays."""
    recipe = write_recipe(seed=None)
    made: list[Path] = []
    made_at: list[int] = []

    def overtake(done: int, total: int) -> None:
        if done == 2:
            with pytest.raises(RunError, match="1 of 3"):
                train(recipe, "runtime.checkpoint_seconds=0", progress=stop_at(1, KeyboardInterrupt()))
            made.append(train(recipe, "runtime.checkpoint_seconds=0", resume=True))
            made_at.append((made[0] / "result.json").stat().st_mtime_ns)

    directory = train(recipe, "runtime.checkpoint_seconds=0", progress=overtake)
    assert made[0] == directory
    assert (directory / "result.json").stat().st_mtime_ns == made_at[0]
    assert {path.name for path in directory.iterdir()} == FILES
    assert left_in(tmp_path / "out") == {"tiny"}


def test_something_else_in_the_place_of_the_result_is_found_before_training(
    train: Train, write_recipe: WriteRecipe, tmp_path: Path, stop_at: StopAt
) -> None:
    recipe = write_recipe()
    directory = loop.result_directory(resolve_auto(load_recipe(str(recipe))), tmp_path / "out")
    directory.mkdir(parents=True)
    (directory / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is in the way and is no finished result"):
        train(recipe, progress=stop_at(1, AssertionError("trained")))
    assert (directory / "notes.txt").read_text() == "mine"
    (directory / "notes.txt").unlink()
    assert train(recipe) == directory
