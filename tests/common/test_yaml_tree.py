"""YAML with places: what values mean, where they stand, and every mistake of form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dpsgd_cli.common.yaml_tree import CoreDumper, SourceLocation, read_tree

FILE = SourceLocation("r.yaml", 1)


def plain(text: str) -> Any:
    tree, problems = read_tree(text, FILE)
    assert tree is not None
    assert problems == []
    return tree.plain()


def problems(text: str, place: SourceLocation = FILE) -> list[str]:
    return [str(problem) for problem in read_tree(text, place)[1]]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-3.", -3.0),
        ("-.inf", -math.inf),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+7", 7),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"),
        ("1_000", "1_000"),
        ("'1e-5'", "1e-5"),
        ('"caf\\u00e9"', "café"),
        ("1e-5x", "1e-5x"),
    ],
)
def test_plain_values_follow_yaml_1_2(text: str, value: object) -> None:
    got = plain(f"key: {text}")["key"]
    assert got == value
    assert type(got) is type(value)


def test_every_value_knows_the_line_of_its_key_or_entry() -> None:
    tree, _ = read_tree("# why\na:\n  b: 1\nlist:\n  - x\n  - {y:\n      2}\n", FILE)
    assert tree is not None
    lines = {path: str(tree.nearest(path).place) for path in [("a",), ("a", "b"), ("list", 0), ("list", 1, "y")]}
    assert lines == {("a",): "r.yaml:2", ("a", "b"): "r.yaml:3", ("list", 0): "r.yaml:5", ("list", 1, "y"): "r.yaml:6"}


def test_an_alias_stands_for_a_copy() -> None:
    assert plain("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "r.yaml:3: a: given twice (first on line 1); keep one"),
        ("a: {b: 1, b: 2}", "r.yaml:1: a.b: given twice (first on line 1); keep one"),
        ("? [x]\n: 1", "r.yaml:1: a key must be a single word, not a list or a mapping"),
        (
            "a: !!python/name:os.system",
            "r.yaml:1: a: tag !!python/name:os.system is not allowed here; write the plain value",
        ),
        ("a: !!int word", "r.yaml:1: a: tag !!int is not allowed here; write the plain value"),
        ("a: !!map [1]", "r.yaml:1: a: tag !!map is not allowed here; write the plain value"),
        ("a: &x [*x]", "r.yaml:1: a.0: contains itself"),
        ("a: " + "[" * 60 + "]" * 60, "r.yaml:1: a: nested too deeply to be a recipe"),
        ('a: "\\ud800"', "r.yaml:1: a: '\\ud800' is not valid text"),
        ("\na: " + "9" * 400, "r.yaml:2: a: a number of 400 digits; write a shorter one"),
    ],
)
def test_a_mistake_of_form_is_reported_at_its_line(text: str, message: str) -> None:
    assert problems(text) == [message]


@pytest.mark.parametrize(
    ("text", "start", "advice"),
    [
        ("a: [1\nb: 2", "r.yaml:2: not YAML: ", "check indentation, colons, brackets and quotes"),
        ("a:\n\t- 2", "r.yaml:2: not YAML: ", "indent with spaces, not tabs"),
        ("a: 1\n---\nb: 2", "r.yaml:2: not YAML: ", "check indentation, colons, brackets and quotes"),
        ("a: *b", "r.yaml:1: not YAML: ", "check indentation, colons, brackets and quotes"),
        ("a: 'x", "r.yaml:1: not YAML: ", "check indentation, colons, brackets and quotes"),
        ("a: 1\nb: \x01", "r.yaml:2: character 1 is not allowed", "remove it"),
        ("[" * 5000, "r.yaml:1: nested too deeply", "to be a recipe"),
    ],
)
def test_what_is_no_yaml_is_one_problem_with_a_line(text: str, start: str, advice: str) -> None:
    tree, found = read_tree(text, FILE)
    assert tree is None
    assert len(found) == 1
    assert str(found[0]).startswith(start)
    assert str(found[0]).endswith(advice)


def test_aliases_cannot_explode() -> None:
    levels = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert any("too many values" in problem for problem in problems("\n".join(levels)))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.from_regex(
    r"[-+0-9_.:eEoxX]{1,8}|y|n|yes|no|on|off|null|true|~|=|<<|0o17|\.inf", fullmatch=True
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)


@given(VALUES)
def test_what_is_dumped_is_read_back(value: object) -> None:
    text = yaml.dump(value, Dumper=CoreDumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)
    assert plain(text) == value


@given(st.text(max_size=60) | st.text("{}[]:,-&*!|>'\"#%@`\n\t ab1", max_size=40))
def test_any_text_is_read_or_reported_never_a_crash(text: str) -> None:
    tree, found = read_tree(text, FILE)
    assert (tree is None) <= bool(found)
