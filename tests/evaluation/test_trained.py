"""Private evaluation through the commands: parts, ledger, refusals, and what one record changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.data.preparation import held_out_rows
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.metrics import METRICS
from dpsgd_cli.evaluation.estimates import Noised
from dpsgd_cli.evaluation.metrics import baseline_of_two, f1_of_two, of_two_classes
from dpsgd_cli.evaluation.strategy import for_two_classes
from dpsgd_cli.main import main

RECIPE: dict[str, Any] = {
    "name": "measured",
    "data": {
        "path": "records.csv",
        "target": "y",
        "classes": ["no", "yes"],
        "bounds": [-4, 4],
        "split": {"test": 0.25},
        "evaluation": "private",
    },
    "model": {"kind": "linear"},
    "method": {"kind": "dp-gd", "learning_rate": 1},
    "privacy": {"budget": {"epsilon": 1, "delta": 1e-5}},
    "epochs": 20,
    "seed": 0,
    "save_model": True,
}


def table(rows: int = 2000) -> pd.DataFrame:
    """Three columns and a label with AUC of about .9."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).round(3)
    share = 1 / (1 + np.exp(-(x @ [2.0, -1.5, 0.5])))
    return pd.DataFrame(x, columns=list("abc")).assign(y=np.where(rng.random(rows) < share, "yes", "no"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def train(out: str, **changed: Any) -> tuple[Path, dict[str, Any]]:
    """Train and return the result's folder and document."""
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **changed}))
    done = run("train", "recipe.yaml", "--out", out)
    assert done.exit_code == 0, done.output
    (directory,) = Path(out).glob("measured-*")
    return directory, json.loads((directory / "result.json").read_text())


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table().to_csv("records.csv", index=False)


def test_the_whole_costs_what_the_training_costs_and_declares_no_record_public() -> None:
    directory, document = train("out")
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in lines] == ["train"] * 20 + ["held-out"]
    assert lines[-1]["noise_multiplier"] == pytest.approx(3.7306, abs=1e-3)  # Balle and Wang, epsilon 1, delta 1e-5
    assert 0.999 < document["privacy"]["epsilon"] <= 1
    assert not [text for text in document["privacy"]["declarations"] if "test" in text]
    (row,) = json.loads(run("account", str(directory), "--accountant", "gaussian", "--format", "json").stdout)
    assert row["epsilon"] == pytest.approx(document["privacy"]["epsilon"])


def test_no_public_field_knows_more_than_the_released_cells() -> None:
    """Metrics, points and intervals follow from `cells` and `noise` alone; nothing was measured by epoch."""
    directory, document = train("out")
    (measured,) = document["evaluation"]
    plan = for_two_classes()
    noised = Noised(np.array(measured["cells"]), plan, measured["noise"])
    again = of_two_classes(noised)
    assert measured["metrics"] == {
        name: [pytest.approx(one.value), pytest.approx(one.low), pytest.approx(one.high)] for name, one in again.items()
    }
    assert measured["records"] == pytest.approx(noised.records)
    history = pd.read_csv(directory / "history.csv")
    assert not [column for column in history if column.startswith(("test_", "constant_"))]
    constants, gain = baseline_of_two(noised)
    known = {
        f"constant_{name}": one.value for name, one in constants.items() if name in METRICS and one.value is not None
    }
    assert {name: document["metrics"][name]["mean"] for name in document["metrics"] if "constant" in name} == known
    assert measured["gain"] == pytest.approx([gain.value, gain.low, gain.high])
    told = [name for name in document["metrics"] if name.startswith("test_")]
    points = measured["metrics"] | {
        f"f1_{name}": one for name, one in zip(("no", "yes"), measured["f1_by_class"], strict=True)
    }
    assert told and all(document["metrics"][name]["mean"] == points[name[5:]][0] for name in told)
    each = [(one.value, one.low, one.high) for one in f1_of_two(noised)]
    assert measured["f1_by_class"] == [pytest.approx(one) for one in each]


