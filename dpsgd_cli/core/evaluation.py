"""How good the weights of every trial are on a table.

Not here: whether the table is private (the caller names the columns).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpsgd_cli.core.losses import LOSSES, Loss
from dpsgd_cli.core.packing import Pack
from dpsgd_cli.core.sampling import Batch
from dpsgd_cli.core.tensors import Table

# On a CPU more rows at once only push activations out of the cache.
_ROWS_IN_CACHE = 2048


@torch.no_grad()
def evaluate(
    pack: Pack, values: Tensor, table: Table, task: str, most: int, loss: Loss | None = None
) -> dict[str, Tensor]:
    """Metrics (R,), float64, of weights `values` (R, P) over all rows of `table`, `most` rows at a time.

    classification: `accuracy` in [0, 1] and `loss` (mean cross-entropy). regression: `loss` (mean of half the
    squared error) and `mae` (mean absolute error). An empty table gives no metrics. `loss` stands in for the task's
    own; one output tells two classes apart by its sign. With folds, each trial's rows are those it trains on.
    """
    if table.rows == 0:
        return {}
    kept = pack.values.clone() if values is not pack.values else None
    if kept is not None:
        pack.values.copy_(values)
    try:
        return _totals(pack, table, (task, loss or LOSSES[task]), most)
    finally:
        if kept is not None:
            pack.values.copy_(kept)


def _totals(pack: Pack, table: Table, judge: tuple[str, Loss], most: int) -> dict[str, Tensor]:
    task, loss_of = judge
    loss = torch.zeros(pack.trials, device=pack.values.device, dtype=torch.float64)
    other = torch.zeros_like(loss)
    if not pack.values.is_cuda:
        most = min(most, max(1, _ROWS_IN_CACHE // pack.trials))
    for x, y, mask in table.chunks(Batch(rows=None), most):
        outputs = pack(x)
        labels = y.expand(pack.trials, -1)
        losses, hits = loss_of(outputs, labels), _hits(outputs, labels, task)
        if mask is not None:
            losses, hits = torch.where(mask, losses, 0.0), torch.where(mask, hits, 0)
        loss += losses.sum(dim=1, dtype=torch.float64)
        other += hits.sum(dim=1, dtype=torch.float64)
    counts = table.counts
    return {"accuracy" if task == "classification" else "mae": other / counts, "loss": loss / counts}


def _hits(outputs: Tensor, labels: Tensor, task: str) -> Tensor:
    """Right answers, or absolute errors."""
    if task != "classification":
        return (outputs.squeeze(-1) - labels).abs()
    if outputs.shape[-1] == 1:
        return (outputs.squeeze(-1) > 0) == (labels > 0)
    return outputs.argmax(dim=-1) == labels
