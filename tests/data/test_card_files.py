"""Files of cards: found, checked, and downloaded from a server that cuts connections and sends wrong bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.data import card_files
from dpsgd_cli.data.cards import Card
from dpsgd_cli.errors import DataError
from tests.data.conftest import described, put

MakeCard = Callable[..., Card]
DATA = bytes(range(256)) * 2000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Site:
    """What the server offers: content by path, and after how many bytes it cuts; it keeps the path of every request."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.cut_after: dict[str, int] = {}
        self.requests: list[str] = []
        self.url = ""


def serve(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            site.requests.append(self.path)
            if self.path not in site.content:
                return self.send_error(404)
            body = site.content[self.path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: site.cut_after.get(self.path, len(body))])
            self.close_connection = True
            return None

    return Handler


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = Site()
    server = ThreadingHTTPServer(("127.0.0.1", 0), serve(made))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def card(make_card: MakeCard, site: Site) -> Card:
    """A data set of one file, at two addresses of the site."""
    urls = [f"{site.url}/first", f"{site.url}/second"]
    return make_card(
        files=[{"name": "toy.csv", "records": 3, "sha256": sha256(DATA), "bytes": len(DATA), "urls": urls}]
    )


def left(library: Path) -> list[str]:
    return sorted(path.name for path in (library / "toy").iterdir())


def test_a_download_lands_in_place_and_is_not_repeated(library: Path, site: Site, card: Card) -> None:
    site.content["/first"] = DATA
    assert card_files.fetch(card) == [library / "toy" / "toy.csv"]
    assert card_files.read_content(card, card.files[0]).data == DATA
    assert left(library) == ["toy.csv"]
    assert card_files.fetch(card) == []
    assert site.requests == ["/first"]


def test_a_cut_connection_leaves_nothing_behind(library: Path, site: Site, card: Card) -> None:
    site.content["/first"] = DATA
    site.cut_after["/first"] = 200_000
    with pytest.raises(DataError, match="IncompleteRead"):
        card_files.fetch(card)
    assert left(library) == []


def test_wrong_bytes_are_never_put_in_place_and_the_next_address_is_tried(
    library: Path, site: Site, card: Card
) -> None:
    site.content = {"/first": b"<html>moved</html>", "/second": DATA}
    card_files.fetch(card)
    assert site.requests == ["/first", "/second"]
    assert left(library) == ["toy.csv"]


def test_when_every_address_fails_each_reason_is_named(library: Path, site: Site, card: Card) -> None:
    site.content["/first"] = b"other"
    with pytest.raises(DataError) as caught:
        card_files.fetch(card)
    for part in (
        *("cannot download toy.csv", "/first: expected SHA-256", sha256(DATA), sha256(b"other")),
        *("/second: 404", str(library / "toy" / "toy.csv")),
    ):
        assert part in str(caught.value)
    assert left(library) == []


def test_compressed_files_keep_their_ending_and_replace_damaged_ones(library: Path, site: Site, card: Card) -> None:
    site.content["/first"] = gzip.compress(DATA)
    (library / "toy").mkdir()
    (library / "toy" / "toy.csv").write_bytes(b"damaged")
    card_files.fetch(card)
    assert left(library) == ["toy.csv.gz"]
    assert card_files.read_content(card, card.files[0]).data == DATA


def archive_of(kind: str, member: str, data: bytes) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr(member, data)
            archive.writestr("../outside", b"never extracted")
    else:
        with tarfile.open(fileobj=out, mode="w:gz") as archive_file:
            info = tarfile.TarInfo(member)
            info.size = len(data)
            archive_file.addfile(info, io.BytesIO(data))
    return out.getvalue()


