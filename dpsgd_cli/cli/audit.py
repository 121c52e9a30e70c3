"""Command `dpsgd audit`: options only, without slow imports until a recipe was read. `audit/auditing.py` runs it."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.audit.findings import TIERS, AuditOptions
from dpsgd_cli.cli.budget import BOOK, with_book


def _tiers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    del context, parameter
    asked = [name.strip().upper() for name in value.split(",") if name.strip()]
    unknown = [name for name in asked if name not in TIERS]
    if unknown or not asked:
        raise click.BadParameter(f"{', '.join(unknown) or 'none'} is not a tier; choose from {','.join(TIERS)}")
    return tuple(name for name in TIERS if name in asked)


@click.command("audit")
@click.argument("target", metavar="RECIPE|RESULT_DIR")
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--trials", type=click.IntRange(min=2), help="Number of trials. Default: 100; with --quick 20.")
@click.option(
    "--canaries", type=click.IntRange(min=1), help="Canaries per trial. Default: 100, or a third of the records."
)
@click.option("--confidence", type=click.FloatRange(0.5, 0.9999), default=0.95, show_default=True,
              help="Confidence of each bound and of the verdict.")  # fmt: skip
@click.option("--tier", "tiers", default=",".join(TIERS), show_default=True, callback=_tiers, help="Attacks to run.")
@click.option("--quick", is_flag=True, help="Fewer rows and trials: seconds, for CI.")
@BOOK
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder. Default: audits/ beside results."
)
def command(
    target: str,
    overrides: tuple[str, ...],
    trials: int | None,
    canaries: int | None,
    confidence: float,
    tiers: tuple[str, ...],
    quick: bool,
    out: Path | None,
    book: Path | None,
) -> None:
    """Attack the privacy claim of a recipe or a result, and report the findings.

    The recipe is trained unchanged on random rows with canaries. Tier A gives a lower bound on epsilon without
    assumptions, tier B within the family of the claim; C tests noise and batches, D neighbouring data. The exit code is
    1 if a claim is refuted. A lower bound far below the claim is no failure: it shows how far these attacks get.

    A book is not charged, because no record of its table is used: with a book, tier D does not read the recipe's file.

    \b
    Examples:
      dpsgd audit quickstart
      dpsgd audit patients.yaml --quick
      dpsgd audit results/quickstart-* --tier B --trials 500
    """
    from dpsgd_cli.errors import UsageError
    from dpsgd_cli.recipe.loading import load_recipe  # pydantic
    from dpsgd_cli.sweep.settings import is_sweep

    def say(text: str) -> None:
        click.echo(text, err=True)

    options = AuditOptions(tiers, confidence, trials, canaries, quick, say=say)
    if is_sweep(target):
        raise UsageError(f"{target} is a sweep; audit the recipes of its cells one by one")
    result = Path(target) if (Path(target) / "recipe.yaml").is_file() else None
    loaded = load_recipe(target if result is None else str(result / "recipe.yaml"), with_book(overrides, book))

    from dpsgd_cli.audit import auditing  # torch

    auditing.run(loaded, out, result, options)
