"""Validation of the tree of a recipe or a sweep, with every problem reported at its line, in the user's words.

Pydantic validates. Its reports name members of unions and not what a user wrote, so they are put into the schema's
words, at the line of the value. Then the errors are repaired and the tree is validated again, so that
one mistake neither hides nor causes another. (Only rules across sections wait until no section breaks its own rules.)
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from dpsgd_cli.common.sections import TO_FILL_IN, WHOSE
from dpsgd_cli.common.text_format import any_of, quoted, shortened, similar
from dpsgd_cli.common.yaml_tree import Key, Node, Path, Problem, SourceLocation, dotted, from_plain

Schema = dict[str, Any]


def json_schema(model: type[BaseModel]) -> Schema:
    """Return the JSON Schema of a file, for a reader. `kind` is required wherever several kinds are possible."""
    schema = model.model_json_schema(by_alias=True)
    for place in _dicts(schema):
        for reference in place.get("discriminator", {}).get("mapping", {}).values():
            section = schema["$defs"][reference.rpartition("/")[2]]
            section["required"] = sorted({"kind", *section.get("required", [])})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


@functools.cache
def schema_of(model: type[BaseModel]) -> Schema:
    """Return the JSON Schema without references: each is its target, and keys beside it (default) take precedence."""
    schema = json_schema(model)
    for place in list(_dicts(schema)):
        while "$ref" in place:
            target = schema["$defs"][place.pop("$ref").rpartition("/")[2]]
            place.update({key: value for key, value in target.items() if key not in place})
    return schema


def alternatives(schema: Schema) -> list[Schema]:
    """Return the options of an `anyOf` except null; any other schema is its own only option."""
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


def kinds(schema: Schema) -> dict[str, Schema]:
    """Return the sections that a `kind:` chooses from, in the schema's order; empty if there is no choice."""
    if "discriminator" not in schema:
        return {}
    return {name: option for option in schema["oneOf"] for name in literals(option["properties"]["kind"])}


def literals(schema: Schema) -> list[str]:
    """Return the literal values that `schema` lists; empty if it lists none."""
    return [schema["const"]] if "const" in schema else list(schema.get("enum", []))


def inside(schema: Schema, key: Key) -> Any:
    """Return the schema of the entry `key` of a section, a mapping or a list."""
    if isinstance(key, int):
        return schema["prefixItems"][key] if "prefixItems" in schema else schema["items"]
    return schema["properties"][key] if "properties" in schema else schema["additionalProperties"]


def words(schema: Schema) -> str:
    """Return in words what `schema` allows, to follow "must be"."""
    if "anyOf" in schema:
        return any_of([name for option in alternatives(schema) for name in literals(option) or [words(option)]])
    if "discriminator" in schema:
        return f"a section with kind: {any_of(list(kinds(schema)))}"
    if literals(schema):
        return any_of(literals(schema))
    return _typed_words(schema)


def shown(value: Any) -> str:
    """Return a value as the user wrote it, shortened."""
    if value is None:
        return "nothing"
    text = quoted(value, 60) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, 60)


def placeholder(schema: Schema) -> Any:
    """Return a value that `schema` allows, to replace a wrong one while the rest is checked; None if there is none."""
    if schema.get("default") is not None:
        return schema["default"]
    schema = alternatives(schema)[0]
    if literals(schema):
        return literals(schema)[0]
    low: Any = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high: Any = schema.get("maximum", schema.get("exclusiveMaximum", low + 2))
    any_values = {"integer": int(low) + 1, "number": (low + high) / 2, "boolean": False, "string": "x"}
    return any_values.get(str(schema.get("type")))


def sections(schema: Schema, kind: object = None) -> list[Schema]:
    """Return every section that `schema` allows: only that of `kind` if it is one of its kinds, else all."""
    found = []
    for option in alternatives(schema):
        choices = kinds(option)
        chosen = choices.get(kind) if isinstance(kind, str) else None
        found += [chosen] if chosen is not None else list(choices.values()) or [option]
    return [section for section in found if "properties" in section]


def key_paths(schema: Schema, node: Node | None, path: Path = ()) -> Iterator[Path]:
    """Yield every key path that a file may have under the kinds that `node` chooses; lists are not entered."""
    kind = node.child("kind") if node is not None else None
    for section in sections(schema, kind.value if kind is not None else None):
        for key, inner in section["properties"].items():
            yield (*path, key)
            yield from key_paths(inner, node.child(key) if node is not None else None, (*path, key))


def _typed_words(schema: Schema) -> str:
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return f"a {'whole ' if kind == 'integer' else ''}number{_range_words(schema)}"
    if kind == "string":
        form = f"text that matches {schema['pattern']}" if "pattern" in schema else "text"
        return str(schema.get("x-form", form))
    if kind == "boolean":
        return "true or false"
    if kind == "array" and "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])} values ({', '.join(map(words, schema['prefixItems']))})"
    if kind == "array":
        return f"a list, each entry {words(schema['items'])}" if schema.get("items") else "a list"
    if kind == "object" and "properties" in schema:
        return f"a section with keys {', '.join(schema['properties'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"a mapping of names, each to {words(schema['additionalProperties'])}"
    return "a mapping" if kind == "object" else "any value"


