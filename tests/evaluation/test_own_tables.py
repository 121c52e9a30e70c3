"""Held-out records of a table of one's own are private unless the recipe says that they are public."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result

import dpsgd_cli as dpsgd
from dpsgd_cli.evaluation import run as measuring
from dpsgd_cli.evaluation.groups import HeldOut
from dpsgd_cli.main import main
from dpsgd_cli.recipe.schema import Recipe

DATA: dict[str, Any] = {"path": "own.csv", "target": "y", "classes": ["no", "yes"], "bounds": {"a": [0, 1]}}
DATA |= {"categorical": {"sex": ["f", "m"]}, "drop": ["who"]}
PRIVACY: dict[str, Any] = {"budget": {"epsilon": 2, "delta": 1e-4}}
METHOD = {"kind": "dp-gd", "learning_rate": 1}
PATE = {
    "kind": "pate",
    "aggregation": {"kind": "gnmax", "noise": 4},
    "teachers": {"count": 10, "epochs": 1, "learning_rate": 1.0},
    "student": {"epochs": 1, "learning_rate": 1.0},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame().to_csv("own.csv", index=False)


def frame(rows: int = 1500) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    a, who = rng.random(rows).round(3), rng.integers(0, 300, rows)
    y = np.where(rng.random(rows) < a, "yes", "no")
    return pd.DataFrame({"a": a, "sex": rng.choice(["f", "m"], rows), "who": who, "y": y})


def content(**changes: Any) -> dict[str, Any]:
    made = {"name": "own", "data": DATA, "model": {"kind": "linear"}, "method": METHOD, "privacy": PRIVACY}
    made |= {"epochs": 5, "seed": 0} | changes
    return {key: value for key, value in made.items() if value is not None}


def run(command: str, *arguments: str, **changes: Any) -> Result:
    Path("own.yaml").write_text(yaml.safe_dump(content(**changes)))
    return CliRunner().invoke(main, [command, "own.yaml", *arguments])


def document(**changes: Any) -> dict[str, Any]:
    done = run("train", "--out", "out", **changes)
    assert done.exit_code == 0, done.output
    (found,) = Path("out").glob("own-*/result.json")
    told: dict[str, Any] = json.loads(found.read_text())
    return told


@pytest.mark.parametrize("kind", ["csv", "frame"])
def test_left_out_no_held_out_record_is_public(kind: str) -> None:
    if kind == "csv":
        told = document()
    else:
        facts = {"bounds": {"a": (0, 1)}, "categories": {"sex": ["f", "m"]}, "classes": ["no", "yes"]}
        changes = {"epochs": 5, "method": METHOD, "seed": 0}
        result = dpsgd.train(frame(), changes, target="y", epsilon=2, delta=1e-4, drop=["who"], **facts)  # type: ignore[arg-type]
        told = result.document
        assert list(result.intervals()["auc"]) == told["evaluation"][0]["metrics"]["auc"]
    assert not [text for text in told["privacy"]["declarations"] if "test" in text or "without noise" in text]
    assert told["privacy"]["evaluation"] == "private" and told["privacy"]["epsilon"] <= 2
    assert 200 < told["evaluation"][0]["records"] < 400
    constants = {name[9:]: one["mean"] for name, one in told["metrics"].items() if name.startswith("constant_")}
    assert constants and all(told["evaluation"][0]["constants"][name][0] == one for name, one in constants.items())


def test_a_model_that_nothing_shows_to_be_better_than_a_constant_is_warned_of() -> None:
    """Nothing predicts, and 94% are of one class; `ja` is the positive one, though it is listed first."""
    rng = np.random.default_rng(0)
    left = np.where(rng.random(800) < 0.06, "ja", "nein")
    pd.DataFrame({"a": rng.random(800), "y": left}).to_csv("own.csv", index=False)
    data = {"path": "own.csv", "target": "y", "classes": ["ja", "nein"], "bounds": {"a": [0, 1]}}
    done = run("train", "--verbose", "--out", "out", data=data)
    assert done.exit_code == 0, done.output
    baseline = re.search(r"accuracy .*; baseline: (0\.\d+)\n", done.stdout)
    assert baseline is not None and abs(float(baseline[1]) - (left == "nein").mean()) < 0.1
    assert re.search(r"positive class +ja\n", done.stdout)
    assert re.search("warning: no(t shown to be| )better than the majority-class baseline .*; try ", done.stderr)
    (page,) = Path("out").glob("own-*/report.md")
    assert "baseline (best constant answer)" in page.read_text() and "positive class is ja" in page.read_text()


def test_public_has_to_be_stated_and_is_declared() -> None:
    told = document(data=DATA | {"evaluation": "public"})
    assert "evaluation" not in told
    assert [
        text for text in told["privacy"]["declarations"] if text.startswith("The test records") and "public" in text
    ]


@pytest.mark.parametrize(
    ("data", "private"),
    [
        ({"name": "breast-cancer"}, False),
        ({"name": "breast-cancer", "split": {"test": 0.2}}, False),
        (DATA | {"test_path": "other.csv"}, False),
        (DATA | {"split": {"test": 0}}, False),
        (DATA, True),
        (DATA | {"split": {"test": 0.5}}, True),
        (DATA | {"evaluation": {"by": ["sex"]}}, True),
    ],
)
def test_what_is_private_by_default(data: dict[str, Any], private: bool) -> None:
    assert Recipe.model_validate(content(data=data)).data.measured_privately == private
    plain = {"kind": "sgd", "batching": "full", "learning_rate": 1.0}
    if not isinstance(data.get("evaluation"), dict):
        assert not Recipe.model_validate(content(data=data, method=plain, privacy=None)).data.measured_privately


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "folds": ({"folds": 4}, "leave folds out"),
    "count": ({"data": DATA | {"split": {"test": 100}}}, "need a fraction"),
    "pate": (
        {"data": DATA | {"public": {"records": 50}}, "method": PATE, "privacy": {"delta": 1e-4}, "epochs": None},
        "cut it from: train",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_private_has_to_be_stated_public(case: str) -> None:
    changes, advice = REFUSED[case]
    done = run("train", "--dry-run", **changes)
    assert done.exit_code == 2 and advice in done.stderr and "state evaluation: public" in done.stderr
    stated = changes.get("data", DATA) | {"evaluation": "public"}
    assert run("train", "--dry-run", **changes | {"data": stated}).exit_code == 0


def test_arrays_without_test_records_are_not_cut_unasked() -> None:
    rng = np.random.default_rng(0)
    np.savez("own.npz", x=rng.random((200, 2)), y=rng.integers(0, 2, 200))
    data = {"path": "own.npz", "bounds": [0, 1], "classes": [0, 1]}
    done = run("train", "--dry-run", data=data)
    assert done.exit_code != 0 and "has no x_test" in done.stderr and "data.split" in done.stderr
    assert document(data=data | {"split": {"test": 0.5}})["privacy"]["evaluation"] == "private"


def test_at_most_the_allowed_rows_of_a_user_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows' weights add up to 1 for each user; there are fewer rows than in the file."""
    seen: list[tuple[int, HeldOut]] = []
    own = measuring.ClassCounts.of

    def watched(labels: np.ndarray, outputs: np.ndarray, held: HeldOut) -> Any:
        seen.append((len(labels), held))
        return own(labels, outputs, held)

    monkeypatch.setattr(measuring.ClassCounts, "of", watched)
    data = {key: value for key, value in DATA.items() if key != "drop"} | {"evaluation": {"by": ["sex"]}}
    told = document(data=data, privacy=PRIVACY | {"unit": {"column": "who", "most_rows": 2}})
    ((rows, held),) = seen
    assert held.users and held.weights is not None and set(held.weights) <= {0.5, 1.0}
    assert held.weights.sum() == pytest.approx(round(held.weights.sum())) and rows <= 2 * held.weights.sum()
    assert len(held.groupings[0].codes) == rows
    (measured,) = told["evaluation"]
    assert measured["unit"] == "users" and 20 < held.weights.sum() < 100
    assert set(measured["groups"]["sex"]) >= {"f", "m"}


def test_a_group_has_to_be_a_column_of_public_categories() -> None:
    done = run("train", "--dry-run", data=DATA | {"evaluation": {"by": ["six"]}})
    assert done.exit_code != 0 and "no column 'six' with public categories" in done.stderr and "'sex'" in done.stderr
