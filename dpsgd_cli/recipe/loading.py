"""Functions that find a recipe, read it with overrides, write it resolved, and hash its content.

Relative paths start from the recipe's own folder. In a result's copy of a recipe they start from the folder of the
recipe that was trained. The copy keeps the paths as they were written, so that its hash does not change.
`result.json` holds that folder as a path relative to the result, so project and results may be moved together.

YAML with line numbers is in `common/yaml_tree.py`, `KEY=VALUE` in `overrides.py`, validation in `check.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from dpsgd_cli.common.package_files import irregularity, shipped
from dpsgd_cli.common.text_format import similar
from dpsgd_cli.common.yaml_tree import CoreDumper, Node, Problem, SourceLocation, from_plain, read_tree, undotted
from dpsgd_cli.data.step_settings import PretrainedFeatures
from dpsgd_cli.engine.settings import HuggingFaceModel, PythonLoss, PythonModel
from dpsgd_cli.errors import PrivacyError, RecipeError, UsageError
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.overrides import apply_overrides, plain_value
from dpsgd_cli.recipe.schema import Recipe

MOST_BYTES = 1_000_000
SWEEPS = "sweeps/"
RECIPE_FOLDER = "recipe_folder"
"""Key in the `provenance` of `result.json` of the folder that the recipe's paths start from."""
IS_A_SWEEP = "this is a sweep, not a recipe; use `dpsgd sweep {}`"

# The result depends on these at most by the order of floating-point sums, so a run may be resumed with other values
# and is still the same run. `dtype` and `evaluate_every` do change what is written.
NOT_IN_HASH = (
    "description",
    "save_model",
    "privacy.book",
    *("runtime.device", "runtime.compile", "runtime.threads", "runtime.micro_batch"),
    *("runtime.checkpoint_seconds", "runtime.track"),
)


@dataclass(frozen=True)
class AutoChoice:
    """A setting that a recipe left `auto`: its key, its resolved value, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        shown = plain(self.value) if isinstance(self.value, BaseModel) else self.value
        value = json.dumps(shown).replace('"', "")
        return f"{self.key} {value}: {self.why}"


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, the directory that its relative paths start from, a name to show, and the place of each value."""

    recipe: Recipe
    base: Path
    source: str
    tree: Node | None = field(default=None, compare=False, repr=False)

    @property
    def own_code(self) -> dict[str, Path]:
        """Return the Python files that the recipe names, by their names in the recipe."""
        return {file: self.base / file for file in own_code(self.recipe)}

    def with_location(self, message: str) -> str:
        """Return `message` with `file:line` (or the override) in front if it begins with a key, else unchanged."""
        path, rest = undotted(message)
        if self.tree is None or not rest.startswith(": ") or self.tree.child(path[0]) is None:
            return message
        return str(Problem(self.tree.nearest(path).place, path, rest[2:]))

    @contextlib.contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Add the place in the recipe to every PrivacyError and UsageError that the block raises."""
        try:
            yield
        except (PrivacyError, UsageError) as error:
            raise type(error)(self.with_location(str(error))) from error.__cause__


@dataclass(frozen=True)
class SettledRecipe(LoadedRecipe):
    """A recipe without any `auto` setting, which is what is trained. `training/plans.resolve_auto` makes it.

    `chosen`: the settings that were `auto`, with the value and the reason of each.
    """

    chosen: tuple[AutoChoice, ...] = field(default=(), compare=False)


def load_recipe(source: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read the recipe file, or the shipped recipe, `source`; apply `KEY=VALUE` overrides; validate.

    Raises RecipeError with every problem: `file:line: key.path: what is wrong`, or `override KEY=VALUE: ...`.
    """
    path = find_recipe(source)
    tree, problems = read_tree(read_text(path, source), SourceLocation(source, 1))
    if tree is None:
        raise RecipeError([str(problem) for problem in problems])
    if tree.value is None and not problems:
        raise RecipeError(f"{source}: empty; see `dpsgd recipe show quickstart` for an example")
    if tree.child("recipes") is not None and tree.child("model") is None:
        raise RecipeError(f"{source}: {IS_A_SWEEP.format(source)}")
    recipe = _validated(tree, problems, overrides)
    return LoadedRecipe(recipe, start_of_paths(path, recipe), source, tree)


