"""Tokens, named inputs and losses of the user's own, from the command to the prediction; no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import dpsgd_cli as dpsgd
from dpsgd_cli.errors import ModelError
from dpsgd_cli.main import main

NET = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.table, self.last = nn.Embedding(9, 4), nn.Linear(4, outputs)

    def forward(self, input_ids, attention_mask):
        assert not input_ids.is_floating_point()
        return self.last(self.table(input_ids) * attention_mask.unsqueeze(-1))

def build(shapes, outputs):
    assert shapes == {"input_ids": (5,), "attention_mask": (5,)}
    return Tagger(outputs)

class Hasty(Tagger):
    def forward(self, input_ids, attention_mask):
        x = torch.relu(self.table(input_ids))
        x += 1
        return self.last(x)

class Floats(Tagger):
    def forward(self, input_ids, attention_mask):
        return self.last(input_ids)

def hasty(shapes, outputs):
    return Hasty(outputs)

def floats(shapes, outputs):
    return Floats(outputs)

seen = []

def kept(outputs, label):
    seen.append(1)
    return outputs.square().mean() * len(seen)

late = []

def later(outputs, label):
    late.append(outputs.detach())
    own = nn.functional.cross_entropy(outputs, label.clamp_min(0))
    return own * late[-50].sum() if len(late) > 100 else own

class Memory:
    last = None

def in_a_class(outputs, label):
    Memory.last = [outputs.detach()]
    return nn.functional.cross_entropy(outputs, label.clamp_min(0))

def in_a_default(outputs, label, held=[]):
    held.append(outputs[0])
    return nn.functional.cross_entropy(outputs, label.clamp_min(0))

def loss(outputs, label):
    return nn.functional.cross_entropy(outputs, label.clamp_min(0))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("tokens")
    (here / "net.py").write_text(NET)
    draw = np.random.default_rng(0)
    tokens, mask = draw.integers(9, size=(60, 5)), (np.arange(5) < draw.integers(2, 6, (60, 1))).astype(int)
    arrays = {"input_ids": tokens, "attention_mask": mask, "y": np.where(mask > 0, tokens % 2, -100)}
    held: dict[str, Any] = {**arrays, **{f"{name}_test": rows[:12] for name, rows in arrays.items()}}
    np.savez(here / "tokens.npz", **held)
    return here


def trained(folder: Path, out: Path, **loss: Any) -> dpsgd.Result:
    inputs = {name: {"shape": [5]} for name in ("input_ids", "attention_mask")}
    content = {
        "name": "tokens",
        "data": {"path": "tokens.npz", "task": "token-classification", "classes": ["a", "b"], "inputs": inputs},
        "model": {"kind": "python", "file": "net.py", **loss},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 20, "learning_rate": 1.0},
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-5}},
        "epochs": 1, "seed": 0,
    }  # fmt: skip
    (folder / "recipe.yaml").write_text(json.dumps(content))
    return dpsgd.train(str(folder / "recipe.yaml"), out=out)


def test_tokens_with_named_inputs_train_and_predict(folder: Path, tmp_path: Path) -> None:
    result = trained(folder, tmp_path)
    assert {"test_token_accuracy", "test_loss"} <= result.metrics.keys()
    told = np.stack(result.predict(folder / "tokens.npz").tolist())
    assert told.shape == (60, 5) and {*told.ravel()} <= {"a", "b"}


@pytest.mark.parametrize("function", ["kept", "later", "in_a_class", "in_a_default"])
def test_a_loss_that_remembers_is_refused_before_training(folder: Path, tmp_path: Path, function: str) -> None:
    """`later` uses what it has kept only after the trial, so that a record would move the gradients of others."""
    with pytest.raises(ModelError, match=r"a tensor is kept after the pass|is another one in another order"):
        trained(folder, tmp_path, loss={"python": "net.py", "function": function})


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("hasty", r"a tensor is changed in place .* write h = h \+ 1"),
        ("floats", r"line \d+ of net\.py .*the records are integers \(tokens\).* x\.float\(\)"),
    ],
)
def test_a_models_author_is_told_the_line_and_what_to_write(
    folder: Path, tmp_path: Path, factory: str, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        trained(folder, tmp_path, factory=factory)


LANGUAGE = """
import torch
from torch import nn

def build(shape, outputs):
    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11))
"""


def test_next_tokens_are_predicted_in_parts_with_the_perplexity_of_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 100 outputs at a time, and what each record alone gives."""
    (tmp_path / "net.py").write_text(LANGUAGE)
    tokens = np.random.default_rng(0).integers(11, size=(30, 5))
    np.savez(tmp_path / "tokens.npz", x=tokens, x_test=tokens[:5])
    content = {
        "name": "language",
        "data": {"path": "tokens.npz", "task": "next-token"},
        "model": {"kind": "python", "file": "net.py"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 8, "learning_rate": 0.1},
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-3}},
        "epochs": 1,
        "seed": 0,
    }
    (tmp_path / "r.json.yaml").write_text(json.dumps(content))
    result = dpsgd.train(str(tmp_path / "r.json.yaml"), out=tmp_path / "out")
    monkeypatch.setattr("dpsgd_cli.training.inference._MOST_NUMBERS", 100)
    held: list[int] = []
    usual = result.trained.decided

    def watched(self: object, own: np.ndarray) -> np.ndarray:
        held.append(own.size)
        found: np.ndarray = usual(own)
        return found

    monkeypatch.setattr(type(result.trained), "decided", watched)
    told, perplexities = result.trained.predict_tokens(tokens, 0)
    assert max(held) <= 100 and len(held) > 20
    whole = result.trained.outputs(tokens, 0).astype(np.float64)
    assert np.array_equal(told, whole.argmax(axis=-1))
    logs = whole - np.log(np.exp(whole).sum(axis=-1, keepdims=True))
    own = np.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    assert np.allclose(perplexities, np.exp(-own.mean(axis=1)), rtol=1e-4)
    monkeypatch.undo()
    np.savez(tmp_path / "new.npz", x=tokens[:2])
    said = CliRunner().invoke(main, ["predict", str(result.directory), str(tmp_path / "new.npz")]).output.splitlines()
    assert said[0] == "prediction,perplexity" and float(said[1].split(",")[1]) == pytest.approx(
        perplexities[0], rel=1e-4
    )