def archived(make_card: MakeCard, site: Site, content: bytes, **archive: Any) -> Card:
    site.content["/all"] = content
    return make_card(
        archive={"name": "all.zip", "urls": [f"{site.url}/all"], "sha256": sha256(content), **archive},
        files=[{"name": "toy.csv", "member": "deep/toy.csv", "records": 3, "sha256": sha256(DATA), "bytes": len(DATA)}],
    )


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_members_are_taken_out_of_an_archive(library: Path, site: Site, make_card: MakeCard, kind: str) -> None:
    content = archive_of(kind, "deep/toy.csv", DATA)
    card = archived(make_card, site, content, sha256=sha256(content))
    card_files.fetch(card)
    assert left(library) == ["toy.csv"]
    assert not (library / "outside").exists()
    assert card_files.is_right(card, card.files[0])


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_archives_that_are_not_what_the_card_says(library: Path, site: Site, make_card: MakeCard, kind: str) -> None:
    card = archived(make_card, site, archive_of(kind, "deep/toy.csv", DATA), sha256="0" * 64)
    with pytest.raises(DataError, match=f"expected SHA-256 {'0' * 64}"):
        card_files.fetch(card)
    card = archived(make_card, site, b"neither")
    with pytest.raises(DataError, match="neither a zip nor a tar file"):
        card_files.fetch(card)
    card = archived(make_card, site, archive_of(kind, "elsewhere.csv", DATA))
    with pytest.raises(DataError, match=r"holds no file 'deep/toy.csv'"):
        card_files.fetch(card)
    card = archived(make_card, site, archive_of(kind, "deep/toy.csv", b"!" + DATA[1:]))
    with pytest.raises(DataError, match=r"(?s)holds another toy.csv than its card says.*expected SHA-256"):
        card_files.fetch(card)
    card = archived(make_card, site, archive_of(kind, "deep/toy.csv", DATA + b"!"))
    with pytest.raises(DataError, match="holds more than the 512000 bytes"):
        card_files.fetch(card)
    assert "toy.csv" not in left(library)


TABLE = b"30,a,n\n40,b,y\n50,a,y\n"
TOY = described("toy.csv", TABLE)
SHA256: str = TOY["sha256"]


@pytest.mark.parametrize("compress", [False, True])
def test_content_is_found_plain_or_compressed(library: Path, make_card: MakeCard, compress: bool) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv.gz" if compress else "toy.csv", gzip.compress(TABLE) if compress else TABLE)
    content = card_files.read_content(card, card.files[0])
    assert content == card_files.Content(TABLE, SHA256, 3)


def test_a_missing_file_says_where_and_how_to_get_it(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    with pytest.raises(DataError) as caught:
        card_files.read_content(card, card.files[0])
    assert str(library / "toy" / "toy.csv") in str(caught.value)
    assert "`dpsgd data fetch toy`" in str(caught.value)


def test_a_changed_file_shows_both_hashes(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv", TABLE + b"!")
    with pytest.raises(DataError) as caught:
        card_files.read_content(card, card.files[0])
    for part in (SHA256, described("", TABLE + b"!")["sha256"], "toy.csv", "22 bytes", "dpsgd data fetch toy"):
        assert part in str(caught.value)


def test_damaged_compression_is_named(library: Path, make_card: MakeCard) -> None:
    card = make_card(files=[TOY])
    put(library, "toy.csv", gzip.compress(TABLE)[:-9])
    with pytest.raises(DataError, match=r"(?s)toy.csv.*damaged gzip data"):
        card_files.read_content(card, card.files[0])


def test_variants_are_accepted_with_their_own_count(library: Path, make_card: MakeCard) -> None:
    short = TABLE[:7]
    variant = {"sha256": described("", short)["sha256"], "records": 1, "bytes": 7, "note": "first row"}
    card = make_card(files=[TOY | {"variants": [variant]}])
    assert card_files.records(card, card.files[0]) == 3
    put(library, "toy.csv", short)
    assert card_files.read_content(card, card.files[0]).records == 1
    assert card_files.records(card, card.files[0]) == 1
    put(library, "toy.csv", TABLE)
    assert card_files.read_content(card, card.files[0]).records == 3
    assert card_files.records(card, card.files[0]) == 3


def test_a_variant_that_is_put_right_must_become_the_canonical_content(library: Path, make_card: MakeCard) -> None:
    spoilt = TABLE.replace(b"30", b"99")
    variant = {
        "sha256": described("", spoilt)["sha256"],
        "records": 3,
        "bytes": len(TABLE),
        "note": "typo",
        "replace": {"99": "30"},
    }
    files = [TOY | {"variants": [variant]}]
    put(library, "toy.csv", spoilt)
    card = make_card(files=files)
    assert card_files.read_content(card, card.files[0]) == card_files.Content(TABLE, SHA256, 3)
    variant["replace"] = {"99": "31"}
    card = make_card(files=files)
    with pytest.raises(DataError, match=SHA256):
        card_files.read_content(card, card.files[0])
