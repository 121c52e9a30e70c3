"""Subcommands, one file each: a file defines `command` and is imported only when that command is called.

`TRUST_CODE` is the option `--trust-code` of each command that would run Python files named by a recipe or a result. The
list of trusted files and the refusal are in `common/plugins.py`.
"""

from __future__ import annotations

import click


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
