"""Class weights, and costs that decide: what is trained, predicted, measured and charged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.engine.losses import cross_entropy, weighted
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import DataError
from dpsgd_cli.methods.risks.affine import AffineRisk
from dpsgd_cli.results import store
from dpsgd_cli.training.inference import Trained
from tests.conftest import OWN, WriteRecipe

Train = Callable[..., Path]
RARE: dict[str, Any] = {
    "path": "rare.csv",
    "target": "y",
    "classes": ["no", "yes"],
    "bounds": {"a": [0, 1], "b": [0, 1]},
}
CONVEX: dict[str, Any] = {"model": {"kind": "convex"}, "method": {"kind": "dp-gd"}, "epochs": "auto"}
LINEAR: dict[str, Any] = CONVEX | {"model": {"kind": "linear"}}
FIXED: dict[str, Any] = {"model": {"kind": "convex"}, "method": {"kind": "dp-gd", "learning_rate": 20.0}, "epochs": 40}
STEPS: dict[str, Any] = {"preprocess": [{"bin": {}}]}


@pytest.fixture
def rare(tmp_path: Path) -> pd.DataFrame:
    """2,000 records, of which about a tenth are positive, more of them where a is large."""
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"a": rng.random(2000), "b": rng.random(2000)})
    table["y"] = np.where(rng.random(2000) < 0.02 + 0.35 * table["a"] ** 3, "yes", "no")
    table.to_csv(tmp_path / "rare.csv", index=False)
    return table


@pytest.mark.parametrize("kind", [CONVEX, LINEAR, FIXED], ids=["convex", "linear", "fixed"])
def test_a_dear_miss_is_missed_less_at_the_same_price(
    kind: dict[str, Any], write_recipe: WriteRecipe, train: Train, rare: pd.DataFrame
) -> None:
    found = {}
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "costs": {"costs": {"false-negative": 8, "false-positive": 1}},
        "weights": {"class_weights": [1, 8]},
    }
    for name, given in settings.items():
        steps = {} if kind is FIXED else STEPS
        directory = train(write_recipe(data=RARE | steps | given, **kind), save_models=True)
        document, trained = store.read_document(directory), Trained.load(directory)
        rows = document["trials"]
        for metric, again in trained.metrics().items():
            assert again == pytest.approx([row[f"test_{metric}"] for row in rows]), metric
        told = trained.predict(trained.source.rows(rare), 0) == "yes"
        shares = trained.probabilities(trained.outputs(trained.source.rows(rare), 0))[:, 1]
        sure = shares[rare["y"] == "yes"].mean() > shares[rare["y"] == "no"].mean()
        found[name] = (told[rare["y"] == "yes"].mean(), shares.mean(), rows[0]["epsilon"], sure)
        if name == "costs":
            assert (told == (8 * shares > 1 - shares)).all()
    recalls = {name: one[0] for name, one in found.items()}
    assert recalls.pop("plain") + 0.15 < min(recalls.values())
    # probabilities allow for the weights
    assert all(one[1] < 0.35 and one[3] for one in found.values())
    assert len({one[2] for one in found.values()}) == 1


@pytest.mark.parametrize("outputs", [2, 3])
def test_a_record_moves_a_sum_by_its_clip_norm_at_most_whatever_its_weight(outputs: int) -> None:
    """Against a float64 gradient by hand: weight (p - e_y) (x, 1), clipped as a whole."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)), rng.integers(outputs, size=40)
    weights, bound = np.array([50.0, 1.0, 0.2][:outputs]), 0.7
    values = rng.normal(size=(1, outputs * 6))
    logits = x @ values[0, : 5 * outputs].reshape(outputs, 5).T + values[0, 5 * outputs :]
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    slopes = weights[y, None] * (shares - np.eye(outputs)[y])
    each = np.concatenate([slopes[:, :, None] * x[:, None], slopes[:, :, None]], axis=2)
    norms = np.linalg.norm(each.reshape(40, -1), axis=1)
    assert (norms > bound).any() and (norms < bound).any()
    for record in range(40):
        table = Table.load(x[[record]], y[[record]], False, torch.device("cpu"), torch.float64)
        risk = AffineRisk(table, weighted(cross_entropy, tuple(weights)), True)
        sums = torch.zeros(1, outputs * 6, dtype=torch.float64)
        clipping = Clipping(torch.full((1, 1), bound, dtype=torch.float64))
        risk.add_sums(torch.from_numpy(values), sums, clipping, Diagnostics(1, torch.device("cpu")))
        clipped = each[record] * min(1, bound / norms[record])
        expected = np.concatenate([clipped[:, :5].ravel(), clipped[:, 5]])
        assert sums[0].numpy() == pytest.approx(expected, abs=1e-9)
        assert float(sums.norm()) <= bound * (1 + 1e-12)


def test_costs_are_refused_for_three_classes(write_recipe: WriteRecipe, train: Train) -> None:
    with pytest.raises(DataError, match="two classes"):
        train(write_recipe(data=OWN | {"costs": {"false-negative": 2, "false-positive": 1}}))


def test_weights_of_three_classes_follow_their_order(write_recipe: WriteRecipe, train: Train) -> None:
    counts = []
    for weights in ([1, 1, 1], [1, 1, 20]):
        trained = Trained.load(train(write_recipe(data=OWN | {"class_weights": weights}), save_models=True))
        rows = np.random.default_rng(0).random((200, 4))
        counts.append(int((trained.predict(trained.source.rows(rows), 0) == 2).sum()))
    assert counts[1] > counts[0]


def test_a_private_measurement_is_of_what_is_decided(
    write_recipe: WriteRecipe, train: Train, rare: pd.DataFrame
) -> None:
    """Of 400 held-out records at epsilon 50: the accuracy of the dear decision, and no log loss of moved odds."""
    data = RARE | STEPS | {"evaluation": "private", "split": {"test": 0.5}}
    data |= {"costs": {"false-negative": 8, "false-positive": 1}}
    privacy = {"budget": {"epsilon": 50, "delta": 1e-5}}
    directory = train(write_recipe(data=data, privacy=privacy, **CONVEX), save_models=True)
    (trial, *_), trained = store.read_document(directory)["trials"], Trained.load(directory)
    right = (trained.predict(trained.source.rows(rare), 0) == rare["y"]).mean()
    assert trial["test_accuracy"] == pytest.approx(right, abs=0.05)
    assert "test_log_loss" not in trial and "test_auc" in trial
