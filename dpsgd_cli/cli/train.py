"""Command `dpsgd train`: options only, without slow imports until a recipe was read. `training.py` runs it."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.cli.budget import BOOK, with_book
from dpsgd_cli.cli.trust import TRUST_CODE
from dpsgd_cli.errors import UsageError


@click.command("train")
@click.argument("recipe")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results"), show_default=True,
              help="Where the result directory goes.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), help="Trials, trained together; short for repeats=N.")
@click.option("--dry-run", is_flag=True, help="Build the model, print the plan and its price; train nothing.")
@click.option("--fail-on-divergence", is_flag=True, help="Exit with code 1 where a trial diverged; for CI.")
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
    resume: bool,
    finish: bool,
    fail_on_divergence: bool,
    book: Path | None,
) -> None:
    """Train the model of RECIPE and state what it guarantees.

    RECIPE is a YAML file or the name of a shipped recipe; KEY=VALUE replaces single settings. A result that
    exists already is shown, not made again. With `torchrun --nproc-per-node N -m dpsgd_cli train RECIPE`, N processes
    train it together: the same batches, one draw of noise, the same guarantee.

    \b
    Examples:
      dpsgd train quickstart
      dpsgd train quickstart --dry-run privacy.budget.epsilon=1
      dpsgd train yu2019/mnist-time --repeats 3
    """
    if finish and (resume or dry_run):
        raise UsageError("--finish trains nothing, so it goes with neither --resume nor --dry-run; give one of them")

    from dpsgd_cli.common.plugins import trusting
    from dpsgd_cli.recipe.loading import load_recipe  # pydantic

    overrides = with_book(overrides, book)
    loaded = load_recipe(recipe, overrides if repeats is None else (*overrides, f"repeats={repeats}"))

    from dpsgd_cli.cli.training import rehearse, train  # torch, for which a mistyped recipe should not wait

    if dry_run:
        rehearse(loaded)
    else:
        with trusting():
            train(loaded, out, resume, fail_on_divergence, finish)
