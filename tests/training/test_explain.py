"""What a model learnt, explained: shapes of known functions, the law of their noise, and quality on public records."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.main import main
from dpsgd_cli.results import report, shapes, store
from dpsgd_cli.results.document import Picture
from dpsgd_cli.training import explain
from dpsgd_cli.training.inference import Trained
from tests.conftest import OWN, Train, WriteRecipe

PLAIN: dict[str, Any] = {"method": {"kind": "gd", "learning_rate": 1}, "privacy": None}
LINE = {"path": "line.csv", "target": "y", "task": "regression", "target_bounds": [0, 400],
        "bounds": {"a": [0, 1], "b": [-2, 2]}, "split": {"test": 30}}  # fmt: skip
FULL: dict[str, Any] = {"kind": "dp-sgd", "batching": "full", "preconditioner": None}


@pytest.fixture
def line(tmp_path: Path) -> pd.DataFrame:
    """y = 100 + 200 a + 10 b, and the word, which says if b is above 0."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.uniform(0, 1, 120), "b": rng.uniform(-2, 2, 120)})
    frame["y"] = 100 + 200 * frame["a"] + 10 * frame["b"]
    frame.to_csv(tmp_path / "line.csv", index=False)
    return frame


def table_of(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.integers(0, 10, 200), "job": rng.choice(["smith", "nurse"], 200)})
    frame["y"] = np.where(frame["age"] + 4 * (frame["job"] == "smith") > 6, "yes", "no")
    frame.to_csv(folder / "own.csv", index=False)
    return {"path": "own.csv", "target": "y", "classes": ["no", "yes"], "bounds": {"age": [0, 9]},
            "categorical": {"job": ["nurse", "smith"]}, "split": {"test": 50}}  # fmt: skip


def test_a_straight_line_has_straight_shapes_in_the_unit_of_the_target(
    write_recipe: WriteRecipe, train: Train, line: pd.DataFrame
) -> None:
    model = {"kind": "convex", "loss": "squared"}
    directory = train(write_recipe(data=LINE, model=model, epochs=800, repeats=1, **PLAIN), save_models=True)
    found = explain.explain(Trained.load(directory))
    assert [shape.column for shape in found.shapes] == ["a", "b"] and found.unit == "target, in its own unit"
    for shape, slope in zip(found.shapes, (200, 10), strict=True):
        values = np.array(shape.values, float)
        assert np.array(shape.effects)[:, 0] == pytest.approx(slope * (values - values.mean()), abs=2)
    assert "no noise" in found.about_noise
    groups = np.array(explain.curves_of(Trained.load(directory), 0).predicted)
    assert groups[:, 0] == pytest.approx(groups[:, 1], abs=4) and (groups[:, 2] <= groups[:, 1]).all()
    names = {row.feature: row.weight for row in explain.coefficients(Trained.load(directory), 0)}
    assert names["a"] == pytest.approx(1, abs=0.02) and set(names) == {"a", "b", "the model's own constant"}


