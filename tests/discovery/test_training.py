"""Private bounds and categories in a training: charged, used, named, kept over a stop, refused where unproved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.optimize import brentq
from scipy.stats import norm

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import read_entries
from dpsgd_cli.accounting.mechanism import GaussianSum, Threshold
from dpsgd_cli.data.preparation import prepare
from dpsgd_cli.discovery import price
from dpsgd_cli.discovery.run import CELLS
from dpsgd_cli.errors import RecipeError, RunError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import report, store
from dpsgd_cli.sweep.planning import shared
from dpsgd_cli.training.build_models import own_folds
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto
from tests.conftest import StopAt, Train

PRIVATE: dict[str, Any] = {
    "path": "own.csv",
    "target": "ill",
    "classes": [0, 1],
    "bounds": {"income": "private", "age": [18, 90]},
    "categorical": {"job": "private"},
    "split": {"test": 100},
    "preprocess": [{"bin": {"waves": 4}}],
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recipe for 700 records: of incomes some are missing, of jobs each of 20 is had by one record alone."""
    random = np.random.default_rng(0)
    income, job = random.lognormal(10, 0.7, 700).round(2), random.choice(["clerk", "judge", "nurse"], 700)
    job[:20] = [f"job {number}" for number in range(20)]
    frame = pd.DataFrame({"income": income, "age": random.integers(18, 91, 700), "job": job})
    frame["ill"] = ((income > 22_000) ^ (random.random(700) < 0.1)).astype(int)
    frame.loc[30:50, "income"] = np.nan
    frame.loc[40:60, "job"] = None
    frame.to_csv(tmp_path / "own.csv", index=False)

    def made(**sections: Any) -> Path:
        content = {
            "name": "own",
            "data": PRIVATE,
            "model": {"kind": "linear"},
            "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 2.0},
            "privacy": {"budget": {"epsilon": 4, "delta": 1e-4}},
            "runtime": {"device": "cpu", "threads": 1, "checkpoint_seconds": 0},
            "epochs": 4,
            "seed": 0,
            "repeats": 2,
        } | sections
        path = tmp_path / "own.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return path

    return made


def test_both_releases_are_charged_before_training_with_their_share_of_the_budget(write: Write, train: Train) -> None:
    """Expected: 5% of the mu^2 that a Gaussian may have at epsilon 4 and nine tenths of delta (Balle and Wang 2018)."""
    recipe = write()
    directory = train(recipe)
    mu = brentq(lambda m: norm.cdf(m / 2 - 4 / m) - np.exp(4) * norm.cdf(-m / 2 - 4 / m) - 9e-5, 0.1, 4)
    for entries in read_entries(directory / "ledger.jsonl").values():
        first, second = (entry.release.mechanism for entry in entries if entry.phase == "before")
        assert isinstance(first, GaussianSum) and isinstance(second, Threshold)
        assert first.noise_multiplier == pytest.approx((0.05 * mu**2) ** -0.5, rel=1e-5)
        assert (first.sensitivity, first.batching) == (pytest.approx(2**0.5), "full")
        assert second.delta == pytest.approx(1e-5)
        steps = [entry.release.mechanism for entry in entries if entry.phase == "train"]
        spent = sum(step.noise_multiplier**-2 for step in steps if isinstance(step, GaussianSum))
        assert spent == pytest.approx(0.95 * mu**2, rel=1e-4)
    privacy = store.read_document(directory)["privacy"]
    assert privacy["epsilon"] == pytest.approx(4, rel=1e-6)
    settled = resolve_auto(load_recipe(str(recipe)))
    plan = plan_and_outline(settled)[0]
    assert plan is not None and plan.guarantee().epsilon == pytest.approx(4, rel=1e-6)
    again = plan_and_outline(load_recipe(str(directory / "recipe.yaml")))[0]
    assert again is not None and again.releases == plan.releases


def test_the_result_names_what_was_released_and_no_category_of_one_record(write: Write, train: Train) -> None:
    directory = train(write(), save_models=True)
    found = store.read_document(directory)["privacy"]["discovered"]
    assert len(found) == 2
    for income, job in found:
        assert income.startswith("income: ") and job == "job: clerk, judge, nurse, other"
    report.write(directory)
    text = (directory / "report.md").read_text()
    assert "What was released of private columns" in text and found[0][1] in text
    assert "job 1" not in (directory / "result.json").read_text() + text
    assert b"job 1" not in (directory / "model.safetensors").read_bytes()


