"""Command `dpsgd check`: verdicts on a result, from its files alone."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.account.checking import FORGERY, verdicts
from dpsgd_cli.cli.report import results_in
from dpsgd_cli.errors import RunError

_MARKS = {True: "ok", False: "FAILED", None: "unknown"}


@click.command("check")
@click.argument("places", metavar="RESULT_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
def command(places: tuple[Path, ...]) -> None:
    """Check a result that you received, or every result in a folder: one verdict a line.

    \b
    files    unchanged since they were written
    claim    epsilon, rho and attacks are what the ledger costs
    terms    the recipe has this unit, this source of noise and this scope
    ledger   the steps, noise, sampling and clip that the recipe plans, what else is released, and what is public
    numbers  means, table of trials and the model's metadata agree
    page     what the result generates
    code     the files that the recipe names are those that ran

    Exit code 1 if any verdict fails. `unknown` is what cannot be checked here, because a file is not there.

    \b
    Examples:
      dpsgd check results/quickstart-*
    """
    failed = 0
    for directory in (found for place in places for found in results_in(place)):
        click.echo(directory)
        for verdict in verdicts(directory):
            click.echo(f"  {verdict.what:<8} {_MARKS[verdict.holds]:<8} {verdict.told}")
            failed += verdict.holds is False
    click.echo(f"author: {FORGERY}")
    if failed:
        raise RunError(f"{failed} of these verdicts failed")
