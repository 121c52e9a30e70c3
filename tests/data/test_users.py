"""Whose each row is: numbers, cuts, folds, and which rows of a user are taken."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dpsgd_cli import data
from dpsgd_cli.data import card_readers, cards, opening, users
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.data.users import members_of, owners_in_file
from dpsgd_cli.errors import DataError
from dpsgd_cli.users.settings import Unit

CUT: dict[str, Any] = {"split": {"test": 0.4, "seed": 1}}
NAMES = ["zoe", "al", "zoe", "bo", "al", "zoe", "di", "bo", "cy", "di"]


def frame(names: list[Any] = NAMES) -> pd.DataFrame:
    rows = len(names)
    return pd.DataFrame({"a": np.arange(rows) / 10, "who": names, "y": [0, 1] * (rows // 2)})


def section(column: str = "who", by_place: bool = False, **changes: Any) -> Data:
    own = {"path": "own.csv", "target": "y", "classes": [0, 1], "bounds": [0, 1], "preprocess": []} | changes
    made = Data.model_validate({key: value for key, value in own.items() if value is not None})
    return made.protecting(Unit(column=column, most_rows=2), by_place=by_place)


def refuse(trial: int, purpose: str, *rest: object) -> np.ndarray:
    raise AssertionError("nothing is released")


@pytest.mark.parametrize("by_place", [True, False])
def test_rows_are_grouped_by_user_in_an_order_that_the_file_does_not_decide(by_place: bool, tmp_path: Path) -> None:
    found = []
    for order in (np.arange(10), np.arange(10)[::-1], np.random.default_rng(0).permutation(10)):
        frame().iloc[order].to_csv(tmp_path / "own.csv", index=False)
        train = opening.load_raw(section(by_place=by_place), tmp_path).train
        assert isinstance(train, Part) and train.x.shape == (10, 1) and train.owners is not None
        keys = train.known_keys
        assert keys.of_users and keys.by_place == by_place and len(keys.different) == 5
        names = dict(zip(keys.values.tolist(), train.owners.tolist(), strict=True))
        ranks = [sorted(set(NAMES)).index(names[key]) for key in sorted(names)]
        assert by_place == (ranks == [0, 1, 2, 3, 4]), "by place a user's key is their rank by name"
        assert sorted(zip(train.owners, (10 * train.x[:, 0]).round().astype(int), strict=True)) == sorted(
            zip(NAMES, range(10), strict=True)
        )
        found.append((train.x.tolist(), train.y.tolist(), keys.values.tolist()))
    assert found[0] == found[1] == found[2]


def test_a_users_key_is_a_hash_of_their_name() -> None:
    """By hand: the first 8 bytes of BLAKE2b of the name, whoever else is there."""
    expected = [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") for name in ("al", "bo")
    ]
    assert Keys.of_names(["al", "bo"]).values.tolist() == expected
    assert Keys.of_names(["zoe", "bo"]).values.tolist()[1] == expected[1]


@pytest.mark.parametrize("kind", ["table", "npz", "npy", "users file"])
def test_users_of_every_kind_of_file(kind: str, tmp_path: Path) -> None:
    table = frame()
    x, y, who = table[["a"]].to_numpy(np.float32), table["y"].to_numpy(), np.array(NAMES)
    table.to_csv(tmp_path / "own.csv", index=False)
    np.savez(tmp_path / "own.npz", x=x, y=y, who=who)
    for name, held in (("x", x), ("y", y), ("who", who)):
        np.save(tmp_path / f"{name}.npy", held)
    made = {
        "table": section(**CUT),
        "npz": section(path="own.npz", target=None, **CUT),
        "npy": section("who.npy", path="x.npy", target="y.npy", **CUT),
        "users file": section("who.npy", drop=["who"], **CUT),
    }[kind]
    dataset, outline = data.prepare(made, tmp_path, 1, refuse, "add-remove"), data.outline(made, tmp_path)
    assert dataset.keys is not None and made.unit is not None
    assert len(np.unique(dataset.keys.values[: len(dataset.train_y)])) <= outline.train_records == dataset.train_records
    assert outline.files == (5,) and dataset.declarations == outline.declarations
    assert any("The number of users is public: 5; at most 5 of them train" in said for said in outline.declarations)
    assert ("who.npy" in dataset.sha256) == made.unit.in_a_file == ("who.npy" in made.files)
    whose = {round(float(value), 1): name for value, name in zip(x[:, 0], NAMES, strict=True)}
    owners = [{whose[round(float(value), 1)] for value in rows[:, 0]} for rows in (dataset.train_x, dataset.test_x)]
    assert owners[0].isdisjoint(owners[1]) and owners[0] | owners[1] == set(NAMES)
    assert len(owners[0]) <= outline.train_records


@pytest.mark.parametrize("by_place", [True, False])
def test_all_rows_of_a_user_are_in_one_part_and_one_fold(by_place: bool) -> None:
    names = np.array([f"u{n}" for n in np.random.default_rng(0).integers(0, 40, 400)])
    ranks = np.unique(names, return_inverse=True)[1]
    keys = Keys(ranks, by_place=True, of_users=True) if by_place else Keys.of_names(names)
    part = Part(np.arange(400.0)[:, None], np.zeros(400, np.int64), keys)
    for test in (0.3, 7):
        rest, held = part.cut(Data.model_validate({"name": "x", "split": {"test": test}}).split)  # type: ignore[arg-type]
        assert set(rest.known_keys.values).isdisjoint(held.known_keys.values) and len(rest) + len(held) == 400
    assert held.units == 7
    folds = keys.folds(4, 2, seed=0)
    for user in range(40):
        assert len(np.unique(folds[ranks == user], axis=0)) == 1


def rows_taken(names: list[str], values: np.ndarray) -> dict[str, set[float]]:
    """The values of the 3 rows at most that are taken of each user."""
    part = Part(values[:, None], np.zeros(len(names), np.int64), None, np.array(names))
    grouped = users._by_user(part, Keys.of_names(names))
    assert grouped.owners is not None
    keys, members = members_of(grouped.known_keys.values, 3)
    found = [set(grouped.x[line[line >= 0], 0].tolist()) for line in members]
    whose = dict(zip(grouped.known_keys.values.tolist(), grouped.owners.tolist(), strict=True))
    return {whose[key]: rows for key, rows in zip(keys.tolist(), found, strict=True)}


def test_which_rows_are_taken_depends_on_the_users_own_rows_alone() -> None:
    """Others may come, go, have other numbers of rows or identical rows: what is taken of a user stays what it was."""
    names = ["a"] * 5 + ["b"] + ["c"] * 9 + ["d"] * 3
    values = np.array([*range(5), 0.0, *range(9), *range(3)], dtype=np.float64)
    whole = rows_taken(names, values)
    assert {name: len(rows) for name, rows in whole.items()} == {"a": 3, "b": 1, "c": 3, "d": 3}
    for gone in "abcd":
        left = [row for row, name in enumerate(names) if name != gone]
        fewer = rows_taken([names[row] for row in left], values[left])
        assert fewer == {name: rows for name, rows in whole.items() if name != gone}
    shuffled = np.random.default_rng(1).permutation(len(names))
    assert rows_taken([names[row] for row in shuffled], values[shuffled]) == whole
    # each row of a user is as likely as any other to be taken (false failure below 1e-6 by Hoeffding's bound)
    many = [f"u{n // 4}" for n in range(16_000)]
    grouped = users._by_user(
        Part(np.arange(16_000.0)[:, None], np.zeros(16_000), None, np.array(many)), Keys.of_names(many)
    )
    first = grouped.x[members_of(grouped.known_keys.values, 1)[1][:, 0], 0].astype(int) % 4
    assert np.abs(np.bincount(first, minlength=4) / 4000 - 0.25).max() < 0.045


def test_a_user_of_the_training_file_has_no_test_rows(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    frame(["new", "al", "newer", "new"]).to_csv(tmp_path / "test.csv", index=False)
    with pytest.raises(DataError, match=r"1 user of the training rows .* test rows too.*give data.split"):
        opening.load_raw(section(test_path="test.csv"), tmp_path)
    pooled = section(test_path="test.csv", split={"test": 0.4})
    dataset = data.prepare(pooled, tmp_path, 1, refuse, "add-remove")
    assert dataset.keys is not None
    train, keys = len(dataset.train_y), dataset.keys.values
    assert train + len(dataset.test_y) == 14 and len(np.unique(keys)) == 7
    assert set(keys[:train]).isdisjoint(keys[train:])
    frame(["new", "newer", "newest", "new"]).to_csv(tmp_path / "test.csv", index=False)
    outline = data.outline(section(test_path="test.csv"), tmp_path)
    assert (outline.train_records, outline.test_records, outline.files) == (5, 3, (5, 3))


def test_what_is_said_of_features_says_nothing_of_the_unit_column(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "own.csv", index=False)
    with pytest.raises(DataError, match=r"'who' is none: privacy.unit.column names it"):
        data.outline(section(categorical=["who"]), tmp_path)


def test_a_column_of_a_card_is_no_feature_then(tmp_path: Path) -> None:
    made = Data.model_validate({"name": "breast-cancer", "bounds": None})
    made = made.protecting(Unit(column="mean radius", most_rows=2))
    with pytest.raises(DataError, match="'mean radius', which is no column of breast-cancer that can say whose a row"):
        data.outline(made, tmp_path)


def owners_as_read(folder: Path, path: str, **changes: Any) -> list[str]:
    """The names that a file's rows have, in the order of the file."""
    made = section(path=path, test_path=None, **changes)
    source = opening._open(made, folder, lambda layout: None)
    assert isinstance(source.train, Part) and source.train.owners is not None
    return [str(name) for name in source.train.owners]


