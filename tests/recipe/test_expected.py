"""The JSON Schema as words, samples and suggestions."""

from __future__ import annotations

from dpsgd_cli.recipe import check
from dpsgd_cli.recipe.check import Schema
from dpsgd_cli.recipe.schema import Recipe

SCHEMA = check.schema_of(Recipe)
NUMBER: Schema = {"type": "number", "exclusiveMinimum": 0}


def test_every_key_of_a_recipe_is_described() -> None:
    bare = [
        f"{name}.{key}"
        for name, section in {"Recipe": SCHEMA, **SCHEMA["$defs"]}.items()
        for key, inner in section.get("properties", {}).items()
        if key != "kind" and "description" not in inner and "discriminator" not in inner
    ]
    assert bare == []
