"""Pages of results: reproductions whose every number is in a CSV beside them, drawn again without training.

A page is a module with the names that `Page` lists, a `page.md` beside it, and a line in `PAGES`. What it measured is
in `results/<name>/trials.csv` and `curves.csv`; `results/<name>/README.md` and its pictures are made from these alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from benchmarks.pages.case import Case
    from benchmarks.pages.rows import Rows

PAGES = {
    "yu2019": "benchmarks.yu2019.page",
    "lectures": "benchmarks.lectures.page",
    "lee2018": "benchmarks.lee2018.page",
    "pate": "benchmarks.pate.page",
    "frontier": "benchmarks.frontier.page",
    "automatic": "benchmarks.automatic.page",
    "finetune": "benchmarks.finetune.page",
}
RESULTS = Path("results")


class Page(Protocol):
    """What a page's module defines."""

    CASES: Sequence[Case]
    METRICS: Sequence[str]
    """The columns of a run's `trials.csv` that the page's own keeps."""
    QUOTED: str
    """Decimal numbers that `page.md` may say in its own words: published ones and settings, nothing measured."""

    def said(self, rows: Rows) -> Mapping[str, str]:
        """The text of each `${name}` of `page.md`: tables, and numbers of its sentences."""

    def pictures(self, rows: Rows) -> Mapping[str, Figure]:
        """Figures by the name of their file, without `.png`."""


def page_of(name: str) -> Page:
    """A page by its name."""
    return cast(Page, importlib.import_module(PAGES[name]))


def template_of(name: str) -> str:
    """The words of a page."""
    source = importlib.import_module(PAGES[name]).__file__
    assert source is not None
    return (Path(source).parent / "page.md").read_text(encoding="utf-8")
