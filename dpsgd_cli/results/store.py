"""Result directories on disk: written completely or not at all, found by a hash of the recipe; and public copies.

A directory is `<out>/<recipe name>-<8 hex>`. It is assembled under a hidden name beside its final place and then
renamed, so that a reader sees a complete directory or none.

Trials that train together may belong to several results, which are published all or none, whenever the process is
killed. Each is first written completely under a hidden name (`stage_result`, `keep`). When all are there, a record
lists the final name of each hidden folder. Then the folders are renamed and the record is removed. A process that is
killed before the record is complete leaves no result. If it is killed later, the next process that works in the folder
finishes the renaming (`roll_forward`). Several processes may do so at once: the second of two renames finds nothing
left to do.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsgd_cli.common.plugins import IN_MEMORY
from dpsgd_cli.common.whole_files import hidden_name
from dpsgd_cli.errors import DataError, PrivacyError, RunError, UsageError
from dpsgd_cli.results import reading
from dpsgd_cli.results.files import finite, read_json, remove, to_csv, to_json, write_whole
from dpsgd_cli.results.result import NONPRIVATE, ResultContent, Row, public

if TYPE_CHECKING:
    from dpsgd_cli.recipe.loading import LoadedRecipe
    from dpsgd_cli.recipe.schema import Recipe

_AT_ONCE = 16
_RECORD = ".publishing"
Staged = tuple[Path, Path]
FILES = (*reading.WITH_EVERY_RESULT, reading.RESULT)
FAILED = ".failed.json"
"""Ending of the name of a record of a sweep's failed cell, which lies where the cell's result would be."""
AUDIT = "audit.json"
INDEX = ".sweep.json"
"""Ending of the name of a file that lists the cells of a sweep."""


def is_complete(directory: Path) -> bool:
    """Return whether `directory` is a finished result."""
    return (directory / "result.json").is_file()


def read_document(directory: Path) -> Row:
    """Return `result.json` of a finished result. Raises DataError if there is none or it was changed.

    The files beside it are not checked: see `reading.checked`.
    """
    if not is_complete(directory):
        raise DataError(f"{directory}: not a result directory (it has no result.json)")
    return reading.read(directory / reading.RESULT)


def read_whole(directory: Path) -> Row:
    """Return `result.json` of a finished result after checking all its files.

    Raises DataError that names the first file that is missing or was changed.

    Guarantee: what is then read of the result is what its training wrote, except for an edit that is meant to deceive
    (see `reading.py`).
    """
    document = read_document(directory)
    reading.check_files(directory, document)
    return document


def audit_place(out: Path, name: str) -> Path:
    """Return the folder for the audit of the result `name` in `out` (`audit/`); it does not have to exist."""
    return out / "audits" / name


def read_audit(directory: Path) -> Row | None:
    """Return the audit of the result in `directory`; None if there is none, it is damaged, or its hash is another's."""
    there = directory.resolve()
    try:
        found = read_json(audit_place(there.parent, there.name) / AUDIT)
    except DataError:
        return None
    return found if there.name.endswith(f"-{found.get('hash')}") else None


def prepare_place(directory: Path) -> None:
    """Create the parent folder of `directory` and check, before any training, that it can be written.

    Removes the finished, unpublished result of a killed run: what is trained next is another draw of the noise, and
    one draw is charged.
    Raises RunError that names the folder, or whatever is in the result's place.
    """
    if directory.exists() and not is_complete(directory) and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{directory}: is in the way and is no finished result; remove it or choose another --out")
    out = directory.parent
    try:
        out.mkdir(parents=True, exist_ok=True)
        remove(directory)
        with tempfile.TemporaryFile(dir=out) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise RunError(
            f"{out}: results cannot be written here ({error.strerror}); choose another folder with --out"
        ) from error


