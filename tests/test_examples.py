"""The one-file examples: what they compute is what the package computes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer, load_digits

from dpsgd_cli.accounting.renyi import poisson_gaussian_divergence
from dpsgd_cli.main import main

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    """Import an example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_dp_sgd_in_one_file_is_dpsgd_train_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights, biases and epsilon of 40 epochs on the digits."""
    made = example("dp_sgd")
    settings = made.Settings()
    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x[:-360], y=labels[:-360])
    np.savez(tmp_path / "test.npz", x=x[-360:], y=labels[-360:])
    recipe = {
        "name": "example",
        "data": {"path": "train.npz", "test_path": "test.npz", "classes": list(range(10)), "bounds": [0, 1]},
        "model": {"kind": "linear"},
        "method": {
            "kind": "dp-sgd",
            "batching": "poisson",
            "batch_size": settings.batch_size,
            "learning_rate": settings.learning_rate,
        },
        "privacy": {
            "adjacency": "add-remove",
            "clipping": {"kind": "flat", "norm": settings.clip},
            "schedule": {"kind": "uniform", "initial": settings.noise},
            "delta": 1e-5,
            "accountant": "pld",
            "noise_source": "seeded",
        },
        "epochs": settings.epochs,
        "seed": settings.seed,
        "save_model": True,
    }
    (tmp_path / "example.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["train", "example.yaml", "--out", "out"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (directory,) = Path("out").glob("example-*")
    tensors = load_file(directory / "model.safetensors")
    rows, classes = torch.from_numpy(x[:-360]), torch.from_numpy(labels[:-360]).long()
    weight, bias, steps = made.train(rows, classes, 10, settings)
    assert torch.equal(tensors["1.weight"], weight) and torch.equal(tensors["1.bias"], bias)
    epsilon = made.epsilon_of(settings, len(rows), steps, 1e-5)
    document = json.loads((directory / "result.json").read_text())
    assert document["privacy"]["epsilon"] == epsilon
    capsys.readouterr()
    made.main()
    told = capsys.readouterr().out
    accuracy = document["metrics"]["test_accuracy"]["mean"]
    assert told == f"accuracy {accuracy:.4f}, epsilon {epsilon:.4f} at delta 1e-5\n"


def test_dp_agd_in_one_file_is_dpsgd_train_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights after all rounds that the budget allows, some of which measure a gradient again."""
    made = example("dp_agd")
    settings = made.Settings()
    features, labels = load_breast_cancer(return_X_y=True)
    x = (features / 10.0 ** np.ceil(np.log10(features.max(axis=0)))).astype(np.float32)
    np.savez(tmp_path / "train.npz", x=x[:-114], y=labels[:-114])
    np.savez(tmp_path / "test.npz", x=x[-114:], y=labels[-114:])
    recipe = {
        "name": "example",
        "data": {"path": "train.npz", "test_path": "test.npz", "classes": [0, 1], "bounds": [0, 1]},
        "model": {"kind": "convex", "loss": "logistic", "l2": settings.l2},
        "method": {"kind": "dp-agd"},
        "privacy": {
            "budget": {"epsilon": settings.epsilon, "delta": settings.delta},
            "accountant": "zcdp",
            "noise_source": "seeded",
        },
        "seed": settings.seed,
    }
    (tmp_path / "example.yaml").write_text(yaml.safe_dump(recipe))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["train", "example.yaml", "--out", "out"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    (directory,) = Path("out").glob("example-*")
    tensors = load_file(directory / "model.safetensors")
    values, spent = made.train(torch.from_numpy(x[:-114]), torch.from_numpy(labels[:-114]).long(), settings)
    assert torch.equal(torch.cat([one.flatten() for one in tensors.values()]).sort()[0], values.sort()[0])
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    noise = {one["noise_multiplier"] for one in ledger if "noise_multiplier" in one}
    assert len(noise) > 1, "no gradient was measured again"
    document = json.loads((directory / "result.json").read_text())
    assert made.bun_steinke_epsilon(spent, settings.delta) <= document["privacy"]["epsilon"] <= settings.epsilon


@pytest.mark.parametrize(("q", "z", "steps"), [(0.01, 1.0, 1000), (0.05, 2.0, 200)])
def test_an_accountant_from_scratch_agrees_with_dpsgd_account(q: float, z: float, steps: int) -> None:
    """Whole orders and a coarser grid state a little more than the package, and nothing less."""
    made = example("accountant_from_scratch")
    numbers = ["--noise-multiplier", z, "--sampling-rate", q, "--steps", steps, "--accountant", "rdp", "--accountant"]
    done = CliRunner().invoke(main, ["account", *map(str, numbers), "pld", "--delta", "1e-5", "--format", "json"])
    assert done.exit_code == 0, done.output
    stated = {row["accountant"]: row["epsilon"] for row in json.loads(done.stdout)}
    found = {"rdp": made.epsilon_by_renyi(q, z, steps, 1e-5)}
    found["pld"] = made.epsilon_by_loss_distribution(q, z, steps, 1e-5, width=1e-4)
    assert stated["rdp"] <= found["rdp"] * (1 + 1e-9) and found["rdp"] <= 1.02 * stated["rdp"]
    assert stated["pld"] - 1e-4 <= found["pld"] <= stated["pld"] + steps * 1e-4
    assert made.renyi_divergence(q, z, 8) == pytest.approx(poisson_gaussian_divergence(q, z, 8), rel=1e-9)


def test_frontier_features_of_an_image_depend_on_it_alone() -> None:
    made = example("frontier_features")
    formulae = (made.scattering(8), made.histograms, made.mirrored(made.mean_colours))
    images = np.random.default_rng(0).random((3, 3, 8, 8), np.float32)
    others = images * 1000
    others[1] = images[1]
    alone, among = made.joined(formulae, images)[1], made.joined(formulae, others)[1]
    assert alone.dtype == np.float16 and np.allclose(alone, among, atol=1e-3)
