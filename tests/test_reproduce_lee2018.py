"""The page of `make reproduce-lee2018`: every method is a row, every recipe it asks for is valid."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.lee2018 import reproduce
from benchmarks.lee2018.reproduce import DATA, EPSILONS, METHODS, STUDIES, Cell
from dpsgd_cli.errors import RunError
from dpsgd_cli.recipe.loading import load_recipe


def fake(recipes: list[tuple[str, list[str]]], out: Path) -> list[Cell]:
    """Cells without training; every recipe is read, so a wrong override fails here."""
    loaded = [load_recipe(name, changes).recipe for name, changes in recipes]
    return [Cell(0.5 + 0.001 * len(one.name), 0.01, 1.0) for one in loaded]


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("loss", ["logistic", "svm"])
def test_every_method_has_a_row(data: str, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "run", fake)
    found = reproduce.figure(data, loss, 1, tmp_path)
    assert list(found) == list(METHODS)
    lines = reproduce.table(found, objective=False)
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == list(METHODS.values())
    assert all(line.count("|") == len(EPSILONS) + 2 for line in lines)


def test_a_method_that_fails_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(recipes: list[tuple[str, list[str]]], out: Path) -> list[Cell]:
        if "privgene" in recipes[0][0]:
            raise RunError("it broke")
        return fake(recipes, out)

    monkeypatch.setattr(reproduce, "run", broken)
    assert set(METHODS) - set(reproduce.figure("adult", "logistic", 1, tmp_path)) == {"privgene"}
    assert "adult logistic privgene: it broke" in capsys.readouterr().err


def test_the_page_holds_tables_pictures_and_studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "run", fake)
    reproduce.page(argparse.Namespace(out=tmp_path, repeats=1, data=["adult"], loss=["svm"], studies=True))
    text = (tmp_path / "README.md").read_text()
    assert all(name in text for name in METHODS.values())
    assert all(f"by {key}" in text for key in STUDIES)
    assert {path.stem for path in tmp_path.glob("*.png")} == {"adult-svm", *(f"study-{key}" for key in STUDIES)}
