"""Bounds that a recipe declares in the place of a card's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsgd_cli import data
from dpsgd_cli.data.card import Card
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data

HERE = Path()
AGES = [-5, 0, 10, 30, 60, 99]


@pytest.fixture
def toy(library: Path, make_card: Callable[..., Card]) -> None:
    text = "".join(f"{age},{'ab'[i % 2]},{'ny'[i % 2]}\n" for i, age in enumerate(AGES))
    (library / "toy").mkdir()
    (library / "toy" / "toy.csv").write_text(text)
    import hashlib

    file = {"name": "toy.csv", "records": len(AGES), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    make_card(files=[file])


def section(**settings: Any) -> Data:
    return Data.model_validate({"name": "toy", **settings})


def ages(settings: Data) -> list[float]:
    made = data.prepare(settings, HERE, 1, lambda trial, purpose, shape: np.zeros(shape), "add-remove")
    return sorted(np.concatenate([made.train_x, made.test_x])[:, 0].tolist())


@pytest.mark.usefixtures("toy")
def test_values_are_clamped_to_the_recipe_s_bounds_and_scaled_by_them() -> None:
    assert ages(section()) == pytest.approx([0, 0, 0.1, 0.3, 0.6, 0.99])
    assert ages(section(bounds={"age": [10, 50]})) == pytest.approx([0, 0, 0, 0.5, 1, 1])


@pytest.mark.usefixtures("toy")
def test_without_scaling_the_bounds_still_hold() -> None:
    settings = section(bounds={"age": [10, 50]}, preprocess=[{"one-hot": {}}])
    assert ages(settings) == [10, 10, 10, 30, 50, 50]
    assert data.outline(settings, HERE).norm_bound == pytest.approx(np.sqrt(50**2 + 1))


@pytest.mark.usefixtures("toy")
def test_the_declarations_say_whose_bounds_they_are() -> None:
    settings = section(bounds={"age": [10, 50]})
    said = data.outline(settings, HERE).declarations
    assert "The bounds of age of toy are public (recipe): 10 to 50; values outside are clamped." in said
    assert not any("(data set card)" in one and "numeric" in one for one in said)
    made = data.prepare(settings, HERE, 1, lambda trial, purpose, shape: np.zeros(shape), "add-remove")
    assert made.declarations == said
    assert any(
        "numeric columns of toy are public (data set card)" in one for one in data.outline(section(), HERE).declarations
    )


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("name", ["ages", "job", "label"])
def test_only_numeric_columns_of_the_card_have_bounds(name: str) -> None:
    with pytest.raises(DataError, match=f"data.bounds names '{name}', which is no numeric column of toy"):
        data.outline(section(bounds={name: [0, 1]}), HERE)


def test_bundled_tables_are_clamped_too_and_images_have_no_columns() -> None:
    settings = Data.model_validate({"name": "breast-cancer", "bounds": {"mean radius": [10, 12]}, "preprocess": []})
    made = data.prepare(settings, HERE, 1, lambda trial, purpose, shape: np.zeros(shape), "add-remove")
    assert (made.train_x[:, 0].min(), made.train_x[:, 0].max()) == (10, 12)
    with pytest.raises(DataError, match="no numeric column of digits"):
        data.outline(Data.model_validate({"name": "digits", "bounds": {"pixel": [0, 1]}}), HERE)


def test_one_pair_for_all_columns_is_for_own_files() -> None:
    with pytest.raises(ValueError, match="one pair of bounds: only for a file of your own"):
        section(bounds=[0, 1])
