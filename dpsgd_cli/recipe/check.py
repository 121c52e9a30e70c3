"""Checks a recipe's tree and reports every problem at its line, in the user's words.

The form (keys, kinds, types, ranges) is compared with the schema here, because pydantic's own reports of unions
cannot be read; the rules that join several values are the schema's validators, which pydantic runs on the tree
after wrong keys and values in it were mended, so that one mistake hides no other and causes no other. (Only the
rules that join sections wait until no section breaks a rule of its own.)

Not here: YAML (`tree.py`), the wording of what is allowed (`expected.py`).
"""

from __future__ import annotations

import json

from pydantic import ValidationError

from dpsgd_cli.recipe import expected
from dpsgd_cli.recipe.expected import Schema, any_of, shown, similar, words
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.tree import Key, Node, Path, Place, Problem, dotted, grow

OTHER_NAMES = {"gpu": "cuda", "bf16": "bfloat16"}
"""What some call a value that goes by another name here."""


def validate(tree: Node) -> tuple[Recipe | None, list[Problem]]:
    """The recipe that `tree` holds, or everything that is wrong with it."""
    mended, problems = check_form(tree)
    try:
        recipe = Recipe.model_validate_json(json.dumps(mended.plain()), strict=True)
    except ValidationError as error:
        return None, problems + _rule_problems(mended, error, bool(problems))
    return (None if problems else recipe), problems


def check_form(tree: Node) -> tuple[Node, list[Problem]]:
    """What is wrong with keys, kinds, types and ranges, and a copy of `tree` with as much of it mended as possible."""
    form = _Form(tree.copy())
    form.check(expected.recipe_schema(), form.root, ())
    return form.root, form.problems


class _Form:
    """One walk along the schema. Mends the tree as it goes; a trial walks a part of a tree and moves no keys."""

    def __init__(self, root: Node, trial: bool = False) -> None:
        self.root = root
        self.trial = trial
        self.problems: list[Problem] = []

    def check(self, schema: Schema, node: Node, path: Path) -> None:
        schema = expected.resolve(schema)
        if "anyOf" in schema:
            self._choice(schema, node, path)
        elif "discriminator" in schema and isinstance(node.value, dict):
            self._kinds(schema, node, path)
        elif schema.get("type") == "object" and isinstance(node.value, dict):
            self._mapping(schema, node, path)
        elif schema.get("type") == "array" and isinstance(node.value, list):
            self._list(schema, node, path)
        elif not expected.fits(schema, node.value):
            self._wrong(schema, node, path)

    def _choice(self, schema: Schema, node: Node, path: Path) -> None:
        options = expected.alternatives(schema)
        if node.value is None and len(options) < len(schema["anyOf"]):
            return
        near = options if len(options) == 1 else _near(options, node)
        if len(near) == 1:
            self.check(near[0], node, path)
        elif all(_trial(option, node, path) for option in options):
            self._wrong(schema, node, path)

    def _kinds(self, schema: Schema, node: Node, path: Path) -> None:
        choices = expected.kinds(schema)
        kind = node.child("kind")
        if kind is None:
            self._report(node.place, (*path, "kind"), f"missing; give {any_of(list(choices))}")
            return
        names: Schema = {"type": "string", "enum": list(choices)}
        if not expected.fits(names, kind.value):
            self._wrong(names, kind, (*path, "kind"), guess=False)
        if expected.fits(names, kind.value):
            self._section(choices[kind.value], node, path, choices)

    def _mapping(self, schema: Schema, node: Node, path: Path) -> None:
        if "properties" in schema:
            self._section(schema, node, path, {})
            return
        inner = schema.get("additionalProperties")
        if isinstance(inner, dict):
            for key, child in node.value.items():
                self.check(inner, child, (*path, key))

    def _section(self, schema: Schema, node: Node, path: Path, choices: dict[str, Schema]) -> None:
        for key in [key for key in node.value if key not in schema["properties"]]:
            self._unknown(schema, node, (*path, key), choices)
        for key in schema.get("required", []):
            if key not in node.value:
                inner = expected.resolve(schema["properties"][key])
                about = f" ({inner['description']})" if "description" in inner else ""
                self._report(node.place, (*path, key), f"missing; give {words(inner)}{about}")
                value = expected.placeholder(inner)
                if value is not None:
                    node.value[key] = grow(value, node.place)
        for key, child in list(node.value.items()):
            self.check(schema["properties"][key], child, (*path, key))

    def _list(self, schema: Schema, node: Node, path: Path) -> None:
        fixed = schema.get("prefixItems")
        if fixed is not None and len(node.value) != len(fixed):
            self._wrong(schema, node, path)
            return
        for index, item in enumerate(node.value):
            self.check(fixed[index] if fixed is not None else schema.get("items", {}), item, (*path, index))

    def _unknown(self, schema: Schema, node: Node, path: Path, choices: dict[str, Schema]) -> None:
        """Report a key that has no place here; move it to where it was probably meant to be, or drop it."""
        key = str(path[-1])
        child = node.value.pop(key)
        owners = [name for name, option in choices.items() if key in option["properties"]]
        if owners:
            kind = node.value["kind"]
            text = f"not a key of kind: {kind.value} (but of {any_of(owners)}); {_remedy(path[:-1], kind, child)}"
            self._report(child.place, path, text)
            return
        target = None if self.trial else self._meant(path, list(schema["properties"]))
        if target is None:
            self._report(child.place, path, f"unknown key; the keys here are {', '.join(schema['properties'])}")
            return
        self._report(child.place, path, f"unknown key; did you mean {dotted(target)}?")
        home = node if target[:-1] == path[:-1] else _find(self.root, target[:-1])
        if home is not None and isinstance(home.value, dict):
            home.value.setdefault(target[-1], child)

    def _meant(self, path: Path, allowed: list[str]) -> Path | None:
        """Where an unknown key belongs: the same name elsewhere, else a similar name here, else one elsewhere."""
        key = str(path[-1])
        others = set(expected.key_paths(expected.recipe_schema(), self.root)) - {path}
        everywhere = sorted(others, key=lambda place: (len(place), place))
        exact = [place for place in everywhere if place[-1] == key]
        here = similar(key, allowed)
        if exact or here is not None:
            return exact[0] if exact else (*path[:-1], str(here))
        name = similar(key, [str(place[-1]) for place in everywhere], cutoff=0.8)
        return next((place for place in everywhere if place[-1] == name), None)

    def _wrong(self, schema: Schema, node: Node, path: Path, guess: bool = True) -> None:
        """Report a value that `schema` does not allow; put the likely one in its place, or any if `guess`."""
        options = expected.alternatives(schema)
        meant = _likely(node.value, [name for option in options for name in expected.literals(option)])
        step = _likely(node.value, [name for option in options for name in option.get("properties", {})])
        advice = f"; did you mean {meant or f'{{{step}: {{}}}}'}?" if meant or step else ""
        if _is_mixed(node):
            advice = f"; an override adds to what the file says, so replace the section: {dotted(path)}={{...}}"
        self._report(node.place, path, f"must be {words(schema)}, got {shown(node.plain())}{advice}")
        value = expected.placeholder(schema) if meant is None and guess else meant
        if value is not None:
            node.value = grow(value, node.place).value

    def _report(self, place: Place, path: Path, text: str) -> None:
        self.problems.append(Problem(place, path, text))


