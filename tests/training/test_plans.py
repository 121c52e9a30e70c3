"""One plan for everyone, made of data that are read once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from dpsgd_cli.data import card_readers, opening, prepare, table_files
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.models import builder
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, ConvexModel, LinearModel, MlpModel, WrnModel
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto

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


MANY = "name: many\nrecipes: [own.yaml]\ngrid: {model.radius: [1, 2], method.steps: [4, 5]}\n"
AGD = CONVEX.replace("name: own", "name: agd").replace("output-perturbation, steps: 5", "dp-agd")


@pytest.mark.parametrize(
    ("command", "parses"),
    [
        ("train own.yaml", 1),
        ("account own.yaml", 1),
        ("compare own.yaml agd.yaml --epsilon 1,2 --repeats 2", 1),
        ("compare own.yaml other.yaml --epsilon 1 --repeats 2", 2),
        ("sweep many.yaml", 1),
    ],
)
def test_a_command_opens_each_data_section_once(
    command: str, parses: int, recipe: Path, parsed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agd.yaml").write_text(AGD)
    (tmp_path / "other.yaml").write_text(AGD.replace("target: y", "target: y, drop: [c]"))
    (tmp_path / "many.yaml").write_text(MANY)
    done = CliRunner().invoke(main, [*command.split(), *([] if "account" in command else ["--out", "out"])])
    assert done.exit_code == 0, done.output
    assert parsed == [Path("own.csv")] * parses


def test_a_card_is_read_once_for_all_who_ask(parsed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = card_readers.read
    monkeypatch.setattr(card_readers, "read", lambda card, owner: asked.append(card.name) or read(card))  # type: ignore[func-returns-value]
    sections: list[dict[str, Any]] = [{"preprocess": []}, {"split": {"test": 5}}, {"bounds": {"mean radius": [0, 40]}}]
    for settings in sections:
        opening.load_raw(Data.model_validate({"name": "breast-cancer", **settings}), Path())
    assert asked == ["breast-cancer"] * 2, "other bounds are other values"


def test_a_file_that_has_changed_is_read_again(recipe: Path, parsed: list[Any], tmp_path: Path) -> None:
    """Of the same size, and within the same tick of the clock."""
    data = Data.model_validate({"path": "own.csv", "target": "y"})
    first: Any = opening.load_raw(data, tmp_path)
    text = (tmp_path / "own.csv").read_text()
    (tmp_path / "own.csv").write_text(text.replace("0.6", "0.7"))
    again: Any = opening.load_raw(data, tmp_path)
    assert not np.array_equal(again.train.x, first.train.x)
    assert len(parsed) == 2


def test_nobody_writes_into_what_is_kept(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((8, 2), dtype=np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=[0, 1] * 4, x_test=x, y_test=[0, 1] * 4)
    data = Data.model_validate({"path": "own.npz", "preprocess": []})
    made = prepare(data, tmp_path, 1, lambda trial, purpose, exact, mechanism, records: exact, "add-remove")
    for rows in (made.train_x, made.train_y, made.test_x, made.test_y):
        rows[:] = 0
    again: Any = opening.load_raw(data, tmp_path)
    assert np.array_equal(again.train.x, x) and again.train.y.tolist() == [0, 1] * 4


def test_what_is_large_is_forgotten_when_training_has_it(
    recipe: Path, parsed: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MOST_KEPT_BYTES", 100)
    loop.run(resolve_auto(load_recipe(str(recipe))), loop.Options(tmp_path / "out"))
    assert len(parsed) == 1
    assert opening._kept == {}


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
    assert plan is not None and outline.input_shape is not None
    layers = Pack(
        builder(loaded.recipe.model, outline.input_shape, 10, Path()), [0], Placement(torch.device("cpu"))
    ).layers
    assert plan.sensitivity == pytest.approx(0.5 * len(layers) ** 0.5)
