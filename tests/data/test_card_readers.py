"""Readers on small files of known content, and on the real ones where DPSGD_DATA names them."""

from __future__ import annotations

import gzip
import importlib.machinery
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.datasets
import yaml

from dpsgd_cli.data import card_files, card_readers, cards
from dpsgd_cli.data.cards import Card
from dpsgd_cli.errors import DataError
from tests.data.conftest import put

MakeCard = Callable[..., Card]


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


def test_idx(library: Path, make_card: MakeCard) -> None:
    images = np.arange(24).reshape(2, 3, 4) * 10
    files = []
    for part in ("train", "test"):
        more = {"part": part, "records": 2}
        files.append(put(library, f"{part}-images.gz", gzip.compress(idx(images)), holds="images", **more))
        files.append(put(library, f"{part}-labels", idx(np.array([1, 0])), holds="labels", **more))
    shape = {"shape": [1, 3, 4], "bounds": [0, 255], "columns": None, "target": None, "split": None}
    source: Any = card_readers.read(make_card(reader={"kind": "idx"}, files=files, classes=["zero", "one"], **shape))
    assert source.test is not None
    np.testing.assert_allclose(source.train.x, images.reshape(2, 1, 3, 4) / 255, rtol=1e-6)
    assert source.train.x.dtype == np.float32
    assert (source.train.y.tolist(), source.train.y.dtype) == ([1, 0], np.int64)
    assert source.sha256 == {file["name"]: file["sha256"] for file in files}


def test_cifar(library: Path, make_card: MakeCard) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (3, 13)).astype(np.uint8)
    rows[:, 0] = [1, 0, 1]
    files = [
        put(library, "one.bin", rows[:2].tobytes(), records=2, part="train"),
        put(library, "two.bin", rows[2:].tobytes(), records=1, part="train"),
        put(library, "test.bin", rows[:1].tobytes(), records=1, part="test"),
    ]
    shape = {"shape": [3, 2, 2], "bounds": [0, 255], "columns": None, "target": None, "split": None}
    source: Any = card_readers.read(make_card(reader={"kind": "cifar"}, files=files, classes=["a", "b"], **shape))
    assert source.train.y.tolist() == [1, 0, 1]
    np.testing.assert_allclose(source.train.x[2, 1, 0], rows[2, 1 + 4 : 1 + 6] / 255, rtol=1e-6)
    assert source.test is not None
    assert source.test.x.shape == (1, 3, 2, 2)


def a_part(library: Path, make_card: MakeCard, kept: dict[str, list[int]]) -> tuple[Card, np.ndarray]:
    """A card of classes b and d of four, and the labels of the files that it shares with the card of all."""
    rows = np.arange(6 * 13).reshape(6, 13).astype(np.uint8)
    rows[:, 0] = [3, 0, 1, 2, 3, 1]
    files = [
        put(library, "one.bin", rows[:4].tobytes(), records=4, part="train"),
        put(library, "test.bin", rows[4:].tobytes(), records=2, part="test"),
    ]
    shape = {"shape": [3, 2, 2], "bounds": [0, 255], "columns": None, "target": None, "split": None}
    make_card(reader={"kind": "cifar"}, files=files, classes=["a", "b", "c", "d"], preprocess=None, **shape)
    path = library.parent / "cards" / "half.yaml"
    classes = {"d": ["3"], "b": ["1"]}
    said = {"name": "half", "description": "b and d", "part_of": "toy", "classes": classes, "kept": kept}
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return cards.load_card("half"), rows


def test_a_part_of_a_card_is_the_records_of_its_classes(library: Path, make_card: MakeCard) -> None:
    """In the order of the files, labelled in the order of its own classes, from the files of the whole."""
    half, rows = a_part(library, make_card, {"one.bin": [2], "test.bin": [2]})
    source: Any = card_readers.read(half)
    assert half.labels == ("d", "b")
    assert source.train.y.tolist() == [0, 1]
    np.testing.assert_allclose(source.train.x.reshape(2, 12), rows[[0, 2], 1:] / 255, rtol=1e-6)
    assert source.test.y.tolist() == [0, 1]
    assert [card_files.records(half, file) for file in half.files] == [2, 2]
    assert any("toy" in said for said in source.declarations)


def test_a_part_of_other_numbers_than_its_card_declares_is_refused(library: Path, make_card: MakeCard) -> None:
    """Prices and noise were planned for the number that is public."""
    half, _ = a_part(library, make_card, {"one.bin": [3], "test.bin": [2]})
    with pytest.raises(DataError, match="half: 2 records for train have its classes, but its card says 3"):
        card_readers.read(half)
    with pytest.raises(DataError, match="so many of each file"):
        a_part(library, make_card, {"one.bin": [2]})
    a_part(library, make_card, {"one.bin": [2], "test.bin": [2]})
    path = library.parent / "cards" / "quarter.yaml"
    path.write_text("{name: quarter, description: b, part_of: half, classes: {b: ['1']}}")
    with pytest.raises(DataError, match="'half', which is no shipped card of a whole"):
        cards.load_card("quarter")


