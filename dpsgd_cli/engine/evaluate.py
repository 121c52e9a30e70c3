"""A table through a model: the metrics of every trial's weights, and their outputs.

The caller knows whether a table is private, and names the result columns accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.engine.coded_table import CodedTable
from dpsgd_cli.engine.losses import LOSSES, Loss
from dpsgd_cli.engine.metrics import metrics_of
from dpsgd_cli.engine.packing import Pack
from dpsgd_cli.engine.tensors import Batch, Examples, Table

Units = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# On a CPU, more rows at once would push activations out of the cache.
_ROWS_IN_CACHE = 2048


@torch.no_grad()
def evaluate(
    pack: Pack, values: Tensor, table: Table, task: str, most: int, loss: Loss | None = None, units: Units | None = None
) -> dict[str, Tensor]:
    """Return the task's metrics, each (R,) float64, of weights `values` (R, P) on all rows of `table`.

    Rows are processed `most` at a time. An empty table gives no metrics. `loss` replaces the task's own (mean
    cross-entropy, or mean of half the squared error). `units` maps outputs and labels (or targets) to what metrics
    other than the loss are of. With folds, each trial is evaluated on the rows it trains on.
    """
    if table.rows == 0:
        return {}
    metrics = {name: metric for name, metric in metrics_of(task).items() if metric.at_every_look}
    loss_of = loss or LOSSES[task]
    totals = {name: torch.zeros(pack.trials, device=pack.values.device, dtype=torch.float64) for name in metrics}
    places = {name: totals[name].clone() for name, metric in metrics.items() if metric.places is not None}
    for outputs, y, mask in passes(pack, values, table, most):
        labels = y.expand(pack.trials, *y.shape[1:])
        for name, metric in metrics.items():
            pair = units(outputs, labels) if units is not None and metric.of_records else (outputs, labels)
            counts = (metric.of_records or loss_of)(*pair)
            counts = counts if mask is None else torch.where(mask, counts, 0)
            totals[name] += counts.sum(dim=1, dtype=torch.float64)
            if metric.places is not None:
                own = metric.places(labels)
                places[name] += (own if mask is None else torch.where(mask, own, 0)).sum(dim=1, dtype=torch.float64)
    found = {name: total / places.get(name, table.counts) for name, total in totals.items()}
    return {name: total.exp() if metrics[name].of_logs else total for name, total in found.items()}


@torch.no_grad()
def outputs_on(pack: Pack, values: Tensor, table: Table, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the outputs (R, N, K) of weights `values` (R, P) on all rows of `table`, which must not be empty.

    Also returns labels (N,) and, with folds, a mask (R, N) of the rows that count for each trial.
    """
    found = [
        (outputs.float().cpu(), y[0].cpu(), None if mask is None else mask.cpu())
        for outputs, y, mask in passes(pack, values, table, most)
    ]
    outputs, labels = torch.cat([one[0] for one in found], dim=1), torch.cat([one[1] for one in found])
    labels = labels.float() if labels.dtype == torch.bfloat16 else labels
    masks = [one[2] for one in found if one[2] is not None]
    return outputs.numpy(), labels.numpy(), torch.cat(masks, dim=1).numpy() if masks else None


@torch.no_grad()
def passes(pack: Pack, values: Tensor, table: Table, most: int) -> Iterator[Examples]:
    """Yield all rows of `table` in pieces of outputs (R, B, K), labels and mask."""
    kept = pack.values.clone() if values is not pack.values else None
    if kept is not None:
        pack.values.copy_(values)
    if not pack.values.is_cuda:
        most = min(most, max(1, _ROWS_IN_CACHE // pack.trials))
    try:
        if isinstance(table, CodedTable) and pack.linear is not None:
            held = pack.linear.values
            yield from table.outputs(held["weight"], held.get("bias"))
        else:
            for x, y, mask in table.chunks(Batch(rows=None), most):
                yield pack(x), y, mask
    finally:
        if kept is not None:
            pack.values.copy_(kept)
