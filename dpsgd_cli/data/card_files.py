"""The files of a card: where they lie, the check of their content, and their download.

A file is downloaded to `<file>.part` beside its target, and renamed only after its content has the hash of the card.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import os
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from dpsgd_cli import __version__
from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.terminal import for_bars
from dpsgd_cli.data.cards import Archive, Card, File
from dpsgd_cli.errors import DataError

BLOCK = 1 << 16
TIMEOUT = 60.0
"""Seconds without an answer after which an address is given up."""


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


def fetch(card: Card) -> list[Path]:
    """Bring every file of `card` into the data folder with the right content, and return the paths that were written.

    Files with the right content are left alone; wrong ones are replaced once their replacement has been checked. Raises
    DataError with every address tried and the reason of its failure.
    """
    wanted = [file for file in card.files if not is_right(card, file)] if card.reader.kind != "bundled" else []
    written = []
    for file in wanted:
        if not file.member:
            target = folder() / card.folder / file.name
            download(file.urls, target, functools.partial(identify, file))
            written.append(_settle(target))
    members = [file for file in wanted if file.member]
    if members and card.archive is not None:
        written += _fetch_archive(card, card.archive, members)
    return written


def is_right(card: Card, file: File) -> bool:
    """Return True if the file is in the data folder and has the content that the card states."""
    try:
        read_content(card, file)
    except DataError:
        return False
    return True


def download(urls: Sequence[str], target: Path, accept: Callable[[Path], object]) -> None:
    """Download to `target` from the first address whose content `accept` does not refuse with DataError.

    Raises DataError with the reason of each address if all fail.
    """
    import pooch  # type: ignore[import-untyped]  # takes a while to import
    from requests import RequestException
    from tqdm import tqdm

    target.parent.mkdir(parents=True, exist_ok=True)
    part, reasons = target.with_name(f"{target.name}.part"), []
    headers = {"User-Agent": f"dpsgd/{__version__}", "Accept-Encoding": "identity"}
    for url in urls:
        bar = tqdm(total=1, unit="B", unit_scale=True, desc=target.name, file=for_bars(), disable=None)
        try:
            pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT, headers=headers)(url, str(part), None)
            accept(part)
            os.replace(part, target)
            return
        except (RequestException, DataError) as error:
            reasons.append(f"{url}: {error}")
        finally:
            bar.close()
            part.unlink(missing_ok=True)
    raise DataError(
        f"cannot download {target.name}:\n"
        + "\n".join(reasons)
        + f"\ncheck the connection and run the same command again, or put the file at {target} yourself"
    )


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


def _fetch_archive(card: Card, archive: Archive, members: Sequence[File]) -> list[Path]:
    """Download the archive, extract and check the wanted members, and delete the archive."""
    import pooch

    target = folder() / card.folder / archive.name
    download(archive.urls, target, functools.partial(_accept_archive, archive))
    unpack = pooch.Unzip if zipfile.is_zipfile(target) else pooch.Untar
    written = []
    with tempfile.TemporaryDirectory(dir=target.parent) as place:
        for file in members:
            member = file.member or file.name
            with contextlib.suppress(KeyError):  # there is no such file, which the next line finds
                unpack(members=[member], extract_dir=place)(str(target), "download", None)
            if not Path(place, member).is_file():
                raise DataError(f"{archive.name} holds no file {member!r}")
            try:
                identify(file, Path(place, member))
            except DataError as error:
                raise DataError(f"{archive.name} holds another {file.name} than its card says\n{error}") from None
            os.replace(Path(place, member), target.with_name(file.name))
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
