"""Texts as tokens without transformers: hashed words of a table and of a card, each text by itself."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dpsgd_cli.data import texts
from dpsgd_cli.data.dataset import Part
from dpsgd_cli.data.new_rows import source_of
from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.data.preparation import outline
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError

LINES = ["a good film", "Good, good night", "", "the plot is bad"]
CONTENT = "said\tmood\n" + "".join(f"{line or 'none'}\t{row % 2}\n" for row, line in enumerate(LINES * 6))
WORDS = {"column": "said", "length": 3, "words": 50}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of texts, and a card of the same file."""
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path / "data"))
    (tmp_path / "moods.tsv").write_text(CONTENT)
    return card_of_moods(tmp_path)


def card_of_moods(folder: Path) -> Path:
    """Write the card `moods.yaml`, and its file where data sets lie."""
    (folder / "data" / "moods").mkdir(parents=True)
    (folder / "data" / "moods" / "moods.tsv").write_text(CONTENT)
    sha256 = hashlib.sha256(CONTENT.encode()).hexdigest()
    card: dict[str, Any] = {
        "name": "moods",
        "description": "texts",
        "reader": {"kind": "table", "header": True, "separator": "\t"},
        "files": [{"name": "moods.tsv", "records": 24, "sha256": sha256}],
        "columns": {"said": {"use": {"text": 16}}, "mood": {}},
        "target": "mood",
        "classes": {"bad": ["0"], "good": ["1"]},
        "split": {"test": 4},
    }
    (folder / "moods.yaml").write_text(yaml.safe_dump(card, sort_keys=False))
    return folder


def murmur3(key: bytes) -> int:
    """MurmurHash3 of 32 bits with seed 0, as Appleby published it."""
    h, whole = 0, len(key) // 4 * 4
    for at in range(0, len(key), 4):
        k = int.from_bytes(key[at : at + 4], "little") * 0xCC9E2D51 % 2**32
        k = (k << 15 | k >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= k
        if at < whole:
            h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(key)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return h ^ h >> 16


def told(**text: Any) -> Data:
    return Data.model_validate({"name": "moods.yaml", "text": WORDS | text})


def train_of(data: Data, folder: Path) -> Part:
    found = load_raw(data, folder).train
    assert isinstance(found, Part)
    return found


def test_hashed_words_are_tokens_of_each_text_alone(project: Path) -> None:
    data = Data.model_validate({"path": "moods.tsv", "target": "mood", "classes": [0, 1], "text": WORDS})
    rows = texts.tokens(LINES, data, project)
    assert rows.shape == (4, 3) and rows.dtype == np.int64
    assert rows[1, 0] == rows[1, 1] == rows[0, 1], "one word is one token, whatever its case"
    assert (rows[2] == -1).all() and rows[3, 2] >= 0, "padded, and cut"
    for row, line in enumerate(LINES):
        assert np.array_equal(texts.tokens([line], data, project)[0], rows[row])
    # the public hash, written out below
    assert rows[0].tolist() == [murmur3(word.encode()) % 50 for word in ("a", "good", "film")]


def test_a_card_gives_the_tokens_that_a_table_gives(project: Path) -> None:
    own = Data.model_validate({"path": "moods.tsv", "target": "mood", "classes": [0, 1], "text": WORDS})
    table, card = train_of(own, project), load_raw(told(), project)
    assert np.array_equal(train_of(told(), project).x, table.x) and card.layout.shape == (3,)
    facts = outline(told(), project)
    assert facts.input_shape == (3,) and facts.integers
    assert any("hash of words to 50 tokens" in said for said in facts.declarations)
    new = pd.DataFrame({"said": ["a good film"], "mood": ["1"]})
    source = source_of(told(), card.layout, project)
    assert np.array_equal(source.rows(new)[0], table.x[0])
    assert source.labelled(new, card.classes).y.tolist() == [1]


def test_other_tokens_of_the_same_file_are_read_anew(project: Path) -> None:
    """The sources of a process are kept by all that their tokens depend on."""
    assert train_of(told(), project).x.max() < 50
    assert train_of(told(words=5000), project).x.max() >= 50
    assert train_of(told(length=2), project).x.shape == (24, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"column": "sad"}, "names 'sad', which is no column of text of moods; did you mean 'said'"),
        ({"column": "mood"}, "known: said"),
    ],
)
def test_a_column_without_text_is_told(project: Path, text: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        load_raw(told(**text), project)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ({"name": "sst2", "text": {"length": 4, "words": 9}}, "name the column of the card"),
        ({"path": "a.csv", "target": "y", "text": WORDS | {"folder": "bert", "public": True}}, "leave folder out"),
    ],
)
def test_settings_of_hashed_words_go_together(data: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Data.model_validate(data)
