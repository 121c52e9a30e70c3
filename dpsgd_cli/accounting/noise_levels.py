"""Many noise levels as few: each use of one level is a public coin between uses of two neighbours. NumPy.

Statement. Let H_a(z) be the hockey-stick divergence of one use at noise multiplier z, all else fixed, w = 1 / z and
s(z) = erf(w / sqrt 8). H_a is a convex function of s for every a >= 0, in both directions, for batches of fixed size,
and for Poisson batches of a record that comes or goes. So for z_1 <= z <= z_2 and s(z) = l s(z_1) + (1 - l) s(z_2),
the pair that reveals a coin of probability l, and is that of z_1 or of z_2, dominates the pair of z. So do compositions
with anything else.

Proof. Let C(w, b) = H_b(N(w, 1), N(0, 1)), b > 0. Its derivative by w is phi(w / 2 - log(b) / w), phi the normal
density; that of s is a constant times phi(w / 2). So the derivative of C by s is a constant times

    phi(w / 2 - log(b) / w) / phi(w / 2) = exp((log(b) - log(b)^2 / w^2) / 2),

which grows with w. So C is convex in s; for b <= 0 it is 1 - b, constant. Now (1 - q) Q + q N(w) against Q, by
one use of Poisson batches:

    H_a(P, Q) = q C(w, 1 + (a - 1) / q),        H_a(Q, P) = 1 - a + a H_(1/a)(P, Q)   (a > 0; H_0 = 1),

so both are convex in s. A batch of fixed size has H_a(P, Q) of this for a >= 1 and H_a(Q, P) below
(`losses.fixed_pair`). A use of two levels by a coin has l H_a(z_1) + (1 - l) H_a(z_2), and compositions are
means over the other uses' losses.

Other samples (replaced records of Poisson batches, groups, epochs of random allocation) have no such statement here.
They take the nearest lower noise level instead, which dominates since noise may be added to it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism

Floats = NDArray[np.floating]
Places = NDArray[np.integer]

_COIN_STEP = 0.03
"""Distance of neighbours between which a coin decides, in log z, at large z; times z^2 / (z^2 + 1)."""
_MANY, _SHARES = 2000, 64
"""From so many levels on, shares are multiples of 1 / 64, so that few differ."""
_LOWER_STEP = 4e-4
"""Distance of neighbours where the lower one is taken."""


@dataclass(frozen=True)
class Levels:
    """M uses by few mechanisms: use i is `made[first[i]]` with probability `share[i]`, else `made[second[i]]`."""

    made: list[Mechanism]
    first: Places
    second: Places
    share: Floats


def levels_of(mechanisms: Sequence[Mechanism]) -> Levels:
    """Return few mechanisms of which public coins dominate each of `mechanisms`; the same ones where they are few."""
    count = len(mechanisms)
    made: list[Mechanism] = []
    first, second, share = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), np.ones(count)
    families: dict[object, list[int]] = {}
    for i, mechanism in enumerate(mechanisms):
        families.setdefault(_family(mechanism, i), []).append(i)
    for members in families.values():
        own = mechanisms[members[0]]
        places = np.array(members)
        nodes = None
        if len(members) > 2 and isinstance(own, GaussianSum):
            convex = _is_convex(own)
            noises = np.array([mechanisms[i].noise_multiplier for i in members])  # type: ignore[union-attr]
            nodes = _nodes(float(noises.min()), float(noises.max()), convex)
        if nodes is None or len(nodes) >= len(members):
            first[places] = second[places] = len(made) + np.arange(len(members))
            made += [mechanisms[i] for i in members]
            continue
        assert isinstance(own, GaussianSum)
        # the cell whose lower end is at most z
        cells = np.clip(np.searchsorted(nodes, noises, side="right") - 1, 0, len(nodes) - 2)
        first[places], second[places] = len(made) + cells, len(made) + cells
        if convex:
            second[places] += 1
            low, high = _coordinate(nodes[cells]), _coordinate(nodes[cells + 1])
            share[places] = np.clip((_coordinate(noises) - high) / (low - high), 0.0, 1.0)
            if len(members) > _MANY:  # up, to the lower noise: it dominates
                share[places] = np.ceil(share[places] * _SHARES) / _SHARES
        made += [dataclasses.replace(own, noise_multiplier=float(z)) for z in nodes]
    return Levels(made, first, second, share)


def _family(mechanism: Mechanism, place: int) -> object:
    """Return a key that mechanisms share which differ in nothing but noise."""
    if not isinstance(mechanism, GaussianSum) or not mechanism.sampled:
        return place
    return type(mechanism), tuple(value for name, value in vars(mechanism).items() if name != "noise_multiplier")


def _is_convex(mechanism: GaussianSum) -> bool:
    """Return whether the statement is about the mechanism's batching."""
    return mechanism.comes_and_goes or mechanism.batching == "fixed"


def _coordinate(noises: Floats) -> Floats:
    """Return s, by which divergences are convex."""
    found: Floats = erf(1 / noises / math.sqrt(8))
    return found


def _nodes(least: float, most: float, convex: bool) -> Floats:
    """Return increasing noise multipliers from `least` to `most`, near enough to each other."""
    logs, end = [math.log(least)], math.log(most)
    while logs[-1] < end and len(logs) < 100_000:
        square = math.exp(2 * logs[-1])
        step = _COIN_STEP * square / (square + 1) if convex else _LOWER_STEP
        logs.append(logs[-1] + step)
    nodes = np.exp(np.array(logs))
    nodes[0], nodes[-1] = least, most
    return nodes
