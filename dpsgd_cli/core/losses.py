"""Losses of single examples. Each is a function of that example's output and label alone.

Not here: regularisation (it reads no data and is part of the update).
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Negative log-likelihood of class indices: outputs (R, B, K), labels int64 (R, B) -> (R, B)."""
    flat = F.cross_entropy(outputs.flatten(0, 1), labels.reshape(-1), reduction="none")
    return flat.view(outputs.shape[:2])


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half the squared error: outputs (R, B, 1), targets (R, B) -> (R, B)."""
    return (outputs.squeeze(-1) - targets).square() / 2


LOSSES: dict[str, Loss] = {"classification": cross_entropy, "regression": squared_error}
