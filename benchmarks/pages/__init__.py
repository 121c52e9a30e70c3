"""Pages of results: reproductions whose every number is in a CSV beside them, drawn again without training.

A page is a folder with `page.yaml` (what is trained, tables, claims: `spec.py`), `page.py` (a module with the names
that `Page` lists) and `page.md` (its words), and a name in `PAGES`. What it measured is in `results/<name>/trials.csv`
and `curves.csv`; `results/<name>/README.md` and its pictures are made from these alone.
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

PAGES = ("yu2019", "lectures", "lee2018", "pate", "frontier", "automatic", "finetune")
RESULTS = Path("results")


class Page(Protocol):
    """What a page's module defines."""

    CASES: Sequence[Case]
    METRICS: Sequence[str]
    """The columns of a run's `trials.csv` that the page's own keeps."""

    def said(self, rows: Rows) -> Mapping[str, str]:
        """The text of each `${name}` of `page.md`: tables, and numbers of its sentences."""

    def pictures(self, rows: Rows) -> Mapping[str, Figure]:
        """Figures by the name of their file, without `.png`."""


def page_of(name: str) -> Page:
    """A page by its name."""
    return cast(Page, importlib.import_module(f"benchmarks.{name}.page"))


def template_of(name: str) -> str:
    """The words of a page."""
    return (Path(__file__).parents[1] / name / "page.md").read_text(encoding="utf-8")
