"""Every shipped card is valid and complete, and a bad card is refused with its problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsgd_cli.common.package_files import shipped
from dpsgd_cli.data import cards
from dpsgd_cli.data.cards import read_card
from dpsgd_cli.data.settings import Data, TextInput
from dpsgd_cli.errors import DataError, UsageError


@pytest.mark.parametrize("name", cards.names())
def test_shipped_card_is_complete(name: str) -> None:
    card = cards.load_card(name)
    assert card.homepage.startswith("http")
    assert card.licence
    assert len(card.citation) > 20
    assert len(card.labels) >= 2
    for column in card.features.values():
        assert [column.bounds, column.values, column.use].count(None) == 2
    assert card.bounds_source, "say why the bounds are public knowledge"
    if card.reader.kind == "bundled":
        assert not any(file.urls for file in card.files)
    for file in card.files if card.reader.kind != "bundled" else []:
        assert file.urls or file.member
        assert all(url.startswith("https://") for url in file.urls)


def test_problems_of_a_card_are_named(tmp_path: Path) -> None:
    source = (shipped("datasets") / "bank.yaml").read_text()
    path = tmp_path / "bank.yaml"
    path.write_text(source.replace("description:", "# ").replace("licence:", "license:"))
    with pytest.raises(DataError, match=r"(?s)bank.yaml is not a data set card.*description: Field required.*license"):
        read_card(path)
    path.write_text(source.replace('target: "y"', "target: z"))
    with pytest.raises(DataError, match="target 'z' is not among the columns"):
        read_card(path)
    path.write_text(source.replace("bounds: [0, 100]", "bounds: [100, 0]"))
    with pytest.raises(DataError, match=r"columns.age.bounds.*low < high"):
        read_card(path)
    path.write_text("a: [")
    with pytest.raises(DataError, match="is not YAML"):
        read_card(path)
    other = tmp_path / "other.yaml"
    other.write_text(source)
    with pytest.raises(DataError, match="name is 'bank', but must be 'other'"):
        read_card(other)


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown data set 'mnits'; did you mean 'mnist'\?"):
        cards.load_card("mnits")


def test_a_recipe_that_takes_texts_otherwise_is_not_given_the_layout_of_the_card() -> None:
    """Whoever asked for it before."""
    card, told = cards.load_card("sst2"), TextInput(column="sentence", length=24, words=1024)
    assert card.layout.shape != (24,)
    layout = cards.card_of(Data(name="sst2", text=told), Path()).layout
    assert layout.shape == (24,) and layout.integers
