"""What is the same data, and what are the same test records of it."""

from __future__ import annotations

from typing import Any

import pytest

from dpsgd_cli.accounting.joint_composition import Records
from dpsgd_cli.results.evaluated import evaluated_on, records_of

OWN: dict[str, Any] = {"path": "folder/mine.csv", "target": "y", "task": "classification"}
HASHES = {"folder/mine.csv": "aa"}


@pytest.mark.parametrize(
    ("change", "hashes"),
    [
        ({"target": "z"}, HASHES),
        ({"task": "regression"}, HASHES),
        ({}, {"folder/mine.csv": "bb"}),
        ({"test_path": "more.csv"}, {**HASHES, "more.csv": "cc"}),
    ],
)
def test_another_content_or_label_is_other_data(change: dict[str, Any], hashes: dict[str, str]) -> None:
    assert evaluated_on({**OWN, **change}, None, hashes).source != evaluated_on(OWN, None, HASHES).source


def test_the_same_content_under_another_name_is_the_same_data() -> None:
    moved = evaluated_on({**OWN, "path": "elsewhere.csv"}, None, {"elsewhere.csv": "aa"})
    assert moved.source == evaluated_on(OWN, None, HASHES).source
    assert (moved.name, evaluated_on(OWN, None, HASHES).name) == ("elsewhere.csv", "mine.csv")


def test_cards_differ_by_name_and_by_content_but_not_by_extractors() -> None:
    digits = evaluated_on({"name": "digits"}, None, {"digits": "aa"})
    assert digits.source == evaluated_on({"name": "digits"}, None, {"digits": "aa", "features": "cc"}).source
    assert digits.source != evaluated_on({"name": "digits"}, None, {"digits": "bb"}).source
    assert digits.source != evaluated_on({"name": "breast-cancer"}, None, {"digits": "aa"}).source


def test_what_is_done_to_features_leaves_the_test_records() -> None:
    done = {"preprocess": [{"bias": {"value": 1.0}}], "validation": {"records": 10, "public": True}, "drop": ["x"]}
    assert evaluated_on({**OWN, **done}, None, HASHES) == evaluated_on(OWN, None, HASHES)


def test_records_cut_by_content_are_the_same_only_if_they_are_read_alike() -> None:
    """With a column less, coins of what is left cut other records; places, users and a test file stay as they are."""

    def out(**change: Any) -> str:
        data = {"path": "t.csv", "target": "y", "bounds": [0, 1], **change}
        found = records_of(data, None, {"t.csv": "aa", "u.csv": "bb"})
        assert found is not None
        return found.left_out

    assert out() != out(drop=["a"]) and out() != out(classes=[1, 0])
    assert out(task="regression") != out(task="regression", target_bounds=[0, 2])
    assert out() == out(bounds=[0, 2]) == out(preprocess=[{"scale": {}}])
    assert out(missing={"a": 1}) != out(missing={"a": 1}, bounds=[0, 2])
    for fixed in ({"coins": "place"}, {"unit": "who"}, {"test_path": "u.csv"}):
        assert out(**fixed) == out(**fixed, drop=["a"])


def test_records_whose_tokens_come_from_another_file_are_other_data() -> None:
    """Coins of tokens hold out other records where the file of them is another: no joint statement.
    Coins by place, and a test file, hold out the same; a file that is not known is no statement at all. The words,
    which are printed, name no content of a file."""
    told: dict[str, Any] = {"text": {"length": 8, "folder": "bert", "public": True}}
    file = "bert"

    def read(content: str, folds: int | None = None, **change: Any) -> Records:
        found = records_of({**OWN, **told, **change}, folds, {**HASHES, "tests.csv": "tt", file: content})
        assert found is not None
        return found

    assert read("x") == read("x") and read("x").data != read("y").data
    assert read("x").left_out == read("y").left_out
    assert read("x", 5).data != read("y", 5).data
    for key, value in (("coins", "by place"), ("test_path", "tests.csv")):
        fixed: dict[str, Any] = {key: value}
        assert read("x", **fixed) == read("y", **fixed)
    assert records_of({**OWN, **told}, None, HASHES) is None
    card = {"name": "sst2", "split": {"test": 0.2}, "text": {**told["text"], "column": "sentence"}}
    assert evaluated_on(card, None, {file: "x"}).source != evaluated_on(card, None, {file: "y"}).source
