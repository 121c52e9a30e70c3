"""Public copy of a result: a folder with everything that may be published, and nothing else.

The copy consists of releases charged to the ledgers, the recipe, and declared public data. It leaves out all fields,
columns and hashes marked `nonprivate_`, checkpoints, event files, audits, and folders: only the last name of a path
stays. The Python files that the recipe names are copied, because the model cannot be used without them. The copy is a
result with its own hashes, for `dpsgd account`, `predict` and `report`. The command adds the report's pages to it.
"""

from __future__ import annotations

import csv
import shutil
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import PrivacyError, UsageError
from dpsgd_cli.recipe.loading import (
    RECIPE_FOLDER,
    LoadedRecipe,
    dump_recipe,
    load_recipe,
    named_files,
    own_code,
    resolved,
)
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import reading, store
from dpsgd_cli.results.files import hidden_name, to_csv, to_json
from dpsgd_cli.results.result import NONPRIVATE, Row, public


def publish(directory: Path, out: Path) -> Path:
    """Write the public copy of the result in `directory` to the new folder `out`, and return it.

    Raises UsageError if `out` exists, DataError if the result was changed after it was written, and PrivacyError if it
    must not be published: nothing protects its records, or not everything that was learned from them.
    """
    if out.exists():
        raise UsageError(f"{out}: is there already; choose a new folder, in which nothing else lies")
    document = store.read_whole(directory)
    _check_may_be_published(directory, document)
    loaded = load_recipe(str(directory / "recipe.yaml"))
    code = {Path(name).name: (loaded.base / name).read_bytes() for name in own_code(loaded.recipe)}
    files = {name: _public(directory / name) for name in reading.HASHED if (directory / name).is_file()}
    files["recipe.yaml"] = dump_recipe(_without_folders(loaded)).encode()
    told = reading.sealed(_public_document(document), files, published=True)
    staging = hidden_name(out)
    try:
        staging.mkdir(parents=True)
        for name, content in (files | code | {reading.RESULT: to_json(told).encode()}).items():
            (staging / name).write_bytes(content)
        store.keep([staging])
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return out


def _check_may_be_published(directory: Path, document: Row) -> None:
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
    folders = {name: Path(name).name for name in named_files(loaded.recipe)}
    if loaded.recipe.data.cards is not None:
        folders[loaded.recipe.data.cards] = Path(loaded.recipe.data.cards).name

    def changed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: changed(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return folders.get(value, value) if isinstance(value, str) else value

    return Recipe.model_validate(changed(resolved(loaded.recipe)))