def test_trials_release_their_own_and_alone_or_together_the_same(write: Write, train: Train, tmp_path: Path) -> None:
    both = store.read_document(train(write()))["privacy"]["discovered"]
    first = store.read_document(train(write(repeats=1), out=tmp_path / "one"))["privacy"]["discovered"]
    second = store.read_document(train(write(repeats=1, seed=1), out=tmp_path / "two"))["privacy"]["discovered"]
    assert both == [*first, *second]
    small: list[np.ndarray] = []

    def noised(trial: int, purpose: str, exact: np.ndarray, *_: object) -> np.ndarray:
        small.append(exact)
        return exact + trial

    settled = resolve_auto(load_recipe(str(write())))
    made = prepare(settled.recipe.data, settled.base, 2, noised, "add-remove")
    assert len(small) == 2 and np.array_equal(small[0], small[1]) and set(made.released) == {"0/0", "1/0"}
    kept = prepare(settled.recipe.data, settled.base, 2, noised, "add-remove", made.released)
    assert len(small) == 2 and np.array_equal(kept.train_x, made.train_x)


def test_a_model_predicts_with_the_bounds_and_categories_that_its_trial_released(
    write: Write, train: Train, tmp_path: Path
) -> None:
    directory = train(write(), save_models=True)
    trained = Trained.load(directory)
    rows = store.read_document(directory)["trials"]
    for name, found in trained.metrics().items():
        assert found == [row[f"test_{name}"] for row in rows]
    (tmp_path / "own.csv").unlink()
    new = pd.DataFrame({"income": [1e4, 1e4, None], "age": [30, 30, 30], "job": ["never seen", "job 3", "clerk"]})
    outputs = trained.outputs(trained.source.rows(new), 0)
    assert outputs[1] == pytest.approx(outputs[0], abs=1e-5)
    assert outputs[2] != pytest.approx(outputs[0], abs=1e-3)