def test_another_held_out_record_changes_one_release_only() -> None:
    """With one held-out record in place of another, weights are equal to the bit; the sum moves by two columns at most.

    The number of records, which is declared public, stays the same. A record's own content decides its part.
    """
    longer = table(2100)
    longer.to_csv("longer.csv", index=False)
    data = Data.model_validate({**RECIPE["data"], "path": "longer.csv"})
    held = held_out_rows(load_raw(data, Path()), data, Path()).x[:, :3]
    places = [int(np.flatnonzero((longer[list("abc")].to_numpy() == row).all(axis=1))[0]) for row in held.round(3)]
    came = next(place for place in places if place >= 2000)
    gone = next(place for place in places if place < 2000 and longer.y[place] != longer.y[came])
    longer[:2000].to_csv("records.csv", index=False)
    directory, document = train("before")
    pd.concat([longer[:2000].drop(index=gone), longer.loc[[came]]]).to_csv("records.csv", index=False)
    other, after = train("after")
    weights, found = (load_file(place / "model.safetensors") for place in (directory, other))
    assert all(np.array_equal(found[name], value) for name, value in weights.items())
    cells, again = (np.array(one["evaluation"][0]["cells"]) for one in (document, after))
    moved = float(np.linalg.norm(for_two_classes().matrix @ (again - cells)))
    assert 0 < moved <= 2 + 1e-9


def test_the_interval_holds_the_exact_accuracy() -> None:
    directory, document = train("out")
    new = table(20_000)
    new.to_csv("new.csv", index=False)
    told = json.loads(run("evaluate", str(directory), "new.csv", "--format", "json").stdout)
    value, low, high = document["evaluation"][0]["metrics"]["accuracy"]
    assert low <= told["metrics"]["accuracy"]["mean"] <= high and low < value < high


def test_the_held_out_records_are_never_measured_without_noise() -> None:
    directory, _ = train("out")
    done = run("evaluate", str(directory))
    assert done.exit_code == 2 and "held-out records of this result are private" in done.stderr


def test_trials_together_add_up_part_by_part() -> None:
    """Two trials of mu each on both parts: sqrt(2) mu, whose epsilon is 1.4652 (scipy, Balle and Wang)."""
    directory, _ = train("out", repeats=2)
    lines = run("account", str(directory), "--trials", "all", "--accountant", "gaussian", "--format", "json").stdout
    (row,) = json.loads(lines)
    assert row["epsilon"] == pytest.approx(1.4652, abs=2e-4)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"folds": 4}, "leave folds out"),
        ({"data": {**RECIPE["data"], "split": {"test": 400}}}, "need a fraction"),
        ({"data": {**RECIPE["data"], "split": {"test": 0}}}, "give data.split"),
        (
            {"method": {"kind": "gd", "learning_rate": 1, "steps": 5}, "privacy": None, "epochs": None},
            "without privacy",
        ),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(changed: dict[str, Any], problem: str) -> None:
    content = {key: value for key, value in {**RECIPE, **changed}.items() if value is not None}
    if "folds" in changed:
        content["data"] = {k: v for k, v in RECIPE["data"].items() if k != "split"}
    Path("recipe.yaml").write_text(yaml.safe_dump(content))
    done = run("train", "recipe.yaml", "--dry-run")
    assert done.exit_code == 2 and problem in done.stderr, done.stderr


def test_a_private_choice_among_such_runs_is_refused() -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({**RECIPE, "seed": None}))
    sweep = {"name": "chosen", "recipes": ["recipe.yaml"], "grid": {"method.learning_rate": [0.5, 1]},
             "select": {"kind": "random-stopping", "mean": 3}}  # fmt: skip
    Path("sweep.yaml").write_text(yaml.safe_dump(sweep))
    for more in (["--dry-run"], ["--out", "swept"]):
        done = run("sweep", "sweep.yaml", *more)
        assert done.exit_code != 0 and "a private choice among runs whose held-out records are private" in done.stderr
    assert not list(Path().glob("swept/**/result.json"))


def test_the_report_says_how_the_metrics_were_measured() -> None:
    directory, document = train("out")
    told = (directory / "report.md").read_text()
    value, low, high = document["evaluation"][0]["metrics"]["accuracy"]
    assert "held-out records, which are private, by one noisy release" in told
    assert f"| accuracy | {value:.4f} | {low:.4f} to {high:.4f} |" in told
    assert "Measured without noise" not in told and "declared public" not in told.split("## How good")[1].split("##")[0]


def test_a_choice_by_both_parts_has_no_price_and_a_group_in_both_costs_its_dearest_split() -> None:
    """Both parts cost the same mu here, so a group of two costs most where both are in one: 2 mu."""
    directory, _ = train("out")
    for source in (str(directory), "recipe.yaml"):
        done = run("account", source, "--best-of", "3")
        assert done.exit_code == 2 and "no price of that is proved" in " ".join(done.stderr.split())
        one, two = (
            json.loads(run("account", source, "--accountant", "gaussian", "--format", "json", *more).stdout)[0]["rho"]
            for more in ([], ["--group", "2"])
        )
        assert two == pytest.approx(4 * one, rel=1e-9)
