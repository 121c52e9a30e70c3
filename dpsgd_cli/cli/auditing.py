"""Run of `dpsgd audit` after its recipe was read: it audits, writes and prints. The attacks are in `audit/`."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.audit import auditing, report
from dpsgd_cli.audit.options import Options
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.errors import RunError
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.results import audited, store
from dpsgd_cli.results import report as pages
from dpsgd_cli.training.loop import result_directory
from dpsgd_cli.training.plans import resolve_auto


@trusting()
def audit(loaded: LoadedRecipe, out: Path | None, result: Path | None, options: Options) -> None:
    """Audit a claim, write the findings and print them. Raises RunError if the claim is refuted."""
    if result is not None:
        store.read_whole(result)
    settled = resolve_auto(loaded)
    of = result_directory(settled, Path("results")) if result is None else result.resolve()
    directory = audited.place(of.parent, of.name) if out is None else out / of.name
    with kill_is_interrupt():
        document = auditing.audit(settled, options)
    files = report.write(document, directory)
    if result is not None and pages.is_written(result):
        pages.write(result)
    for line in report.lines(document):
        click.echo(line)
    click.echo(f"  written   {', '.join(str(file) for file in files)}")
    if document["refuted"]:
        raise RunError(f"{loaded.source}: the claim is refuted ({'; '.join(document['refuted_by'])})")
