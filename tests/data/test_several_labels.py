"""Several labels of a record: clipped one record at a time, measured one by one, and refused where one is needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.engine.losses import LossOptions, binary
from dpsgd_cli.engine.metrics import counts_of_places, of_counts
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.methods.risks.affine import AffineRisk

DATA = {"path": "t.npz", "task": "multi-label", "classes": ["ill", "old"], "evaluation": "public"}


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "name": "several", "data": DATA | {"split": {"test": 0.25}}, "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 16, "learning_rate": 0.5},
        "privacy": {"clipping": {"kind": "flat", "norm": 1}, "budget": {"epsilon": 8, "delta": 1e-3}},
        "epochs": 2, "seed": 0,
    } | changes  # fmt: skip


def test_a_layer_with_several_labels_is_clipped_one_example_at_a_time() -> None:
    draw = torch.Generator().manual_seed(0)
    x, values = torch.randn(7, 3, generator=draw), torch.randn(2, 2 * 3 + 2, generator=draw)
    y = torch.randint(2, (7, 2), generator=draw)

    def of_outputs(outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        return binary(outputs, truth, LossOptions())

    risk, sums = AffineRisk(Table(x, y, False), of_outputs, True), torch.zeros(2, 8, dtype=torch.float64)
    risk.add_sums(values, sums, Clipping(torch.full((1, 2), 0.4)), Diagnostics(2, torch.device("cpu")))
    for trial in range(2):
        whole_sum = torch.zeros(8, dtype=torch.float64)
        for row in range(7):
            own = values[trial].double().requires_grad_()
            outputs = own[:6].view(2, 3) @ x[row].double() + own[6:]
            (slope,) = torch.autograd.grad(of_outputs(outputs[None, None], y[row][None, None]).sum(), own)
            whole_sum += slope * min(1.0, 0.4 / slope.norm().item())
        torch.testing.assert_close(sums[trial], whole_sum, rtol=1e-5, atol=1e-6)


def test_f1_of_each_class_of_places_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    outputs, truth = torch.randn(9, 5, 3, generator=draw), torch.randint(-1, 3, (9, 5), generator=draw)
    pieces = [counts_of_places(outputs[part], truth[part]) for part in (slice(0, 4), slice(4, 9))]
    of, told, right = np.sum(pieces, axis=0)
    found = of_counts(of, told, right, ["x", "y", "z"])
    there = truth >= 0
    each = f1_score(truth[there], outputs.argmax(dim=-1)[there], average=None)
    assert [found[f"label_f1_{name}"] for name in "xyz"] == pytest.approx(each.tolist())
    assert found["label_f1"] == pytest.approx(each.mean())
