"""The reproduction of Yu et al. 2019: valid recipes, the epochs of the paper, and a page that says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.yu2019.cases import EPOCHS, LENGTHS, Case, cases
from dpsgd_cli.experiment import plan_recipe
from dpsgd_cli.recipe.loading import load_recipe, recipe_hash

CASES = cases(3)


def test_no_training_is_done_twice() -> None:
    assert len({case.name for case in CASES}) == len(CASES) == 64
    hashes = {recipe_hash(load_recipe(case.recipe, case.overrides).recipe) for case in CASES}
    assert len(hashes) == len(CASES)


def planned(case: Case) -> int:
    plan, _ = plan_recipe(load_recipe(case.recipe, case.overrides))
    assert plan is not None
    return plan.most_epochs


DECIDED = [
    case
    for case in CASES
    if case.figure in ("table2", "control", "length") and case.x != "validation" and "non-private" not in case.x
]


@pytest.mark.parametrize("case", DECIDED, ids=lambda case: case.name)
def test_epochs_are_those_of_the_paper(case: Case) -> None:
    wanted = int(case.x.split()[1]) if case.figure == "length" else EPOCHS[case.x]
    assert planned(case) == wanted
    assert case.figure != "length" or wanted in LENGTHS


def test_a_page_says_what_is_missing(tmp_path: Path) -> None:
    from benchmarks.yu2019 import page

    page.write(tmp_path, 3)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "0 of 64 trainings are finished" in text
    assert "not run" in text
    assert not list(tmp_path.glob("*.png"))
    # Table III: beside the published rate the one that leaves nothing of the budget
    assert "0.0138 (0.0142)" in text
