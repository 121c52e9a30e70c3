"""Subcommands, one file each: a file defines `command` and is imported only when that command is called.

`complete` offers recipes and their keys to a shell. `TRUST_CODE` is the option `--trust-code` of each command that
would run Python files named by a recipe or a result. The list of trusted files and the refusal are in
`common/plugins.py`.
"""

from __future__ import annotations

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
    from dpsgd_cli.common.yaml_tree import dotted
    from dpsgd_cli.recipe.check import key_paths, schema_of
    from dpsgd_cli.recipe.loading import shipped_recipes
    from dpsgd_cli.recipe.schema import Recipe

    del context, parameter
    keys = dict.fromkeys(f"{dotted(path)}=" for path in key_paths(schema_of(Recipe), None))
    names = [*shipped_recipes(), *keys]
    return [CompletionItem(typed, type="file"), *(CompletionItem(name) for name in names if name.startswith(typed))]
