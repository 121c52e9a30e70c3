"""Command `dpsgd sweep`: options and progress. Cells, packs and prices are in `sweep/`."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpsgd_cli.cli import TRUST_CODE
from dpsgd_cli.cli.budget import BOOK, with_book
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.text_format import count
from dpsgd_cli.errors import RecipeError, RunError
from dpsgd_cli.sweep import launchers

if TYPE_CHECKING:
    from dpsgd_cli.sweep.session import SweepSession


class _RunByDefault(click.Group):
    """Group that runs `dpsgd sweep FILE ...` as `dpsgd sweep run FILE ...`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            meant = difflib.get_close_matches(args[0], self.commands, n=1, cutoff=0.75)
            if meant and not Path(args[0]).exists():
                ctx.fail(f"no sweep and no command {args[0]!r}; did you mean {meant[0]}?")
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_RunByDefault)
def command() -> None:
    """Train every cell of a sweep: grids, lists and random samples over recipe keys.

    `dpsgd sweep SWEEP.yaml` is short for `dpsgd sweep run SWEEP.yaml`; see `dpsgd sweep run --help`.

    \b
    Examples:
      dpsgd sweep sweeps/ci --dry-run
      dpsgd sweep sweeps/ci --out results/ci
      dpsgd sweep status results/ci
    """


@command.command()
@TRUST_CODE
@click.argument("sweep")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
              help="Folder of results, failures and tables.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check and price every cell; train nothing.")
@click.option("--shard", metavar="I/N", help="Run only every N-th cell, from the I-th on.")
@click.option("--launcher", type=click.Choice(list(launchers.LAUNCHERS)), default="local", show_default=True,
              help="Where the trainings run.")  # fmt: skip
@click.option("--fail-fast", is_flag=True, help="Stop at the first cell that fails.")
@BOOK
@click.option("--retry-failed", is_flag=True, help="Run cells again that failed before.")
def run(sweep: str, overrides: tuple[str, ...], out: Path, shard: str | None, dry_run: bool, book: Path | None,
        **how: Any) -> None:  # fmt: skip
    """Train every cell of SWEEP that has no result yet.

    SWEEP is a YAML file or the name of a shipped sweep; KEY=VALUE replaces a recipe key in every cell, or, below
    grid, zip, list, random or select, a part of the sweep. Running the same command again continues where it
    stopped.

    \b
    Examples:
      dpsgd sweep sweeps/ci --dry-run
      dpsgd sweep sweeps/ci repeats=2 --out results/ci --shard 1/4
    """
    from dpsgd_cli.common.plugins import trusting
    from dpsgd_cli.sweep.session import SweepSession  # torch

    with trusting(really=not dry_run):
        _open_and_run(SweepSession.open(sweep, with_book(overrides, book), out, shard), dry_run, how)


def _open_and_run(session: SweepSession, dry_run: bool, how: dict[str, Any]) -> None:
    if dry_run:
        lines, problems = session.dry_run()
        click.echo("\n".join(lines))
        if problems:
            raise RecipeError(problems)
        return
    with kill_is_interrupt():
        failed = _run(session, **how)
    if failed and session.secret:
        raise RunError(
            f"a run failed, so nothing is published; {session.place.path} has the reason, which must stay private;"
            " --retry-failed tries again"
        )
    if failed:
        raise RunError(f"{failed} of {count(len(session.cells), 'cell')} failed; --retry-failed tries them again")


@command.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True), metavar="DIR")
def status(folder: Path) -> None:
    """Show the progress and the failures of the sweeps in DIR.

    \b
    Example:
      dpsgd sweep status results/ci
    """
    from dpsgd_cli.sweep.folder import status_lines

    click.echo("\n".join(status_lines(folder)))


def _run(session: SweepSession, launcher: str, fail_fast: bool, retry_failed: bool) -> int:
    """Run the sweep, printing a line per pack to stderr; return the number of this shard's failed cells."""
    launch = launchers.get(launcher)
    session.begin()
    jobs = session.jobs(retry_failed, fail_fast)
    finished = len(session.cells) - sum(len(job.cells) for job in jobs)
    if finished and not session.secret:
        click.echo(f"{finished} of {len(session.cells)} cells have run before and are kept", err=True)
    try:
        for number, outcome in enumerate(session.outcomes(launch, jobs), start=1):
            done = f"{count(len(outcome.done), 'cell')}, {count(outcome.trials, 'trial')} in {outcome.seconds:.1f} s"
            if not session.secret:
                click.echo(f"pack {number}/{len(jobs)}: {done}, {len(outcome.failed)} failed", err=True)
    except RunError as error:
        raise RunError(str(error).replace(" with --resume", "")) from error
    result = session.finish()
    if result is None:
        click.echo("not all runs are over, so nothing is published yet", err=True)
        return session.failed()
    click.echo("\n".join(session.told(result)))
    return 0 if session.secret else session.failed()
