"""Several targets, or several labels, of a table: read by name, trained, measured and predicted one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from click.testing import CliRunner
from sklearn.metrics import f1_score, mean_absolute_error, r2_score

import dpsgd_cli as dpsgd
from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.data.opening import load_raw, open_labelled
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table import predicted, target_scale
from dpsgd_cli.engine.losses import LossOptions, binary, poisson, squared
from dpsgd_cli.engine.metrics import Answers, counts_of_places, of_constants, of_counts, of_table
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.main import main
from dpsgd_cli.methods.risks.affine import AffineRisk
from dpsgd_cli.recipe.loading import load_mapping

ROWS = 60
A = np.linspace(0, 1, ROWS)
TABLE = pd.DataFrame(
    {"a": A, "high": 100 + 50 * A, "low": 60 + 20 * A, "ill": np.where(A > 0.5, "yes", "no"), "old": (A > 0.3) * 1}
)
BOUNDS = {"high": [80, 180], "low": [40, 110]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TABLE.to_csv(tmp_path / "t.csv", index=False)
    return tmp_path


def numbers(**changes: Any) -> dict[str, Any]:
    told = {"path": "t.csv", "target": ["high", "low"], "task": "regression", "target_bounds": BOUNDS}
    return told | {"bounds": {"a": [0.0, 1.0]}, "drop": ["ill", "old"], "evaluation": "public"} | changes


def labels(**changes: Any) -> dict[str, Any]:
    told = {"path": "t.csv", "target": ["ill", "old"], "task": "multi-label", "bounds": {"a": [0.0, 1.0]}}
    return told | {"drop": ["high", "low"], "evaluation": "public"} | changes


def recipe(data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": "several", "data": data | {"split": {"test": 0.25}}, "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 16, "learning_rate": 0.5},
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-3}},
        "epochs": 2, "seed": 0,
    } | changes  # fmt: skip


def section(told: dict[str, Any]) -> Data:
    return Data.model_validate_json(json.dumps(told))


def test_targets_are_scaled_each_by_its_own_bounds(folder: Path) -> None:
    data = section(numbers())
    read: Any = load_raw(data, folder)
    assert [column.name for column in read.layout.columns or ()] == ["a"]
    assert np.allclose(read.train.y[0], [(100 - 130) / 50, (60 - 75) / 35], atol=1e-6)
    assert np.allclose(target_scale(data).outward(read.train.y.astype(float)), TABLE[["high", "low"]], atol=1e-4)
    assert predicted(data, np.array([[-3.0, 3.0]])).tolist() == [[80.0, 110.0]]
    said = " ".join(read.declarations)
    assert "bounds of high are public (recipe): 80 to 180" in said and "bounds of low" in said
    shared: Any = load_raw(section(numbers(target_bounds=[0, 200])), folder).train.y
    assert np.allclose(shared, TABLE[["high", "low"]] / 100 - 1, atol=1e-6)
    again = open_labelled(folder / "t.csv", data, read.layout, None, folder)
    assert np.array_equal(again.y, read.train.y)


def test_labels_are_words_of_yes_and_no(folder: Path) -> None:
    read: Any = load_raw(section(labels()), folder)
    assert read.classes == ("ill", "old") and read.train.y.dtype == np.int64
    assert np.array_equal(read.train.y, np.stack([A > 0.5, A > 0.3], axis=1))


def test_counts_have_bounds_of_their_own_in_the_poisson_loss() -> None:
    """mu - y log mu in each target's own unit, here with mu 3 and 20, y 4 and 30."""
    low, high = np.array([0.0, 10.0]), np.array([8.0, 50.0])
    mu, y = np.array([3.0, 20.0]), np.array([4.0, 30.0])
    inside = [torch.tensor((own - low) / (high - low) * 2 - 1).view(1, 1, 2) for own in (mu, y)]
    found = poisson(inside[0], inside[1], LossOptions(low=tuple(low), high=tuple(high)))
    assert found.item() == pytest.approx((mu - y * np.log(mu)).mean(), rel=1e-6)


