"""The page of `make reproduce-lee2018`: every method is a row, every recipe it asks for is valid."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.lee2018 import cases, page, reproduce, runs
from benchmarks.lee2018.runs import Asked, Cell, Named
from dpsgd_cli.errors import RunError
from dpsgd_cli.recipe.loading import load_recipe, recipe_hash


def fake(recipes: list[Named], asked: Asked, clock: str | None = None) -> list[Cell]:
    """Cells without training; every recipe is read, so a wrong override fails here."""
    loaded = [load_recipe(name, changes).recipe for name, changes in recipes]
    return [Cell(0.5 + 0.001 * len(one.name), 0.01, 1.0, 5 * one.repeats) for one in loaded]


@pytest.mark.parametrize("data", cases.DATA)
@pytest.mark.parametrize("loss", cases.LOSSES)
def test_every_method_has_a_row(data: str, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run", fake)
    found = runs.figure(data, loss, Asked(tmp_path, (0.1, 0.4), repeats=1))
    missing = {"ipums": "dp-gd-bounds", "kddcup99": "non-private:model.l2=0"}.get(data)
    assert set(found.cells) == set(cases.METHODS) - {missing}
    lines = page.table(found.cells, "method|eps")
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == [cases.METHODS[name] for name in found.cells]
    assert all(line.count("|") == 4 for line in lines)


def test_the_methods_that_the_paper_compared_are_all_there() -> None:
    compared = {"ObjPert", "OutPert", "PrivGene", "SGD-Adv", "SGD-MA", "NonPrivate", "Majority", "DP-AGD, as published"}
    assert compared <= set(cases.METHODS.values())
    assert {cases.METHODS[name] for name in cases.OF_FIGURE_2} == compared - {"Majority"}


def test_a_method_that_fails_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(recipes: list[Named], asked: Asked, clock: str | None = None) -> list[Cell]:
        if "privgene" in recipes[0][0]:
            raise RunError("it broke")
        return fake(recipes, asked)

    monkeypatch.setattr(runs, "run", broken)
    asked = Asked(tmp_path, (0.1,))
    found = runs.figure("adult", "logistic", asked)
    assert set(cases.METHODS) - set(found.cells) == {"privgene"}
    assert "adult logistic privgene: it broke" in capsys.readouterr().err
    assert "PrivGene has no row: it broke.\n" in page.figure(found, asked)


def test_what_a_larger_budget_makes_worse_is_remarked_on(tmp_path: Path) -> None:
    def drawn(accuracies: list[float], last: float = 0.6, loss: str = "svm") -> str:
        numbers = zip((0.1, 0.4, 1.6), accuracies, (10, 2.5, last), strict=True)
        cells = {epsilon: Cell(accuracy, 0.001, objective, 5) for epsilon, accuracy, objective in numbers}
        return "\n".join(page.figure(runs.Figure("bank", loss, {"dp-agd-better": cells}, {}), Asked(tmp_path)))

    falls, rises, steady = [0.85, 0.89, 0.883], [0.85, 0.88, 0.89], [0.85, 0.89, 0.8885]
    assert "falls from 0.8900 to 0.8830 while its objective goes on falling, to 0.600" in drawn(falls)
    assert "and its objective ends at 2.600, its least being 2.500: [why](#why-dp-agds-acc" in drawn(falls, 2.6)
    assert "split: its objective ends at 3.000, its least being 2.500: [why]" in drawn(rises, 3.0)
    assert "alpha_shrink" in drawn(rises, 3.0, "logistic")
    for quiet in (drawn(rises), drawn(steady), drawn(steady, 2.6)):
        assert "falls" not in quiet
        assert "its least" not in quiet


def test_variants_without_a_change_are_the_cases_of_the_figure() -> None:
    recipe, changes = cases.variant_overrides("bank", "narrower bounds, [-0.5, 2]", 2, 4)
    assert (recipe, changes) == ("dp-gd-bounds", cases.overrides("dp-gd-bounds", "bank", "logistic", 4))
    assert "repeats=2" in cases.variant_overrides("bank", "step 5", 2, 4)[1]


@pytest.mark.parametrize("data", cases.VARIANTS)
def test_every_variant_is_a_valid_recipe_and_no_two_are_the_same(data: str) -> None:
    made = [cases.variant_overrides(data, label, 2, 4) for label in cases.VARIANTS[data]]
    hashes = {recipe_hash(load_recipe(f"lee2018/{recipe}", changes).recipe) for recipe, changes in made}
    assert len(hashes) == len(made)


def test_the_page_holds_tables_pictures_studies_variants_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run", fake)
    asked = Asked(tmp_path, (0.1, 0.4), repeats=1)
    kept = {runs.clock_of("adult", "svm", name, asked): {"processor": 60.0, "wall": 1.0} for name in cases.OF_FIGURE_2}
    monkeypatch.setattr(runs, "seconds", lambda out: kept)
    asked_for = [
        "--data",
        "adult",
        "ipums",
        "--loss",
        "svm",
        "--repeats",
        "1",
        "--epsilon",
        "0.1",
        "0.4",
        "--out",
        str(tmp_path),
    ]
    reproduce.write(reproduce.parser().parse_args(asked_for))
    text = (tmp_path / "README.md").read_text()
    assert all(name in text for name in cases.METHODS.values())
    assert all(f"by {key}" in text for key in cases.STUDIES)
    assert all(label in text for label in cases.VARIANTS["adult"])
    assert "5 trials: 5 folds x 1 repeat." in text
    assert "NonPrivate), minutes | 7.0 |" in text
    assert "no epsilon includes that choice" in text
    assert "| hinge | eps 0.1 | eps 1.6 | eps 25.6 |" in text
    drawn = {"adult-svm", "ipums-svm", *(f"study-{key}" for key in cases.STUDIES)}
    assert {path.stem for path in tmp_path.glob("*.png")} == drawn


def test_a_pack_run_whole_leaves_its_time(tmp_path: Path) -> None:
    recipes = [("lee2018/majority", ["data.name=breast-cancer", f"privacy.budget.epsilon={e}"]) for e in (1, 2)]
    asked = Asked(tmp_path)
    first = runs.run(recipes[:1], asked)
    assert runs.seconds(asked.runs) == {}
    with pytest.raises(runs.NotRun):
        runs.run(recipes, replace(asked, train=False))
    both = runs.run(recipes, asked, "not whole")
    assert runs.seconds(asked.runs) == {}
    assert runs.run(recipes, replace(asked, train=False)) == both
    assert both[0] == first[0]
    runs.run([("lee2018/majority", ["data.name=breast-cancer"])], asked, "whole")
    assert list(runs.seconds(asked.runs)) == ["whole"]
    assert runs.seconds(asked.runs)["whole"]["wall"] > 0
