"""Pages of results say what their CSVs say, and nothing stale unmarked. Every page is redrawn here, in memory."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from benchmarks.pages import PAGES, RESULTS, drawing, page_of, training
from benchmarks.pages.case import Case
from benchmarks.pages.claims import Claim, Contrast
from benchmarks.pages.rows import CURVES, KEYS, Rows
from benchmarks.tabular import page as tables
from benchmarks.tabular import peers
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.data.settings import Data
from dpsgd_cli.training.loop import plan_recipe
from dpsgd_cli.training.plans import resolve_auto

PICTURE = re.compile(r"!\[[^]]*]\(([^)]+)\)")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_its_rows_say(name: str) -> None:
    """Every number, and that it is stale: a recipe that changed, or code that does something else, changes the text."""
    again = drawing.text(name, RESULTS / name)
    assert again == (RESULTS / name / "README.md").read_text("utf-8"), f"python -m benchmarks.pages redraw {name}"


@pytest.mark.parametrize("name", PAGES)
def test_every_row_is_of_a_case(name: str) -> None:
    """A row of a case that is gone is behind no number, and nothing would find it stale."""
    cases = {(case.table, case.name) for case in page_of(name).CASES}
    for file in RESULTS.joinpath(name).glob("*.csv"):
        rows = pd.read_csv(file)
        if {"table", "case"} <= set(rows):
            assert set(zip(rows["table"], rows["case"], strict=True)) <= cases


@pytest.mark.parametrize("name", PAGES)
def test_pictures_are_drawn_from_todays_rows(name: str) -> None:
    folder = RESULTS / name
    shown = set(PICTURE.findall((folder / "README.md").read_text("utf-8")))
    assert shown == {path.name for path in folder.glob("*.png")}
    digest = drawing.digest(folder)
    assert {Image.open(folder / picture).info[drawing.FIELD] for picture in shown} <= {digest}


@pytest.mark.parametrize("name", PAGES)
def test_cases_are_valid_recipes_and_no_two_of_a_table_are_the_same(name: str) -> None:
    cases = page_of(name).CASES
    some = [one for number, one in enumerate(cases) if number % 7 == 0 or len(cases) < 100]
    assert len({(one.table, one.name) for one in cases}) == len(cases)
    assert len({(one.table, one.hash) for one in some}) == len(some)
    assert set(page_of(name).METRICS).isdisjoint(KEYS)


ONE = Case("table", "one", "yu2019/cancer-uniform", (), trials=4, chunk=2)
TWO = replace(ONE, name="two", changes=("method.learning_rate=1",))


def made(one: Case, values: list[float], recipe: str | None = None, behaviour: float | None = None) -> pd.DataFrame:
    stamp = {"recipe": recipe or one.hash, "behaviour": one.behaviour if behaviour is None else behaviour}
    rows = [(one.table, one.name, 0, 0, number, 0, 1.0, value) for number, value in enumerate(values)]
    return pd.DataFrame(rows, columns=[*KEYS, "test_accuracy"]).assign(**stamp)


def rows_of(*tables: pd.DataFrame) -> Rows:
    return Rows([ONE, TWO], pd.concat(tables), pd.DataFrame(columns=[*CURVES]))


def test_differences_are_of_trials_of_one_seed() -> None:
    """Trials that only one of the two has are left out; a mean of 0.1 and no spread, whatever the trials' own is."""
    rows = rows_of(made(ONE, [0.9, 0.3, 0.6]), made(TWO, [0.8, 0.2]))
    assert rows.gain(("table", "one"), ("table", "two")) == "+0.1000 ± 0.0000"


def test_a_deal_of_folds_is_one_number() -> None:
    """Deals of mean .5 and .7, whatever their folds are; of a third one there are two folds only."""
    one = Case("table", "one", "lee2018/dp-gd", trials=3)
    two = replace(one, name="two", changes=("method.learning_rate=1",))
    ours = made(one, [0.3, 0.4, 0.5, 0.6, 0.7, 0.9, 0.8, 0.7, 0.6, 0.5, 0.1, 0.1])
    theirs = made(two, [0.2, 0.2, 0.4, 0.4, 0.3, 0.7, 0.5, 0.5, 0.3, 0.5])
    rows = Rows([one, two], pd.concat([ours, theirs]), pd.DataFrame(columns=[*CURVES]))
    assert one.folds == 5
    assert rows.text("table", "one") == "0.6000 ± 1.2706"
    assert rows.gain(("table", "one"), ("table", "two")) == "+0.2000 ± 0.0000"
    only = Rows([one, two], ours[10:], pd.DataFrame(columns=[*CURVES]))
    assert only.summary("table", "one") is None


