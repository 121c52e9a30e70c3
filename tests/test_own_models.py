"""A user's own model from its file to predictions: check-model, --dry-run and train agree, and weights are declared."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from dpsgd_cli.errors import DataError, RunError
from dpsgd_cli.main import main
from dpsgd_cli.results import store
from dpsgd_cli.training.inference import Trained
from tests.conftest import StopAt, WriteRecipe

Train = Callable[..., Path]

CODE = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.3))
    def forward(self, x):
        return x * self.by

def scalar(shape, outputs):
    return nn.Sequential(Scaled(), nn.Linear(4, outputs))

def compiled(shape, outputs):
    return torch.compile(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, outputs)))

def compiled_in_place(shape, outputs):
    made = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, outputs))
    made[0].compile()
    return made

def compiled_inside(shape, outputs):
    return nn.Sequential(torch.compile(nn.Linear(4, 5)), nn.Linear(5, outputs))

def scripted(shape, outputs):
    return nn.Sequential(torch.jit.script(nn.Linear(4, 5)), nn.Linear(5, outputs))

def lazy(shape, outputs):
    return nn.Sequential(nn.LazyLinear(5), nn.Linear(5, outputs))

def normed(shape, outputs, frozen=True, training=False):
    made = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).train(training), nn.Linear(5, outputs))
    made[1].requires_grad_(not frozen)
    return made

def pretrained(shape, outputs):
    made = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))
    made[0].requires_grad_(False)
    return made

def table(shape, outputs):
    made = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, outputs))
    made[0].register_buffer("table", torch.arange(5.0).sin())
    return made
"""


@pytest.fixture
def own(tmp_path: Path, write_recipe: WriteRecipe) -> Callable[..., Path]:
    (tmp_path / "net.py").write_text(CODE)

    def write(factory: str, sections: dict[str, Any] | None = None, **further: Any) -> Path:
        model = {"kind": "python", "file": "net.py", "factory": factory, **further}
        return write_recipe(model=model, **(sections or {}))

    return write


def said(*arguments: object) -> Result:
    found = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert "internal error" not in found.output and "bug of ours" not in found.output
    return found


def asked(recipe: Path) -> list[Result]:
    """What check-model, --dry-run and train say of a recipe."""
    out = ("--out", recipe.parent / "out")
    return [said("recipe", "check-model", recipe), said("train", recipe, "--dry-run"), said("train", recipe, *out)]