def stage_result(directory: Path, result: ResultContent) -> Path:
    """Write every file of `result` into a folder with a hidden name beside `directory`, and return the folder.

    Files that may hold a `nonprivate_` value can be read by their owner only. An OSError (a full disk) names the file,
    leaves nothing behind and is passed on. Call `keep` before the folder gets its final name.
    """
    staging = hidden_name(directory)
    made = {name: file.content(result) for name, file in reading.FILES.items() if file.content is not None}
    files = {name: content for name, content in made.items() if content is not None}
    shared = [name for name in files if reading.FILES[name].unreleased == "never"]
    files[reading.RESULT] = to_json(reading.sealed(finite(result.document()), files)).encode()
    try:
        staging.mkdir(parents=True)
        for name, content in files.items():
            mode = 0o666 if name in shared else 0o600
            with open(os.open(staging / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(staging / name)) from error
        raise
    return staging


def keep(stagings: Sequence[Path]) -> None:
    """Force every file in these folders to disk. An OSError names the file that failed.

    All files are forced at once: a disk commits many files in hardly more time than one.
    """
    files = [path for staging in stagings for path in staging.rglob("*") if path.is_file()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(_synchronise, files))


def _synchronise(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _put_in_place(staging: Path, directory: Path) -> None:
    """Rename a staged result. If another finished result is already there, keep that one and remove this one."""
    try:
        staging.rename(directory)
    except OSError:
        # another run of the same recipe finished first: its result is complete and equivalent
        if not is_complete(directory):
            raise
        shutil.rmtree(staging, ignore_errors=True)


def publish(staged: Sequence[Staged]) -> None:
    """Rename each hidden folder to its place. If some are renamed, the others will be, even after a crash."""
    if len(staged) == 1:
        _put_in_place(*staged[0])
        return
    out = staged[0][1].parent
    record = out / f".{secrets.token_hex(8)}{_RECORD}"
    write_whole(record, json.dumps([[hidden.name, directory.name] for hidden, directory in staged]))
    _finish_publishing(record)


def discard(staged: Sequence[Staged]) -> None:
    """Remove staged results that were not published."""
    for hidden, _ in staged:
        shutil.rmtree(hidden, ignore_errors=True)


def roll_forward(out: Path) -> None:
    """Finish in `out` the publishing that killed processes began."""
    for record in sorted(out.glob(f".*{_RECORD}")):
        _finish_publishing(record)


def _finish_publishing(record: Path) -> None:
    try:
        pairs = json.loads(record.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    for hidden, directory in pairs:
        _put_in_place(record.parent / hidden, record.parent / directory)
    record.unlink(missing_ok=True)


def is_hidden(path: Path, folder: Path) -> bool:
    """Return whether `path`, in `folder`, or a folder on the way to it is hidden (unfinished, or not to be listed)."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def missing_cells(folder: Path) -> list[Path]:
    """Return the missing result folders of cells that the indexes of sweeps in `folder` and its subfolders list.

    A cell that failed has a record instead of a result, and is not missing. A sweep that lists only its best run adds
    none.
    """
    found = []
    for index in sorted(folder.rglob(f"*{INDEX}")):
        if is_hidden(index, folder):
            continue
        cells = [index.parent / cell["directory"] for cell in read_json(index)["cells"]]
        found += [cell for cell in cells if not is_complete(cell) and not Path(f"{cell}{FAILED}").is_file()]
    return found


def public_copy(directory: Path, out: Path) -> Path:
    """Write the public copy of the result in `directory` to the new folder `out`, and return it.

    The copy consists of releases charged to the ledgers, the recipe, and declared public data. It leaves out all
    fields, columns and hashes marked `nonprivate_`, checkpoints, event files, audits, and folders: only the last name
    of a path stays. The Python files that the recipe names are copied, because the model cannot be used without them.
    The copy is a result with its own hashes, for `dpsgd account`, `predict` and `report`.

    Raises UsageError if `out` exists, DataError if the result was changed after it was written, and PrivacyError if it
    must not be published: nothing protects its records, or not everything that was learned from them.
    """
    if out.exists():
        raise UsageError(f"{out}: is there already; choose a new folder, in which nothing else lies")
    document = read_whole(directory)
    check_may_be_published(directory, document)
    from dpsgd_cli.recipe.loading import dump_recipe, load_recipe, own_code  # slow; only a copy needs recipes

    loaded = load_recipe(str(directory / "recipe.yaml"))
    if any(name.endswith(IN_MEMORY) for name in own_code(loaded.recipe)):
        raise UsageError(f"{directory}: its model was given in memory; train with model.file, whose code can be copied")
    code = {Path(name).name: (loaded.base / name).read_bytes() for name in own_code(loaded.recipe)}
    files = {name: _public(directory / name) for name in reading.HASHED if (directory / name).is_file()}
    files["recipe.yaml"] = dump_recipe(_without_folders(loaded)).encode()
    beside = directory / "explained.json"
    if beside.is_file():
        code[beside.name] = beside.read_bytes()
    told = reading.sealed(_public_document(document), files, published=True)
    staging = hidden_name(out)
    try:
        staging.mkdir(parents=True)
        for name, content in (files | code | {reading.RESULT: to_json(told).encode()}).items():
            (staging / name).write_bytes(content)
        keep([staging])
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def check_may_be_published(directory: Path, document: Row) -> None:
    privacy = document["privacy"]
    if privacy["accountant"] is None:
        raise PrivacyError(f"{directory}: was trained without privacy, so nothing of it may be published")
    if len(document["trials"]) > 1:
        raise PrivacyError(
            f"{directory}: its statement is of one trial, and it holds {len(document['trials'])}, with a model each;"
            " train what is to be published with repeats=1"
        )
    if document["provenance"].get("seed") is not None:
        raise PrivacyError(
            f"{directory}: its seed is in its recipe, and who knows the seed can take the noise away; train without"
            " `seed` what is to be published"
        )
    if privacy.get("uncovered_steps"):
        raise PrivacyError(
            f"{directory}: its statement does not cover {'; '.join(privacy['uncovered_steps'])}: the model holds what"
            " such a step kept of the records; scale by public bounds, or pay for the step (`epsilon:`)"
        )


def _public_document(document: Row) -> Row:
    """Return `result.json` without marked fields. The marked fields that a reader requires are empty."""
    from dpsgd_cli.recipe.loading import RECIPE_FOLDER

    kept: Row = public(document)
    origin = {name: value for name, value in kept["provenance"].items() if name != RECIPE_FOLDER}
    for kind in ("data_sha256", "code_sha256"):
        origin[kind] = {Path(name).name: found for name, found in origin.get(kind, {}).items()}
    return kept | {"provenance": origin, f"{NONPRIVATE}warnings": [], f"{NONPRIVATE}files": {}}


def _public(path: Path) -> bytes:
    """Return the content of a file, of a table without marked columns. Raises ValueError for another marked file."""
    if reading.FILES[path.name].unreleased != "always":
        return path.read_bytes()
    if path.suffix != ".csv":
        raise ValueError(f"{path.name} holds values that were not released, and is no table of marked columns")
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{k: cell for k, cell in row.items() if not k.startswith(NONPRIVATE)} for row in csv.DictReader(file)]
    return to_csv(rows).encode()


def _without_folders(loaded: LoadedRecipe) -> Recipe:
    """Return the recipe with the last name of every path, so that it reveals nothing about the computer."""
    from dpsgd_cli.recipe.loading import named_files, resolved

    folders = {name: Path(name).name for name in named_files(loaded.recipe)}

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return folders.get(value, value) if isinstance(value, str) else value

    return type(loaded.recipe).model_validate(changed(resolved(loaded.recipe)))
