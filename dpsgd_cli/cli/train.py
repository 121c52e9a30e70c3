"""Command `dpsgd train`: options, progress, messages and the printed result. Training is in `training/loop.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from dpsgd_cli.accounting.statement import warnings_of
from dpsgd_cli.cli import TRUST_CODE, complete
from dpsgd_cli.cli.budget import BOOK, with_book
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.package_files import MODEL
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.common.terminal import for_bars
from dpsgd_cli.common.text_format import count, visible
from dpsgd_cli.errors import DpsgdError, RunError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.results import guarantee, report, store, summary
from dpsgd_cli.results.earlier import earlier_of, total
from dpsgd_cli.training.plans import declared_by_model, resolve_auto


@click.command("train")
@click.argument("recipe", shell_complete=complete)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1, shell_complete=complete)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
              help="Where the result directory goes.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), help="Number of trials, trained together; short for repeats=N.")
@click.option("--dry-run", is_flag=True, help="Build the model, print the plan and its price; train nothing.")
@click.option("--verbose", is_flag=True, help="Print every metric and term of the statement, as the report does.")
@click.option("--fail-on-divergence", is_flag=True, help="Exit with code 1 if a trial diverged; for CI.")
@BOOK
@TRUST_CODE
@click.option("--resume", is_flag=True, help="Continue an interrupted run from its last checkpoint.")
@click.option("--finish", is_flag=True, help="Train no further: make a result of the last checkpoint.")
def command(
    recipe: str,
    overrides: tuple[str, ...],
    out: Path,
    repeats: int | None,
    dry_run: bool,
    verbose: bool,
    resume: bool,
    finish: bool,
    fail_on_divergence: bool,
    book: Path | None,
) -> None:
    """Train the model of RECIPE and state its privacy guarantee.

    RECIPE is a YAML file or the name of a shipped recipe. KEY=VALUE replaces a setting. A result that already exists
    is shown, not made again. With `torchrun --nproc-per-node N -m dpsgd_cli train RECIPE`, N processes train together:
    the same batches, one draw of noise, the same guarantee.

    \b
    Examples:
      dpsgd train quickstart
      dpsgd train quickstart --dry-run privacy.budget.epsilon=1
      dpsgd train yu2019/mnist-time --repeats 3
    """
    if finish and (resume or dry_run):
        raise UsageError("--finish trains nothing: give it without --resume and --dry-run")

    overrides = with_book(overrides, book)
    loaded = load_recipe(recipe, overrides if repeats is None else (*overrides, f"repeats={repeats}"))
    if dry_run:
        _rehearse(loaded)
    else:
        with trusting():
            _train(loaded, out, resume, finish, verbose, fail_on_divergence)


def _rehearse(loaded: LoadedRecipe) -> None:
    """Build the model, then print the plan and its price."""
    from dpsgd_cli.engine import processes  # torch, for which a mistyped recipe should not wait
    from dpsgd_cli.training import build_models, loop

    if processes.started_by_a_launcher():
        raise UsageError("--dry-run is for one process; start it without torchrun")
    settled = resolve_auto(loaded)
    plan, outline = loop.rehearse(settled)
    for line in build_models.weights_told(settled):
        click.echo(line)
    if plan is None:
        length = settled.recipe.epochs
        trained = count(length, "epoch") if isinstance(length, int) else length
        click.echo(f"{settled.recipe.name}: {trained} without privacy; there is nothing to price")
        return
    for warning in warnings_of(plan.guarantee().epsilon, plan.delta, plan.sampling.records):
        click.echo(f"warning: {warning}", err=True)
    if (earlier := earlier_of(settled)) is not None:
        price = plan.guarantee()
        both = {**earlier.record, "own": {"epsilon": price.epsilon, "delta": plan.delta}}
        epsilon, delta = total(price.epsilon, plan.delta, both)
        stated = guarantee.epsilon_words({"epsilon": epsilon, "delta": delta, "bound": price.bound})
        click.echo(f"with the result that it starts from: epsilon {stated}: {guarantee.start_words(both)}")
    click.echo(
        summary.plan_text(plan, settled.recipe, [*outline.declarations, *declared_by_model(settled)], settled.chosen)
    )


def _train(
    loaded: LoadedRecipe, out: Path, resume: bool, finish: bool, verbose: bool, fail_on_divergence: bool
) -> None:
    """Train a recipe that has no result yet, alone or as one of a team of processes, and print the result.

    Raises RunError with `fail_on_divergence`, after a diverged result was written and printed.
    """
    from dpsgd_cli.engine import processes  # torch
    from dpsgd_cli.training import explain, loop

    settled = resolve_auto(loaded)
    directory = loop.result_directory(settled, out)
    with (
        processes.join() as team,
        kill_is_interrupt(once=team.size > 1),
        _Bar(loaded.recipe.name, silent=not team.first) as bar,
    ):
        try:
            if team.tell(lambda: loop.is_finished(settled, directory, bar.say)):
                bar.say("This recipe has been trained already; remove the directory to train it again.")
                if loaded.recipe.save_model is not False and not (directory / MODEL).is_file():
                    bar.say("It holds no model, as results of sweeps and comparisons do not.")
            else:
                run = loop.finish if finish else loop.run
                run(settled, loop.Options(out, resume, bar.update, bar.say, team, save_models=True))
        except DpsgdError as error:
            raise team.say_of(error) from error.__cause__
    if not team.first:
        return
    document = store.read_document(directory)
    for warning in document["warnings"]:
        if f"warning: {warning}" not in bar.told:
            click.echo(f"warning: {warning}", err=True)
    for warning in document["nonprivate_warnings"]:
        click.echo(f"nonprivate warning: {warning}", err=True)
    click.echo((summary.result_text if verbose else summary.brief_text)(document, directory))
    if not report.is_written(directory):
        explain.write(directory, settled.base)  # after the numbers are printed: drawing takes half a second
        report.write(directory)
    if fail_on_divergence and document["diverged"]:
        trials = ", ".join(map(str, document["diverged"]))
        raise RunError(f"{directory}: diverged (trial {trials}), and --fail-on-divergence was given")


class _Bar:
    """Progress bar of epochs on stderr, shown only in a terminal; messages are printed above it and kept in `told`."""

    def __init__(self, name: str, silent: bool) -> None:
        self.told: set[str] = set()
        self._silent, hidden = silent, silent or not sys.stderr.isatty()
        self._bar: Any = tqdm(desc=visible(name), unit="epoch", file=for_bars(), disable=hidden, leave=False)

    def __enter__(self) -> _Bar:
        return self

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def say(self, text: str) -> None:
        self.told.add(text)
        if not self._silent:
            self._bar.write(visible(text), file=for_bars())

    def __exit__(self, *_: object) -> None:
        self._bar.close()