@pytest.mark.parametrize(("loss", "whole"), [(squared, False), (binary, True)])
def test_a_layer_with_several_labels_is_clipped_one_example_at_a_time(loss: Any, whole: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, values = torch.randn(7, 3, generator=draw), torch.randn(2, 2 * 3 + 2, generator=draw)
    y = torch.randint(2, (7, 2), generator=draw) if whole else torch.rand(7, 2, generator=draw)

    def of_outputs(outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = loss(outputs, truth, LossOptions())
        return found

    risk, sums = AffineRisk(Table(x, y, False), of_outputs, True), torch.zeros(2, 8, dtype=torch.float64)
    risk.add_sums(values, sums, Clipping(torch.full((1, 2), 0.4)), Diagnostics(2, torch.device("cpu")))
    for trial in range(2):
        whole_sum = torch.zeros(8, dtype=torch.float64)
        for row in range(7):
            own = values[trial].double().requires_grad_()
            outputs = own[:6].view(2, 3) @ x[row].double() + own[6:]
            truth = y[row] if whole else y[row].double()
            (slope,) = torch.autograd.grad(of_outputs(outputs[None, None], truth[None, None]).sum(), own)
            whole_sum += slope * min(1.0, 0.4 / slope.norm().item())
        torch.testing.assert_close(sums[trial], whole_sum, rtol=1e-5, atol=1e-6)


def test_metrics_of_each_target_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    truth, told = draw.normal(size=(2, 40, 2))
    found = of_table("regression", Answers(truth, told), ["high", "low"])
    for at, name in enumerate(("high", "low")):
        assert found[f"mae_{name}"] == pytest.approx(mean_absolute_error(truth[:, at], told[:, at]))
        assert found[f"r2_{name}"] == pytest.approx(r2_score(truth[:, at], told[:, at]))
    base = of_constants("regression", truth, None, ["high", "low"])
    assert base["mae_low"] == pytest.approx(np.abs(truth[:, 1] - np.median(truth[:, 1])).mean())
    assert base["r2_low"] == pytest.approx(0)


def test_f1_of_each_class_of_places_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs, truth = torch.randn(9, 5, 3, generator=draw), torch.randint(-1, 3, (9, 5), generator=draw)
    pieces = [counts_of_places(outputs[part], truth[part]) for part in (slice(0, 4), slice(4, 9))]
    of, told, right = np.sum(pieces, axis=0)
    found = of_counts(of, told, right, ["x", "y", "z"])
    there = truth >= 0
    each = f1_score(truth[there], outputs.argmax(dim=-1)[there], average=None)
    assert [found[f"label_f1_{name}"] for name in "xyz"] == pytest.approx(each.tolist())
    assert found["label_f1"] == pytest.approx(each.mean())


@pytest.mark.parametrize("data", [numbers(), labels()], ids=["numbers", "labels"])
def test_from_a_table_of_several_targets_to_columns_of_predictions(folder: Path, data: dict[str, Any]) -> None:
    (folder / "r.yaml").write_text(yaml.safe_dump(recipe(data)))
    result = dpsgd.train(str(folder / "r.yaml"), out=folder / "out")
    names = data["target"]
    wanted = [f"test_mae_{name}" if data["task"] == "regression" else f"test_label_f1_{name}" for name in names]
    assert set(wanted) <= set(result.metrics)
    told = CliRunner().invoke(main, ["predict", str(result.directory), str(folder / "t.csv")])
    assert told.exit_code == 0 and told.output.splitlines()[0] == ",".join(f"prediction_{name}" for name in names)
    told = CliRunner().invoke(main, ["explain", str(result.directory)])
    assert (
        "targets, each in its own unit" if data["task"] == "regression" else "log-odds of each label"
    ) in told.output


@pytest.mark.parametrize(
    ("data", "changes", "why"),
    [
        (numbers(target_bounds={"high": [0, 1]}), {}, "names high, and target high, low"),
        (numbers(target="high"), {}, "one for each of several targets"),
        (numbers(target=["high", "high"], target_bounds=[0, 1]), {}, "names a column twice"),
        (numbers(task="classification", target_bounds=None), {}, "several columns are numbers"),
        (labels(classes=["a", "b"]), {}, "are the names of the columns"),
        (numbers(path="t.npz"), {}, r"y \(N, K\)"),
        (numbers(), {"model": {"kind": "convex", "loss": "squared"}}, "convex has one output"),
        (numbers(evaluation="private"), {}, "not 2 targets"),
        (numbers(), {"method": {"kind": "dp-gd", "preconditioner": {"kind": "second-moment"}}}, "usual loss of one"),
    ],
)
def test_what_does_not_take_several_targets_says_so(data: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    given = recipe(data, **changes)
    if "method" in changes:
        del given["epochs"]
    with pytest.raises(RecipeError, match=why):
        load_mapping(given, ())
