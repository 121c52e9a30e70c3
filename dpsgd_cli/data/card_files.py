"""The files of a card: where they lie, the check of their content, and their download.

A download is resumed if cut off, checked before use, and moved into place only when complete. It is written to
`<file>.<address hash>.part` beside its target, so that a cut connection, a killed process or another mirror never mixes
two sources. It is renamed only after its content has the hash of the card.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import http.client
import os
import ssl
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import certifi

from dpsgd_cli import __version__
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.terminal import for_bars
from dpsgd_cli.data.cards import Archive, Card, File
from dpsgd_cli.errors import DataError

BLOCK = 1 << 16
FRUITLESS_ATTEMPTS = 4
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Content:
    """The uncompressed bytes of one file, their SHA-256 and the number of usable records in them."""

    data: bytes
    sha256: str
    records: int


def folder() -> Path:
    """Return the folder of all data sets: $DPSGD_DATA, else one in this user's cache directory."""
    given = os.environ.get("DPSGD_DATA")
    return Path(given).expanduser() if given else cache_folder() / "data"


def locate(card: Card, file: File) -> Path | None:
    """Return the path of the file on disk, plain or gzip-compressed; None if it is missing."""
    plain = folder() / card.folder / file.name
    return next((path for path in (plain, plain.with_name(f"{file.name}.gz")) if path.is_file()), None)


def records(card: Card, file: File) -> int:
    """Return the number of records in `file` by the card, or by the variant that has the size of the file on disk."""
    path = locate(card, file) if file.variants else None
    size = path.stat().st_size if path is not None else None
    return card.records(file, next((n for n, variant in enumerate(file.variants, 1) if variant.bytes == size), 0))


def read_content(card: Card, file: File) -> Content:
    """Read `file`, uncompressed, and check its hash.

    Raises DataError naming the path and the remedy if the file is missing or damaged, or its content is not the card's.
    """
    path = locate(card, file)
    if path is None:
        raise DataError(
            f"data set {card.name}: {folder() / card.folder / file.name} (or .gz) is missing;"
            f" run `dpsgd data fetch {card.name}`, or set DPSGD_DATA to the folder that holds {card.folder}/"
        )
    try:
        return identify(file, path)
    except DataError as error:
        raise DataError(
            f"data set {card.name}: {path} does not hold what its card says\n{error}\n"
            f"run `dpsgd data fetch {card.name}` to replace it"
        ) from None


def identify(file: File, path: Path) -> Content:
    """Return the content of `path` as that of `file`, with a known variant corrected. Raises DataError on other hashes.

    The hash is computed piece by piece first, so that a file of other content never fills the memory.
    """
    found, size = _hash_unpacked(path, file.most_bytes)
    variant = next((variant for variant in file.variants if variant.sha256 == found), None)
    if variant is None and found != file.sha256:
        raise DataError(f"expected SHA-256 {file.sha256}\nfound SHA-256    {found} ({size} bytes, uncompressed)")
    with _unpacked(path) as stream:
        data = stream.read(size)
    if variant is not None and variant.replace:
        for old, new in variant.replace.items():
            data = data.replace(old.encode(), new.encode())
        found, variant = hashlib.sha256(data).hexdigest(), None
        if found != file.sha256:
            raise DataError(f"a variant that its replacements do not put right: expected SHA-256 {file.sha256}")
    return Content(data, found, file.records if variant is None else variant.records)


def _hash_unpacked(path: Path, most: int) -> tuple[str, int]:
    """Return the SHA-256 and the number of the uncompressed bytes of `path`, in constant memory.

    Raises DataError if the file is damaged, or unpacks to more than `most` bytes.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with _unpacked(path) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                size += len(block)
                if size > most:
                    raise DataError(f"holds more than the {most} bytes, uncompressed, that its card allows")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"damaged gzip data ({error})") from None
    return digest.hexdigest(), size


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for its bytes, through gzip if they are compressed."""
    with path.open("rb") as raw:
        is_compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.GzipFile(fileobj=raw) if is_compressed else contextlib.nullcontext(raw) as stream:
            yield cast(BinaryIO, stream)


