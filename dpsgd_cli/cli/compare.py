"""Command `dpsgd compare`: options, and the run of a comparison. Torch is imported only if there is training to do.

Training at matched budgets is in `sweep/running.py`; statistics, tables and pages are in `results/`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dpsgd_cli.cli.budget import BOOK, with_book
from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.errors import UsageError
from dpsgd_cli.results import comparison as comparisons
from dpsgd_cli.results import comparison_report, files
from dpsgd_cli.results.comparison import Entry
from dpsgd_cli.results.pictures import draw


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...]:
    """Parse text such as `0.5,1,3` into ascending positive numbers; BadParameter for anything else."""
    del context, parameter
    try:
        found = tuple(sorted({float(part) for part in text.split(",")})) if text else ()
    except ValueError:
        found = (0.0,)
    if any(not 0 < value < float("inf") for value in found):
        raise click.BadParameter(f"{text!r}: write positive numbers with commas, for example 0.5,1,3")
    return found


@click.command("compare")
@click.argument("sources", metavar="(RECIPE|RESULT_DIR|KEY=VALUE)...", nargs=-1, required=True)
@click.option("--epsilon", "epsilons", callback=_numbers, metavar="E1,E2,...",
              help="Run every recipe at each of these budgets. Its noise is solved for; if the recipe fixes it, the"
              " label says so.")  # fmt: skip
@click.option("--delta", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=1e-5, show_default=True,
              help="Delta of the matched budgets.")  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), help="Trials of every recipe and fold. Default: the most of a recipe."
)
@click.option("--folds", type=click.IntRange(min=2), help="Cross-validate, with the same folds for every recipe.")
@click.option("--data-of", metavar="RECIPE", help="Use the data section of this recipe, and its folds, in all of them.")
@click.option("--baseline", metavar="NAME", help="Method that the others are compared with. Default: the first.")
@click.option("--metric", help="Metric to compare. Default: test accuracy, error or loss.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Folder of results, tables and pictures. Default: results/ for results, and a folder in it for the"
              " tables and pictures of this comparison.")  # fmt: skip
@BOOK
@click.option("--plot", is_flag=True, help="Draw pictures, as PNG and SVG.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained HTML page.")
def command(sources: tuple[str, ...], out: Path | None, baseline: str | None, metric: str | None, plot: bool,
            report: Path | None, book: Path | None, **terms: Any) -> None:  # fmt: skip
    """Compare recipes and results on equal budgets, seeds and test records.

    Recipes without a result are trained; result directories (also the folder of a sweep) are read as they are.
    KEY=VALUE changes every recipe. Results on other records or at another budget are listed in the table, without a
    difference.

    \b
    Examples:
      dpsgd compare results/quickstart-*
      dpsgd compare lee2018/dp-gd lee2018/dp-agd lee2018/objective-perturbation --epsilon 0.1,0.5,1 --plot
      dpsgd compare mine.yaml lee2018/dp-agd --data-of mine.yaml --epsilon 0.5,1,3 --report mine.html
    """
    sources = with_book(sources, book)
    _check_public(metric, report)
    overrides = tuple(source for source in sources if "=" in source and not Path(source).exists())
    places = [Path(source) for source in sources if source not in overrides and Path(source).is_dir()]
    recipes = [source for source in sources if source not in overrides and not Path(source).is_dir()]
    if (overrides or terms["epsilons"] or terms["folds"] or terms["repeats"]) and not recipes:
        raise UsageError("budgets, folds, repeats and KEY=VALUE are for recipes; results are compared as they are")
    results = Path("results") if out is None else out
    entries: list[Entry] = []
    if recipes:
        from dpsgd_cli.sweep.running import compared  # torch

        with trusting():
            terms = {**terms, "overrides": overrides}
            entries += compared(recipes, terms, results, lambda text: click.echo(text, err=True))
    # `results/*` also names folders that earlier comparisons wrote
    places = [p for p in places if not (p.name.startswith("comparison-") and (p / "comparison.json").is_file())]
    entries += [entry for place in places for entry in comparisons.read_entries(place)]
    if not entries:
        raise UsageError("nothing to compare; give recipes or result directories")
    counts = Counter((entry.method, entry.target) for entry in entries)
    # entries with equal names and targets are named by their directories
    named = [
        replace(entry, method=entry.directory.name) if counts[(entry.method, entry.target)] > 1 else entry
        for entry in entries
    ]
    found = comparisons.compare(named, metric, baseline)
    _check_public(found.metric, report)
    click.echo(comparison_report.to_markdown(found), nl=False)
    place = results / found.folder if out is None else out
    written = comparison_report.write(found, place)
    pictures = draw(found, place) if plot or report is not None else {}
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(report, comparison_report.page(found, pictures))
    names = ", ".join(file.name for file in [*written, *pictures.values()])
    click.echo(f"written to {place}: {names}{'' if report is None else f'; the page is {report}'}", err=True)


def _check_public(metric: str | None, report: Path | None) -> None:
    """Raise UsageError for a non-private metric if the comparison becomes a page, which is made to be shared."""
    if report is not None and metric is not None and metric.startswith("nonprivate_"):
        raise UsageError(f"{metric} is computed on training records without noise; choose another --metric for a page")
