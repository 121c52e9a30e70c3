"""One plan for everyone, made of data that are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpsgd_cli.data import opening, table_files
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.models import builder
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, ConvexModel, LinearModel, MlpModel, WrnModel
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_and_outline

CONVEX = """
name: own
data: {path: own.csv, target: y, bounds: [0, 1], classes: [0, 1], preprocess: [{scale: {}}]}
model: {kind: convex, radius: 2}
method: {kind: output-perturbation, steps: 5}
privacy: {budget: {epsilon: 1, delta: 1.0e-4}}
seed: 0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    rows = pd.DataFrame(random.random((60, 3)), columns=["a", "b", "c"]).assign(y=random.integers(0, 2, 60))
    rows.to_csv(tmp_path / "own.csv", index=False)
    (tmp_path / "own.yaml").write_text(CONVEX)
    return tmp_path / "own.yaml"


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The files that have been parsed."""
    found: list[Any] = []
    parse = table_files.read_table

    def noted(file: Any, *how: Any) -> Any:
        found.append(file)
        return parse(file, *how)

    monkeypatch.setattr("dpsgd_cli.data.own_table.read_table", noted)
    monkeypatch.setattr(opening, "_kept", {})
    return found


def test_a_file_that_has_changed_is_read_again(recipe: Path, parsed: list[Any], tmp_path: Path) -> None:
    """Of the same size, and within the same tick of the clock."""
    data = Data.model_validate({"path": "own.csv", "target": "y"})
    first: Any = opening.load_raw(data, tmp_path)
    text = (tmp_path / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(text.replace("0.6", "0.7"))
    again: Any = opening.load_raw(data, tmp_path)
    assert not np.array_equal(again.train.x, first.train.x)
    assert len(parsed) == 2


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LinearModel(), (4,)),
        (ConvexModel(bias=False), (4,)),
        (MlpModel(hidden=[3, 5]), (4,)),
        (CnnModel(), (1, 28, 28)),
        (CnnModel(layout="cifar10"), (3, 32, 32)),
        (WrnModel(depth=10, width=1), (3, 8, 8)),
    ],
)
def test_a_model_section_knows_its_layers_or_leaves_them_to_be_counted(model: Any, shape: tuple[int, ...]) -> None:
    built = Pack(builder(model, shape, 2, Path()), [0], Placement(torch.device("cpu")))
    assert model.layers in (None, len(built.layers))
    assert (model.layers is None) == (model.kind == "wrn")


def test_layers_that_only_building_tells_are_counted() -> None:
    clipping = ["privacy.clipping={kind: per-layer, norm: 0.5}", "data={name: digits}", "epochs=1"]
    changes = [*clipping, "model={kind: wrn, depth: 10, width: 1}"]
    loaded = load_recipe("quickstart", changes)
    plan, outline = plan_and_outline(loaded)
    assert plan is not None
    layers = Pack(
        builder(loaded.recipe.model, outline.input_shape, 10, Path()), [0], Placement(torch.device("cpu"))
    ).layers
    assert plan.sensitivity == pytest.approx(0.5 * len(layers) ** 0.5)
