"""The one hook for a user's own code: an attribute of a Python file that the recipe names.

Running a recipe that names a Python file runs that file. Not here: what the attribute must be (each caller checks).
"""

from __future__ import annotations

import importlib.util
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import RecipeError


def load_attribute(path: Path, name: str) -> Any:
    """Execute the Python file at `path` and return its attribute `name`.

    Raises RecipeError when the file is missing, fails to run, or has no such attribute.
    """
    if not path.is_file():
        raise RecipeError(f"{path}: no such Python file; `file:` is relative to the recipe")
    module_name = f"dpsgd_recipe_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise RecipeError(f"{path}: not a Python file (it must end in .py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RecipeError(f"{path}: running the file failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"{path}: has no attribute {name!r}{hint}")
    return getattr(module, name)
