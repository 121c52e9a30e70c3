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
from dpsgd_cli.metrics import metrics_of

# On a CPU more rows at once only push activations out of the cache.
_ROWS_IN_CACHE = 2048


@torch.no_grad()
def evaluate(
    pack: Pack, values: Tensor, table: Table, task: str, most: int, loss: Loss | None = None
) -> dict[str, Tensor]:
    """The task's metrics (R,), float64, of weights `values` (R, P) over all rows of `table`, `most` rows at a time.

    An empty table gives no metrics. `loss` stands in for the task's own (mean cross-entropy; mean of half the squared
    error). With folds, each trial's rows are those it trains on.
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
    metrics = metrics_of(task)
    totals = {name: torch.zeros(pack.trials, device=pack.values.device, dtype=torch.float64) for name in metrics}
    if not pack.values.is_cuda:
        most = min(most, max(1, _ROWS_IN_CACHE // pack.trials))
    for x, y, mask in table.chunks(Batch(rows=None), most):
        outputs = pack(x)
        labels = y.expand(pack.trials, -1)
        for name, metric in metrics.items():
            counts = (metric.of_records or loss_of)(outputs, labels)
            counts = counts if mask is None else torch.where(mask, counts, 0)
            totals[name] += counts.sum(dim=1, dtype=torch.float64)
    return {name: total / table.counts for name, total in totals.items()}
