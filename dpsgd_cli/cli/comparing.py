"""Run of `dpsgd compare`. Torch is imported only if there is something to train.

Training at matched budgets is in `sweep/running.py`; statistics, tables and pages are in `results/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.errors import UsageError
from dpsgd_cli.results import comparison as comparisons
from dpsgd_cli.results import files, tables
from dpsgd_cli.results.comparison import Comparison, Entry
from dpsgd_cli.results.page import page
from dpsgd_cli.results.pictures import draw


@dataclass(frozen=True)
class Shown:
    """Options for the output in addition to the tables."""

    plot: bool
    report: Path | None
    with_nonprivate: bool

    def check(self, metric: str | None) -> None:
        """Raise UsageError for a page with a non-private metric, unless `--with-nonprivate` allows it.

        Pages are made to be shared.
        """
        nonprivate = metric is not None and metric.startswith("nonprivate_")
        if nonprivate and self.report is not None and not self.with_nonprivate:
            raise UsageError(
                f"{metric} is computed on training records without noise; --with-nonprivate puts it on the page,"
                " which is then not to be published, or choose another --metric"
            )

    def write(self, found: Comparison, place: Path) -> None:
        """Write tables, pictures and the page, and print where they are."""
        written = tables.write(found, place)
        pictures: dict[str, Path] = {}
        if self.plot or self.report is not None:
            pictures = draw(found, place, self.with_nonprivate)
        if self.report is not None:
            self.report.parent.mkdir(parents=True, exist_ok=True)
            files.write_whole(self.report, page(found, pictures))
        names = ", ".join(file.name for file in [*written, *pictures.values()])
        told = "" if self.report is None else f"; the page is {self.report}"
        click.echo(f"written to {place}: {names}{told}", err=True)


@trusting()
def compare(
    sources: Sequence[str], terms: dict[str, Any], by: tuple[str | None, str | None], shown: Shown, out: Path | None
) -> None:
    """Train the recipes without a result, then print and write the comparison. `by`: metric and baseline."""
    shown.check(by[0])
    overrides = tuple(source for source in sources if "=" in source and not Path(source).exists())
    places = [Path(source) for source in sources if source not in overrides and Path(source).is_dir()]
    recipes = [source for source in sources if source not in overrides and not Path(source).is_dir()]
    if (overrides or terms["epsilons"] or terms["folds"] or terms["repeats"]) and not recipes:
        raise UsageError("budgets, folds, repeats and KEY=VALUE are for recipes; results are compared as they are")
    results = Path("results") if out is None else out
    entries: list[Entry] = []
    if recipes:
        from dpsgd_cli.sweep.running import compared

        terms = {**terms, "overrides": overrides}
        entries += compared(recipes, terms, results, lambda said: click.echo(said, err=True))
    # `results/*` also names folders that earlier comparisons wrote
    places = [p for p in places if not (p.name.startswith("comparison-") and (p / "comparison.json").is_file())]
    entries += [entry for place in places for entry in comparisons.read_entries(place)]
    if not entries:
        raise UsageError("nothing to compare; give recipes or result directories")
    found = comparisons.compare(_distinct(entries), *by)
    shown.check(found.metric)
    click.echo(tables.to_markdown(found), nl=False)
    shown.write(found, results / found.folder if out is None else out)


def _distinct(entries: list[Entry]) -> list[Entry]:
    """Return the entries; entries with equal names and targets are named by their directories."""
    counts = Counter((entry.method, entry.target) for entry in entries)
    return [
        replace(entry, method=entry.directory.name) if counts[(entry.method, entry.target)] > 1 else entry
        for entry in entries
    ]