def _range_words(schema: Schema) -> str:
    names = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    parts = [f"{name} {schema[key]:g}" for key, name in names.items() if key in schema]
    return f" {' and '.join(parts)}" if parts else ""


def _dicts(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(inner)


OTHER_NAMES = {"gpu": "cuda", "bf16": "bfloat16"}
"""Common names of values that have another name here."""

FILL_IN = (
    f"still to be filled in; replace [{', '.join(TO_FILL_IN)}] by the least and the largest value there can be, from"
    " public knowledge and not from the data"
)
ANSWER_WHOSE = (
    "is an open question: whose rows are these? Cells repeat in {}. If a person has several rows, name the column that"
    " tells persons apart, as {{column: {}, most_rows: 10}}; if no person has, write null (one row a person)"
)
MOST_ROUNDS = 10
Model = TypeVar("Model", bound=BaseModel)
Report = tuple[tuple[Key, ...], dict[str, Any]]
"""A report of pydantic: its place, relative to the current value, and its content."""


def validate(tree: Node, model: type[Model]) -> tuple[Model | None, list[Problem]]:
    """Return the recipe or sweep that `tree` holds, or None, and all its problems."""
    mended, found = tree.copy(), dict[tuple[Path, str], Problem]()
    for _ in range(MOST_ROUNDS):
        try:
            held = model.model_validate_json(json.dumps(mended.plain()), strict=True)
        except ValidationError as error:
            known, told = len(found), _ErrorExplainer(mended, schema_of(model))
            reports: list[Report] = [(one["loc"], dict(one)) for one in error.errors(include_url=False)]
            told.explain(reports, told.schema, mended, ())
            for problem in told.problems:
                found.setdefault((problem.path, problem.text), problem)
            if len(found) == known:
                break
        else:
            return (None if found else held), list(found.values())
    return None, list(found.values())


class _ErrorExplainer:
    """Problems of one tree, in words, from pydantic's reports. Errors in the tree are repaired where possible."""

    def __init__(self, root: Node, schema: Schema) -> None:
        self.root, self.schema = root, schema
        self.problems: list[Problem] = []

    def explain(self, reports: list[Report], schema: Schema, node: Node, path: Path) -> None:
        """Collect the problems of `node`, which `schema` describes."""
        options = alternatives(schema)
        if len(options) > 1:
            self._choice(reports, schema, node, path)
            return
        if "discriminator" in options[0] and isinstance(node.value, dict):
            self._kinds(reports, options[0], node, path)
            return
        self._section(reports, options[0] | schema, node, path, {})

    def _choice(self, reports: list[Report], schema: Schema, node: Node, path: Path) -> None:
        """Collect the problems of a union: those of the member that the user meant, else a single one."""
        options = alternatives(schema)
        by_member = _grouped(reports)
        meant = _meant(options, node.value)
        ruled = [said for said in by_member.values() if all(one["type"] == "value_error" for _, one in said)]
        if meant is not None and len(by_member) == len(options):
            self.explain(list(by_member.values())[meant], options[meant], node, path)
        elif ruled:
            self._section(ruled[0], {}, node, path, {})
        else:
            self._wrong(schema, node, path)

    def _kinds(self, reports: list[Report], schema: Schema, node: Node, path: Path) -> None:
        choices, kind = kinds(schema), node.child("kind")
        if kind is None:
            self._report(node.place, (*path, "kind"), f"missing; give {any_of(list(choices))}")
        elif not isinstance(kind.value, str) or kind.value not in choices:
            self._wrong({"type": "string", "enum": list(choices)}, kind, (*path, "kind"), guess=False)
        else:
            self._section([(place[1:], one) for place, one in reports], choices[kind.value], node, path, choices)

    def _section(
        self, reports: list[Report], schema: Schema, node: Node, path: Path, choices: dict[str, Schema]
    ) -> None:
        """Collect the problems of a value and its entries; unknown keys first: they may be missing elsewhere."""
        said = [one for place, one in reports if not place]
        for one in said:
            if one["type"] == "value_error":
                self.problems += [self._rule(path, line) for line in str(one["ctx"]["error"]).splitlines()]
            elif one["type"] == "too_short" and "prefixItems" not in schema:
                self._report(node.place, path, str(one["msg"]))
            else:
                self._wrong(schema, node, path)
        below = _grouped([(place, one) for place, one in reports if place])
        if any(one["type"] == "missing" for held in below.values() for _, one in held) and "prefixItems" in schema:
            self._wrong(schema, node, path)
            return
        for key in [key for key, held in below.items() if _is(held, "extra_forbidden")]:
            self._unknown(schema, node, (*path, key), choices)
            del below[key]
        for key, held in below.items():
            child = node.child(key)
            if child is not None and not _is(held, "missing"):
                self.explain(held, inside(schema, key), child, (*path, key))
            elif child is None:
                self._missing(schema["properties"][key], node, (*path, key))

    def _missing(self, schema: Schema, node: Node, path: Path) -> None:
        about = f" ({schema['description']})" if "description" in schema else ""
        self._report(node.place, path, f"missing; give {words(schema)}{about}")
        value = placeholder(schema)
        if value is not None:
            node.value[path[-1]] = from_plain(value, node.place)

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
        target = self._place_for(path, list(schema["properties"]))
        if target is None:
            self._report(child.place, path, f"unknown key; the keys here are {', '.join(schema['properties'])}")
            return
        self._report(child.place, path, f"unknown key; did you mean {dotted(target)}?")
        home = node if target[:-1] == path[:-1] else _find(self.root, target[:-1])
        if home is not None and isinstance(home.value, dict):
            home.value.setdefault(target[-1], child)

    def _place_for(self, path: Path, allowed: list[str]) -> Path | None:
        """Return where an unknown key belongs: its name elsewhere, else a similar name here, else elsewhere."""
        key = str(path[-1])
        others = set(key_paths(self.schema, self.root)) - {path}
        everywhere = sorted(others, key=lambda place: (len(place), place))
        exact = [place for place in everywhere if place[-1] == key]
        here = similar(key, allowed)
        if exact or here is not None:
            return exact[0] if exact else (*path[:-1], str(here))
        name = similar(key, [str(place[-1]) for place in everywhere], cutoff=0.8)
        return next((place for place in everywhere if place[-1] == name), None)

    def _wrong(self, schema: Schema, node: Node, path: Path, guess: bool = True) -> None:
        """Report a value that `schema` does not allow; put the likely one in its place, or any if `guess`."""
        if node.value in TO_FILL_IN:
            self._report(node.place, path[:-1], FILL_IN)
            node.value = schema.get("examples", [0.0, 1.0])[TO_FILL_IN.index(node.value)]
            return
        if isinstance(node.value, list) and node.plain()[:1] == [WHOSE]:
            columns = [*map(str, node.plain()[1:]), "COLUMN"]
            told = ANSWER_WHOSE.format(", ".join(columns[:-1]) or "some column", quoted(columns[0]))
            self._report(node.place, path, told)
            node.value = None
            return
        options = alternatives(schema)
        meant = _likely(node.value, [name for option in options for name in literals(option)])
        step = _likely(node.value, [name for option in options for name in option.get("properties", {})])
        advice = f"; did you mean {meant or f'{{{step}: {{}}}}'}?" if meant or step else ""
        if isinstance(node.value, dict) and len({child.place.line is None for child in node.value.values()}) == 2:
            advice = f"; an override adds to what the file says, so replace the section: {dotted(path)}={{...}}"
        self._report(node.place, path, f"must be {words(schema)}, got {shown(node.plain())}{advice}")
        value = placeholder(schema) if meant is None and guess else meant
        if value is not None:
            node.value = from_plain(value, node.place).value

    def _rule(self, section: Path, text: str) -> Problem:
        """Return a rule's message as a problem of its section, or of the key that it begins with (`key.path: `)."""
        name, colon, rest = text.partition(": ")
        path: Path = (*section, *name.split("."))
        if colon and _find(self.root, path[: len(section) + 1]) is not None:
            numbered = (*section, *(int(key) if key.isdecimal() else key for key in name.split(".")))
            block = (*section, *name.split(".", 1))  # whose keys may have dots
            there = next((one for one in (numbered, block) if _find(self.root, one) is not None), path)
            return Problem(self.root.nearest(there).place, path, rest)
        return Problem(self.root.nearest(section).place, section, text)

    def _report(self, place: SourceLocation, path: Path, text: str) -> None:
        self.problems.append(Problem(place, path, text))


def _grouped(reports: list[Report]) -> dict[Key, list[Report]]:
    """Return the reports grouped by the first key of their places, which is removed."""
    found: dict[Key, list[Report]] = {}
    for place, one in reports:
        found.setdefault(place[0], []).append((place[1:], one))
    return found


def _is(reports: list[Report], kind: str) -> bool:
    return any(not place and one["type"] == kind for place, one in reports)


def _meant(options: list[Schema], value: object) -> int | None:
    """Return the index of the only option of the value's shape; of several sections, the only one with its keys."""
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None
    near = [
        number
        for number, option in enumerate(options)
        if option.get("type") == kind or ("discriminator" in option and kind == "object")
    ]
    if len(near) > 1 and isinstance(value, dict):
        near = [number for number in near if options[number].get("properties", {}).keys() & value.keys()]
    return near[0] if kind is not None and len(near) == 1 else None


def _likely(value: object, names: list[str]) -> str | None:
    other = OTHER_NAMES.get(value.lower()) if isinstance(value, str) else None
    texts = [name for name in names if isinstance(name, str)]  # a key may also allow a number, such as 0
    return other if other in texts else similar(value, texts) if isinstance(value, str) else None


def _find(root: Node, path: Path) -> Node | None:
    here: Node | None = root
    for key in path:
        here = here.child(key) if here is not None else None
    return here


def _remedy(section: Path, kind: Node, stale: Node) -> str:
    if kind.place.line is None and stale.place.line is not None:
        return (
            f"the override changed the kind only, so replace the section: {dotted(section)}={{kind: {kind.value}, ...}}"
        )
    return "remove it or choose another kind"
