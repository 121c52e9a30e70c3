"""The JSON Schema as words, samples and suggestions."""

from __future__ import annotations

import pytest

from dpsgd_cli.recipe import expected
from dpsgd_cli.recipe.expected import Schema
from dpsgd_cli.recipe.schema import Recipe

SCHEMA = expected.schema_of(Recipe)
NUMBER: Schema = {"type": "number", "exclusiveMinimum": 0}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "a number above 0 and below 1"),
        ({"type": "number", "minimum": 0, "maximum": 2.5}, "a number at least 0 and at most 2.5"),
        ({"anyOf": [NUMBER, {"const": "auto"}, {"type": "null"}]}, "a number above 0 or auto"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "string", "pattern": "c+", "x-form": "cc"}]}, "a, b or cc"),
        ({"type": "array", "items": {}}, "a list"),
        ({"type": "object", "additionalProperties": NUMBER}, "a mapping of names, each to a number above 0"),
        ({"type": "object", "additionalProperties": True}, "a mapping"),
        ({}, "any value"),
        (expected.schema_of(Recipe)["$defs"]["RhoBudget"], "a section with keys rho"),
    ],
)
def test_words(schema: Schema, words: str) -> None:
    assert expected.words(schema) == words


def test_every_key_of_a_recipe_is_described() -> None:
    bare = [
        f"{name}.{key}"
        for name, section in {"Recipe": SCHEMA, **SCHEMA["$defs"]}.items()
        for key, inner in section.get("properties", {}).items()
        if key != "kind" and "description" not in inner and "discriminator" not in inner
    ]
    assert bare == []
