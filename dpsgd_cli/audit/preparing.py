"""Tier D for preprocessing: what each step learns from neighbouring rows, and whether that is charged or declared.

A step that learns from the training rows is a release: it must have noise and a charge, or be declared non-private.
Each step learns from random rows, and again with one record changed and the same random draws.
"""

from __future__ import annotations

import numpy as np

from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit.findings import Finding, exact
from dpsgd_cli.data import preparation
from dpsgd_cli.data.dataset import Layout, PrivateStep, Step
from dpsgd_cli.data.projections import Rotation
from dpsgd_cli.recipe.loading import LoadedRecipe

_RECORDS = 40


def compare(loaded: LoadedRecipe, plan: Plan) -> list[Finding]:
    """Return a finding for each preprocessing step that may learn from rows."""
    recipe = loaded.recipe
    if recipe.data.features is not None:
        return []
    steps, layouts = preparation.planned_steps(recipe.data, recipe.adjacency, loaded.base)
    charges = [release.mechanism for release in plan.before]
    found = []
    rows = _rows(layouts[0])
    for number, (step, layout) in enumerate(zip(steps, layouts, strict=False)):
        name = f"preprocessing {number} ({type(step).__name__.lower()})"
        kept = [_kept(step, one, layout) for one in (rows, _changed(rows))]
        moves = kept[0] is not None and kept[1] is not None and not np.array_equal(kept[0], kept[1])
        if step.release is not None or moves:
            charged = step.release is not None and step.release in charges
            declared = step.nonprivate is not None or step.declaration is not None
            told = "charged" if charged else "declared" if declared else "neither charged nor declared"
            refuted = not charged and not (declared and step.release is None)
            told = f"one record changes what is kept; {told}" if moves else told
            found.append(exact("D", name, told, "charged or declared", refuted))
        rows = step.transform(layout, kept[0])(rows)
    drawn = sum(isinstance(step, PrivateStep) and step.release is not None for step in steps)
    found.append(exact("D", "releases of preprocessing", f"{drawn}", f"{len(charges)}", drawn > len(charges)))
    return found


def _kept(step: Step, rows: np.ndarray, layout: Layout) -> np.ndarray | None:
    if isinstance(step, Rotation):
        return step.kept(step.drawn(layout), layout)
    if not isinstance(step, PrivateStep) or step.release is None:
        return step.kept(rows, layout)
    random = np.random.default_rng(3)
    return step.learn(rows, layout)(lambda exact: exact + random.standard_normal(exact.shape))


def _rows(layout: Layout) -> np.ndarray:
    """Return random records in the form in which a file is read: numbers in [0, 1) and codes of categories."""
    random = np.random.default_rng(2)
    if layout.columns is None:
        return random.random((_RECORDS, *layout.shape), dtype=np.float32)
    tops = [1 if column.values is None else len(column.values) for column in layout.columns]
    drawn = random.random((_RECORDS, len(tops))) * tops
    whole = np.array([column.values is not None for column in layout.columns])
    return np.where(whole, np.floor(drawn), drawn).astype(np.float32)


def _changed(rows: np.ndarray) -> np.ndarray:
    """Return the rows with the first record replaced by a copy of the second."""
    other = rows.copy()
    other[0] = other[1]
    return other
