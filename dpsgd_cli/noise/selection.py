"""Private choice of the least of a few scores: report noisy min, and the exponential mechanism.

Scores are sums over records of losses in [0, D] (D = `sensitivity`). So one more record increases ALL of a trial's
scores, each by a number in [0, D].

noisy-min   Add independent two-sided Laplace noise of scale D / eps to every score and report the index of the least.
            eps-DP under add-remove, because the scores are monotone (Dwork and Roth 2014, Claim 3.9, stated there for
            counts; the proof uses only that all scores move in one direction by at most D). As zCDP: eps^2 / 2 (Bun
            and Steinke 2016, Proposition 1.4).
exponential Report index i with probability proportional to exp(-eps score_i / D). Between neighbouring data sets the
            exponents move by numbers in an interval of length eps. So the privacy loss is eps-bounded-range (Durfee
            and Rogers 2019), hence eps-DP, and eps^2 / 8-zCDP (Cesar and Rogers 2021, Lemma 3.2).

With a seed the computation is in floating point; without, it is exact and in integers (`discrete.py`).

Under replace-one, scores may move by numbers in [-D, D], in different directions. Both mechanisms then need twice the
scale: the caller passes 2 D.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from dpsgd_cli.engine import discrete
from dpsgd_cli.engine.discrete import Coins
from dpsgd_cli.engine.streams import Streams
from dpsgd_cli.noise.run import is_secure

NoisyChoice = Literal["laplace", "exponential"]
NORMALS_PER_SCORE: dict[str, int] = {"laplace": 4, "exponential": 2}


def exponentials(normals: Tensor) -> Tensor:
    """Return standard exponential variates (..., n) from standard normals (..., n, 2): half the squared radius."""
    return normals.square().sum(dim=-1) / 2


def choice_draws(
    streams: Sequence[Streams], purpose: str, counter: int, count: int, kind: NoisyChoice
) -> Tensor | list[Coins]:
    """Draw randomness for one choice among `count` scores per stream: normals with a seed, else coins."""
    if is_secure(streams):
        return [stream.coins(purpose, counter) for stream in streams]
    shape = (count, NORMALS_PER_SCORE[kind])
    return torch.stack([own.normal(purpose, counter, torch.empty(shape, dtype=torch.float64)) for own in streams])


def select_least(
    scores: Tensor, epsilon: Tensor, sensitivity: Tensor, kind: NoisyChoice, draws: Tensor | Sequence[Coins]
) -> Tensor:
    """Return the index (A,) of the chosen score of each trial.

    Args: scores (A, n) float64; epsilon, sensitivity (A,) > 0; draws: (A, n, k) float64 standard normals that were
    never used before, k = NORMALS_PER_SCORE[kind], or coins for each trial. NaN is never preferred.

    Guarantee: that of `kind` in the module's docstring; with coins, for exact arithmetic on the given scores.
    """
    if not isinstance(draws, Tensor):
        numbers = zip(scores.tolist(), epsilon.double().tolist(), sensitivity.double().tolist(), draws, strict=True)
        return torch.tensor([least_exactly(*one, kind) for one in numbers])
    scaled = scores.nan_to_num(nan=torch.finfo(scores.dtype).max / 4) * (epsilon / sensitivity).unsqueeze(1)
    if kind == "laplace":
        noise = exponentials(draws[..., :2]) - exponentials(draws[..., 2:])
        return (scaled + noise).argmin(dim=1)
    if kind != "exponential":
        raise ValueError(f"no noise is proved for a choice of kind {kind!r}")
    gumbel = -exponentials(draws).log()
    return (scaled - gumbel).argmin(dim=1)


def least_exactly(scores: Sequence[float], epsilon: float, sensitivity: float, coins: Coins, kind: NoisyChoice) -> int:
    """Return the index of the chosen score, by integer arithmetic.

    Between neighbouring data sets, rounding adds at most 2 steps to the movement of two scores relative to each other,
    in any direction. The epsilon of the draw is reduced accordingly.
    """
    unit = Fraction(sensitivity) / discrete.drawn_epsilon(epsilon, 2)
    whole = [discrete.on_grid(discrete.finite(score), unit) for score in scores]
    return (discrete.least_noisy if kind == "laplace" else discrete.least_likely)(whole, coins)