def test_a_run_that_was_stopped_goes_on_without_a_second_release(
    write: Write, train: Train, stop_at: StopAt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write()
    whole = train(recipe, out=tmp_path / "whole")
    with pytest.raises(RunError, match="--resume"):
        train(recipe, progress=stop_at(2, KeyboardInterrupt()))

    def no_second(*_: object) -> Any:
        raise AssertionError("released anew")

    monkeypatch.setattr("dpsgd_cli.discovery.run.Counts.released", no_second)
    again = train(recipe, resume=True)
    for name in ("ledger.jsonl", "trials.csv"):
        assert (again / name).read_text() == (whole / name).read_text()


def test_public_facts_do_not_depend_on_what_private_columns_hold(write: Write, tmp_path: Path) -> None:
    recipe = load_recipe(str(write()))
    before = data.outline(recipe.recipe.data, recipe.base)
    frame = pd.read_csv(tmp_path / "own.csv")
    frame["income"], frame["job"] = frame["income"] * -1e6, [f"other {number}" for number in range(len(frame))]
    frame.to_csv(tmp_path / "own.csv", index=False)
    assert data.outline(recipe.recipe.data, recipe.base) == before
    assert before.norm_bound is not None
    assert "Of income, job it is public (recipe) that missing values are not counted" in " ".join(before.declarations)


def test_cells_of_other_budgets_have_a_pack_of_their_own(write: Write) -> None:
    recipe = str(write())
    one, other = (shared(load_recipe(recipe, [f"privacy.budget.epsilon={epsilon}"])) for epsilon in (1, 4))
    assert one != other
    public = ["data.bounds.income=[0,100000]", "data.categorical.job=[clerk]"]
    one, other = (shared(load_recipe(recipe, [*public, f"privacy.budget.epsilon={epsilon}"])) for epsilon in (1, 4))
    assert one == other


BOUNDS = PRIVATE | {"categorical": {"job": ["clerk", "judge", "nurse"]}, "drop": ["job"]}
del BOUNDS["categorical"]
BUDGET = {"epsilon": 4, "delta": 1e-4}
USERS: dict[str, Any] = {"budget": BUDGET, "unit": {"column": "age", "most_rows": 3}}
OF_USERS = PRIVATE | {"bounds": {"income": "private"}, "split": {"test": 0.2}, "evaluation": "public"}
FOLDED = {name: value for name, value in PRIVATE.items() if name != "split"}
UNIFORM = {"delta": 1e-5, "schedule": {"kind": "uniform", "initial": 4.0}}
ADAPTIVE = {"budget": {"epsilon": 1, "delta": 1e-5}, "schedule": {"kind": "validation", "initial": 4.0}}
PLAIN = PRIVATE | {"bounds": [0, 1], "categorical": {"job": ["a"]}, "discovery": {"share": 0.1}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no privacy": ({"privacy": None, "method": {"kind": "sgd", "batch_size": 8}}, "needs a privacy section"),
    "no budget": ({"privacy": UNIFORM}, "share of privacy.budget"),
    "rho": ({"privacy": {"budget": {"rho": 1.0}, "delta": 1e-5}}, "only epsilon and delta cover"),
    "no delta": (
        {"method": {"kind": "dp-agd"}, "epochs": None},
        "private goes with dp-gd, dp-least-squares, dp-sgd or pate .* or no delta",
    ),
    "at once": (
        {"method": {"kind": "output-perturbation"}, "model": {"kind": "convex", "l2": 0.1}, "epochs": None},
        "covers no release before them",
    ),
    "one matrix": (
        {"method": {"kind": "privgene"}, "model": {"kind": "convex"}, "epochs": None, "data": BOUNDS},
        "private goes with dp-agd, dp-gd, dp-least-squares, dp-sgd, pate or private-selection",
    ),
    "adaptive": (
        {"privacy": ADAPTIVE, "data": PRIVATE | {"validation": {"records": 50, "public": True}}},
        "known beforehand",
    ),
    "nothing private": ({"data": PLAIN}, "no bounds or categories are private"),
    "card": ({"data": {"name": "adult", "bounds": {"age": "private"}}}, "only for a file of your own"),
    "share": ({"data": PRIVATE | {"discovery": {"share": 1.0}}}, "share"),
    "delta": ({"data": PRIVATE | {"discovery": {"delta": 0.1}}}, "delta"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_proved_is_refused_with_the_reason(write: Write, kind: str) -> None:
    sections, reason = REFUSED[kind]
    with pytest.raises(RecipeError, match=reason):
        load_recipe(str(write(**sections)))


def test_a_spent_delta_is_refused_before_anything_is_read(write: Write) -> None:
    recipe = write(data=PRIVATE | {"discovery": {"delta": 1e-4}})
    with pytest.raises(Exception, match="alone spend the budget's delta"):
        resolve_auto(load_recipe(str(recipe)))


def test_bounds_alone_need_no_delta_and_fit_a_budget_in_rho(write: Write, train: Train) -> None:
    directory = train(write(data=BOUNDS, privacy={"budget": {"rho": 0.5}, "delta": 1e-5}))
    document = store.read_document(directory)
    assert document["privacy"]["rho"] == pytest.approx(0.5)
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    assert {line["mechanism"] for line in lines} == {"gaussian"}
    assert lines[0]["noise_multiplier"] == pytest.approx((0.05 * 2 * 0.5) ** -0.5, rel=1e-5)


def exact_counts(path: Path) -> tuple[list[np.ndarray], np.ndarray, int]:
    """The exact counts that each trial's release adds noise to, the rows that it does not train on, and the places."""
    settled, seen = resolve_auto(load_recipe(str(path))), list[np.ndarray]()
    held, places = list[np.ndarray](), set[int]()

    def noised(trial: int, purpose: str, exact: np.ndarray, mechanism: GaussianSum, records: int) -> np.ndarray:
        seen.append(exact)
        places.add(records)
        return exact + 1000 * (np.arange(len(exact)) % 50 == 0)

    def held_out(keys: Any) -> np.ndarray:
        held.append(own_folds([settled.recipe], keys).numpy())
        return held[0]

    made = prepare(settled.recipe.data, settled.base, settled.recipe.trials, noised, "add-remove", None, held_out)
    assert made.per_trial and made.train_x.shape[0] == settled.recipe.trials
    return seen, held[0] if held else np.zeros((len(made.train_y), 1), bool), places.pop()


@pytest.mark.parametrize("unit", [False, True])
def test_with_folds_a_trial_counts_the_rows_that_it_trains_on_and_no_other(write: Write, unit: bool) -> None:
    """Of 700 rows 679 have an income, and all but 21 a job; a user's rows count as one."""
    data_ = {k: v for k, v in (OF_USERS if unit else PRIVATE).items() if k != "split"}
    privacy = USERS if unit else {"budget": BUDGET}
    path = write(data=data_, folds=3, repeats=1, privacy=privacy)
    frame = pd.read_csv(path.parent / "own.csv")
    seen, held, places = exact_counts(path)
    assert places == (3 * frame["age"].nunique() if unit else 700)
    assert len(seen) == 3 and held.any(axis=1).all()
    for exact, out in zip(seen, held.T, strict=True):
        incomes, jobs = exact[:CELLS].sum(), exact[CELLS:]
        if unit:
            users = frame["age"].nunique()
            assert users / 2 < incomes <= users and jobs.sum() <= users
        else:
            assert incomes <= (~out).sum() and (~out).sum() - incomes <= 21
            assert jobs.sum() <= (~out).sum() and (jobs > 0).all()
    if not unit:
        assert sum(exact[:CELLS].sum() for exact in seen) == 2 * frame["income"].notna().sum()


def test_a_user_counts_as_one_however_many_rows(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold is for three categories of a user's own, and the grid for three rows of each of the places."""
    asked, threshold = [], price.threshold

    def watched(*given: Any) -> float:
        asked.append(given[2:])
        return threshold(*given)

    monkeypatch.setattr(price, "threshold", watched)
    (exact,), _, places = exact_counts(write(data=OF_USERS, privacy=USERS, repeats=1))
    assert asked == [(1, 3)] and places % 3 == 0 and places >= 3 * 55
    assert 40 < exact[:CELLS].sum() <= places / 3 and 40 < exact[CELLS:].sum() <= places / 3


STUDENT = {"learning_rate": 1.0, "epochs": 1}
PATE = {
    "kind": "pate",
    "teachers": {"count": 2, **STUDENT},
    "student": {**STUDENT},
    "aggregation": {"kind": "gnmax", "noise": "auto"},
}
CHOICE = {
    "kind": "private-selection",
    "learning_rate": 1.0,
    "batching": "shuffle",
    "batch_size": 100,
    "candidates": [{"kind": "uniform", "initial": z} for z in (8.0, 9.0)],
}
PUBLIC = PRIVATE | {"public": {"from": "test", "records": 30}, "evaluation": "public"}
OTHERS: dict[str, dict[str, Any]] = {
    "users": {"data": OF_USERS, "privacy": USERS},
    "folds": {"data": FOLDED, "folds": 2, "repeats": 1},
    "least squares": {"method": {"kind": "dp-least-squares"}, "epochs": None},
    "least squares of users": {
        "data": OF_USERS,
        "privacy": USERS,
        "method": {"kind": "dp-least-squares"},
        "epochs": None,
    },
    "agd": {"data": BOUNDS, "method": {"kind": "dp-agd", "splits": 8}, "epochs": None},
    "pate": {"data": PUBLIC, "method": PATE, "epochs": None},
    "selection": {
        "data": BOUNDS,
        "method": CHOICE,
        "epochs": "until-budget",
        "privacy": {"budget": {"rho": 0.5}, "delta": 1e-4, "adjacency": "zero-out"},
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_both_charges_are_in_the_ledger_of_every_method_and_within_its_budget(
    write: Write, train: Train, kind: str
) -> None:
    directory = train(write(**{"epochs": 2, "repeats": 1} | OTHERS[kind]))
    document = store.read_document(directory)
    for entries in read_entries(directory / "ledger.jsonl").values():
        before = [entry.release.mechanism for entry in entries if entry.phase == "before"]
        bounds = before[0]
        assert isinstance(bounds, GaussianSum) and bounds.label == "discovery"
        private = 1 if OTHERS[kind].get("data") is BOUNDS else 2
        assert bounds.sensitivity**2 == pytest.approx(private)
        assert [isinstance(own, Threshold) for own in before[1:]] == [True] * (private - 1)
    privacy = document["privacy"]
    if kind == "selection":
        assert privacy["rho"] <= 0.5 * (1 + 1e-9)
    else:
        assert privacy["epsilon"] <= 4 * (1 + 1e-9)
    assert all(own[0].startswith("income: ") for own in privacy["discovered"])


def test_a_model_of_folds_predicts_by_what_each_trial_released(write: Write, train: Train) -> None:
    directory = train(write(**OTHERS["folds"], epochs=2), save_models=True)
    found, rows = Trained.load(directory).metrics(), store.read_document(directory)["trials"]
    for name, own in found.items():
        assert own == pytest.approx([row[f"test_{name}"] for row in rows], rel=1e-6)
