"""Loading of a user's own code: an attribute of a Python file that the recipe names.

A Python file runs with all rights of the user, so a file that came with another person's recipe or result does not run
before this user trusts it. Trust is in a content, by its SHA-256. To train is to trust: files that `train`, `sweep`,
`compare` and `audit` run are remembered in the user's cache folder. Everything else runs remembered files only, or
inside `trusting()` (`--trust-code`, `trust_code=True`) any file, which is then remembered, too. Imports of a file are
not covered.

A model that is given in memory (`library.py`) stands for a file while `standing_for` is open; it is trusted, as its
code runs already. Callers check the attribute. `named` imports the package's own code that settings name, so that these
need no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsgd_cli.common.package_files import cache_folder
from dpsgd_cli.common.text_format import similar
from dpsgd_cli.errors import RecipeError, UsageError

Logger = Callable[[str], None]
_trusting: list[Logger | None] = []
_FOLDER = "trusted-code"
OWN_FILES = "dpsgd_recipe_"
"""How the names of modules of files that a recipe names begin."""
IN_MEMORY = " (in memory)"
"""How the name ends that a recipe has for something in memory; no file has it."""


@dataclass(frozen=True)
class InMemory:
    """An object in place of a file that a recipe names, and the SHA-256 of its content."""

    held: Any
    sha256: str


_standing: ContextVar[Mapping[str, InMemory]] = ContextVar("standing", default={})  # noqa: B039, never changed in place


@contextlib.contextmanager
def standing_for(files: Mapping[str, InMemory]) -> Iterator[None]:
    """Let what is in memory stand for files by their names, in this thread, until the block ends."""
    token = _standing.set({**_standing.get(), **files})
    try:
        yield
    finally:
        _standing.reset(token)


def in_memory(path: Path) -> InMemory | None:
    """Return what stands for the file `path`; None if it is a file."""
    return _standing.get().get(path.name)


def content_of(things: Iterable[Any]) -> str:
    """Return the SHA-256 of numbers, texts and the sources of functions and classes, and of all such that these name.

    Installed packages are not covered, nor are other values of globals and closures.
    """
    texts: dict[Any, str] = {}
    left = [*things]
    while left:
        one = left.pop()
        if isinstance(one, bool | int | float | str):
            texts[type(one), one] = repr(one)
        if not isinstance(one, type | types.FunctionType) or one in texts or _is_installed(one):
            continue
        codes = [] if isinstance(one, type) else [one.__code__]
        for code in codes:  # which grows by the functions inside of it
            codes += [inner for inner in code.co_consts if inspect.iscode(inner)]
        if isinstance(one, type):
            left += [*one.__bases__, *vars(one).values()]
        else:
            named = {name for code in codes for name in code.co_names if not name.startswith("__")}
            used = [one.__globals__.get(name) for name in named]
            left += used + [vars(held).get(name) for held in used if inspect.ismodule(held) for name in named]
            left += inspect.getclosurevars(one).nonlocals.values()
        try:
            texts[one] = inspect.getsource(one)
        except (OSError, TypeError):  # typed at a prompt
            texts[one] = str([(code.co_code, [c for c in code.co_consts if not inspect.iscode(c)]) for code in codes])
    return hashlib.sha256("\0".join(sorted(texts.values())).encode()).hexdigest()


def _is_installed(one: Any) -> bool:
    root = one.__module__.partition(".")[0]
    file = getattr(sys.modules.get(one.__module__), "__file__", None) or ""
    return root in sys.stdlib_module_names - {"__main__"} or root == "dpsgd_cli" or "site-packages" in file


@contextlib.contextmanager
def trusting(say: Logger | None = None, really: bool = True) -> Iterator[None]:
    """Allow any Python file that a recipe names to run inside the block, and remember each as trusted.

    `say` receives a line for each file that was not trusted before. If not `really`, the block changes nothing.
    """
    if not really:
        yield
        return
    _trusting.append(say)
    try:
        yield
    finally:
        _trusting.pop()


def _check_trusted(path: Path, code: bytes) -> None:
    """Raise UsageError unless this content of a file is trusted. Inside `trusting()`, remember it as trusted."""
    digest = hashlib.sha256(code).hexdigest()
    mark = cache_folder() / _FOLDER / digest
    if mark.is_file():
        return
    if not _trusting:
        raise UsageError(
            f"{path}: this Python file would run with all your rights, and you have not trained with this content of"
            f" it before\nSHA-256 {digest}\nread it; if you trust it, give --trust-code (in Python: trust_code=True),"
            " which is remembered, so once is enough"
        )
    say = _trusting[-1]
    if say is not None:
        say(f"{path}: trusted from now on (SHA-256 {digest})")
    with contextlib.suppress(OSError):
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch(mode=0o600)


def named(name: str) -> Any:
    """Return the attribute `name` of `module`, given as `module:name`; import the module."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def load_attribute(path: Path, name: str) -> Any:
    """Execute the Python file at `path` and return its attribute `name`, or what stands for the file in memory.

    The content that runs is the content that was hashed, never a compiled file. Raises UsageError if it is not trusted,
    and RecipeError if the file is missing, fails to run, or has no such attribute.
    """
    if (given := in_memory(path)) is not None:
        return given.held
    if not path.is_file():
        raise RecipeError(f"{path}: no such Python file; `file:` is relative to the recipe")
    module_name = f"{OWN_FILES}{path.stem}_{abs(hash(str(path.resolve()))):x}"
    if path.suffix != ".py":
        raise RecipeError(f"{path}: not a Python file (it must end in .py)")
    try:
        code = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    _check_trusted(path, code)
    module = types.ModuleType(module_name)
    module.__file__ = str(path.absolute())
    sys.modules[module_name] = module
    try:
        exec(compile(code, str(path), "exec"), module.__dict__)
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
    """Return why `function` cannot be called with the values of `given` in order and `further` as keywords.

    Return None if it can, or if it has no signature. `name` is its name in the message.
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
