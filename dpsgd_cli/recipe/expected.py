"""Functions that look up and put into words what the JSON Schema of a recipe or a sweep allows.

`check.py` reports what is wrong with a file.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from dpsgd_cli.common.text_format import any_of, quoted, shortened
from dpsgd_cli.common.yaml_tree import Key, Node, Path

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
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    parts = [f"{name} {schema[key]:g}" for key, name in names.items() if key in schema]
    return f" {' and '.join(parts)}" if parts else ""


def _dicts(value: Any) -> Iterator[Schema]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _dicts(inner)
