"""Objectives and empirical risks of recipes: linear for convex models, by forward passes for other models.

Sums over records are in `methods/risks/risk.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from dpsgd_cli.engine.losses import Loss, MarginLoss, margin_loss
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import ModelError
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.methods.risks.risk import LinearRisk, PackRisk, Risk
from dpsgd_cli.methods.risks.rows import SignedRows


def loss_of(model: ConvexModel) -> MarginLoss:
    """Return the margin loss that a model section names."""
    return margin_loss(model.loss, model.huber_width, model.quantile)


def output_loss(model: ConvexModel, raw: bool = False) -> Loss:
    """Return the model's loss as a function of outputs (R, B, 1) and labels (R, B) of all trials.

    Training clamps targets to `model.target_bound`, because its price relies on the bound. `raw` keeps targets as they
    are: use it for metrics on held-out rows, where clamping would make a model with small outputs look good.
    """
    loss, residual = loss_of(model), model.known.residual
    bound = math.inf if raw else model.target_bound

    def of_outputs(outputs: Tensor, labels: Tensor) -> Tensor:
        margin = outputs.squeeze(-1)
        if residual:
            return loss.value(margin - labels.clamp(-bound, bound))
        return loss.value(margin * ((labels > 0).to(margin) * 2 - 1))

    return of_outputs


def rows_of(model: ConvexModel, table: Table) -> SignedRows:
    """Return the signed rows of a table that all trials share; ModelError for a table with per-trial rows."""
    if table.per_trial:
        raise ModelError(
            "a convex model needs one matrix of rows for all trials, and private preprocessing gives each its own;"
            " use model.kind: linear with dp-sgd"
        )
    residual = model.known.residual
    y = table.y.clamp(-model.target_bound, model.target_bound) if residual else table.y
    return SignedRows.load(table.x, y, residual, model.has_bias, table.held_out)


def linear_risk(context: Context) -> LinearRisk:
    """Return the linear risk of a convex model; ModelError for any other model."""
    model = context.recipes[0].model
    if not isinstance(model, ConvexModel):
        raise ModelError(f"method {context.recipes[0].method.kind} is for model.kind: convex, not {model.kind}")
    return LinearRisk(rows_of(model, context.table), loss_of(model))


def merged_risk(context: Context) -> LinearRisk:
    """Return the linear risk on merged rows: equal records are one weighted row, and sums over records are equal."""
    risk = linear_risk(context)
    return LinearRisk(risk.rows.merged(), risk.loss)


def risk_of(context: Context) -> Risk:
    """Return the risk of any model: linear for a convex model on shared rows, else by forward passes."""
    if isinstance(context.recipes[0].model, ConvexModel) and not context.table.per_trial:
        return merged_risk(context)
    return PackRisk(context.pack, context.table, context.loss, context.most_rows)


def l2_of(recipe: Experiment) -> float:
    """Return the coefficient of |w|^2 / 2 in the objective; 0 for models without one."""
    return recipe.model.l2 if isinstance(recipe.model, ConvexModel) else 0.0


def penalty_of(context: Context) -> Tensor:
    """Return N lambda of every trial, (R, 1): the coefficient of |w|^2 / 2 next to SUMS of losses. Public."""
    return context.column([len(context.table) * l2_of(recipe) for recipe in context.recipes])


def radii_of(recipes: Sequence[Experiment]) -> list[float]:
    """Return the radius of each trial's constraint; inf for unconstrained trials."""
    return [
        r.model.radius if isinstance(r.model, ConvexModel) and r.model.radius is not None else math.inf for r in recipes
    ]