def _likely(value: object, names: list[str]) -> str | None:
    other = OTHER_NAMES.get(value.lower()) if isinstance(value, str) else None
    return other if other in names else similar(value, names) if isinstance(value, str) else None


def _trial(schema: Schema, node: Node, path: Path) -> list[Problem]:
    """What would be wrong with a copy of `node` if `schema` were the one meant."""
    form = _Form(node.copy(), trial=True)
    form.check(schema, form.root, path)
    return form.problems


def _near(options: list[Schema], node: Node) -> list[Schema]:
    """The options of a mapping's or list's own shape; of several sections, the one with just its keys."""
    if isinstance(node.value, list):
        return [option for option in options if option.get("type") == "array"]
    if not isinstance(node.value, dict):
        return []
    near = [option for option in options if option.get("type") == "object" or "discriminator" in option]
    exact = [
        option
        for option in near
        if set(option.get("required", [])) <= set(node.value) <= set(option.get("properties", {}))
    ]
    if exact or len(near) < 2:
        return exact or near
    # no section has just these keys: the only one that has any of them is meant, and says what is wrong
    some = [option for option in near if option.get("properties", {}).keys() & node.value.keys()]
    return some if len(some) == 1 else []


def _find(root: Node, path: Path) -> Node | None:
    here: Node | None = root
    for key in path:
        here = here.child(key) if here is not None else None
    return here


def _is_mixed(node: Node) -> bool:
    """Whether a section holds keys of the file and keys of overrides."""
    if not isinstance(node.value, dict):
        return False
    return len({child.place.line is None for child in node.value.values()}) == 2


def _remedy(section: Path, kind: Node, stale: Node) -> str:
    if kind.place.line is None and stale.place.line is not None:
        return (
            f"the override changed the kind only, so replace the section: {dotted(section)}={{kind: {kind.value}, ...}}"
        )
    return "remove it or choose another kind"


def _real_path(root: Node, location: tuple[Key, ...]) -> Path:
    """A pydantic location without its labels of union members."""
    path: list[Key] = []
    here: Node | None = root
    for part in location:
        child = here.child(part) if here is not None else None
        if child is not None:
            path.append(part)
            here = child
    return tuple(path)


def _rule_problems(root: Node, error: ValidationError, form_is_wrong: bool) -> list[Problem]:
    """What validators refused. A refused member of a union drags in reports of the other members: left out."""
    details = error.errors(include_url=False)
    rules = [(detail["loc"], str(detail["ctx"]["error"])) for detail in details if detail["type"] == "value_error"]
    if not rules and not form_is_wrong:
        rules = [(detail["loc"], detail["msg"]) for detail in details]
    return [_located(root, _real_path(root, place), line) for place, text in rules for line in text.splitlines()]


def _located(root: Node, section: Path, text: str) -> Problem:
    """A rule's message at its section, or at the key that it begins with, `key.path: `."""
    name, colon, rest = text.partition(": ")
    path = (*section, *name.split("."))
    if colon and _find(root, path[: len(section) + 1]) is not None:
        return Problem(root.nearest(path).place, path, rest)
    return Problem(root.nearest(section).place, section, text)
