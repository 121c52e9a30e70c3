"""A library of small cards in a folder of the test's own, and where the real data lie."""

from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dpsgd_cli.data import cards
from dpsgd_cli.data.cards import Card

# Read before any test changes the environment.
REAL_DATA = os.environ.get("DPSGD_DATA")

MakeCard = Callable[..., Card]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty folders for cards and data, in the place of the shipped cards and of DPSGD_DATA; the data folder."""
    shipped, data = tmp_path / "cards", tmp_path / "data"
    shipped.mkdir()
    data.mkdir()
    monkeypatch.setenv("DPSGD_DATA", str(data))
    monkeypatch.setattr(cards, "shipped", lambda kind: shipped)
    cards.load_card.cache_clear()
    yield data
    cards.load_card.cache_clear()


def put(library: Path, name: str, data: bytes, **more: Any) -> dict[str, Any]:
    """Write a file of data set `toy`, and give what its card says of it (the content when it is uncompressed)."""
    (library / "toy").mkdir(exist_ok=True)
    (library / "toy" / name).write_bytes(data)
    return described(name.removesuffix(".gz"), gzip.decompress(data) if name.endswith(".gz") else data, **more)


def described(name: str, content: bytes, **more: Any) -> dict[str, Any]:
    """What a card says of a file of that content."""
    return {"name": name, "records": 3, "sha256": hashlib.sha256(content).hexdigest(), **more}


@pytest.fixture
def make_card(library: Path) -> MakeCard:
    """Writes a card called `toy`, a table of two columns and a label, with the changes that are given."""

    def make(**changes: Any) -> Card:
        content: dict[str, Any] = {
            "name": "toy",
            "description": "a toy",
            "homepage": "none",
            "licence": "none",
            "citation": "none",
            "reader": {"kind": "table", "separator": ",", "header": False},
            "columns": {"age": {"bounds": [0, 100]}, "job": {"values": ["a", "b"]}, "label": {}},
            "target": "label",
            "classes": {"no": ["n"], "yes": ["*"]},
            "split": {"test": 1},
            "preprocess": [{"scale": {}}, {"one-hot": {}}],
        } | changes
        kept = {key: value for key, value in content.items() if value is not None}
        (library.parent / "cards" / f"{content['name']}.yaml").write_text(yaml.safe_dump(kept, sort_keys=False))
        cards.load_card.cache_clear()
        return cards.load_card(content["name"])

    return make


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of real data sets; tests that need it are skipped where there is none."""
    if not REAL_DATA:
        pytest.skip("DPSGD_DATA is not set: no real data here")
    monkeypatch.setenv("DPSGD_DATA", REAL_DATA)
    return Path(REAL_DATA)
