"""What is public of a recipe's data before any value is used: records a trial trains on, and how long a record can be.

Needs no torch, so that prices can be asked without it. Not here: plans made of it (`privacy/plan.py`).
"""

from __future__ import annotations

import math
from pathlib import Path

from dpsgd_cli.data.bounds import feature_norm_bound
from dpsgd_cli.data.dataset import Outline
from dpsgd_cli.data.preparation import folds_declared, sizes_declared
from dpsgd_cli.data.splits import most_trained_on
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.model import ConvexModel


def training_records(recipe: Recipe, outline: Outline) -> int:
    """Records of each trial: the training part, or with folds the most that any of them trains on."""
    if recipe.folds is None:
        return outline.train_records
    return most_trained_on(outline.files, recipe.folds)


def feature_bound(recipe: Recipe, base: Path) -> float | None:
    """Public bound on the norm of a convex model's features, its constant column included; None where there is none."""
    if not isinstance(recipe.model, ConvexModel):
        return None
    bound = feature_norm_bound(recipe.data, base)
    return None if bound is None else math.hypot(bound, float(recipe.model.bias))


def declarations(recipe: Recipe, outline: Outline) -> tuple[str, ...]:
    """What the outline declares, with the numbers of records that folds make of it, and what the model declares."""
    return (*_of_records(recipe, outline), *of_model(recipe))


def of_model(recipe: Recipe) -> tuple[str, ...]:
    """What the model section takes to be public of the data."""
    model = recipe.model
    if not isinstance(model, ConvexModel) or model.loss != "squared":
        return ()
    bound = f"{model.target_bound:g}"
    return (
        f"In training targets are clamped to [-{bound}, {bound}], a public bound (model.target_bound); metrics of test"
        " records are of their targets as they are.",
    )


def _of_records(recipe: Recipe, outline: Outline) -> tuple[str, ...]:
    if recipe.folds is None:
        return outline.declarations
    of_split = sizes_declared(outline.train_records, outline.test_records)
    kept = tuple(said for said in outline.declarations if said not in of_split)
    return (*kept, *folds_declared(outline.files, recipe.folds))
