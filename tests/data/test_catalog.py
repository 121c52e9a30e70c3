"""Finding files and checking their content."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsgd_cli.data import catalog
from dpsgd_cli.data.card import Card
from dpsgd_cli.errors import DataError, UsageError
from tests.data.conftest import described, put

MakeCard = Callable[..., Card]
DATA = b"30,a,n\n40,b,y\n50,a,y\n"


TOY = described("toy.csv", DATA)
SHA256: str = TOY["sha256"]


@pytest.mark.parametrize("compress", [False, True])
def test_content_is_found_plain_or_compressed(library: Path, make_card: MakeCard, compress: bool) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv.gz" if compress else "toy.csv", gzip.compress(DATA) if compress else DATA)
    content = catalog.read_content(card, card.files[0])
    assert content == catalog.Content(DATA, SHA256, 3)


def test_a_missing_file_says_where_and_how_to_get_it(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    with pytest.raises(DataError) as caught:
        catalog.read_content(card, card.files[0])
    assert str(library / "toy" / "toy.csv") in str(caught.value)
    assert "`dpsgd data fetch toy`" in str(caught.value)


def test_a_changed_file_shows_both_hashes(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv", DATA + b"!")
    with pytest.raises(DataError) as caught:
        catalog.read_content(card, card.files[0])
    for part in (SHA256, described("", DATA + b"!")["sha256"], "toy.csv", "22 bytes", "dpsgd data fetch toy"):
        assert part in str(caught.value)


def test_damaged_compression_is_named(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv", gzip.compress(DATA)[:-9])
    with pytest.raises(DataError, match=r"(?s)toy.csv.*damaged gzip data"):
        catalog.read_content(card, card.files[0])


def test_variants_are_accepted_with_their_own_count(library: Path, make_card: MakeCard) -> None:
    short = DATA[:7]
    variant = {"sha256": described("", short)["sha256"], "records": 1, "bytes": 7, "note": "first row"}
    card = make_card(files=[TOY | {"variants": [variant]}])
    assert catalog.records(card, card.files[0]) == 3
    put(library, "toy.csv", short)
    assert catalog.read_content(card, card.files[0]).records == 1
    assert catalog.records(card, card.files[0]) == 1
    put(library, "toy.csv", DATA)
    assert catalog.read_content(card, card.files[0]).records == 3
    assert catalog.records(card, card.files[0]) == 3


def test_a_variant_that_is_put_right_must_become_the_canonical_content(library: Path, make_card: MakeCard) -> None:
    spoilt = DATA.replace(b"30", b"99")
    variant = {
        "sha256": described("", spoilt)["sha256"],
        "records": 3,
        "bytes": len(DATA),
        "note": "typo",
        "replace": {"99": "30"},
    }
    files = [TOY | {"variants": [variant]}]
    put(library, "toy.csv", spoilt)
    card = make_card(files=files)
    assert catalog.read_content(card, card.files[0]) == catalog.Content(DATA, SHA256, 3)
    variant["replace"] = {"99": "31"}
    card = make_card(files=files)
    with pytest.raises(DataError, match=SHA256):
        catalog.read_content(card, card.files[0])


def test_an_unknown_name_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"unknown data set 'mnits'; did you mean 'mnist'\?"):
        catalog.load_card("mnits")


def test_the_folder_is_the_cache_directory_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path))
    assert catalog.folder() == tmp_path
    monkeypatch.delenv("DPSGD_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert catalog.folder().is_relative_to(Path.home()) or catalog.folder().is_relative_to(tmp_path)