class ConnectionCut(Exception):
    """The network failed in a way that another attempt may fix."""


class AddressFailed(Exception):
    """This address does not serve the file; another one may."""


@dataclass(frozen=True)
class Manner:
    """Settings of a download: `progress` shows a bar (on a terminal only); `pause` and `timeout` are in seconds.

    After n attempts in a row without progress, the wait before the next one is `pause` times 2^n.
    """

    progress: bool = True
    pause: float = 1.0
    timeout: float = 60.0


def fetch(card: Card, manner: Manner = Manner()) -> list[Path]:
    """Bring every file of `card` into the data folder with the right content, and return the paths that were written.

    Files with the right content are left alone; wrong ones are replaced once their replacement has been checked. Raises
    DataError with every address tried and the reason of its failure.
    """
    wanted = [file for file in card.files if not is_right(card, file)] if card.reader.kind != "bundled" else []
    written = []
    for file in wanted:
        if not file.member:
            target = folder() / card.folder / file.name
            download(file.urls, target, functools.partial(identify, file), manner)
            written.append(_settle(target))
    members = [file for file in wanted if file.member]
    if members and card.archive is not None:
        written += _fetch_archive(card, card.archive, members, manner)
    return written


def is_right(card: Card, file: File) -> bool:
    """Return True if the file is in the data folder and has the content that the card states."""
    try:
        read_content(card, file)
    except DataError:
        return False
    return True


def download(urls: Sequence[str], target: Path, accept: Callable[[Path], object], manner: Manner) -> None:
    """Download to `target` from the first address whose content `accept` does not refuse with DataError.

    Raises DataError with the reason of each address if all fail.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in urls:
        part = target.with_name(f"{target.name}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part")
        try:
            _download_checked(url, part, accept, manner)
        except AddressFailed as error:
            reasons.append(f"{url}: {error}")
            continue
        os.replace(part, target)
        return
    raise DataError(
        f"cannot download {target.name}:\n"
        + "\n".join(reasons)
        + f"\ncheck the connection and run the same command again, or put the file at {target} yourself"
    )


def _download_checked(url: str, part: Path, accept: Callable[[Path], object], manner: Manner) -> None:
    """Download from one address, continuing a partial file. If that gives wrong content, start over once."""
    leftover = part.exists()
    while True:
        _download_whole(url, part, manner)
        try:
            accept(part)
            return
        except DataError as error:
            part.unlink()
            if not leftover:
                raise AddressFailed(f"sends something else; {error}") from None
            leftover = False


def _download_whole(url: str, part: Path, manner: Manner) -> None:
    """Repeat attempts, each continuing where the last was cut. Raises AddressFailed after several without progress."""
    fruitless = 0
    while True:
        before = _size(part)
        try:
            return _attempt(url, part, manner)
        except ConnectionCut as error:
            fruitless = 0 if _size(part) > before else fruitless + 1
            if fruitless >= FRUITLESS_ATTEMPTS:
                raise AddressFailed(f"{error} ({fruitless} times without progress)") from None
        time.sleep(manner.pause * 2**fruitless)


def _attempt(url: str, part: Path, manner: Manner) -> None:
    """Make one request. Raises ConnectionCut if the server has not sent everything."""
    from tqdm import tqdm

    have = _size(part)
    with _open(url, have, manner) as response:
        if response.status == 416:
            return
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdigit() else None
        name = part.name.split(".part")[0].rsplit(".", 1)[0]
        shown = None if manner.progress else True
        with (
            part.open("ab" if have else "wb") as out,
            tqdm(
                total=total, initial=have, unit="B", unit_scale=True, desc=name, file=for_bars(), disable=shown
            ) as bar,
        ):
            while block := _next(response):
                out.write(block)
                bar.update(len(block))
    if total is not None and _size(part) < total:
        raise ConnectionCut(f"cut off after {_size(part)} of {total} bytes")


def _open(url: str, have: int, manner: Manner) -> http.client.HTTPResponse:
    """Request the bytes from `have` on. A 416 answer (nothing is left) is returned; other errors are raised.

    Only http and https are opened. Redirections to ftp, which urllib would follow, are refused too.
    """
    _refuse_scheme(url)
    headers = {"User-Agent": f"dpsgd/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        # some builds of Python have no authorities of their own
        trust = ssl.create_default_context(cafile=certifi.where())
        request = urllib.request.Request(url, headers=headers)
        web = urllib.request.build_opener(urllib.request.HTTPSHandler(context=trust), _WebOnly())
        answer: http.client.HTTPResponse = web.open(request, timeout=manner.timeout)
        return answer
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:
            return error  # type: ignore[return-value]
        reason = f"the server answers {error.code} {error.reason}"
        raise (ConnectionCut if error.code in RETRIED_STATUS else AddressFailed)(reason) from None
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionCut(str(getattr(error, "reason", error)) or type(error).__name__) from None


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """A handler that follows redirections to http and https only."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _refuse_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refuse_scheme(url: str) -> None:
    """Raise AddressFailed unless `url` is http or https; a file:// address would read this computer's files."""
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise AddressFailed("is no http or https address")