def test_the_effects_of_several_classes_have_mean_zero(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    data = table_of(tmp_path)
    frame = pd.read_csv(tmp_path / "own.csv")
    frame["y"] = frame["age"] // 4
    frame.to_csv(tmp_path / "own.csv", index=False)
    directory = train(write_recipe(data=data | {"classes": [0, 1, 2]}, repeats=1, method=FULL), save_models=True)
    found = explain.explain(Trained.load(directory))
    assert found.outputs == ["0", "1", "2"]
    for shape in found.shapes:
        assert np.abs(np.array(shape.effects).sum(axis=1)).max() < 1e-9
        assert shape.noise is not None and min(shape.noise) > 0
    drawn = "".join(block.element for block in shapes.blocks(found) if isinstance(block, Picture))
    assert drawn.count("<svg") == 1
    assert explain.curves_of(Trained.load(directory), 0) == shapes.TestCurves()


SETTINGS: dict[str, tuple[dict[str, Any], float, float]] = {
    # almost no curvature: a short way at a small rate. The band is exact there.
    "short": ({"epochs": 6, "learning_rate": 0.01}, 0.8, 1.2),
    "momentum": (
        {
            "epochs": 20,
            "learning_rate": 0.005,
            "optimizer": {"kind": "sgd", "momentum": 0.8},
            "averaging": {"kind": "tail"},
        },
        0.8,
        1.2,
    ),
    # a long way, on which later steps take noise back: the band is an upper bound
    "long": ({"epochs": 150, "learning_rate": 1.0, "averaging": {"kind": "tail"}}, 0.05, 1.1),
    "by rule": ({"epochs": None}, 0.05, 1.15),
}


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_band_is_the_spread_of_many_trainings_or_above_it(
    write_recipe: WriteRecipe, train: Train, line: pd.DataFrame, tmp_path: Path, loss: str, setting: str
) -> None:
    """40 trainings, all on the same records, by 40 seeds. A variance of 40 values is off by 23% (one deviation); the
    mean over 2 columns and 9 values of each by less. A band for twice the noise must fail, and so must one for half."""
    changes, least, most = SETTINGS[setting]
    method = {key: value for key, value in changes.items() if key != "epochs"} | (
        {"kind": "dp-sgd", "batching": "full"} if setting == "by rule" else FULL
    )
    data: dict[str, Any] = LINE | {"bounds": {"a": [0, 8], "b": [-2, 6]}}
    if loss != "squared":
        line["y"] = np.where(line["a"] > 0.5, "yes", "no")
        line.to_csv(tmp_path / "line.csv", index=False)
        data = {key: value for key, value in data.items() if key not in ("task", "target_bounds")}
        data |= {"classes": ["no", "yes"]}
    model = {"kind": "linear"} if loss == "softmax" else {"kind": "convex", "loss": loss}
    # the prior is the weight 0 in all trainings: what differs is noise
    privacy = {"budget": {"epsilon": 2, "delta": 1e-3}, "clipping": {"kind": "flat", "norm": 0.5}}
    data |= {"preprocess": [{"bin": {}}]} if setting == "by rule" else {}
    recipe = write_recipe(data=data, model=model, method=method, privacy=privacy, epochs=changes["epochs"], repeats=40)
    trained = Trained.load(train(recipe, save_models=True))
    found = [explain.explain(trained, trial) for trial in range(40)]
    ratios = []
    for column in ("a", "b"):
        own = [next(shape for shape in one.shapes if shape.column == column) for one in found]
        spread = np.array([shape.effects for shape in own])[:, :, 0].var(axis=0, ddof=1)
        band = np.mean([np.square(shape.noise or [np.nan]) for shape in own], axis=0)
        seen = band > 0.01 * band.max()
        ratios.append((spread[seen] / band[seen]).mean())
    assert least**2 < np.mean(ratios) < most**2


def test_the_band_is_as_much_wider_as_a_calibration_makes_effects(
    write_recipe: WriteRecipe, train: Train, line: pd.DataFrame
) -> None:
    """And dp-gd has the band of full batches."""
    data: dict[str, Any] = LINE | {"evaluation": "public"}
    given: dict[str, Any] = {"data": data, "model": {"kind": "convex", "loss": "squared"}, "repeats": 1, "epochs": 2}
    given["privacy"] = {"budget": {"epsilon": 4, "delta": 1e-5}, "noise_source": "seeded"}
    bands = []
    for kind in ("dp-sgd", "dp-gd"):
        method = FULL | {"kind": kind, "calibration": {"share": 0.1}}
        trained = Trained.load(train(write_recipe(**given, method=method), save_models=True))
        found = []
        for scale in (1.25, 1.0):
            trained.bundle.kept["0/calibration"][0] = scale
            found.append(explain.explain(trained))
        assert "without the noise of the calibration" in found[0].about_noise
        for wide, narrow in zip(found[0].shapes, found[1].shapes, strict=True):
            assert narrow.noise is not None and wide.noise == pytest.approx(np.multiply(narrow.noise, 1.25))
        bands.append([shape.noise for shape in found[0].shapes])
    assert bands[0] == bands[1]


def test_the_command_and_the_report(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    recipe = write_recipe(data=table_of(tmp_path), repeats=1, seed=None, method=FULL)
    trained = CliRunner().invoke(main, ["train", str(recipe), "--out", str(tmp_path / "out")])
    assert trained.exit_code == 0
    directory = next((tmp_path / "out").glob("tiny-*"))
    plain, drawn = (directory / name for name in report.NAMES)
    assert "## What the model learnt" in plain.read_text()
    assert drawn.read_text().count("<svg") == 3  # the curve of the first screen, shapes, epochs
    told = CliRunner().invoke(main, ["explain", str(directory), "--out", str(tmp_path / "tables")])
    assert told.exit_code == 0 and "effect on the log-odds of yes against no" in told.stdout
    with (tmp_path / "tables" / "shapes.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 10 + 3 and {row["column"] for row in rows} == {"age", "job"}
    assert (
        (tmp_path / "tables" / "coefficients.csv")
        .read_text()
        .startswith("feature,output,weight,estimate,low,high,note\nage,no,")
    )
    assert "<svg" in (tmp_path / "tables" / "explained.html").read_text()
    kept = shapes.read(directory)
    assert kept is not None and len(kept.curves.roc) > 2
    # the records are not there any more: shapes are post-processing, curves are not drawn anew
    (tmp_path / "own.csv").unlink()
    again = explain.explain(Trained.load(directory))
    assert again.shapes == kept.shapes and explain.curves_of(Trained.load(directory), 0) == shapes.TestCurves()
    copy = store.public_copy(directory, tmp_path / "public")
    report.write(copy)
    assert "## What the model learnt" in (copy / "report.md").read_text()
    (directory / shapes.NAME).write_text("{}")
    with pytest.raises(DataError, match=r"explained\.json: cannot be read"):
        report.write(directory)
    with pytest.raises(UsageError, match="no trial 3"):
        explain.explain(Trained.load(directory), 3)


@pytest.mark.parametrize("changes", [PLAIN, {"data": OWN | {"preprocess": [{"scale": {"by": "min-max"}}]}}])
def test_a_model_that_must_not_be_published_is_not_explained_in_its_report(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path, changes: dict[str, Any]
) -> None:
    model = {"kind": "convex", "loss": "logistic"} if changes is PLAIN else {"kind": "linear"}
    if changes is PLAIN:
        changes = changes | {"data": table_of(tmp_path)}
    directory = train(write_recipe(repeats=1, model=model, **changes), save_models=True)
    explain.write(directory, tmp_path)
    assert not (directory / shapes.NAME).exists()


def test_folds_have_no_curves(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    """Guarantee: no curve is drawn of records that a trial of the result trained on."""
    data = {key: value for key, value in table_of(tmp_path).items() if key != "split"}
    directory = train(write_recipe(data=data, method=FULL, folds=2, repeats=1), save_models=True)
    assert explain.curves_of(Trained.load(directory), 1) == shapes.TestCurves()


def test_private_held_out_records_have_no_curves(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    """Guarantee: no curve is drawn of held-out records that the statement protects."""
    data = table_of(tmp_path) | {"evaluation": "private", "split": {"test": 0.2}}
    directory = train(write_recipe(data=data, method=FULL, repeats=1), save_models=True)
    assert explain.curves_of(Trained.load(directory), 0) == shapes.TestCurves()
