"""The one hook for a user's own code: an attribute of a Python file that the recipe names.

Running a recipe that names a Python file runs that file. Not here: what the attribute must be (each caller checks).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsgd_cli.errors import RecipeError
from dpsgd_cli.wording import similar


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
    except (Exception, SystemExit) as error:
        raise RecipeError(f"{path}: running the file failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        near = similar(name, dir(module))
        hint = f"; did you mean {near}?" if near else ""
        raise RecipeError(f"{path}: has no attribute {name!r}{hint}")
    return getattr(module, name)


def refusal_of_call(
    function: Callable[..., Any], name: str, given: dict[str, Any], further: dict[str, Any]
) -> str | None:
    """Why `function`, which the user calls `name`, cannot be called with the values of `given` in order and `further`
    as keywords; None where it can, or says nothing of what it takes.
    """
    if not callable(function):
        return f"{name} is {type(function).__name__}, not a function"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*given.values(), **further)
    except TypeError as error:
        takes = signature.parameters
        unknown = [key for key in further if key not in takes]
        named = name + str(signature.replace(return_annotation=inspect.Signature.empty))
        if not unknown or any(one.kind is one.VAR_KEYWORD for one in takes.values()):
            return f"{named} is called with {', '.join([*given, *further])}: {error}"
        near = similar(unknown[0], [key for key in takes if key not in further])
        return f"{named} does not take {' and '.join(unknown)}{f'; did you mean {near}?' if near else ''}"
    return None
