"""Subcommands, one file each: a file defines `command` and is imported only when that command is called.

`complete` offers recipes and their keys to a shell. `TRUST_CODE` is the option `--trust-code` of each command that
would run Python files named by a recipe or a result. The list of trusted files and the refusal are in
`common/plugins.py`.
"""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem


def _trust(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    del parameter
    if given:
        from dpsgd_cli.common.plugins import trusting

        context.with_resource(trusting(lambda text: click.echo(text, err=True)))


TRUST_CODE = click.option(
    "--trust-code",
    is_flag=True,
    expose_value=False,
    callback=_trust,
    help="Run the Python files that the recipe or result names, and remember them. `train` does this without asking.",
)


def complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[CompletionItem]:
    """Return the shipped recipes, files and keys of recipes that begin with what was `typed`, for a shell."""
    from dpsgd_cli.recipe.check import json_schema
    from dpsgd_cli.recipe.loading import shipped_recipes
    from dpsgd_cli.recipe.schema import Recipe

    del context, parameter
    schema = json_schema(Recipe)
    names = [*shipped_recipes(), *(f"{key}=" for key in _keys(schema, schema))]
    return [CompletionItem(typed, type="file"), *(CompletionItem(name) for name in names if name.startswith(typed))]


def _keys(section: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """Return the dotted keys of a section of a JSON `schema`, those of every kind of it."""
    found = set()
    if "$ref" in section:
        return _keys(schema["$defs"][section["$ref"].rpartition("/")[2]], schema)
    for kind in [*section.get("anyOf", []), *section.get("oneOf", [])]:
        found |= _keys(kind, schema)
    for name, below in section.get("properties", {}).items():
        found |= {f"{name}.{key}" for key in _keys(below, schema)} or {name}
    return found
