"""A recipe written out to be owned: every setting, with its meaning from the schema as a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import yaml

from dpsgd_cli.common.yaml_tree import CoreDumper
from dpsgd_cli.recipe.check import Schema, alternatives, schema_of, sections
from dpsgd_cli.recipe.loading import SettledRecipe, find_recipe, question, resolved

_WIDTH = 110


def explained(settled: SettledRecipe) -> str:
    """Return a settled recipe as YAML with a comment for each key; it is equal to `settled.recipe` when read back.

    A setting that was `auto` says why it has its value. `auto` stays where it names a rule of the guarantee, such as
    the least noise that fits the budget.
    """
    head = [
        question(find_recipe(settled.source)),
        f"A copy of {settled.source} with every setting written out. It trains to the same result. Change anything;"
        " `dpsgd recipe validate` checks it, `dpsgd train FILE --dry-run` prices it.",
    ]
    why = {choice.key: choice.why for choice in settled.chosen}
    lines = [line for text in filter(None, head) for line in [*_comment(text, ""), "#"]][:-1]
    written = _mapping(resolved(settled.recipe), schema_of(type(settled.recipe)), "", "", why)
    return "\n".join([*lines, "", *written]) + "\n"


def _mapping(content: dict[str, Any], section: Schema, path: str, indent: str, why: dict[str, str]) -> Iterator[str]:
    """Yield the lines of a section's content at a depth of `indent`."""
    for key, value in content.items():
        inner = section["properties"][key]
        dotted = f"{path}.{key}".lstrip(".")
        meaning = inner.get("description", "")
        yield from _comment(meaning, indent)
        if dotted in why:
            yield from _comment(f"Was automatic: {why[dotted]}.", indent)
        below = _section_of(value, inner)
        if below is not None and value:
            yield f"{indent}{key}:"
            yield from _mapping(value, below, dotted, f"{indent}  ", why)
        elif isinstance(value, list) and value and all(_entry(one, inner) is not None for one in value):
            yield f"{indent}{key}:"
            for number, one in enumerate(value):
                of_entry = _entry(one, inner)
                assert of_entry is not None
                yield f"{indent}  -"
                yield from _mapping(one, of_entry, f"{dotted}.{number}", f"{indent}    ", why)
        else:
            flow = None if isinstance(value, dict | list) else False
            how: Any = {"Dumper": CoreDumper, "sort_keys": False, "allow_unicode": True, "width": _WIDTH}
            text = yaml.dump({key: value}, default_flow_style=flow, **how)
            yield from textwrap.indent(text.rstrip("\n"), indent).splitlines()


def _section_of(value: Any, schema: Schema) -> Schema | None:
    """Return the section that `value` is, or None if it is no section."""
    if not isinstance(value, dict):
        return None
    return next((one for one in sections(schema, value.get("kind")) if value.keys() <= one["properties"].keys()), None)


def _entry(value: Any, schema: Schema) -> Schema | None:
    """Return the section that an entry of a list is, or None if it is no section."""
    items = (option["items"] for option in alternatives(schema) if isinstance(option.get("items"), dict))
    return next((found for one in items if (found := _section_of(value, one)) is not None), None)


def _comment(text: str, indent: str) -> list[str]:
    width = max(40, _WIDTH - len(indent) - 2)
    return [f"{indent}# {line}" for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)]
