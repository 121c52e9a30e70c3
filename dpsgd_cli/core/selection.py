"""Private choice of the least of a few scores: report noisy min, and the exponential mechanism.

Scores are sums over records of losses in [0, D] (D = `sensitivity`), so one record more moves ALL of a trial's
scores up, by numbers in [0, D].

noisy-min   Adds independent two-sided Laplace noise of scale D / eps to every score and reports the index of the least.
            eps-DP under add-remove, because the scores are monotone (Dwork and Roth 2014, Claim 3.9, stated there for
            counts; the proof uses only that all scores move one way by at most D). As zCDP eps^2 / 2 (Bun and
            Steinke 2016, Proposition 1.4).
exponential Reports index i with probability proportional to exp(-eps score_i / D). Between neighbours the exponent
            moves by numbers in an interval of length eps, so the privacy loss is eps-bounded-range (Durfee and Rogers
            2019), hence eps-DP, and eps^2 / 8-zCDP (Cesar and Rogers 2021, Lemma 3.2).

Under replace-one scores may move by numbers in [-D, D], not all one way: both need twice the scale, which the caller
gets by passing 2 D. Not here: charging (`privacy/ledger.py`).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

NoisyChoice = Literal["laplace", "exponential"]
NORMALS_PER_SCORE: dict[str, int] = {"laplace": 4, "exponential": 2}


def exponentials(normals: Tensor) -> Tensor:
    """Standard exponential variates (..., n) from pairs of standard normals (..., n, 2): half the squared radius."""
    return normals.square().sum(dim=-1) / 2


def select_least(scores: Tensor, epsilon: Tensor, sensitivity: Tensor, kind: NoisyChoice, normals: Tensor) -> Tensor:
    """Index (A,) of the chosen score of each trial.

    Args: scores (A, n) float64; epsilon, sensitivity (A,) > 0; normals (A, n, k) float64 standard normals of which no
    one was used before, k = NORMALS_PER_SCORE[kind]. A score that is not a number is never preferred.

    Guarantee: that of `kind` in the module's head.
    """
    scaled = scores.nan_to_num(nan=torch.finfo(scores.dtype).max / 4) * (epsilon / sensitivity).unsqueeze(1)
    if kind == "laplace":
        noise = exponentials(normals[..., :2]) - exponentials(normals[..., 2:])
        return (scaled + noise).argmin(dim=1)
    if kind != "exponential":
        raise ValueError(f"no noise is proved for a choice of kind {kind!r}")
    gumbel = -exponentials(normals).log()
    return (scaled - gumbel).argmin(dim=1)
