"""Intervals of trained models: what they cost, what they are computed from, and what is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import dpsgd_cli as dpsgd
from dpsgd_cli.accounting.ledger import read_entries
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.intervals.run import bounded_rows
from dpsgd_cli.results import shapes, store
from dpsgd_cli.results.document import Heading
from dpsgd_cli.training import explain
from dpsgd_cli.training.inference import Trained
from tests.conftest import Train, WriteRecipe

ILL = {"path": "ill.csv", "target": "ill", "classes": ["no", "yes"], "bounds": {"age": [0, 10], "noise": [0, 1]},
       "categorical": {"job": ["nurse", "smith"]}, "split": {"test": 500}}  # fmt: skip
COST = {"path": "ill.csv", "target": "cost", "task": "regression", "target_bounds": [0, 20], "drop": ["ill"],
        "bounds": ILL["bounds"], "categorical": ILL["categorical"], "split": {"test": 500}}  # fmt: skip
LOGISTIC: dict[str, Any] = {
    "model": {"kind": "convex", "loss": "logistic"}, "method": {"kind": "dp-gd", "inference": "intervals"},
    "data": ILL | {"drop": ["cost"]}, "privacy": {"budget": {"epsilon": 2, "delta": 1e-5}}, "epochs": None,
}  # fmt: skip
SQUARES: dict[str, Any] = {
    "model": {"kind": "linear"}, "method": {"kind": "dp-least-squares", "inference": "intervals"}, "data": COST,
    "privacy": {"budget": {"epsilon": 2, "delta": 1e-5}}, "epochs": None, "seed": 4,
}  # fmt: skip


def records(folder: Path) -> None:
    """20,000 records: log-odds .6 (age - 5) + [smith] and cost 2 + age + 3 [smith], both without the noise column."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"age": rng.uniform(0, 10, 20_000), "noise": rng.uniform(0, 1, 20_000)})
    frame["job"] = rng.choice(["nurse", "smith"], 20_000, p=[0.7, 0.3])
    smith = frame["job"] == "smith"
    frame["ill"] = np.where(rng.random(20_000) < 1 / (1 + np.exp(-0.6 * (frame["age"] - 5) - smith)), "yes", "no")
    frame["cost"] = 2 + frame["age"] + 3 * smith + rng.normal(0, 1, 20_000)
    frame.to_csv(folder / "ill.csv", index=False)


def covered(found: list[shapes.Coefficient], truths: dict[str, float]) -> None:
    by_name = {one.feature: one for one in found}
    for name, truth in truths.items():
        ends = by_name[name].ends
        assert ends is not None and ends[0] <= truth <= ends[1] and ends[1] - ends[0] < 1.5
    assert by_name["job=nurse"].note == "reference" and by_name["job="].note == "noise hides it"


def test_intervals_are_a_function_of_released_files_alone(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    """The records are deleted; then intervals of both methods are computed, and hold the truth (fixed seed)."""
    records(tmp_path)
    directories = [train(write_recipe(**case, repeats=1), save_models=True) for case in (LOGISTIC, SQUARES)]
    (tmp_path / "ill.csv").unlink()
    copies = [tmp_path / "first", tmp_path / "second"]
    for copy, directory in zip(copies, directories, strict=True):
        copy.mkdir()
        for name in ("recipe.yaml", "model.safetensors"):
            shutil.copy(directory / name, copy / name)
    first, second = (explain.explain(Trained.load(copy)) for copy in copies)
    covered(first.coefficients, {"age": 6.0, "noise": 0.0, "job=smith": 1.0})
    covered(second.coefficients, {"age": 1.0, "noise": 0.0, "job=smith": 0.3})
    for found, slope in ((first, 0.6), (second, 1.0)):
        by_name = {one.column: one for one in found.shapes}
        age, job = by_name["age"].intervals, by_name["job"].intervals
        assert age is not None and job is not None and job[2] == [None]
        ends = [own[0] for own in age]
        truths = slope * (np.array(by_name["age"].values, float) - 5)
        assert None not in ends
        low, high = np.array(ends, float).T
        assert (low - 1e-6 <= truths).all() and (truths <= high + 1e-6).all()
    table = dpsgd.load(directories[0]).coefficients()
    assert list(table.columns) == ["feature", "output", "weight", "estimate", "low", "high", "note"]
    assert table["low"].tolist()[0] == first.coefficients[0].ends[0]  # type: ignore[index]


def test_the_release_is_a_share_of_the_budget(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    """All releases add up to the Gaussian mechanism of epsilon 2 at delta 1e-5, by its exact curve (Balle and Wang)."""
    records(tmp_path)
    directory = train(write_recipe(**LOGISTIC | {"epochs": 20}, repeats=1), save_models=True)
    made = [entry.release for entry in read_entries(directory / "ledger.jsonl")[0]]
    spent = {"intervals": 0.0, "gradient": 0.0}
    for one in made:
        assert isinstance(one.mechanism, GaussianSum)
        spent[one.mechanism.label] += one.count / one.mechanism.noise_multiplier**2
    mu = math.sqrt(sum(spent.values()))
    assert spent["intervals"] == pytest.approx(0.3 * mu**2, rel=1e-3)
    delta = stats.norm.cdf(mu / 2 - 2 / mu) - math.exp(2) * stats.norm.cdf(-mu / 2 - 2 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert store.read_document(directory)["privacy"]["epsilon"] <= 2


def test_the_clip_is_reported_where_it_biases_beyond_the_width(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    records(tmp_path)
    short = {"kind": "dp-gd", "inference": "intervals", "learning_rate": 0.5, "preconditioner": None}
    directory = train(write_recipe(**LOGISTIC | {"method": short, "epochs": 5}, repeats=1), save_models=True)
    found = explain.explain(Trained.load(directory))
    age = next(one for one in found.coefficients if one.feature == "age")
    if age.ends is not None:
        assert age.note == "the weight is biased beyond its interval" and age.ends[0] <= 6 <= age.ends[1]
    assert "lie outside" in found.about_intervals and math.isfinite(age.weight)
    told = shapes.blocks(found.model_copy(update={"shapes": [], "pairs": []}))
    assert any(isinstance(block, Heading) and "95% intervals" in block.text for block in told)


def test_rows_beyond_their_bound_are_scaled_down() -> None:
    """Guarantee: a record's row has norm at most 1, whatever it says, with and without a preconditioner."""
    x = np.array([[3.0, 4.0], [0.1, 0.2], [math.nan, 1.0], [0.0, 0.0]])
    table = Table.load(x, np.array([0, 1, 1, 0]), False, torch.device("cpu"), torch.float64)
    for cut in (None, np.array([[0.5], [0.0]])):
        ((rows, labels),) = bounded_rows(table, 0, cut, 1.0, True)
        assert (np.linalg.norm(rows, axis=1) <= 1 + 1e-12).all() and labels.tolist() == [0, 1, 1, 0]
