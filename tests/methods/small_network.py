"""Gradient methods on a small network and thirty records, without files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.engine.losses import LOSSES
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.dp_sgd.run import GradientMethod
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.schema import Recipe

RECORDS = 30
Data = tuple[np.ndarray, np.ndarray]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def records(count: int = RECORDS) -> Data:
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 4)) * 2, rng.integers(0, 3, count)


def recipe(**changes: Any) -> Recipe:
    """DP-SGD on shuffled batches of 7 for 4 epochs, but for `changes`; `None` leaves a section out."""
    base: dict[str, Any] = {
        "name": "small",
        "data": {"path": "small.csv", "target": "y"},
        "model": {"kind": "mlp"},
        "method": {"kind": "dp-sgd", "batching": "shuffle", "batch_size": 7, "learning_rate": 0.5},
        "privacy": {"schedule": {"kind": "uniform", "initial": 1.5}, "delta": 1e-5},
        "epochs": 4,
        "seed": 0,
    }
    for key, value in changes.items():
        base[key] = {**base[key], **value} if isinstance(value, dict) else value
    return Recipe.model_validate({key: value for key, value in base.items() if value is not None})


def context(
    recipes: Sequence[Recipe],
    data: Data | None = None,
    streams: Sequence[Streams] | None = None,
    dtype: torch.dtype = torch.float64,
    most_rows: int = 1000,
) -> Context:
    """One trial for each recipe, with the recipe's seed."""
    x, y = records() if data is None else data
    place = Placement(torch.device("cpu"), dtype)
    streams = [SeededStreams(one.seed or 0) for one in recipes] if streams is None else streams
    pack = Pack(network, [stream.integer("init") for stream in streams], place, trusted=True)
    plans = tuple(
        None if one.privacy is None else plan_for(one, Facts(len(y), groups=len(pack.layers))) for one in recipes
    )
    return Context(
        recipes=tuple(recipes),
        plans=plans,
        ledgers=tuple(Ledger() if plan is None else plan.ledger() for plan in plans),
        streams=tuple(streams),
        pack=pack,
        table=Table.load(x, y, False, place.device, place.dtype),
        loss=LOSSES["classification"],
        most_rows=most_rows,
        base=Path(),
    )


def train(context: Context) -> GradientMethod:
    """The context's method after its last epoch."""
    method = create(context)
    assert isinstance(method, GradientMethod)
    for epoch in range(method.epochs):
        method.run_epoch(epoch)
    return method
