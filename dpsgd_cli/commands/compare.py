"""`dpsgd compare`: thin. Not here: matching budgets (`recipe/matching.py`), statistics and tables (`results/`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.wording import count

if TYPE_CHECKING:
    from dpsgd_cli.results.comparison import Comparison, Entry


def _numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[float, ...]:
    """`0.5,1,3` as ascending positive numbers."""
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
@click.option("--plot", is_flag=True, help="Draw pictures, as PNG and SVG.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Write one self-contained HTML page.")
@click.option("--with-nonprivate", is_flag=True,
              help="Also draw what was computed on training records without noise: not to be published.")  # fmt: skip
def command(sources: tuple[str, ...], out: Path | None, baseline: str | None, metric: str | None,
            **terms: Any) -> None:  # fmt: skip
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
    from dpsgd_cli.results import comparison as comparisons
    from dpsgd_cli.results.tables import to_markdown

    shown = Shown(*(terms.pop(name) for name in ("plot", "report", "with_nonprivate")))
    shown.check(metric)
    overrides = tuple(source for source in sources if _is_override(source))
    places = [Path(source) for source in sources if not _is_override(source) and Path(source).is_dir()]
    directories = [place for place in places if not _is_comparison(place)]
    recipes = [source for source in sources if not _is_override(source) and not Path(source).is_dir()]
    if (overrides or terms["epsilons"] or terms["folds"] or terms["repeats"]) and not recipes:
        raise UsageError("budgets, folds, repeats and KEY=VALUE are for recipes; results are compared as they are")
    results = Path("results") if out is None else out
    entries = _run(recipes, {**terms, "overrides": overrides}, results) if recipes else []
    entries += [entry for directory in directories for entry in comparisons.read_entries(directory)]
    if not entries:
        raise UsageError("nothing to compare; give recipes or result directories")
    found = comparisons.compare(_distinct(entries), metric, baseline)
    shown.check(found.metric)
    click.echo(to_markdown(found), nl=False)
    shown.write(found, results / found.folder if out is None else out)


@dataclass(frozen=True)
class Shown:
    """What is written besides the tables."""

    plot: bool
    report: Path | None
    with_nonprivate: bool

    def check(self, metric: str | None) -> None:
        """A page is there to be shared, so what is not to be published needs a word."""
        nonprivate = metric is not None and metric.startswith("nonprivate_")
        if nonprivate and self.report is not None and not self.with_nonprivate:
            raise UsageError(
                f"{metric} is computed on training records without noise; --with-nonprivate puts it on the page,"
                " which is then not to be published, or choose another --metric"
            )

    def write(self, found: Comparison, place: Path) -> None:
        """Tables, pictures and the page; says where they are."""
        from dpsgd_cli.results import tables
        from dpsgd_cli.results.store import write_whole

        written = tables.write(found, place)
        pictures: dict[str, Path] = {}
        if self.plot or self.report is not None:
            from dpsgd_cli.results.pictures import draw

            pictures = draw(found, place, self.with_nonprivate)
        if self.report is not None:
            from dpsgd_cli.results.page import page

            self.report.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.report, page(found, pictures))
        names = ", ".join(file.name for file in [*written, *pictures.values()])
        told = "" if self.report is None else f"; the page is {self.report}"
        click.echo(f"written to {place}: {names}{told}", err=True)


def _is_comparison(place: Path) -> bool:
    """What an earlier comparison wrote, which `results/*` names too."""
    return place.name.startswith("comparison-") and (place / "comparison.json").is_file()


def _is_override(source: str) -> bool:
    return "=" in source and not Path(source).exists()


def _run(recipes: list[str], terms: dict[str, Any], out: Path) -> list[Entry]:
    """Train what has no result yet, packed like a sweep; every recipe at every budget as an entry."""
    from dpsgd_cli.account.matching import Terms, matched
    from dpsgd_cli.interrupts import kill_is_interrupt
    from dpsgd_cli.results import store
    from dpsgd_cli.results.comparison import Entry
    from dpsgd_cli.sweep import grouping, planning
    from dpsgd_cli.sweep.expansion import Cell
    from dpsgd_cli.sweep.running import Job, is_open, run_job

    planner = planning.shared_planner()
    asked = matched(recipes, Terms(**terms))
    cells = [Cell(number, loaded, {}) for number, (_, _, loaded) in enumerate(asked)]
    _refuse([(asked[cell.number], planner.plan(cell).error) for cell in cells])
    with kill_is_interrupt():
        packs = grouping.packs(cells, planner.trials_that_fit, lambda cell: planning.steps_of(planner.plan(cell)))
        left = [pack for pack in packs if any(is_open(cell, out, True) for cell in pack.cells)]
        store.prepare_place(out / "comparison.probe")
        for number, pack in enumerate(left, start=1):
            outcome = run_job(Job(pack.cells, out, retry_failed=True))
            click.echo(
                f"pack {number}/{len(left)}: {count(outcome.trials, 'trial')} in {outcome.seconds:.1f} s", err=True
            )
            if outcome.failed:
                raise RunError("\n".join(f"{name}: {error}" for name, error in outcome.failed.items()))
    return [
        Entry(label, epsilon, out / cell.directory, store.read_whole(out / cell.directory))
        for (label, epsilon, _), cell in zip(asked, cells, strict=True)
    ]


def _refuse(planned: list[Any]) -> None:
    """All recipes and budgets that cannot be run, together."""
    from dpsgd_cli.errors import RecipeError

    problems = [
        f"{label}{'' if epsilon is None else f' at epsilon {epsilon:g}'}: {error}"
        for (label, epsilon, _), error in planned
        if error is not None
    ]
    if problems:
        raise RecipeError(problems)


def _distinct(entries: list[Entry]) -> list[Entry]:
    """Results of the same name told apart by their directory."""
    from dataclasses import replace

    counts: dict[tuple[str, float | None], int] = {}
    for entry in entries:
        counts[(entry.method, entry.target)] = counts.get((entry.method, entry.target), 0) + 1
    return [
        replace(entry, method=entry.directory.name) if counts[(entry.method, entry.target)] > 1 else entry
        for entry in entries
    ]
