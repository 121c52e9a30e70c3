"""Origin of a result: versions, device, seed and the SHA-256 of every file; and a check that files are unchanged."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

import dpsgd_cli
from dpsgd_cli.common.package_files import MODEL, files_of
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.data.memory import is_there
from dpsgd_cli.engine.settings import PythonModel
from dpsgd_cli.errors import RunError
from dpsgd_cli.noise.settings import noise_source
from dpsgd_cli.recipe import loading
from dpsgd_cli.recipe.loading import RECIPE_FOLDER, LoadedRecipe, SettledRecipe, named_files, plain
from dpsgd_cli.results.result import Row


def hashes(loaded: LoadedRecipe, sha256: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the hashes of public files, and those of the user's own files or of files that the user's own card names.

    A hash of a user's own file is a function of every record, without noise. Somebody who knows all records but one
    could try candidates for the last.
    """
    data = loaded.recipe.data
    own = data.files if data.card_file is None else [name for name in sha256 if name != "features"]
    return (
        {name: found for name, found in sha256.items() if name not in own},
        {name: found for name, found in sha256.items() if name in own},
    )


def provenance(loaded: SettledRecipe, data_sha256: dict[str, str], device: str) -> Row:
    """Return the `provenance` section of `result.json`. `data_sha256` has the hashes of public files."""
    recipe = loaded.recipe
    return {
        "version": dpsgd_cli.__version__,
        "git": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": device,
        "threads": torch.get_num_threads(),
        "seed": recipe.seed,
        "noise_source": None if recipe.privacy is None else noise_source(recipe.seed),
        "data_sha256": data_sha256,
        "code_sha256": code_sha256(loaded),
        "weights_sha256": weights_sha256(loaded),
        "chosen": {choice.key: {"value": plain(choice.value), "why": choice.why} for choice in loaded.chosen},
    }


def recipe_folder(loaded: LoadedRecipe, directory: Path) -> dict[str, str]:
    """Return the path from `directory` to the folder from which the recipe's relative paths start.

    The result is empty if the recipe names no relative path.
    """
    if all(Path(name).is_absolute() for name in named_files(loaded.recipe)):
        return {}
    return {RECIPE_FOLDER: Path(os.path.relpath(loaded.base.resolve(), directory.resolve())).as_posix()}


def code_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the SHA-256 of each Python file that the recipe names. The modules that they import are not covered."""
    return {name: sha256(path) for name, path in loaded.own_code.items()}


def weights_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the SHA-256 of the file of `model.weights`, or of each file of `model.folder`, by name in the recipe.

    With `privacy.start`, also that of the model that the training starts from.
    """
    return {name: sha256(loaded.base / name) for name in [*_weights(loaded), *_start(loaded)]}


def _start(loaded: LoadedRecipe) -> list[str]:
    privacy = loaded.recipe.privacy
    return [] if privacy is None or privacy.start is None else [f"{privacy.start.rstrip('/')}/{MODEL}"]


def _weights(loaded: LoadedRecipe) -> list[str]:
    names = loading.own_weights(loaded.recipe)
    folders = [name for name in names if (loaded.base / name).is_dir()]
    files = [f"{name.rstrip('/')}/{file}" for name in folders for file in files_of(loaded.base / name)]
    return [*(name for name in names if name not in folders), *files]


def model_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the SHA-256 of all files of a user's own model; empty for built-in models."""
    model = loaded.recipe.model
    code = {model.file: sha256(loaded.base / model.file)} if isinstance(model, PythonModel) else {}
    return code | {name: sha256(loaded.base / name) for name in _weights(loaded)}


def card_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """Return the SHA-256 of the user's own card that the recipe names; empty if there is none."""
    name = loaded.recipe.data.card_file
    return {} if name is None or not (loaded.base / name).is_file() else {name: sha256(loaded.base / name)}


def check_unchanged(document: Row, loaded: LoadedRecipe, directory: Path) -> list[str]:
    """Check that the files that the recipe names are those from which the result in `directory` was made.

    Returns the names of files that no longer exist, or whose hash was not published, which cannot be compared. Raises
    RunError that names changed files: the recipe is the same, but the result is not that of these files.
    """
    data = loaded.recipe.data
    named = [*data.files, *([] if data.card_file is None else [data.card_file])]
    files = {name: loaded.base / name for name in [*named, *_weights(loaded), *_start(loaded)]} | loaded.own_code
    kinds = ("data_sha256", "nonprivate_data_sha256", "code_sha256", "weights_sha256")
    made_from = {name: found for kind in kinds for name, found in document["provenance"].get(kind, {}).items()}
    here = [name for name, path in files.items() if is_there(path)]
    changed = [name for name in here if name in made_from and sha256(files[name]) != made_from[name]]
    if changed:
        raise RunError(
            f"{directory}: this result was made from another content of {' and '.join(changed)};"
            " remove the directory to train again, or choose another place with --out"
        )
    return [name for name in files if name not in here or name not in made_from]


@functools.cache
def _git_commit() -> str | None:
    """Return the commit of the checkout from which the package runs; None if it is installed."""
    root = Path(dpsgd_cli.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
