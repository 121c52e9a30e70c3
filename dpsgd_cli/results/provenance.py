"""Where a result comes from: versions, device, seed and the SHA-256 of every file; and whether those files changed.

Not here: what the result is (`training/assemble.py`).
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from pathlib import Path

import torch

import dpsgd_cli
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.engine.settings import PythonModel
from dpsgd_cli.errors import RunError
from dpsgd_cli.noise.settings import noise_source
from dpsgd_cli.recipe import loading
from dpsgd_cli.recipe.loading import RECIPE_FOLDER, LoadedRecipe, named_files, plain
from dpsgd_cli.results.result import Row


def hashes(loaded: LoadedRecipe, sha256: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The hashes of what anybody can fetch, and those of the user's own files, or of those that a card of theirs names.

    The hash of a user's own file is a function of every record, without noise: who knows all others can try out
    candidates for the last.
    """
    data = loaded.recipe.data
    own = data.files if data.card_file is None else [name for name in sha256 if name != "features"]
    return (
        {name: found for name, found in sha256.items() if name not in own},
        {name: found for name, found in sha256.items() if name in own},
    )


def provenance(loaded: LoadedRecipe, data_sha256: dict[str, str], device: str) -> Row:
    """What `result.json` says under that name of where a result comes from; `data_sha256` is of public files."""
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
    """What a result in `directory` says of the folder that its recipe's paths start from, if it has any."""
    if all(Path(name).is_absolute() for name in named_files(loaded.recipe)):
        return {}
    return {RECIPE_FOLDER: Path(os.path.relpath(loaded.base.resolve(), directory.resolve())).as_posix()}


def own_code(loaded: LoadedRecipe) -> dict[str, Path]:
    """The Python files that the recipe names, by the name it gives them."""
    return {file: loaded.base / file for file in loading.own_code(loaded.recipe)}


def code_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """SHA-256 of each of `own_code`; what they import is not covered."""
    return {name: sha256(path) for name, path in own_code(loaded).items()}


def weights_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """SHA-256 of the file of `model.weights`, by the name that the recipe gives it; empty without one."""
    return {name: sha256(loaded.base / name) for name in loading.own_weights(loaded.recipe)}


def model_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """SHA-256 of all files that a model of the user's own is made of; empty for built-in models."""
    model = loaded.recipe.model
    code = {model.file: sha256(loaded.base / model.file)} if isinstance(model, PythonModel) else {}
    return code | weights_sha256(loaded)


def card_sha256(loaded: LoadedRecipe) -> dict[str, str]:
    """SHA-256 of the card of the user's own that the recipe names, if it does and it is there."""
    name = loaded.recipe.data.card_file
    return {} if name is None or not (loaded.base / name).is_file() else {name: sha256(loaded.base / name)}


def check_unchanged(document: Row, loaded: LoadedRecipe, directory: Path) -> list[str]:
    """See that the files the recipe names are those that the result in `directory` was made from.

    Returns the names of files that are no longer there, which cannot be compared. Raises RunError naming the
    files that differ: the recipe is the same, and yet this is not its result.
    """
    data = loaded.recipe.data
    named = [*data.files, *([] if data.card_file is None else [data.card_file])]
    files = {name: loaded.base / name for name in [*named, *loading.own_weights(loaded.recipe)]} | own_code(loaded)
    kinds = ("data_sha256", "nonprivate_data_sha256", "code_sha256", "weights_sha256")
    made_from = {name: found for kind in kinds for name, found in document["provenance"].get(kind, {}).items()}
    here = [name for name, path in files.items() if path.is_file()]
    changed = [name for name in here if name in made_from and sha256(files[name]) != made_from[name]]
    if changed:
        raise RunError(
            f"{directory}: this result was made from another content of {' and '.join(changed)};"
            " remove the directory to train again, or choose another place with --out"
        )
    return [name for name in files if name not in here]


@functools.cache
def _git_commit() -> str | None:
    """The commit of the checkout that the package runs from; None when installed."""
    root = Path(dpsgd_cli.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
