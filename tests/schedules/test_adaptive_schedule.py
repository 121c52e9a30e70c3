"""Trials that follow their validation accuracy: own noise, own length, own ledger, alone or in company."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from dpsgd_cli.errors import PrivacyError, RecipeError
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training.loop import plan_recipe
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.conftest import Train, WriteRecipe

OWN: dict[str, Any] = {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2]}
ADAPTIVE: dict[str, Any] = {
    "data": OWN | {"validation": {"records": 20, "public": True, "seed": 3}},
    "method": {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 7, "learning_rate": 0.5},
    "privacy": {
        "budget": {"rho": 0.5},
        "delta": 1e-3,
        "schedule": {"kind": "validation", "initial": 5, "decay": 0.8, "threshold": 0.03, "period": 2, "average": 2},
    },
    "epochs": "until-budget",
    "repeats": 4,
}


def table(directory: Path, name: str) -> list[dict[str, str]]:
    with (directory / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_trial_goes_its_own_way_and_none_passes_the_budget(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(write_recipe(**ADAPTIVE))
    trials, history = table(directory, "trials.csv"), table(directory, "history.csv")
    assert len({row["epochs"] for row in trials}) > 1
    for row in trials:
        own = [line for line in history if line["trial"] == row["trial"]]
        assert len(own) == int(row["epochs"])
        noise = [float(line["noise_multiplier"]) for line in own]
        assert float(row["spent_rho"]) == pytest.approx(sum(0.5 / z**2 for z in noise))
        assert float(row["spent_rho"]) <= 0.5 < float(row["spent_rho"]) + 0.5 / (0.8 * noise[-1]) ** 2
        assert 0.5 * (1 - 1e-12) < float(row["rho"]) <= 0.5
        # the rule, applied to the accuracies that were written down
        accuracy, last, expected = [float(line["validation_accuracy"]) for line in own], 0.0, 5.0
        for epoch in range(len(own)):
            assert noise[epoch] == pytest.approx(expected)
            if epoch % 2 == 1:
                mean = (accuracy[epoch] + accuracy[epoch - 1]) / 2
                expected, last = (0.8 * expected if mean - last <= 0.03 + 1e-12 else expected), mean


def test_public_validation_is_declared_and_private_validation_is_charged(
    train: Train, write_recipe: WriteRecipe
) -> None:
    public = store.read_document(train(write_recipe(**ADAPTIVE)))
    assert any("20 validation records" in said and "public" in said for said in public["privacy"]["declarations"])
    assert set(public["privacy"]["spent"]["parts"]) == {"gradient"}
    charged = ADAPTIVE | {"data": OWN | {"validation": {"fraction": 0.25, "noise_multiplier": 9}}}
    directory = train(write_recipe(**charged))
    document = store.read_document(directory)
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    looks = [line for line in lines if line["label"] == "validation" and line["trial"] == 0]
    assert len(looks) == int(table(directory, "trials.csv")[0]["epochs"])
    assert {(line["noise_multiplier"], line["sensitivity"]) for line in looks} == {(9, 1)}
    parts = document["privacy"]["spent"]["parts"]
    assert parts["validation"]["rho"] == pytest.approx(max(row["epochs"] for row in document["trials"]) / (2 * 9**2))
    assert document["privacy"]["rho"] <= 0.5
    assert "validation_accuracy" not in table(directory, "history.csv")[0]


def test_a_look_has_the_noise_that_it_is_charged_for_anew_at_each_epoch(write_recipe: WriteRecipe) -> None:
    """One record moves the number of right predictions by 1 under every adjacency, so the deviation is z = 9.
    Kolmogorov-Smirnov at 1e-6 of 2000 epochs of one trial; 2/3 and 3/2 of it are rejected."""
    data = OWN | {"validation": {"records": 12, "noise_multiplier": 9}}
    for adjacency in ("zero-out", "replace-one"):
        loaded = load_recipe(str(write_recipe(**ADAPTIVE | {"data": data})), [f"privacy.adjacency={adjacency}"])
        settled = resolve_auto(loaded)
        method = start([Member(settled, plan_recipe(settled)[0])]).method
        assert isinstance(method, DpSgd)
        run = method.adaptive.runs[0]
        drawn = [12 * method.adaptive._released(run, epoch, 0.5, 12) - 6 for epoch in range(2000)]
        assert stats.kstest(drawn, stats.norm(scale=9).cdf).pvalue > 1e-6
        for factor in (2 / 3, 3 / 2):
            assert stats.kstest(drawn, stats.norm(scale=9 * factor).cdf).pvalue < 1e-12


def test_an_average_that_counts_from_the_end_is_refused(train: Train, write_recipe: WriteRecipe) -> None:
    method = ADAPTIVE["method"] | {"averaging": {"kind": "tail"}}
    with pytest.raises(PrivacyError, match="cannot count from the end"):
        train(write_recipe(**ADAPTIVE | {"method": method}))


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "zero-out"])
def test_the_number_of_private_validation_records_is_public(adjacency: str, write_recipe: WriteRecipe) -> None:
    """A count under every adjacency; a fraction where places decide, so that its size follows from a public number."""
    method = {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.5}
    base = ADAPTIVE | {"method": method, "privacy": ADAPTIVE["privacy"] | {"adjacency": adjacency}}
    for size in ({"records": 12}, {"fraction": 0.25}):
        path = str(write_recipe(**base | {"data": OWN | {"validation": {**size, "noise_multiplier": 9}}}))
        if adjacency == "add-remove" and "fraction" in size:
            with pytest.raises(RecipeError, match=r"give data\.validation\.records"):
                load_recipe(path)
        else:
            assert load_recipe(path).recipe.data.validation is not None


def test_learning_rates_change_by_epoch(train: Train, write_recipe: WriteRecipe) -> None:
    """Two epochs at 0.5 and 0.25 by a schedule, and by hand with a constant rate for the first of them."""
    base = {"method": {"kind": "sgd", "batching": "full"}, "privacy": None, "epochs": 2, "repeats": 1}
    falling = {"kind": "linear", "initial": 0.5, "final": 0.25, "epochs": 1}
    changed = train(write_recipe(**base | {"method": base["method"] | {"learning_rate": falling}}))  # type: ignore[operator]
    constant = train(write_recipe(**base | {"method": base["method"] | {"learning_rate": 0.5}}))  # type: ignore[operator]
    losses = [[float(row["test_loss"]) for row in table(d, "history.csv")] for d in (changed, constant)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] > losses[1][1]