@pytest.mark.parametrize(
    ("ours", "theirs", "slack", "verdict"),
    [
        ([0.9, 0.4, 0.6], [0.8, 0.3, 0.5], 0.0, "confirmed"),
        ([0.8, 0.3, 0.5], [0.9, 0.4, 0.6], 0.05, "refuted"),
        ([0.9, 0.3, 0.6], [0.8, 0.4, 0.5], 0.0, "not decided"),
        ([0.9, 0.3, 0.6], [0.8, 0.4, 0.5], 0.5, "confirmed"),
        ([0.9], [0.1], 0.0, "not run"),
    ],
)
def test_a_claim_is_judged_by_whole_intervals(
    ours: list[float], theirs: list[float], slack: float, verdict: str
) -> None:
    """Of one trial there is no interval, and so no verdict."""
    rows = rows_of(made(ONE, ours), made(TWO, theirs))
    one = Contrast("one over two", (("table", "one"),), (("table", "two"),))
    assert Claim("", "", (one,), slack).verdict(rows) == verdict
    not_run = Contrast("one over three", (("table", "one"),), (("table", "three"),))
    also = {"confirmed": "confirmed as far as it was run"}.get(verdict, verdict)
    assert Claim("", "", (one, not_run), slack).verdict(rows) == also


def test_a_trained_case_is_a_row_a_fold(tmp_path: Path) -> None:
    """Seeds go on from chunk to chunk, and what is in the CSV stays when its run is gone."""
    changes = ("data.name=breast-cancer", "privacy.budget.epsilon=1")
    folds = Case("table", "majority", "lee2018/majority", changes, trials=2, chunk=1)
    training.train([folds], ["test_accuracy"], tmp_path, [folds])
    kept = pd.read_csv(tmp_path / "trials.csv")
    assert kept["seed"].tolist() == list(range(10))
    assert kept["fold"].tolist() == [0, 1, 2, 3, 4] * 2
    assert kept["epsilon"].tolist() == pytest.approx([1.0] * 10)
    assert not list(training.packs([folds], [folds], tmp_path))


EPOCHS = {"uniform": 100, "time": 38, "step": 31, "exponential": 71, "polynomial": 44}
PLANNED = [one for one in page_of("yu2019").CASES if one.table in ("table2", "control") and one.name in EPOCHS]


@pytest.mark.parametrize("one", PLANNED, ids=lambda one: f"{one.table}/{one.name}")
def test_epochs_are_those_of_yu(one: Case) -> None:
    plan, _ = plan_recipe(resolve_auto(one.loaded()))
    assert plan is not None
    assert plan.most_epochs == EPOCHS[one.name]


def test_the_noise_of_ada_ssp() -> None:
    """One exact release at delta 1e-5: 3.730632 at epsilon 1 (by code of Balle and Wang, 2018), 1 / 1.6660 at 8.

    Algorithm 2 of Wang (2018) has sqrt(log(6 / delta)) / (epsilon / 3) for each of three, which is more at these.
    """
    for epsilon, one in ((1.0, 3.730632), (8.0, 1 / 1.6660)):
        assert peers.deviation(epsilon, 1e-5) == pytest.approx(3**0.5 * one, rel=1e-3)
    assert 6.46 < peers.deviation(1.0, 1e-5) < 6.47 < 3 * math.log(6 / 1e-5) ** 0.5


@pytest.mark.parametrize("rounds", [1, 4])
def test_ada_ssp_has_that_noise_in_its_sums(rounds: int) -> None:
    """Without targets, on 20,000 rows (0, 1) / sqrt(1.25), a prediction is the noise of X^T y over n sqrt(.8).

    After four rounds it is that of the last one, twice as large, as each solves for what the others left. Of 200 draws
    the deviation is within 25% but for a chance of 1e-6; noise of one release alone would be 42% less.
    """
    n = 20_000
    data = Data(path="x.csv", target="y", task="regression")
    rows = peers.Rows(np.zeros((n, 1)), np.zeros(n), (Column("a", (-1.0, 1.0)),), np.zeros((n, 1), bool), data)
    first = np.arange(n) < 1
    found = [peers.ada_ssp(rows, np.ones(n, bool), first, 1.0, seed, rounds)[0] for seed in range(200)]
    assert np.std(found) * n * 0.8**0.5 == pytest.approx(6.4616 * rounds**0.5, rel=0.25)


def test_linear_regression_without_its_guarantee_is_no_rival(tmp_path: Path) -> None:
    """Rows of diffprivlib for numbers are dropped when the file is read, and those for classes stay."""
    both = {"data": ["adult", "storms"], "tool": "diffprivlib, linear", "accuracy": [0.9, None], "r2": [None, 0.9]}
    pd.DataFrame(both).to_csv(tmp_path / "trials.csv")
    assert tables.read(tmp_path / "trials.csv")["data"].tolist() == ["adult"]
    published = pd.read_csv(RESULTS / "tabular" / "trials.csv").dropna(subset="r2")
    assert "diffprivlib, linear" not in set(published["tool"]) and "AdaSSP, boosted" in set(published["tool"])


def test_the_page_of_tables_is_what_its_csv_says(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "tabular" / "trials.csv", tmp_path)
    tables.write(tmp_path)
    again = (tmp_path / "README.md").read_text("utf-8")
    assert again == (RESULTS / "tabular" / "README.md").read_text("utf-8"), "python -m benchmarks.tabular --page-only"
