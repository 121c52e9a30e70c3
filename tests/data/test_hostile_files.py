"""Cards and compressed files that were made to harm: no path outside the data folder, no unbounded unpacking."""

from __future__ import annotations

import gzip
import http.server
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.data import card_files, table_files
from dpsgd_cli.data.cards import Card
from dpsgd_cli.errors import DataError
from tests.data.conftest import put

MakeCard = Callable[..., Card]
SHA = "0" * 64
URL = "https://example.org/all.zip"
NAMES = [
    "../../home/.bashrc",
    "/etc/passwd",
    "a/b.csv",
    "..",
    ".",
    ".bashrc",
    "a\\b",
    "a\x1b[31m.csv",
    "",
    "a\n",
    "a b",
]


def file(**changes: Any) -> dict[str, Any]:
    return {"name": "toy.csv", "records": 3, "sha256": SHA, "bytes": 10, **changes}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_card_has_a_plain_name(make_card: MakeCard, name: str) -> None:
    with pytest.raises(DataError, match=r"files.0.name: String should match"):
        make_card(files=[file(name=name)])
    with pytest.raises(DataError, match=r"archive.name: String should match"):
        make_card(files=[file(member="toy.csv")], archive={"name": name, "urls": [URL], "sha256": SHA})


def test_what_is_fetched_has_a_hash_and_a_size(make_card: MakeCard) -> None:
    with pytest.raises(DataError, match=r"archive.sha256: Field required"):
        make_card(files=[file(member="toy.csv")], archive={"name": "all.zip", "urls": [URL]})
    with pytest.raises(DataError, match=r"file toy.csv: give bytes"):
        make_card(files=[{"name": "toy.csv", "records": 3, "sha256": SHA, "urls": [URL]}])


def test_an_archive_is_not_called_as_one_of_the_files(make_card: MakeCard) -> None:
    """The archive is deleted when its members are out of it."""
    with pytest.raises(DataError, match=r"two files are called toy.csv"):
        make_card(files=[file(member="toy.csv")], archive={"name": "toy.csv", "urls": [URL], "sha256": SHA})


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://example.org/a", "/etc/passwd", "data:,a", "https://a b/"])
def test_addresses_are_of_the_web(make_card: MakeCard, url: str) -> None:
    with pytest.raises(DataError, match=r"files.0.urls.0: String should match"):
        make_card(files=[file(urls=[url])])
    with pytest.raises(DataError, match=r"archive.urls.0: String should match"):
        make_card(files=[file(member="toy.csv")], archive={"name": "all.zip", "urls": [url], "sha256": SHA})


@pytest.fixture
def redirecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that sends everybody to an ftp server."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", "ftp://127.0.0.1:9/a")
            self.end_headers()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/a"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_redirection_leads_to_the_web_only(library: Path, make_card: MakeCard, redirecting: str) -> None:
    card = make_card(files=[file(urls=[redirecting])])
    with pytest.raises(DataError, match=r"No connection adapters were found for .ftp"):
        card_files.fetch(card)


def test_other_content_is_refused_in_constant_memory(library: Path, make_card: MakeCard) -> None:
    (library / "toy").mkdir()
    with gzip.open(library / "toy" / "toy.csv.gz", "wb", compresslevel=1) as out:
        for _ in range(64):
            out.write(bytes(1 << 20))
    card = make_card(files=[{"name": "toy.csv", "records": 3, "sha256": SHA}])
    tracemalloc.start()
    with pytest.raises(DataError, match=rf"(?s)expected SHA-256 {SHA}.*\({64 << 20} bytes, uncompressed\)"):
        card_files.read_content(card, card.files[0])
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_nothing_is_unpacked_beyond_what_a_card_declares(library: Path, make_card: MakeCard) -> None:
    data = b"1,a,n\n" * 3
    card = make_card(files=[put(library, "toy.csv.gz", gzip.compress(data), bytes=len(data))])
    assert card_files.read_content(card, card.files[0]).data == data
    card = make_card(files=[put(library, "toy.csv.gz", gzip.compress(data), bytes=len(data) - 1)])
    with pytest.raises(DataError, match="holds more than the 17 bytes"):
        card_files.read_content(card, card.files[0])


def test_a_compressed_table_of_ones_own_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 100_000))
    monkeypatch.setattr(table_files, "MOST_UNPACKED", 300_000)
    with pytest.raises(DataError, match=r"own.csv.gz: unpacks to more than 300000 bytes"):
        table_files.read_table(path, ".csv.gz")
