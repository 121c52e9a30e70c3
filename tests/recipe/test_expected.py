"""The JSON Schema as words, samples and suggestions."""

from __future__ import annotations

from typing import Any

import pytest

from dpsgd_cli.recipe import expected
from dpsgd_cli.recipe.expected import Schema

NUMBER: Schema = {"type": "number", "exclusiveMinimum": 0}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1}, "a whole number at least 1"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "a number above 0 and below 1"),
        ({"type": "number", "minimum": 0, "maximum": 2.5}, "a number at least 0 and at most 2.5"),
        ({"type": "boolean"}, "true or false"),
        ({"type": "string"}, "text"),
        ({"const": "auto", "type": "string"}, "auto"),
        ({"enum": ["a", "b", "c"]}, "a, b or c"),
        ({"anyOf": [NUMBER, {"const": "auto"}, {"type": "null"}]}, "a number above 0 or auto"),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "string", "pattern": "c+", "x-form": "cc"}]}, "a, b or cc"),
        ({"type": "string", "pattern": "c+"}, "text that matches c+"),
        ({"type": "array", "items": NUMBER}, "a list, each entry a number above 0"),
        ({"type": "array", "items": {}}, "a list"),
        ({"type": "array", "prefixItems": [NUMBER, NUMBER]}, "a list of 2 values (a number above 0, a number above 0)"),
        ({"type": "object", "additionalProperties": NUMBER}, "a mapping of names, each to a number above 0"),
        ({"type": "object", "additionalProperties": True}, "a mapping"),
        ({}, "any value"),
        ({"$ref": "#/$defs/RhoBudget"}, "a section with keys rho"),
    ],
)
def test_words(schema: Schema, words: str) -> None:
    assert expected.words(schema) == words


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NUMBER, [1, 0.5], [0, -1, True, "1", None, float("inf"), float("nan"), [1], {}]),
        ({"type": "integer", "minimum": 1, "maximum": 3}, [1, 3], [0, 4, 2.0, True, "2"]),
        ({"type": "number", "minimum": 0, "exclusiveMaximum": 1}, [0, 0.99], [1, -0.1]),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ["a", "aaa"], ["aaaa", "b", "a\n", 1, None]),
        ({"enum": ["a", "b"], "type": "string"}, ["a"], ["c", 1, None, ["a"]]),
        ({"type": "boolean"}, [True, False], [0, 1, "true", None]),
        ({}, [None, 1, "x", True], []),
        ({"type": "object"}, [], [1, "x", [1]]),
    ],
)
def test_fits(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good if not expected.fits(schema, value)] == []
    assert [value for value in bad if expected.fits(schema, value)] == []


def every_property() -> list[Schema]:
    sections = [expected.recipe_schema(), *expected.recipe_schema()["$defs"].values()]
    return [inner for section in sections for inner in section.get("properties", {}).values()]


def test_a_placeholder_is_a_value_that_is_allowed() -> None:
    checked = 0
    for schema in every_property():
        value = expected.placeholder(schema)
        if value is not None and not isinstance(value, (dict, list)):
            options = expected.alternatives(expected.resolve(schema))
            assert any(expected.fits(option, value) for option in options), (schema, value)
            checked += 1
    assert checked > 30


def test_every_key_of_a_recipe_is_described() -> None:
    bare = [
        f"{name}.{key}"
        for name, section in {"Recipe": expected.recipe_schema(), **expected.recipe_schema()["$defs"]}.items()
        for key, inner in section.get("properties", {}).items()
        if key != "kind" and "description" not in expected.resolve(inner) and "discriminator" not in inner
    ]
    assert bare == []


def test_kind_is_required_wherever_it_chooses() -> None:
    definitions = expected.recipe_schema()["$defs"]
    assert "kind" in definitions["LinearModel"]["required"]
    assert definitions["TimeDecay"]["required"] == ["decay", "initial", "kind"]


def test_kinds_keep_the_order_of_the_schema() -> None:
    schedule = expected.recipe_schema()["$defs"]["Privacy"]["properties"]["schedule"]
    assert list(expected.kinds(schedule)) == [
        "uniform",
        "time",
        "exponential",
        "step",
        "polynomial",
        "piecewise",
        "validation",
    ]
    assert expected.kinds(NUMBER) == {}


@pytest.mark.parametrize(
    ("word", "found"),
    [("batchsize", "batch_size"), ("BATCH-SIZE", "batch_size"), ("sed", "seed"), ("xyzzy", None)],
)
def test_similar(word: str, found: str | None) -> None:
    assert expected.similar(word, ["batch_size", "seed", "epochs"]) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "nothing"),
        (True, "true"),
        ("a", "'a'"),
        (1.5, "1.5"),
        ({"a": [1]}, '{"a": [1]}'),
        ("x" * 99, "'" + "x" * 56 + "..."),
    ],
)
def test_shown(value: object, text: str) -> None:
    assert expected.shown(value) == text