@pytest.mark.parametrize("others", [[], ["1.5"], [" a", "a", "True"]])
def test_names_of_a_csv_file_are_the_text_of_its_cells(others: list[str], tmp_path: Path) -> None:
    names = ["007", "7", "7.0", "1e3", "1000", "1", "9007199254740993", "9007199254740992", "-0", *others]
    rows = "".join(f'{n},"{name}",{n % 2}\n' for n, name in enumerate(names))
    (tmp_path / "own.csv").write_text(f"a,who,y\n{rows}")
    assert owners_as_read(tmp_path, "own.csv", bounds=[0, 20], format={"trim": False}) == names


def test_names_of_json_lines_are_their_tokens(tmp_path: Path) -> None:
    tokens = ["9007199254740993", "9007199254740992", "1.5", "1.50", "1", "1.0", '"p"', "true", "1e2"]
    rows = [f'{{"a": {n}, "who": {token}, "y": {n % 2}}}\n' for n, token in enumerate(tokens)]
    (tmp_path / "own.jsonl").write_text("".join(rows))
    assert owners_as_read(tmp_path, "own.jsonl", bounds={"a": [0, 20]}) == [
        {"true": "True"}.get(token, token.strip('"')) for token in tokens
    ]


def test_names_of_arrays_and_parquet_are_exact(tmp_path: Path) -> None:
    large = [2**53, 2**53 + 1, 2**63 - 1, -1]
    given: dict[str, tuple[Any, list[str]]] = {
        "integers": (np.array(large), list(map(str, large))),
        "unsigned": (np.array([2**64 - 1, 2**64 - 2, 0, 1], np.uint64), [str(2**64 - 1), str(2**64 - 2), "0", "1"]),
        "float32": (np.array([0.1, 1.0, 1e20, 0.5], np.float32), ["0.1", "1", str(10**20), "0.5"]),
        "float64": (np.array([0.1, 0.1 + 2**-56, 1.0, 2.0**53]), ["0.1", "0.10000000000000002", "1", str(2**53)]),
        "text": (np.array(["01", "1", " 1", "1 "]), ["01", "1", " 1", "1 "]),
        "bytes": (np.array([name.encode() for name in ("é", "e", "01", "1")]), ["é", "e", "01", "1"]),
    }
    for kind, (who, names) in given.items():
        np.savez(tmp_path / "own.npz", x=np.arange(4.0)[:, None] / 4, y=np.array([0, 1, 0, 1]), who=who)
        assert owners_as_read(tmp_path, "own.npz", target=None) == names, kind
        np.save(tmp_path / "who.npy", who)
        assert owners_in_file(tmp_path / "who.npy", [4])[0].tolist() == names, kind
        if kind in ("integers", "unsigned", "text", "float64"):
            pd.DataFrame({"a": [0.1] * 4, "who": who, "y": [0, 1, 0, 1]}).to_parquet(tmp_path / "own.parquet")
            assert owners_as_read(tmp_path, "own.parquet") == names, kind


