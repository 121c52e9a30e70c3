"""Where the relative paths of a recipe start: its own folder, or, of a result's recipe, the one that was trained.

A result holds its recipe as it was given, paths too, so that the recipe's hash stays what it is; `result.json` says
which folder they start from, as a path from the result's own. Project and results may so be moved together.

Not here: reading a recipe (`loading.py`), or the files that it names.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.data import Data
from dpsgd_cli.recipe.schema.features import PretrainedFeatures, TorchvisionFeatures
from dpsgd_cli.recipe.schema.method import PythonMethod
from dpsgd_cli.recipe.schema.model import PythonModel

KEY = "recipe_folder"
"""Its key in the `provenance` of `result.json`."""


def data_files(data: Data) -> list[str]:
    """The files of a user's own that hold records and labels, as the recipe names them."""
    npy = data.path is not None and data.path.endswith(".npy")
    given = (data.path, data.test_path, *((data.target, data.test_target) if npy else ()))
    return [name for name in given if name is not None]


def named_files(recipe: Recipe) -> list[str]:
    """Every file or folder that a recipe names."""
    names = data_files(recipe.data)
    features = recipe.data.features
    if isinstance(features, TorchvisionFeatures) and features.weights is not None:
        names.append(features.weights)
    if isinstance(features, PretrainedFeatures):
        names.append(features.result)
    return names + [own.file for own in (recipe.model, recipe.method) if isinstance(own, PythonModel | PythonMethod)]


def recorded(recipe: Recipe, base: Path, directory: Path) -> dict[str, str]:
    """What a result in `directory` says of `base`, the folder that its recipe's paths start from, if it has any."""
    if all(Path(name).is_absolute() for name in named_files(recipe)):
        return {}
    return {KEY: Path(os.path.relpath(base.resolve(), directory.resolve())).as_posix()}


def start_of_paths(file: Path, recipe: Recipe) -> Path:
    """The folder that the paths of `recipe`, read from `file`, start from.

    Where all files that it names lie beside it, they are meant: a result may have been moved with its data.
    """
    here = file.parent
    names = named_files(recipe)
    from_here = _recorded_folder(here / "result.json") if file.name == "recipe.yaml" and names else None
    if from_here is None or all((here / name).exists() for name in names):
        return here
    return here / from_here


def _recorded_folder(record: Path) -> str | None:
    try:
        found = json.loads(record.read_text("utf-8"))["provenance"][KEY]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None