def load_mapping(content: Mapping[str, Any], overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read a recipe that is a dictionary of plain values; relative paths start from the current folder.

    Raises RecipeError with every problem, and for a value that YAML cannot hold (its type is named, not the value).
    """
    tree = from_plain(json.loads(json.dumps(content, default=plain_value)), SourceLocation("the recipe"))
    return LoadedRecipe(_validated(tree, [], overrides), Path(), "the recipe", tree)


def _validated(tree: Node, problems: list[Problem], overrides: Sequence[str]) -> Recipe:
    """Return the recipe of `tree` with overrides applied. Raises RecipeError with its `problems` and all others."""
    problems = [*problems, *apply_overrides(tree, overrides)]
    recipe, wrong = validate(tree, Recipe)
    problems += wrong
    if recipe is None or problems:
        ordered = sorted(problems, key=lambda problem: (problem.place.line is None, problem.place.line or 0))
        raise RecipeError([str(problem) for problem in ordered])
    return recipe


def find_recipe(source: str, shelf: dict[str, Path] | None = None) -> Path:
    """Return the file that `source` names: a path, or one of `shelf` (default: the shipped recipes).

    Raises RecipeError with the nearest names.
    """
    path = Path(source)
    if (why := irregularity(path)) is not None:
        raise RecipeError(f"{source}: {why}")
    if path.is_file():
        return path
    recipes = shipped_recipes() if shelf is None else shelf
    if source in recipes:
        return recipes[source]
    if path.is_dir():
        inside = path / "recipe.yaml"
        raise RecipeError(f"{source}: is a directory; give {inside if inside.is_file() else 'a recipe file in it'}")
    if source in shipped_recipes(sweeps=True) and shelf is None:
        raise RecipeError(f"{source}: {IS_A_SWEEP.format(source)}")
    beside = {str(found) for found in path.parent.glob("*.y*ml")} if path.parent.is_dir() else set()
    bare = source.removesuffix(".yaml").removesuffix(".yml").removeprefix("recipes/")
    without_folder = {recipe.rpartition("/")[2]: recipe for recipe in recipes}
    alike = similar(bare.rpartition("/")[2], list(without_folder), cutoff=0.75)
    meant = bare if bare in recipes else similar(source, [*beside, *recipes]) or without_folder.get(alike or "")
    what, listed = ("recipe", "`dpsgd recipe list` shows them") if shelf is None else ("sweep", f"{', '.join(recipes)}")
    advice = f"did you mean {meant}?" if meant else f"shipped {what}s: {listed}"
    raise RecipeError(f"{source}: no such file, and no shipped {what} of that name; {advice}")


def named_files(recipe: Recipe) -> list[str]:
    """Return every file or folder that a recipe names."""
    names = recipe.data.files
    if recipe.data.card_file is not None:
        names.append(recipe.data.card_file)
    if recipe.data.public is not None and recipe.data.public.path is not None:
        names.append(recipe.data.public.path)
    features = recipe.data.features
    if isinstance(features, PretrainedFeatures):
        names.append(features.result)
    if recipe.privacy is not None:
        names += filter(None, (recipe.privacy.book, recipe.privacy.start))
    return names + own_code(recipe) + own_weights(recipe)


def own_code(recipe: Recipe) -> list[str]:
    """Return every Python file that a recipe names."""
    loss = getattr(recipe.model, "loss", None)
    own = [loss.python] if isinstance(loss, PythonLoss) else []
    return [one.file for one in (recipe.model, recipe.method) if isinstance(one, PythonModel | PythonMethod)] + own


def own_weights(recipe: Recipe) -> list[str]:
    """Return the file or folder of weights that a user's own model starts from; empty if the recipe names none."""
    text = recipe.data.text
    own = [] if text is None or text.folder is None else [text.folder]
    if isinstance(recipe.model, HuggingFaceModel):
        return list(dict.fromkeys([recipe.model.folder, *own]))
    weights = recipe.model.weights if isinstance(recipe.model, PythonModel) else None
    return own if weights is None or weights.file is None else [weights.file, *own]


def start_of_paths(file: Path, recipe: Recipe) -> Path:
    """Return the folder that the paths of `recipe`, read from `file`, start from.

    If the file's own folder has all files that the recipe names, it is that folder: a result may have been moved with
    its data.
    """
    here, names = file.parent, named_files(recipe)
    if file.name != "recipe.yaml" or all((here / name).exists() for name in names):
        return here
    try:
        found = json.loads((here / "result.json").read_text("utf-8"))["provenance"][RECIPE_FOLDER]
    except (OSError, ValueError, KeyError, TypeError):
        return here
    return here / found if isinstance(found, str) else here


def shipped_recipes(sweeps: bool = False) -> dict[str, Path]:
    """Return name -> file of every recipe that ships with the package, or with `sweeps` of every shipped sweep."""
    root = shipped("recipes")
    files = sorted(root.rglob("*.yaml"), key=lambda file: (len(file.relative_to(root).parts), str(file)))
    named = {file.relative_to(root).with_suffix("").as_posix(): file for file in files}
    return {name: file for name, file in named.items() if name.startswith(SWEEPS) == sweeps}


def question(file: Path) -> str:
    """Return the question that a recipe file answers: the first paragraph of its opening comment, or ''."""
    lines = []
    for line in file.read_text("utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        lines.append(text)
    return " ".join(lines)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe as plain data, with defaults, in the schema's order, under the names that YAML uses.

    Optional keys that are not set are left out, so that a later version may add some without changing a hash.
    """
    content: dict[str, Any] = plain(recipe)
    return content


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML; `load_recipe` reads it back to an equal recipe."""
    return yaml.dump(
        resolved(recipe), Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100
    )


def recipe_hash(recipe: Recipe) -> str:
    """Return 8 hex digits of a SHA-256 of everything in the resolved recipe that can change a result."""
    content = _without_nothing(resolved(recipe))
    for key in NOT_IN_HASH:
        *sections, last = key.split(".")
        here = content
        for section in sections:
            here = here.get(section, {})
        here.pop(last, None)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:8]


def _without_nothing(value: Any) -> Any:
    """Return `value` without keys whose value is None, which mean the same as missing keys."""
    if isinstance(value, dict):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    return value


def read_text(path: Path, source: str) -> str:
    """Return the text of a YAML file, called `source` in messages. Raise RecipeError if it is large or not UTF-8."""
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise RecipeError(f"{source}: more than {MOST_BYTES} bytes; a recipe is a small YAML file, is this one?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{source}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def plain(value: Any) -> Any:
    """Return a section, or a value in it, as plain data; optional keys that are not set are left out."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        names = sorted(fields, key=lambda name: name != "kind")
        told = [name for name in names if getattr(value, name) is not None or fields[name].default is not None]
        return {fields[name].alias or name: plain(getattr(value, name)) for name in told}
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value
