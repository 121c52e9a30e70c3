"""The page of the lectures: what their algorithms reach beside what their theorems allow."""

from pathlib import Path

from benchmarks.pages import RESULTS
from benchmarks.pages.case import Case
from benchmarks.pages.spec import Spec

PUBLIC = Case("public", "first five classes", "lectures/cifar10-public", trials=1)
"""Trained by `public.py`; no row of the page."""
FOUND = RESULTS / "lectures" / "runs" / f"public-{PUBLIC.hash}"
SPEC = Spec(Path(__file__).with_name("page.yaml"), {"public": FOUND.as_posix()})
