"""Cross-validation: K folds x repeats as trials of one pack, every one with as many training records.

Which rows are held out is decided by a seed and the number of rows, never by a value. Not here: splits between
training and test files (`data/splits.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def held_out(records: int, folds: int, repeats: int, seed: int = 0) -> Tensor:
    """Rows that each trial does not train on: bool (N, K * repeats); trial t is fold t % K of repeat t // K.

    Each fold of a repeat holds out floor(N / K) rows of a permutation of its own (seed + repeat); the N mod K rows
    left over are trained on by every fold, so that all trials have the same, public number of training records.

    >>> held_out(7, 3, 2).sum(dim=0).tolist()
    [2, 2, 2, 2, 2, 2]
    """
    size = records // folds
    out = torch.zeros(records, folds * repeats, dtype=torch.bool)
    for repeat in range(repeats):
        order = torch.from_numpy(np.random.RandomState((seed + repeat) % 2**32).permutation(records))
        for fold in range(folds):
            out[order[fold * size : (fold + 1) * size], repeat * folds + fold] = True
    return out
