"""Tokens, named inputs and losses of the user's own, from the command to the prediction; no transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpsgd_cli as dpsgd
from dpsgd_cli.errors import ModelError

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

class Bare(Tagger):
    def forward(self, input_ids, attention_mask):
        return nn.functional.linear(self.table(input_ids), self.last.weight)

def hasty(shapes, outputs):
    return Hasty(outputs)

def floats(shapes, outputs):
    return Floats(outputs)

def bare(shapes, outputs):
    return Bare(outputs)

seen = []

def kept(outputs, label):
    seen.append(1)
    return outputs.square().mean() * len(seen)

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


def test_a_loss_of_the_users_own_trains(folder: Path, tmp_path: Path) -> None:
    found = trained(folder, tmp_path, loss={"python": "net.py"})
    assert found.metrics["test_loss"]["mean"] > 0


def test_a_loss_that_remembers_is_refused_before_training(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is another one"):
        trained(folder, tmp_path, loss={"python": "net.py", "function": "kept"})


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        ("hasty", r"line \d+ of net\.py \(`x \+= 1`\): a tensor is changed in place .* write h = h \+ 1"),
        ("floats", r"line \d+ of net\.py .*the records are integers \(tokens\).* x\.float\(\)"),
        ("bare", r"line \d+ of net\.py .*: Linear is clipped by what it is called with"),
    ],
)
def test_a_models_author_is_told_the_line_and_what_to_write(
    folder: Path, tmp_path: Path, factory: str, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        trained(folder, tmp_path, factory=factory)
