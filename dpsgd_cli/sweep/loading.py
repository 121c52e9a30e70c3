"""Reading and validation of sweep files, with every problem reported at its line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from pydantic import ValidationError

from dpsgd_cli.common.text_format import any_of, similar
from dpsgd_cli.common.yaml_tree import Node, Path, Problem, SourceLocation, read_tree, undotted
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe.expected import shown
from dpsgd_cli.recipe.loading import find_recipe, read_text, shipped_recipes
from dpsgd_cli.recipe.overrides import apply_overrides
from dpsgd_cli.sweep.schema import ExponentialChoice, RandomStopping, Sweep

# Keys below these blocks are recipe keys, which contain dots.
_BLOCKS = ("grid", "zip")
_OWN = ("recipes", "zip", "grid", "list", "random", "select", "seeds", "most_trials", "resources")
_IS_A_RECIPE = "this is a recipe, not a sweep; use `dpsgd train {}`"


@dataclass(frozen=True)
class LoadedSweep:
    """A valid sweep, its tree (which has each value's line), its folder, and the overrides for every recipe."""

    sweep: Sweep
    tree: Node
    base: FilePath
    source: str
    overrides: tuple[str, ...]


def load_sweep(source: str, overrides: Sequence[str] = ()) -> LoadedSweep:
    """Read the sweep file, or the shipped sweep, `source`.

    `KEY=VALUE` whose key begins with a block of the sweep (`grid.method.batch_size=[1, 2]`, `random.samples=3`)
    changes the sweep; any other changes every recipe. Raises RecipeError with every problem.
    """
    if source in shipped_recipes() and not FilePath(source).is_file():
        raise RecipeError(f"{source}: {_IS_A_RECIPE.format(source)}")
    path = find_recipe(source, shipped_recipes(sweeps=True))
    tree, problems = read_tree(read_text(path, source), SourceLocation(source, 1))
    if tree is None:
        raise RecipeError([str(problem) for problem in problems])
    if not isinstance(tree.value, dict):
        raise RecipeError(
            f"{source}: not a sweep: it names no recipes; `dpsgd sweep sweeps/ci --dry-run` shows one that is shipped"
        )
    if tree.child("recipes") is None and tree.child("model") is not None:
        raise RecipeError(f"{source}: {_IS_A_RECIPE.format(source)}")
    mine = [text for text in overrides if text.split("=")[0].split(".")[0] in _OWN]
    problems += _override(tree, mine)
    sweep, wrong = _validate(tree)
    problems += wrong
    if sweep is None or problems:
        raise RecipeError(in_order(problems))
    return LoadedSweep(sweep, tree, path.parent, source, tuple(text for text in overrides if text not in mine))


def in_order(problems: Sequence[Problem]) -> list[str]:
    """Return the problems as text, ordered by line, each once, with the number of cells that have it."""
    ordered = sorted(problems, key=lambda problem: (problem.place.line is None, problem.place.line or 0))
    counts: dict[str, int] = {}
    for problem in ordered:
        counts[str(problem)] = counts.get(str(problem), 0) + 1
    return [text if count == 1 else f"{text} (in {count} cells)" for text, count in counts.items()]


def _override(tree: Node, texts: Sequence[str]) -> list[Problem]:
    """Apply overrides to the sweep itself, in place; `grid.a.b=[1]` sets the key `a.b` of the grid."""
    problems = []
    for text in texts:
        block, dot, rest = text.partition(".")
        if block in _BLOCKS and dot:
            key = rest.removesuffix(undotted(rest)[1]) or rest.partition("=")[0]
            new, wrong = read_tree(rest.removeprefix(key).removeprefix("="), SourceLocation(f"override {text}"))
            problems += wrong
            if new is not None:
                section = tree.value.setdefault(block, Node({}, new.place))
                section.value[key] = new
        else:
            problems += apply_overrides(tree, [text])
    return problems


def _validate(tree: Node) -> tuple[Sweep | None, list[Problem]]:
    problems = [problem for block in _BLOCKS for problem in _bad_keys(tree.child(block), (block,))]
    try:
        sweep = Sweep.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        return None, problems + [found for detail in error.errors(include_url=False) for found in _told(tree, detail)]
    return sweep, problems


def _bad_keys(block: Node | None, path: Path) -> list[Problem]:
    keys = block.value if block is not None and isinstance(block.value, dict) else {}
    return [
        Problem(node.place, (*path, key), "not a recipe key; write for example method.batch_size")
        for key, node in keys.items()
        if undotted(key)[1] or not key
    ]


def _told(tree: Node, detail: object) -> list[Problem]:
    """Return the problems of one of pydantic's reports, in the user's words, at their lines."""
    assert isinstance(detail, dict)
    path: Path = ()
    here: Node | None = tree
    for part in detail["loc"]:
        child = here.child(part) if here is not None else None
        # a part that is not a key of the file is pydantic's label of a union's member, unless the key is missing
        if child is not None or (detail["type"] == "missing" and part == detail["loc"][-1]):
            path, here = (*path, part), child
    place = tree.nearest(path).place
    if detail["type"] == "extra_forbidden":
        meant = similar(str(path[-1]), [field.alias or name for name, field in Sweep.model_fields.items()])
        return [Problem(place, path, f"unknown key{f'; did you mean {meant}?' if meant else ''}")]
    if detail["type"] in ("union_tag_not_found", "union_tag_invalid"):
        return [_kind_problem(here, place, path)]
    if detail["type"] == "missing":
        return [Problem(place, path, "missing")]
    if detail["type"] == "value_error":
        return [_at(tree, path, line) for line in str(detail["ctx"]["error"]).splitlines()]
    return [Problem(place, path, detail["msg"][:1].lower() + detail["msg"][1:])]


def _kind_problem(section: Node | None, place: SourceLocation, path: Path) -> Problem:
    """Return the problem with the kind of `select`, the only section that has several kinds."""
    kinds = [str(section.model_fields["kind"].default) for section in (RandomStopping, ExponentialChoice)]
    given = section.child("kind") if section is not None else None
    if given is None:
        return Problem(place, (*path, "kind"), f"missing; give {any_of(kinds)}")
    meant = similar(str(given.value), kinds)
    advice = f"; did you mean {meant}?" if meant else ""
    return Problem(given.place, (*path, "kind"), f"must be {any_of(kinds)}, got {shown(given.plain())}{advice}")


def _at(tree: Node, path: Path, line: str) -> Problem:
    """Return a validator's message as a problem at the key that it begins with; keys of a block keep their dots."""
    name, colon, rest = line.partition(": ")
    block, _, inner = name.partition(".")
    parts: list[Path] = [
        (*path, block, inner),
        (*path, block, int(inner) if inner.isdecimal() else inner),
        (*path, name),
    ]
    for found in parts if colon else []:
        node = tree.nearest(found)
        if node is not tree.nearest(found[:-1]):
            return Problem(node.place, tuple(part for key in found for part in str(key).split(".")), rest)
    return Problem(tree.nearest(path).place, path, line)
