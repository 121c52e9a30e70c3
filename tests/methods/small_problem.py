"""Small convex problems for tests of methods: a context without files, and streams that give no noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.engine import models
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.engine.streams import SeededStreams, Streams
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.context import Context
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.methods.risks.problem import output_loss
from dpsgd_cli.recipe.schema import Recipe


class Silent(SeededStreams):
    """Streams whose normals are all zero: noise switched off."""

    def normal(self, purpose: str, counter: int, out: torch.Tensor) -> torch.Tensor:
        return out.zero_()

    def under(self, name: str) -> Streams:
        return Silent(f"{self.seed}/{name}")


def points(records: int = 60, features: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features in [0, 1] and classes 0 and 1 that a plane roughly separates."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(size=(records, features))
    y = ((x - 0.5) @ rng.normal(size=features) + 0.1 * rng.normal(size=records) > 0).astype(np.int64)
    return x, y


def recipe(method: dict[str, Any], **changes: Any) -> Recipe:
    """A recipe for `points`; `privacy=None` leaves privacy out."""
    base: dict[str, Any] = {
        "name": "small",
        "data": {"path": "small.csv", "target": "y"},
        "model": {"kind": "convex", "l2": 0.01},
        "method": method,
        "privacy": {"budget": {"epsilon": 1.0, "delta": 1e-5}},
        "seed": 0,
    }
    base.update(changes)
    return Recipe.model_validate({k: v for k, v in base.items() if v is not None})


def context(
    made: Recipe,
    streams: list[Streams] | None = None,
    data: tuple[np.ndarray, np.ndarray] | None = None,
    places: int | None = None,
) -> Context:
    """A context in double precision; the feature bound is that of [0, 1] columns and the constant one.

    `places`: those of the table, where it has more than rows.
    """
    x, y = data if data is not None else points()
    place = Placement(torch.device("cpu"), torch.float64)
    table = Table.load(x, y, False, place.device, place.dtype)
    if made.folds is not None:
        held = Keys.of_places([len(y)]).folds(made.folds, made.repeats, seed=0)
        table = table.with_folds(torch.from_numpy(held))
    if places is not None:
        table = table.with_places(places)
    streams = streams or [SeededStreams((made.seed or 0) + i) for i in range(made.trials)]
    assert isinstance(made.model, ConvexModel)
    pack = Pack(models.builder(made.model, table.input_shape, 1, Path()), [0] * len(streams), place, True)
    bound = float(np.sqrt(x.shape[1] + made.model.has_bias))
    plan = None if made.privacy is None else plan_for(made, Facts(len(table), feature_bound=bound))
    ledgers = tuple(plan.ledger() if plan is not None else Ledger() for _ in streams)
    return Context(
        recipes=(made,) * len(streams),
        plans=(plan,) * len(streams),
        ledgers=ledgers,
        streams=tuple(streams),
        pack=pack,
        table=table,
        loss=output_loss(made.model),
        most_rows=7,
        base=Path(),
        feature_bound=bound,
    )


def signed(made: Recipe, data: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """Rows y (x, 1) in double precision, for references."""
    x, y = data if data is not None else points()
    assert isinstance(made.model, ConvexModel)
    rows = np.hstack([x, np.ones((len(x), 1))]) if made.model.has_bias else x
    return rows * (2 * y - 1)[:, None]


def run(method: Any) -> None:
    """Every epoch of a method."""
    for epoch in range(method.epochs):
        if method.finished:
            break
        method.run_epoch(epoch)
