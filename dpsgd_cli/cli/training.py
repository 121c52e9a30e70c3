"""Run of `dpsgd train` after its recipe was read: progress, messages and result. Training is in `training/loop.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from dpsgd_cli.accounting.statement import warnings_of
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.package_files import MODEL
from dpsgd_cli.common.terminal import for_bars
from dpsgd_cli.common.text_format import count, visible
from dpsgd_cli.engine import processes
from dpsgd_cli.errors import DpsgdError, RunError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.results import report, store, summary
from dpsgd_cli.training import build_models, explain, loop
from dpsgd_cli.training.plans import declarations, resolve_auto


def rehearse(loaded: LoadedRecipe) -> None:
    """Build the model, then print the plan and its price."""
    if processes.started_by_a_launcher():
        raise UsageError("--dry-run is for one process; start it without torchrun")
    settled = resolve_auto(loaded)
    plan, outline = loop.rehearse(settled)
    for line in build_models.weights_told(settled):
        click.echo(line)
    if plan is None:
        length = settled.recipe.epochs
        trained = count(length, "epoch") if isinstance(length, int) else length
        click.echo(f"{settled.recipe.name}: {trained} without any privacy; nothing to price")
        return
    for warning in warnings_of(plan.guarantee().epsilon, plan.delta, plan.sampling.records):
        click.echo(f"warning: {warning}", err=True)
    click.echo(summary.plan_text(plan, settled.recipe, declarations(settled, outline), settled.chosen))


def train(
    loaded: LoadedRecipe, out: Path, resume: bool, fail_on_divergence: bool = False, finish: bool = False
) -> None:
    """Train a recipe that has no result yet, alone or as one of a team of processes, and print the result.

    With `finish` nothing is trained: the result is made from the last checkpoint. With `fail_on_divergence`, raises
    RunError after a diverged result was written and printed.
    """
    settled = resolve_auto(loaded)
    directory = loop.result_directory(settled, out)
    told: set[str] = set()
    with (
        processes.join() as team,
        kill_is_interrupt(once=team.size > 1),
        _Bar(loaded.recipe.name, told, silent=not team.first) as bar,
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
        if f"warning: {warning}" not in told:
            click.echo(f"warning: {warning}", err=True)
    for warning in document["nonprivate_warnings"]:
        click.echo(f"nonprivate warning: {warning}", err=True)
    click.echo(summary.result_text(document, directory))
    if not report.is_written(directory):
        explain.write(directory, settled.base)  # after the numbers are printed: drawing takes half a second
        report.write(directory)
    if fail_on_divergence and document["diverged"]:
        trials = ", ".join(map(str, document["diverged"]))
        raise RunError(f"{directory}: diverged (trial {trials}), and --fail-on-divergence was given")


class _Bar:
    """Progress bar of epochs on stderr, shown only in a terminal; messages are printed above it."""

    def __init__(self, name: str, told: set[str], silent: bool) -> None:
        self._name = name
        self._silent = silent
        self._told = told
        self._bar: Any = None

    def __enter__(self) -> _Bar:
        hidden = self._silent or not sys.stderr.isatty()
        name = visible(self._name)
        self._bar = tqdm(total=None, desc=name, unit="epoch", file=for_bars(), disable=hidden, leave=False)
        return self

    def update(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def say(self, text: str) -> None:
        self._told.add(text)
        if not self._silent:
            self._bar.write(visible(text), file=for_bars())

    def __exit__(self, *_: object) -> None:
        self._bar.close()