def test_table(library: Path, make_card: MakeCard) -> None:
    files = [put(library, "toy.csv", b"30, a, n\n40, b, y\n?, a, n\n51, a, other\n\n")]
    card = make_card(files=files, reader={"kind": "table", "separator": ",", "header": False, "missing": "?"})
    source: Any = card_readers.read(card)
    assert source.train.x.tolist() == [[30, 0], [40, 1], [51, 0]]
    assert source.train.y.tolist() == [0, 1, 1]
    assert source.test is None
    assert any("bounds" in said for said in source.declarations)
    assert any("categorical" in said for said in source.declarations)


def test_table_with_header_separator_and_comment(library: Path, make_card: MakeCard) -> None:
    files = [put(library, "toy.csv", b'|made up\n"age";"job";"label"\n30;"b";"n"\n', records=1)]
    reader = {"kind": "table", "separator": ";", "header": True, "comment": "|"}
    source: Any = card_readers.read(make_card(files=files, reader=reader))
    assert source.train.x.tolist() == [[30, 1]]


def test_table_of_other_content_than_the_card_says(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[put(library, "toy.csv", b"30,a,n\n40,c,y\n", records=2)])
    with pytest.raises(DataError, match="'job': 1 cell, first in data row 2, not among"):
        card_readers.read(card)
    card = make_card(files=[put(library, "toy.csv", b"30,a,n\n", records=2)])
    with pytest.raises(DataError, match="holds 1 usable rows, but its card says 2"):
        card_readers.read(card)
    card = make_card(files=[put(library, "toy.csv", b"30,a,n\n", records=1)], classes={"no": ["x"], "yes": ["y"]})
    with pytest.raises(DataError, match="column 'label' holds no class of the card in data row 1"):
        card_readers.read(card)


def test_bundled_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    source: Any = card_readers.read(cards.load_card("digits"))
    np.testing.assert_allclose(source.train.x.reshape(1797, 64), load_digits().data / 16)
    assert source.train.y.tolist() == load_digits().target.tolist()


def test_bundled_breast_cancer_lies_within_its_public_bounds() -> None:
    """A bound that cuts off much would be a bad choice; that it is kept is checked, not how it was made."""
    card = cards.load_card("breast-cancer")
    source: Any = card_readers.read(card)
    low, high = np.array([column.bounds for column in card.layout.columns or ()]).T
    outside = (source.train.x < low) | (source.train.x > high)
    assert outside.mean() < 0.01
    assert source.classes == ("malignant", "benign")


@pytest.mark.parametrize("name", ["digits", "breast-cancer"])
def test_bundled_data_are_those_that_scikit_learn_loads(name: str) -> None:
    x, y = getattr(sklearn.datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    card = cards.load_card(name)
    part = card_readers.read(card).train
    whole = x / 16 if card.shape is not None else x[:, [list(card.columns or ()).index(one) for one in card.features]]
    found_x, found_y = np.asarray(part.x), np.asarray(part.y)
    assert np.array_equal(found_x.reshape(len(y), -1), whole) and np.array_equal(found_y, y)


@pytest.mark.parametrize("content", ["0,1,2\n", "no numbers\n", None])
def test_bundled_data_of_another_version_are_refused(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets" / "data").mkdir(parents=True)
    if content is not None:
        (tmp_path / "datasets" / "data" / "digits.csv.gz").write_bytes(gzip.compress(content.encode()))
    other = importlib.machinery.ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(card_readers, "find_spec", lambda name: other)
    with pytest.raises(DataError, match=r"holds other data than its card says.*constraints.txt"):
        card_readers.read(cards.load_card("digits"))
    monkeypatch.setattr(card_readers, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="scikit-learn, which is not installed"):
        card_readers.read(cards.load_card("digits"))


REAL = {
    "adult": ((32561, 14), (16281, 14), [24720, 7841]),
    "bank": ((45211, 16), None, [39922, 5289]),
    "breast-cancer-wisconsin": ((683, 9), None, [444, 239]),
    "ipums": ((38000, 52), None, [18760, 19240]),
    "kddcup99": ((494021, 41), None, [97278, 396743]),
    "mnist": ((60000, 1, 28, 28), (10000, 1, 28, 28), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]),
    "cifar10": ((50000, 3, 32, 32), (10000, 3, 32, 32), [5000] * 10),
}


@pytest.mark.parametrize("name", REAL)
def test_real_files(real_data: Path, name: str) -> None:
    card = cards.load_card(name)
    if card_files.locate(card, card.files[0]) is None:
        pytest.skip(f"{name} is not in DPSGD_DATA")
    source: Any = card_readers.read(card)
    train, test, counts = REAL[name]
    assert source.train.x.shape == train
    assert np.bincount(source.train.y).tolist() == counts
    held_out = sum(
        card_files.records(card, file) for file in card.files if file.part == "test" and file.holds != "labels"
    )
    assert (source.test.x.shape if source.test else None) == ((held_out, *test[1:]) if test else None)
