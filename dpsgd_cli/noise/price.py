"""Noise that is correlated across steps: its strategy, sensitivity, charges and predicted error. Numbers only.

Notation: n steps; y_t independent normals of standard deviation s_t; C a lower triangular Toeplitz matrix, whose first
column c is divided by its norm; noise x = C^-1 y is added to the sums g_1, ..., g_n. Then C (g + x) = C g + y: the
release is a function of C g with independent noise. `mechanism.CorrelatedSums` proves the price from the products of
columns of |C| that `NoiseStrategy.products` bounds; `noise/correlation.py` draws the noise.

Purpose: descent adds gradients up. The noise of a sum of the first t steps, sum x_1..x_t, is the noise of its weights
after t steps of one length. The predicted error is the root mean square of its standard deviation over all t, in units
of one sum's sensitivity. It ignores momentum, averages and changing learning rates, and accuracy need not follow it.

Sources: Choquette-Choo et al. 2023 (arXiv 2306.08153; banded matrices); those of `noise/weights.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsgd_cli.accounting.adjacency import Batching
from dpsgd_cli.common.plugins import named
from dpsgd_cli.noise.settings import STRATEGIES, CorrelatedNoise, StrategyKind, Workload
from dpsgd_cli.noise.weights import Numbers, Wanted, seen_by

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

    Of x_1, x_2, ... (banded, buffered) or of u_t = |c| y_t (inverse-banded), call them v:
    - without decays b_t = sum_j taken_j v_(t-j): C has the coefficients 1, taken_1, ..., or C^-1 has 1, -taken_1, ...
    - with decays l_i, b_t = sum_i taken_i sum_(j >= 1) l_i^(j-1) v_(t-j): C has 1, sum_i taken_i l_i^(j-1).
    All coefficients of C are divided by |c|, the norm of its first column.
    """

    kind: StrategyKind
    steps: int
    taken: tuple[float, ...] = ()
    decays: tuple[float, ...] = ()

    @property
    def of_fresh(self) -> bool:
        """True if what is taken back is a sum of past fresh noise, not of past added noise."""
        return self.kind == "inverse-banded"

    @cached_property
    def column(self) -> Floats:
        """First column (steps,) of C before it is divided by its norm."""
        from scipy.signal import lfilter  # takes .3 s to import; most noise is not correlated

        found = np.zeros(self.steps)
        found[0] = 1.0
        if self.of_fresh:
            whole: Floats = lfilter([1.0], [1.0, *(-one for one in self.taken)], found)
            return whole
        own = np.asarray(self.taken)
        if self.decays:
            own = own @ np.asarray(self.decays)[:, None] ** np.arange(self.steps - 1)
        found[1 : 1 + len(own)] = own[: self.steps - 1]
        return found

    @cached_property
    def norm(self) -> float:
        """|c|: the standard deviation of a step's own noise, in those of y."""
        return math.sqrt(math.fsum(self.column**2))

    @property
    def reach(self) -> int:
        """Number of steps over which noise is correlated."""
        return min(self.steps, 1 + len(self.taken)) if self.kind == "banded" else self.steps

    @cached_property
    def products(self) -> Floats:
        """Largest product of two columns of |C|, |C|[s] . |C|[s'], at each distance |s - s'| = d and at any greater.

        The product is largest for s = 0, for which the columns are cut last: sum_u |c_u| |c_(u + d)| / |c|^2. 0 where
        the columns of a band no longer meet.
        """
        from scipy.signal import fftconvolve

        size = np.abs(self.column) / self.norm
        if self.kind == "banded":
            own = size[: self.reach]
            found = np.zeros(self.steps)
            found[: self.reach] = np.correlate(own, own, "full")[self.reach - 1 :]
        else:
            # rounding errors of the transform, from above
            found = np.maximum(fftconvolve(size, size[::-1])[self.steps - 1 :], 0.0) + 1e-14 * self.steps
        found[0] = 1.0
        largest: Floats = np.maximum.accumulate(found[::-1])[::-1]
        return largest

    def product(self, distance: int) -> float:
        """Return `products` at a distance; 0 beyond the last step."""
        return float(self.products[distance]) if distance < self.steps else 0.0

    @property
    def moved_by_rounding(self) -> float:
        """Grid steps by which rounding to integers moves a coordinate of C g, in one step (`noise/correlation.py`)."""
        total = math.fsum(np.abs(self.column))
        buffers = math.fsum(abs(a) / (1 - decay) ** 2 for a, decay in zip(self.taken, self.decays, strict=False))
        return 1 + total * (1 + (1 + len(self.taken)) / 8) + buffers / 8

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

    def variances(self, workload: Workload) -> Floats:
        """Return variances (steps,) of what the noise of the first 1, 2, ... steps adds, if y has variance 1."""
        from scipy.signal import lfilter

        impulse = np.zeros(self.steps)
        impulse[0] = 1.0
        if self.of_fresh:
            inverse = impulse
            inverse[1 : 1 + len(self.taken)] = -np.asarray(self.taken)[: self.steps - 1]
        else:
            inverse = lfilter([1.0], self.column[: self.reach], impulse)
        found: Floats = np.cumsum(np.square(self.norm * seen_by(workload, inverse)))
        return found

    def error(self, multipliers: Sequence[float], workload: Workload) -> float:
        """Return the root mean square, over all steps, of the standard deviation of what noise adds to the workload.

        `multipliers` has one entry for each epoch, of equally many steps. The unit is the sensitivity of one sum.
        """
        squares = np.square(np.asarray(multipliers, dtype=np.float64))
        left = self.variances(workload)[::-1]
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


def strategy(noise: CorrelatedNoise, batching: Batching, epochs: int, steps: int) -> NoiseStrategy:
    """Return the strategy for `epochs` epochs of `steps` steps; `noise.bands` must be a number."""
    assert isinstance(noise.bands, int)
    # uses of a record are charged by themselves, unless columns of C reach from one to the next
    alone = batching == "poisson" or (batching == "random-allocation" and noise.kind == "banded")
    total = epochs * steps
    wanted = Wanted(min(noise.bands, total), total, total if alone else steps, noise.weights, noise.workload)
    return NoiseStrategy(noise.kind, total, *_numbers(STRATEGIES[noise.kind].made, wanted))


@lru_cache(maxsize=64)
def _numbers(made: str, wanted: Wanted) -> Numbers:
    found: Numbers = named(made)(wanted)
    return found
