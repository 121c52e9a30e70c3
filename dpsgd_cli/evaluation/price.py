"""The price of measuring a model on held-out records: no more than its training's, by parallel composition.

Release. Let H be the held-out records and m the trained model. Each record of H has one cell, which m and the record
decide (`strategy.py`). Let x be the number of records in each cell and A the public strategy matrix. Released is
A x + N(0, (s z)^2) in each entry, on a public grid (`noise/run.py`), and nothing else that depends on H: neither an
exact metric nor the number of records of H. Groups, confidences, the confusion of classes and cells of targets are
further blocks of the same vector (`groups.py`).

Numbers have a second vector: the sum of the records' moments (`metrics.moments_of`) + N(0, (s z)^2) in each entry. A
record's moments have norm at most 1. The clamp and the constant in them are functions of the first vector, so the two
are an adaptive composition of two Gaussian mechanisms, each of noise multiplier sqrt(2) times that of one.

Sensitivity. Adding or removing a record of H, or replacing it by a null record (which has no cell), moves A x by one
column of A, whose norm is at most 1. Replacing it moves A x by the difference of two columns: at most 2. This is
`replace_factor` times 1.

Users (`privacy.unit`). All rows of a user are in one part, by a coin of the user's name. Of a user's rows, at most
`most_rows` are used, and each counts 1 / (the number that is used). So a user adds the mean of columns, whose norm is
at most 1, too; a user takes the place of a record in all that follows.

Price. Each record is in the training part T or in H, by a coin of its own content (add-remove) or place (replace-one,
zero-out): `data/splits.py`. So neighbouring data differ in T alone or in H alone. Let M1 read T and let M2(m, .) read
H. If M1 is (e, d)-DP, and M2(m, .) is (e, d)-DP for every fixed m, then the pair (M1, M2) is (e, d)-DP. Proof: if the
neighbours differ in T, then H is the same, and M2 is post-processing of m. If they differ in H, then T is the same, so
m has the same law on both sides; for each m, M2(m, .) has indistinguishable laws; average over m. The same holds at
every (e, d), so the trade-off curve of the pair is the lower of the two: the price of a ledger is the greatest over
parts.

What the proof needs, and what is refused elsewhere: no record on both sides (folds), no transform fitted on T and H
together, no cut by exact counts, no exact metric of H. Several releases on one H compose with each other.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import Adjacency, replace_factor
from dpsgd_cli.accounting.budget import EpsilonBudget, mu_squared_left
from dpsgd_cli.accounting.mechanism import GaussianSum, Release


def held_out_release(
    accountant: str, epsilon: float, delta: float, adjacency: Adjacency, regression: bool = False, mu: float = math.inf
) -> GaussianSum:
    """Return the mechanism that measures the held-out part, priced at (epsilon, delta) or less by `accountant`.

    Its 1 / noise multiplier is at most `mu`. With `regression` it is priced as the two releases that it becomes.

    The noise is that of the exact price of one Gaussian (Balle and Wang 2018, Theorem 8), or more where the accountant,
    which also prices the training, states a larger epsilon. Raises ValueError if epsilon is not positive and finite, or
    if no noise up to 1,000 times the exact one is enough.
    """
    if not 0 < epsilon < math.inf:
        raise ValueError(f"no noise for a measurement at epsilon {epsilon:g}")
    pricing = accountants.get(accountant)

    def release(noise_multiplier: float) -> GaussianSum:
        return GaussianSum(noise_multiplier, adjacency, sensitivity=replace_factor(adjacency), label="held-out")

    def excess(log_noise: float) -> float:
        return pricing.epsilon([held_out_releases(release(math.exp(log_noise)), regression)], delta) - epsilon

    exact = math.sqrt(mu_squared_left(EpsilonBudget(epsilon=epsilon, delta=delta), []))
    least = -math.log(min(exact, mu)) + 1e-9
    if excess(least) > 0:
        from scipy.optimize import brentq  # takes .3 s to import, and plans without held-out records need none

        least = brentq(excess, least, least + math.log(1000), xtol=1e-9) + 2e-9
    found = release(math.exp(least))
    if excess(least) > 0:
        raise ValueError(f"{accountant} finds no noise for a measurement at epsilon {epsilon:g}")
    return found


def held_out_releases(mechanism: GaussianSum, regression: bool) -> Release:
    """Return the ledger's entry of one measurement: one release, or for targets two that together cost the same.

    Two Gaussian releases of noise multiplier sqrt(2) z compose to one of noise multiplier z, exactly.
    """
    if not regression:
        return Release(mechanism)
    return Release(replace(mechanism, noise_multiplier=mechanism.noise_multiplier * math.sqrt(2)), 2)
