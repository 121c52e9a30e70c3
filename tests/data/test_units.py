"""Whose each row is: numbers, cuts, folds, and which rows of a user are taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli import data
from dpsgd_cli.data import opening
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.splits import folds_of
from dpsgd_cli.data.units import members_of
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.recipe.schema.unit import Unit

NAMES = ["zoe", "al", "zoe", "bo", "al", "zoe", "di", "bo", "cy", "di"]


def frame(names: list[Any] = NAMES) -> pd.DataFrame:
    rows = len(names)
    return pd.DataFrame({"a": np.arange(rows) / 10, "who": names, "y": [0, 1] * (rows // 2)})


def section(column: str = "who", **changes: Any) -> Data:
    own = {"path": "own.csv", "target": "y", "classes": [0, 1], "bounds": [0, 1], "preprocess": []} | changes
    made = Data.model_validate({key: value for key, value in own.items() if value is not None})
    made.protect(Unit(column=column, most_rows=2))
    return made


def refuse(trial: int, purpose: str, *rest: object) -> np.ndarray:
    raise AssertionError("nothing is released")


def test_rows_stand_user_by_user_in_the_places_of_their_names(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    source = opening.open_source(section(), tmp_path)
    train = source.train
    assert isinstance(train, Part) and train.x.shape == (10, 1)
    # al, bo, cy, di, zoe; each one's rows in the order of the file
    assert train.places.tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 4]
    assert (10 * train.x[:, 0]).round().tolist() == [1, 4, 3, 7, 8, 6, 9, 0, 2, 5]
    assert train.y.tolist() == [1, 0, 1, 1, 0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", ["table", "npz", "npy", "users file"])
def test_users_of_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    table = frame()
    x, y, who = table[["a"]].to_numpy(np.float32), table["y"].to_numpy(), np.array(NAMES)
    table.to_csv(tmp_path / "own.csv", index=False)
    np.savez(tmp_path / "own.npz", x=x, y=y, who=who)
    for name, held in (("x", x), ("y", y), ("who", who)):
        np.save(tmp_path / f"{name}.npy", held)
    made = {
        "table": section(),
        "npz": section(path="own.npz", target=None),
        "npy": section("who.npy", path="x.npy", target="y.npy"),
        "users file": section("who.npy", drop=["who"]),
    }[kind]
    dataset, outline = data.prepare(made, tmp_path, 1, refuse, "add-remove"), data.outline(made, tmp_path)
    assert dataset.places is not None and made.unit is not None
    assert outline.train_records == len(np.unique(dataset.places[: len(dataset.train_y)]))
    assert outline.files == (5,) and outline.test_records == len(dataset.test_y)
    assert any("The number of training users is public" in said for said in outline.declarations)
    assert ("who.npy" in dataset.sha256) == made.unit.in_a_file == ("who.npy" in made.files)
    whose = {round(float(value), 1): name for value, name in zip(x[:, 0], NAMES, strict=True)}
    owners = [{whose[round(float(value), 1)] for value in rows[:, 0]} for rows in (dataset.train_x, dataset.test_x)]
    assert owners[0].isdisjoint(owners[1]) and owners[0] | owners[1] == set(NAMES)
    assert len(owners[0]) == outline.train_records


def test_all_rows_of_a_user_are_in_one_part_and_one_fold() -> None:
    random = np.random.default_rng(0)
    names = [f"u{n}" for n in random.integers(0, 40, 400)]
    places = np.unique(np.array(names), return_inverse=True)[1]
    order = np.argsort(places, kind="stable")
    part = Part(np.arange(400.0)[order, None], np.zeros(400, np.int64), places[order])
    for test in (0.3, 7):
        rest, held = part.cut(Data.model_validate({"name": "x", "split": {"test": test}}).split)  # type: ignore[arg-type]
        assert set(rest.places).isdisjoint(held.places) and len(rest) + len(held) == 400
    assert held.units == 7
    folds = folds_of(part.places, 4, 2)
    for place in range(40):
        assert len(np.unique(folds[part.places == place], axis=0)) == 1


def test_which_rows_are_taken_is_a_function_of_place_and_number_of_the_users_own_rows() -> None:
    """Others may come, go or have other numbers of rows: what is taken of a user stays what it was."""
    sizes = [5, 1, 9, 3]
    places = np.repeat(np.arange(4), sizes)
    users, members = members_of(places, 3)
    assert users.tolist() == [0, 1, 2, 3] and (members >= 0).sum(axis=1).tolist() == [3, 1, 3, 3]
    own = [members[u][members[u] >= 0] - np.flatnonzero(places == u)[0] for u in range(4)]
    for user in range(4):
        for others in (1, 2, 7):
            varied = [size if u == user else others for u, size in enumerate(sizes)]
            other = np.repeat(np.arange(4), varied)
            line = members_of(other, 3)[1][user]
            assert (line[line >= 0] - np.flatnonzero(other == user)[0]).tolist() == own[user].tolist()
        alone = members_of(np.full(sizes[user], user), 3)[1][0]
        assert alone[alone >= 0].tolist() == own[user].tolist()
    # each row of a user is as likely as any other to be taken (false failure below 1e-6 by Hoeffding's bound)
    taken = members_of(np.repeat(np.arange(4000), 4), 1)[1][:, 0] % 4
    assert np.abs(np.bincount(taken, minlength=4) / 4000 - 0.25).max() < 0.045


def test_a_user_of_the_training_file_has_no_test_rows(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    frame(["new", "al", "newer", "new"]).to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"1 user of the training rows .* test rows too.*give data.split"):
        opening.open_source(section(test_path="test.csv"), tmp_path)
    pooled = section(test_path="test.csv", split={"test": 0.4})
    dataset = data.prepare(pooled, tmp_path, 1, refuse, "add-remove")
    assert dataset.places is not None
    train = len(dataset.train_y)
    assert train + len(dataset.test_y) == 14 and len(np.unique(dataset.places)) == 7
    assert set(dataset.places[:train]).isdisjoint(dataset.places[train:])
    frame(["new", "newer", "newest", "new"]).to_csv(tmp_path / "test.csv", index=False)
    outline = data.outline(section(test_path="test.csv"), tmp_path)
    assert (outline.train_records, outline.test_records, outline.files) == (5, 4, (5, 3))


@pytest.mark.parametrize(
    ("names", "column", "told"),
    [
        (
            ["al", "", "bo", "NA"],
            "who",
            r"own.csv: privacy.unit.column 'who' has 2 gaps, first in data row 2.*leave th",
        ),
        (["al"] * 4, "who", r"all 4 rows are one user's by privacy.unit.column 'who'.*names? a column"),
        (["al", "bo"] * 2, "hwo", r"privacy.unit.column names 'hwo', which is no column; did you mean 'who'"),
        (["al", "bo"] * 2, "nobody.npy", r"no such file: .*nobody.npy"),
    ],
)
def test_bad_unit_columns(names: list[str], column: str, told: str, tmp_path: Path) -> None:
    frame(names).to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(DataError, match=told):
        data.outline(section(column, drop=["who"] if column.endswith(".npy") else []), tmp_path)


@pytest.mark.parametrize(
    ("held", "told"),
    [
        (np.arange(3), r"has shape \(3,\) of int64, but must be \(4,\), a number or text for each row"),
        (np.array([0, 1, np.nan, 1]), r"has 1 gap, first in data row 3"),
        (np.arange(8).reshape(4, 2), r"has shape \(4, 2\)"),
    ],
)
def test_bad_users_files(held: np.ndarray, told: str, tmp_path: Path) -> None:
    frame(["al", "bo"] * 2).to_csv(tmp_path / "own.csv", index=False)
    np.save(tmp_path / "who.npy", held)
    with pytest.raises(DataError, match=told):
        data.outline(section("who.npy", drop=["who"]), tmp_path)


def test_what_is_said_of_features_says_nothing_of_the_unit_column(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(DataError, match=r"'who' is none: privacy.unit.column names it"):
        data.outline(section(categorical=["who"]), tmp_path)


def test_a_column_of_a_card_is_no_feature_then(tmp_path: Path) -> None:
    made = Data.model_validate({"name": "breast-cancer", "bounds": None})
    made.protect(Unit(column="mean radius", most_rows=2))
    with pytest.raises(DataError, match="'mean radius', which is no column of breast-cancer that can say whose a row"):
        data.outline(made, tmp_path)
