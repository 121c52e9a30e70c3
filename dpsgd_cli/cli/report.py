"""Command `dpsgd report`: rewrite the page of a result, or of every result in a folder. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.errors import DataError, UsageError
from dpsgd_cli.results import report
from dpsgd_cli.results.deployment import NAME, deployment
from dpsgd_cli.results.reading import place
from dpsgd_cli.results.store import is_complete, is_hidden, public_copy, read_document


@click.command("report")
@click.argument("places", metavar="RESULT_DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--publish", "copy", type=click.Path(path_type=Path), metavar="DIR", help="Write a public copy to DIR.")
def command(places: tuple[Path, ...], copy: Path | None) -> None:
    """Write report.md and report.html: the guarantee and the metrics of a result, in plain words.

    `train` writes both; for results of sweeps and comparisons, use this command, also on a folder of results. The
    report contains public fields only, from files whose SHA-256 is checked first.

    Do not publish a whole result: fields named `nonprivate_` are computed from training records without noise.
    `--publish DIR` writes a new folder with everything that may be published, and nothing else, and `deployment.yaml`
    in it: a record for the Differential Privacy Deployments Registry, in which you answer what the result cannot know.

    \b
    Examples:
      dpsgd report results/quickstart-*
      dpsgd report results
      dpsgd report results/patients-1a2b3c4d --publish to-publish
    """
    if copy is not None:
        if len(places) != 1 or not is_complete(places[0]):
            raise UsageError("--publish is for one result directory")
        folder = public_copy(places[0], copy)
        record = place(folder, NAME)
        record.write_text(deployment(read_document(folder)), encoding="utf-8")
        for page in (*report.write(folder), record):
            click.echo(page)
        return
    for one in places:
        for directory in results_in(one):
            for page in report.write(directory):
                click.echo(page)


def results_in(place: Path) -> list[Path]:
    """Return the result in `place`, or all results below it. Raises DataError if there is none."""
    if is_complete(place):
        return [place]
    found = sorted(file.parent for file in place.rglob("result.json") if not is_hidden(file, place))
    if not found:
        raise DataError(f"{place}: holds no result; give a result directory, or a folder of them")
    return found
