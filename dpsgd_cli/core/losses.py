"""Losses of single examples. Each is a function of that example's output and label alone.

Not here: regularisation (it reads no data and is part of the update).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of class indices: outputs (R, B, K), labels int64 (R, B) -> (R, B)."""
    if not outputs.is_cuda and outputs.dtype in (torch.float32, torch.float64):
        found: Tensor = _CrossEntropy.apply(outputs, labels)
        return found
    flat = F.cross_entropy(outputs.flatten(0, 1), labels.reshape(-1), reduction="none")
    return flat.view(outputs.shape[:2])


class _CrossEntropy(torch.autograd.Function):
    """The same by operations on whole tensors, which a CPU does several times faster than row by row."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, labels: Tensor) -> Tensor:
        below = outputs - outputs.amax(dim=-1, keepdim=True)
        own = below.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        shares = below.exp_()
        total = shares.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(shares, total, labels)
        return total.squeeze(-1).log() - own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shares, total, labels = ctx.saved_tensors
        found = shares * (gradient.unsqueeze(-1) / total)
        found.scatter_add_(-1, labels.unsqueeze(-1), -gradient.unsqueeze(-1))
        return found, None


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error: outputs (R, B, 1), targets (R, B) -> (R, B)."""
    return (outputs.squeeze(-1) - targets).square() / 2


LOSSES: dict[str, Loss] = {"classification": cross_entropy, "regression": squared_error}
