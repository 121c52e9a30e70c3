"""Noise that is correlated across steps: its strategy, sensitivity, charges and predicted error. Numbers only.

Notation: n steps; y_t independent normals of standard deviation s_t; C a lower triangular Toeplitz matrix, whose first
column c is divided by its norm; noise x = C^-1 y is added to the sums g_1, ..., g_n. Then C (g + x) = C g + y: the
release is a function of C g with independent noise. `mechanism.CorrelatedSums` proves the price from the products of
columns of |C| that `NoiseStrategy.products` bounds; `noise/correlation.py` draws the noise.

Purpose: descent adds gradients up. The noise of a sum of the first t steps, sum x_1..x_t, is the noise of its weights
after t steps of one length. The predicted error is the root mean square of its standard deviation over all t, in units
of one sum's sensitivity. It ignores momentum, averages and changing learning rates, and accuracy need not follow it.

Sources: Choquette-Choo et al. 2023 (arXiv 2306.08153; banded matrices); Fichtenberger, Henzinger and Upadhyay 2023
(coefficients of (1 - x)^(-1/2)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.accounting.plan import PlannedNoise
from dpsgd_cli.noise.settings import CorrelatedNoise

Floats = NDArray[np.float64]


class Charge(NamedTuple):
    """Uses of one mechanism: noise of standard deviation `multiplier` S on something that a record moves by root S.

    S is the sensitivity of one sum, and root the root of `squared`.
    """

    multiplier: float
    squared: float
    batching: Batching
    uses: int


@dataclass(frozen=True)
class NoiseStrategy:
    """Noise x_t = |c| y_t - b_t, where b_t is past noise that is taken back, over `steps` steps.

    b_t = sum_j taken_j x_(t-j), so C has the coefficients 1, taken_1, ..., divided by |c|, their norm.
    """

    steps: int
    taken: tuple[float, ...] = ()

    @classmethod
    def of(cls, planned: PlannedNoise) -> NoiseStrategy:
        """Return the strategy that a plan holds the data of."""
        return cls(planned.steps, planned.taken)

    @cached_property
    def column(self) -> Floats:
        """First column (steps,) of C before it is divided by its norm."""
        found = np.zeros(self.steps)
        found[: self.reach] = (1.0, *self.taken)[: self.reach]
        return found

    @cached_property
    def norm(self) -> float:
        """|c|: the standard deviation of a step's own noise, in those of y."""
        return math.sqrt(math.fsum(self.column**2))

    @property
    def reach(self) -> int:
        """Number of steps over which noise is correlated."""
        return min(self.steps, 1 + len(self.taken))

    @cached_property
    def products(self) -> Floats:
        """Largest product of two columns of |C|, |C|[s] . |C|[s'], at each distance |s - s'| = d and at any greater.

        The product is largest for s = 0, for which the columns are cut last: sum_u |c_u| |c_(u + d)| / |c|^2. 0 where
        the columns of a band no longer meet.
        """
        size, found = np.abs(self.column[: self.reach]) / self.norm, np.zeros(self.steps)
        found[: self.reach] = np.correlate(size, size, "full")[self.reach - 1 :]
        found[0] = 1.0
        largest: Floats = np.maximum.accumulate(found[::-1])[::-1]
        return largest

    def product(self, distance: int) -> float:
        """Return `products` at a distance; 0 beyond the last step."""
        return float(self.products[distance]) if distance < self.steps else 0.0

    @property
    def moved_by_rounding(self) -> float:
        """Grid steps by which rounding to integers moves a coordinate of C g, in one step (`noise/correlation.py`)."""
        return 1 + math.fsum(np.abs(self.column)) * (1 + (1 + len(self.taken)) / 8)

    def charges(self, batching: Batching, multipliers: Sequence[float], steps: int, groups: int) -> list[list[Charge]]:
        """Return the charges of each epoch of `steps` steps, given the epochs' noise multipliers.

        `batching` is shuffle or random-allocation; `by_cycle` has those of Poisson batches. `CorrelatedSums` has the
        proof. The first charge of every epoch states the epoch's own noise. Charges up to any epoch cover a training
        that ends after it.
        """
        found, far = [], (self.reach - 1 + steps - 1) // steps
        in_one_order = self._in_one_order(steps)
        for epoch, own in enumerate(multipliers):
            least = min(multipliers[epoch : epoch + 1 + far])
            if batching == "shuffle":
                charged = {"shuffle": in_one_order[epoch]}
            else:
                near = self.product(groups)
                others = math.fsum(self.product(apart * steps + groups) for apart in range(epoch))
                charged = {"random-allocation": 1.0 - near, "full": near + 2 * others}
            stated = next(iter(charged.items()))
            epoch_charges = [] if least == own else [Charge(own, stated[1], stated[0], 0)]  # type: ignore[arg-type]
            epoch_charges += [
                Charge(least, squared, kind, 1)  # type: ignore[arg-type]
                for kind, squared in charged.items()
                if squared > 0
            ]
            found.append(epoch_charges)
        return found

    def _in_one_order(self, steps: int) -> list[float]:
        """Return what each epoch adds to |m|^2, m the sum of every `steps`-th column of |C| from the first on.

        A record at another place of the order has the same columns, cut earlier. Epoch e adds the square of its column
        and twice its products with those of earlier epochs, over the rows from its first step on.
        """
        size, found = np.abs(self.column) / self.norm, []
        earlier = np.zeros(self.steps)
        for start in range(0, self.steps, steps):
            own = size[: self.steps - start]
            earlier = earlier[: len(own)] + (size[start:] if start else 0.0)
            found.append(float(own @ (own + 2 * earlier)))
        return found

    def error(self, multipliers: Sequence[float]) -> float:
        """Return the root mean square, over all steps, of the standard deviation of what noise adds to the weights.

        `multipliers` has one entry for each epoch, of equally many steps. The unit is the sensitivity of one sum.
        """
        from scipy.signal import lfilter  # takes .3 s to import; most noise is not correlated

        squares = np.square(np.asarray(multipliers, dtype=np.float64))
        inverse = lfilter([1.0], self.column[: self.reach], np.eye(1, self.steps)[0])
        left = np.cumsum(np.square(self.norm * np.cumsum(inverse)))[::-1]
        return math.sqrt(float(np.repeat(squares, self.steps // len(squares)) @ left) / self.steps)


def by_cycle(multipliers: Sequence[float], steps: int, bands: int) -> list[list[Charge]]:
    """Return the charges of each epoch on Poisson batches: one use per cycle, in the epoch of its first step.

    A cycle has `bands` steps, as many as the groups of records. The first charge of every epoch states its own noise.

    A record sampled in cycle r (steps r b to (r + 1) b - 1) moves the noisy sums of steps r b to (r + 2) b - 2 and
    no others. So the least noise of these steps, as far as training goes, bounds the cost of the cycle. An epoch in
    which no cycle begins is charged no use.
    """
    last, found = len(multipliers) * steps - 1, []
    for epoch, own in enumerate(multipliers):
        begun, end = -(-epoch * steps // bands), -(-(epoch + 1) * steps // bands)
        ended = end if epoch + 1 == len(multipliers) else ((epoch + 1) * steps + 1) // bands - 1
        # cycles from `across` on also move steps of later epochs
        across = min(max(ended, begun), end)
        counts = {own: across - begun}
        for cycle in range(across, end):
            reach = min((cycle + 2) * bands - 2, last) // steps
            least = min(multipliers[epoch : reach + 1])
            counts[least] = counts.get(least, 0) + 1
        found.append([Charge(z, 1.0, "poisson", count) for z, count in counts.items()])
    return found


def strategy(noise: CorrelatedNoise, steps: int) -> NoiseStrategy:
    """Return the strategy for a training of `steps` steps; `noise.bands` must be a number.

    Its numbers are c_1, ..., c_(b-1) of (1 - x)^(-1/2): c_0 = 1, c_k = c_{k-1} (2 k - 1) / (2 k).
    """
    assert isinstance(noise.bands, int)
    k = np.arange(1, min(noise.bands, steps))
    return NoiseStrategy(steps, tuple(np.cumprod((2 * k - 1) / (2 * k)).tolist()))
