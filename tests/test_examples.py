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
from sklearn.datasets import load_digits

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
