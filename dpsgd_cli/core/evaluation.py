"""How good the weights of every trial are on a table.

Not here: whether the table is private (the caller names the columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.core.losses import LOSSES
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.tensors import Table


@torch.no_grad()
def evaluate(pack: Pack, values: Tensor, table: Table, task: str, most: int) -> dict[str, Tensor]:
    """Metrics (R,), float64, of weights `values` (R, P) over all rows of `table`, `most` rows at a time.

    classification: `accuracy` in [0, 1] and `loss` (mean cross-entropy). regression: `loss` (mean of half the
    squared error) and `mae` (mean absolute error). An empty table gives no metrics.
    """
    if len(table) == 0:
        return {}
    kept = pack.values.clone() if values is not pack.values else None
    if kept is not None:
        pack.values.copy_(values)
    try:
        return _totals(pack, table, task, most)
    finally:
        if kept is not None:
            pack.values.copy_(kept)


def _totals(pack: Pack, table: Table, task: str, most: int) -> dict[str, Tensor]:
    second = "accuracy" if task == "classification" else "mae"
    loss = torch.zeros(pack.trials, device=pack.values.device, dtype=torch.float64)
    other = torch.zeros_like(loss)
    for start in range(0, len(table), most):
        x, y, _ = table.every(start, min(start + most, len(table)))
        outputs = pack(x)
        labels = y.expand(pack.trials, -1)
        loss += LOSSES[task](outputs, labels).sum(dim=1, dtype=torch.float64)
        hits = outputs.argmax(dim=-1) == labels if task == "classification" else (outputs.squeeze(-1) - labels).abs()
        other += hits.sum(dim=1, dtype=torch.float64)
    return {second: other / len(table), "loss": loss / len(table)}