def test_names_of_a_cards_table_are_text_even_where_the_card_says_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path))
    (tmp_path / "card").mkdir()
    names = ["01", "1", "1.0", "2", "9007199254740993", "9007199254740992"]
    frame(names).to_csv(tmp_path / "card" / "d.csv", index=False)
    digest = hashlib.sha256((tmp_path / "card" / "d.csv").read_bytes()).hexdigest()
    (tmp_path / "card.yaml").write_text(
        f"{{name: card, description: mine, files: [{{name: d.csv, part: train, records: 6, sha256: {digest}}}],"
        " reader: {kind: table, header: true}, target: y, classes: {'no': ['0'], 'yes': ['1']},"
        " columns: {a: {bounds: [0, 1], source: mine}, who: {bounds: [0, 1e17], source: mine}, y: {}},"
        " split: {test: 0.5}}"
    )
    made = section(path=None, target=None, classes=None, bounds=None, name="card.yaml", preprocess=None)
    card = cards.card_of(made, tmp_path)
    source = card_readers.read(card, "who")
    assert isinstance(source.train, Part) and source.train.owners is not None
    assert source.train.owners.tolist() == names


def test_cells_that_are_no_names_are_refused(tmp_path: Path) -> None:
    pd.DataFrame({"a": [0.1] * 2, "who": [[1], [2]], "y": [0, 1]}).to_parquet(tmp_path / "own.parquet")
    with pytest.raises(DataError, match="column 'who' holds lists or objects"):
        owners_as_read(tmp_path, "own.parquet")
    np.save(tmp_path / "who.npy", np.array([b"\xff", b"a"]))
    with pytest.raises(DataError, match="holds bytes that are no UTF-8"):
        owners_in_file(tmp_path / "who.npy", [2])