def _next(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionCut(str(error) or type(error).__name__) from None


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _settle(target: Path) -> Path:
    """Give the file the ending of its content (.gz or none), and delete its other form, which might be read instead."""
    compressed = target.with_name(f"{target.name}.gz")
    with target.open("rb") as start:
        is_compressed = start.read(2) == b"\x1f\x8b"
    if is_compressed:
        os.replace(target, compressed)
        return compressed
    compressed.unlink(missing_ok=True)
    return target


def _fetch_archive(card: Card, archive: Archive, members: Sequence[File], manner: Manner) -> list[Path]:
    """Download the archive, extract and check the wanted members, and delete the archive."""
    target = folder() / card.folder / archive.name
    download(archive.urls, target, functools.partial(_accept_archive, archive), manner)
    written = []
    for file in members:
        part = target.with_name(f"{file.name}.part")
        try:
            _extract(target, file.member or file.name, part, file.most_bytes)
            identify(file, part)
        except DataError as error:
            part.unlink(missing_ok=True)
            raise DataError(f"{archive.name} holds another {file.name} than its card says\n{error}") from None
        os.replace(part, target.with_name(file.name))
        written.append(_settle(target.with_name(file.name)))
    target.unlink()
    return written


def _accept_archive(archive: Archive, path: Path) -> None:
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != archive.sha256:
        raise DataError(f"{archive.name} is not what its card says: expected SHA-256 {archive.sha256}, found {found}")
    if not (zipfile.is_zipfile(path) or tarfile.is_tarfile(path)):
        raise DataError(f"{archive.name} is neither a zip nor a tar file (SHA-256 {found})")


def _extract(path: Path, member: str, out: Path, most: int) -> None:
    """Copy one file of a zip or tar archive to `out`. The archive cannot choose any path that is written.

    Raises DataError if there is no such file, or if it has more than `most` bytes; no more than that is written.
    """
    with zipfile.ZipFile(path) if zipfile.is_zipfile(path) else tarfile.open(path) as archive:
        try:
            source = archive.open(member) if isinstance(archive, zipfile.ZipFile) else archive.extractfile(member)
        except KeyError:
            source = None
        if source is None:
            raise DataError(f"{path} holds no file {member!r}")
        with source, out.open("wb") as copy:
            left = most
            while block := source.read(BLOCK):
                left -= len(block)
                if left < 0:
                    raise DataError(f"{member!r} holds more than the {most} bytes that its card allows")
                copy.write(block)
