"""From CSV to page: fill `page.md`, draw pictures. Trains nothing.

A picture carries the SHA-256 of the CSVs that it was drawn from (`Rows`, a text field of PNG), so that a test finds
one that is older than its numbers without drawing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from benchmarks.pages import page_of, template_of
from benchmarks.pages.rows import MISSING, Rows, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIELD = "Rows"


def text(name: str, folder: Path) -> str:
    """The page, from its CSVs. A section that was not run is left out, and named in `${not_run}`."""
    page = page_of(name)
    said = page.said(Rows.read(page.CASES, folder))
    first, *sections = template_of(name).split("\n## ")
    kept = [section for section in sections if not any(said.get(key) == MISSING for key in _names(section))]
    dropped = [section.splitlines()[0] for section in sections if section not in kept]
    words = {**said, "not_run": "; ".join(dropped) or "nothing"}
    return Template("\n## ".join([first, *kept])).substitute(words)


def _names(section: str) -> list[str]:
    return [found["braced"] for found in Template.pattern.finditer(section) if found["braced"]]


def redraw(name: str, folder: Path) -> None:
    """Write `README.md` and the pictures."""
    page = page_of(name)
    for picture, figure in page.pictures(Rows.read(page.CASES, folder)).items():
        figure.savefig(folder / f"{picture}.png", dpi=100, metadata={"Software": None, FIELD: digest(folder)})
    (folder / "README.md").write_text(text(name, folder), encoding="utf-8")


def errorbars(axes: Axes, points: Mapping[float, Summary | None], **style: Any) -> None:
    """A line through the means by x, with intervals, of those that have rows; nothing where none has."""
    known = {x: one for x, one in points.items() if one is not None}
    if known:
        margins = [one.margin or 0.0 for one in known.values()]
        axes.errorbar([*known], [one.mean for one in known.values()], margins, **style)


def over_epsilon(axes: Axes, epsilons: Sequence[float], **labels: Any) -> None:
    """A logarithmic axis with a tick at each epsilon."""
    axes.set(xscale="log", **{"xlabel": "epsilon", **labels})
    axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
    axes.minorticks_off()


def digest(folder: Path) -> str:
    """Of what pictures are drawn from."""
    names = [path for path in (folder / "trials.csv", folder / "curves.csv") if path.is_file()]
    return hashlib.sha256(b"".join(path.read_bytes() for path in names)).hexdigest()
