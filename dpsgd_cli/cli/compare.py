"""Command `dpsgd compare`: options only, without slow imports. `comparing.py` runs the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dpsgd_cli.cli.budget import BOOK, with_book


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
              help="Run every recipe at each of these budgets: its noise is solved for. Labels say where it was"
              " fixed.")  # fmt: skip
@click.option("--delta", type=click.FloatRange(0, 1, min_open=True, max_open=True), default=1e-5, show_default=True,
              help="Of the matched budgets.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), help="Trials of every recipe; the recipes' largest by default.")
@click.option("--folds", type=click.IntRange(min=2), help="Cross-validate, with the same folds for every recipe.")
@click.option("--data-of", metavar="RECIPE", help="Use the data section of this recipe, and its folds, in all of them.")
@click.option("--baseline", metavar="NAME", help="What the others are compared with; the first by default.")
@click.option("--metric", help="Column to compare; test accuracy, error or loss by default.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False),
              help="Folder of results, tables and pictures. Left out: results in results/, and tables and pictures in a"
              " folder there for this comparison.")  # fmt: skip
@BOOK
@click.option("--plot", is_flag=True, help="Draw pictures, as PNG and SVG.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained HTML page.")
@click.option("--with-nonprivate", is_flag=True,
              help="Also draw what was computed on training records without noise: not to be published.")  # fmt: skip
def command(sources: tuple[str, ...], out: Path | None, baseline: str | None, metric: str | None,
            book: Path | None, **terms: Any) -> None:  # fmt: skip
    """Compare recipes and results on equal budgets, seeds and test records.

    Recipes are trained where they have no result yet; result directories (also a sweep's folder) are read as they
    are. KEY=VALUE changes every recipe. What is not on the same records, or not at an equal budget, stands in the
    table and is not subtracted.

    \b
    Examples:
      dpsgd compare results/quickstart-*
      dpsgd compare lee2018/dp-gd lee2018/dp-agd lee2018/objective-perturbation --epsilon 0.1,0.5,1 --plot
      dpsgd compare mine.yaml lee2018/dp-agd --data-of mine.yaml --epsilon 0.5,1,3 --report mine.html
    """
    from dpsgd_cli.cli.comparing import Shown, compare  # NumPy and pydantic

    shown = Shown(*(terms.pop(name) for name in ("plot", "report", "with_nonprivate")))
    compare(with_book(sources, book), terms, (metric, baseline), shown, out)