FINE: dict[str, tuple[str, dict[str, Any]]] = {
    "parameter of no dimension": ("scalar", {}),
    "frozen batch normalisation in eval mode": ("normed", {}),
    "batch normalisation in eval mode": ("normed", {"frozen": False}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "compiled": ("compiled", {}, "the model: OptimizedModule is compiled, which hides the layers"),
    "compiled in place": ("compiled_in_place", {}, "layer '0': Linear is compiled, which hides the layers"),
    "compiled inside": ("compiled_inside", {}, "layer '0': OptimizedModule is compiled, which hides the layers"),
    "scripted": ("scripted", {}, "layer '0': RecursiveScriptModule is compiled, which hides the layers"),
    "lazy": ("lazy", {}, "layer '0': LazyLinear learns its sizes from data that it sees"),
    "batch normalisation": ("normed", {"training": True}, "layer '1': BatchNorm1d mixes the examples"),
    "numbers that no seed drew": ("table", {}, "0.table is the same for every seed and no constant"),
}


@pytest.mark.parametrize(("factory", "arguments"), FINE.values(), ids=FINE)
def test_all_three_take_what_can_be_trained(own: Callable[..., Path], factory: str, arguments: dict[str, Any]) -> None:
    assert [one.exit_code for one in asked(own(factory, arguments=arguments))] == [0, 0, 0]


@pytest.mark.parametrize(("factory", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_all_three_refuse_the_same_for_the_same_reason(
    own: Callable[..., Path], factory: str, arguments: dict[str, Any], message: str
) -> None:
    for found in asked(own(factory, arguments=arguments)):
        assert found.exit_code == 2 and message in found.stderr


@pytest.mark.parametrize("dtype", ["bfloat16", "tf32"])
def test_all_three_refuse_a_precision_that_a_layer_has_no_rule_for(own: Callable[..., Path], dtype: str) -> None:
    codes = {one.exit_code for one in asked(own("scalar", {"runtime": {"device": "cpu", "dtype": dtype}}))}
    assert len(codes) == 1


def test_batch_normalisation_in_eval_mode_is_the_same_map_before_and_after_training(
    own: Callable[..., Path], train: Train
) -> None:
    """With its first statistics (mean 0, variance 1, epsilon 1e-5) it divides by sqrt(1 + 1e-5)."""
    model = Trained.load(train(own("normed"), save_models=True))
    module, x = model.module(0), torch.rand(7, 4)
    by_hand = module[2](module[0](x) / (1 + 1e-5) ** 0.5)  # type: ignore[index]
    torch.testing.assert_close(module(x), by_hand)


WEIGHTS = {"file": "base.safetensors", "public": True}


@pytest.fixture
def declared(tmp_path: Path, own: Callable[..., Path]) -> Path:
    torch.manual_seed(5)
    save_file({"0.weight": torch.randn(5, 4), "0.bias": torch.randn(5)}, tmp_path / "base.safetensors")
    return own("pretrained", weights=WEIGHTS)


def exchange(file: Path) -> None:
    save_file({"0.weight": torch.zeros(5, 4), "0.bias": torch.zeros(5)}, file)


def test_weights_of_a_file_are_loaded_declared_and_in_the_result(declared: Path, tmp_path: Path, train: Train) -> None:
    checked, rehearsed, trained = asked(declared)
    hashed = hashlib.sha256((tmp_path / "base.safetensors").read_bytes()).hexdigest()
    told = f"The weights in base.safetensors (SHA-256 {hashed}), which the model starts from, are declared public."
    listed = "loaded from base.safetensors: 0.bias, 0.weight"
    assert listed in checked.stdout and listed in rehearsed.stdout
    assert told in rehearsed.stdout and trained.exit_code == 0
    directory = train(declared)
    document = store.read_document(directory)
    assert told in document["privacy"]["declarations"] and told in (directory / "report.html").read_text()
    assert document["provenance"]["weights_sha256"] == {"base.safetensors": hashed}


def test_predictions_are_made_with_the_weights_of_the_file(declared: Path, tmp_path: Path, train: Train) -> None:
    from safetensors.torch import load_file

    directory = train(declared, save_models=True)
    own, x = load_file(directory / "model.safetensors"), torch.rand(9, 4)
    base = load_file(tmp_path / "base.safetensors")
    hidden = torch.tanh(x @ base["0.weight"].T + base["0.bias"])
    by_hand = hidden @ own["trial-1/2.weight"].T + own["trial-1/2.bias"]
    outputs = Trained.load(directory).outputs(x.numpy(), 1)
    np.testing.assert_allclose(outputs, by_hand.numpy(), rtol=1e-5, atol=1e-6)
    assert not any("0." in name for name in own), "what the file holds is not kept a second time"


def test_an_exchanged_file_of_weights_is_refused_wherever_it_is_used(
    declared: Path, tmp_path: Path, train: Train, stop_at: StopAt
) -> None:
    directory = train(declared, save_models=True)
    alone = tmp_path / "alone"
    alone.mkdir()
    for name in ("model.safetensors", "recipe.yaml"):
        shutil.copy(directory / name, alone)
    with pytest.raises(RunError, match="1 of 3 epochs are kept"):
        train(declared, "name=stopped", progress=stop_at(1, KeyboardInterrupt()))
    shutil.copytree(tmp_path / "out", tmp_path / "kept")
    exchange(tmp_path / "base.safetensors")
    for name in ("net.py", "base.safetensors"):
        shutil.copy(tmp_path / name, alone)
    for folder in (directory, alone):
        with pytest.raises(RunError, match=r"another content of base\.safetensors"):
            Trained.load(folder)
    assert "another content of base.safetensors" in said("evaluate", directory).stderr
    assert "another content of base.safetensors" in said("predict", directory, tmp_path / "tiny.npz").stderr
    with pytest.raises(RunError, match=r"another content of base\.safetensors"):
        train(declared)
    with pytest.raises(RunError, match="belongs to another recipe, other data or other code"):
        train(declared, "name=stopped", resume=True)
    (tmp_path / "base.safetensors").unlink()
    with pytest.raises(DataError, match=r"the model is made of base\.safetensors, and .* does not exist"):
        Trained.load(directory)


@pytest.mark.parametrize("weights", [{"file": "base.safetensors"}, {"file": "base.safetensors", "public": False}])
def test_weights_must_be_declared_public_in_writing(own: Callable[..., Path], weights: dict[str, Any]) -> None:
    for found in asked(own("pretrained", weights=weights)):
        assert found.exit_code == 2 and "weights" in found.stderr and "public" in found.stderr


def test_what_code_computes_is_declared_by_name_and_kept(own: Callable[..., Path], train: Train) -> None:
    recipe = own("table", weights={"constant": ["0.table"], "public": True})
    assert [one.exit_code for one in asked(recipe)] == [0, 0, 0]
    directory = train(own("table", {"name": "again"}, weights={"constant": ["0.table"], "public": True}))
    told = "The numbers of 0.table, which code computes, are declared public."
    assert told in store.read_document(directory)["privacy"]["declarations"]


def test_frozen_numbers_that_the_seed_drew_are_those_of_the_training_in_predictions(
    own: Callable[..., Path], train: Train, tmp_path: Path
) -> None:
    """One trial may freeze what its seed drew; that seed is nowhere in a result, so the bundle holds the numbers."""
    directory = train(own("pretrained", {"repeats": 1, "epochs": 20}), save_models=True)
    document, model = store.read_document(directory), Trained.load(directory)
    for name, found in model.metrics().items():
        assert found == [row[f"test_{name}"] for row in document["trials"]]
    held = np.load(tmp_path / "tiny.npz")
    right = model.predict(model.source.rows(held["x_test"]), 0) == held["y_test"]
    assert right.mean() == document["trials"][0]["test_accuracy"]


OWN_METHOD = {"kind": "python", "file": "beside.py", "factory": "Own", "batching": "poisson", "batch_size": 12}
BESIDE = """
from dpsgd_cli.methods.dp_sgd.run import DpSgd

class Own(DpSgd):
    pass
"""


def test_a_result_predicts_without_the_file_of_its_method(write_recipe: WriteRecipe, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    assert said("train", write_recipe(method=OWN_METHOD), "--out", tmp_path / "out").exit_code == 0
    (directory,) = (tmp_path / "out").iterdir()
    before = said("evaluate", directory)
    (tmp_path / "beside.py").unlink()
    after = said("evaluate", directory)
    assert (after.exit_code, after.stdout) == (0, before.stdout)
    with np.load(tmp_path / "tiny.npz") as held:
        np.save(tmp_path / "rows.npy", held["x_test"])
    assert said("predict", directory, tmp_path / "rows.npy").exit_code == 0


def test_a_result_without_the_file_of_its_model_says_what_is_missing(
    own: Callable[..., Path], train: Train, tmp_path: Path
) -> None:
    directory = train(own("scalar"), save_models=True)
    (tmp_path / "net.py").unlink()
    found = said("evaluate", directory)
    assert found.exit_code == 2 and "the model is made of net.py" in found.stderr


@pytest.mark.parametrize("given", ["None", "[None, None]", "[0.5]"])
def test_learning_rates_that_are_no_numbers_are_refused(write_recipe: WriteRecipe, tmp_path: Path, given: str) -> None:
    rates = f"\nclass Rates(DpSgd):\n    def learning_rates(self, epoch):\n        return {given}\n"
    (tmp_path / "beside.py").write_text(BESIDE + rates)
    own = OWN_METHOD | {"factory": "Rates"}
    found = said("train", write_recipe(method=own), "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert f"Rates.learning_rates(0) gives {given}; it must give a list of 2 numbers" in found.stderr
