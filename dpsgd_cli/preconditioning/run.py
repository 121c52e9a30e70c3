"""Preconditioners from noisy sums: gradient methods on rows in which all directions have similar scale.

Released, once, before the first step, by its kind:
- second-moment: A = sum over the records of u u^T, plus N(0, s^2) on the diagonal and N(0, s^2 / 2) off it, mirrored.
  u is the record's preprocessed features divided by their own norm.
- marginals: V = sum over the records of v, plus N(0, s^2) in every cell. v is 1 / sqrt(F) in the record's cell of each
  of F columns and 0 in all other cells (`preconditioning/marginals.py`).

Sensitivity: 1 under add-remove and zero-out, sqrt(2) under replace-one. It holds for the upper triangle of A with
off-diagonal entries times sqrt(2), and for V (`preconditioning/price.py`). In both the noise is N(0, s^2) everywhere.

Price: s = z S is a Gaussian mechanism of noise multiplier z. It gets a share of the budget's mu^2, so z is
1 / sqrt(share mu^2). It is charged before training, like private preprocessing. Rows then become unit(x root); the root
is computed from the release and public numbers (`preconditioning/maps.py`). A row is thus a function of one record and
of a release, so steps are priced as on any rows (adaptive composition). All rows have norm 1 (a null record has 0). A
record's gradient is therefore as long as the gradient of its loss by the outputs: at most sqrt(2) for softmax, 1 for
the logistic loss; with the model's own bias sqrt(2) times that.

With folds, each trial's sum covers the records that the trial trains on.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from torch import Tensor

from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.engine.context import Context
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import UNTOLD
from dpsgd_cli.noise.run import gaussian
from dpsgd_cli.preconditioning import marginals
from dpsgd_cli.preconditioning import second_moments as moments
from dpsgd_cli.preconditioning.maps import Preconditioner, cut_by, cut_of
from dpsgd_cli.preconditioning.price import released_moments
from dpsgd_cli.preconditioning.settings import Marginals, SecondMoments

RIDGE = 8.0
"""Ridge of marginals, in 1 / (n * mu). It keeps directions below a few times a mean gradient's noise from growing."""


class _Way(ABC):
    """Computation of one kind of preconditioner, from rows of `features` numbers to the released sum and the root."""

    def __init__(self, context: Context) -> None:
        self.features = math.prod(context.table.input_shape)

    @abstractmethod
    def exact(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        """Return the sum over rows, given in pieces (n, D). Private."""

    @abstractmethod
    def noisy(self, exact: np.ndarray, noised: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the sum with noise. `noised` adds noise to a vector whose sensitivity is bounded."""

    @abstractmethod
    def cut(self, noisy: np.ndarray, scale: float, ridge: float) -> Tensor:
        """Return the root, as a cut (`preconditioning/maps.py`); `ridge` is RIDGE / (n * mu)."""


class _Matrix(_Way):
    def exact(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        return moments.second_moments(pieces, self.features, exactly=True)

    def noisy(self, exact: np.ndarray, noised: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return moments.with_noise(exact, noised)

    def cut(self, noisy: np.ndarray, scale: float, ridge: float) -> Tensor:
        return cut_of(noisy, scale)


class _Counts(_Way):
    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.records, every = len(context.table), np.arange(self.features)
        # rows that were not made from columns, as in an audit: each feature is a cell of one column
        self.columns = context.cells() or (marginals.Cells(every, np.eye(len(every))),)

    def exact(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        return marginals.counted(pieces, self.columns)

    def noisy(self, exact: np.ndarray, noised: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        return noised(exact)

    def cut(self, noisy: np.ndarray, scale: float, ridge: float) -> Tensor:
        return cut_by(marginals.model(noisy, self.columns, self.records, self.features), ridge)


_WAYS: dict[type, type[_Way]] = {SecondMoments: _Matrix, Marginals: _Counts}


class Preconditioning:
    """Preconditioners of a pack's trials, released before the first step or loaded from a checkpoint."""

    def __init__(self, context: Context, plans: Sequence[Plan]) -> None:
        self.context = context
        self.mechanisms = [released_moments(plan) for plan in plans]
        self.weights = next(shape for _, shape in context.pack.spans.values()).numel()
        self.made: Preconditioner | None = None
        self._tables: list[tuple[Table, Table]] = []

    def prepare(self) -> None:
        """Release the preconditioners, unless done before."""
        if self.made is not None:
            return
        table = self.context.table
        settings = [recipe.preconditioner for recipe in self.context.recipes]
        ways = {kind: _WAYS[kind](self.context) for kind in map(type, settings)}
        shared = cache(partial(self._exact, 0))
        cuts = []
        for trial, own in enumerate(settings):
            assert own is not None
            way = ways[type(own)]
            exact = self._exact(trial, way) if table.per_trial or table.held_out is not None else shared(way)
            cuts.append(self._cut(trial, way, exact, own.share))
        self.load(cuts)

    @np.errstate(**UNTOLD)
    def _exact(self, trial: int, way: _Way) -> np.ndarray:
        """Return the sum over the records that a trial trains on. Private."""
        table = self.context.table
        rows = (table.x[trial] if table.per_trial else table.x).flatten(1).cpu().numpy()
        taken = None if table.held_out is None else ~table.held_out[:, trial].cpu().numpy()
        return way.exact(moments.blocks(rows, taken))

    def _cut(self, trial: int, way: _Way, exact: np.ndarray, share: float) -> Tensor:
        mechanism = self.mechanisms[trial]
        scale = mechanism.noise_multiplier * mechanism.sensitivity
        noised = partial(
            gaussian,
            self.context.streams[trial],
            mechanism.label,
            0,
            mechanism=mechanism,
            records=self.context.table.summed,
        )
        noisy = way.noisy(exact, noised)
        if self.context.watcher is not None:
            self.context.watcher.preconditioned(trial, exact, noisy)
        mu = 1 / (math.sqrt(share) * mechanism.noise_multiplier)
        return way.cut(noisy, scale, RIDGE / (mu * len(self.context.table)))

    @property
    def cuts(self) -> Sequence[Tensor]:
        """Cuts of the trials, computed from the releases; empty before these."""
        return () if self.made is None else self.made.cuts

    def load(self, cuts: Sequence[Tensor]) -> None:
        """Use `cuts`, computed from the releases."""
        self.made = Preconditioner([cut.to(self.context.pack.values) for cut in cuts])
        self._tables.clear()

    @property
    def ready(self) -> Preconditioner:
        """Preconditioner of all trials; it must have been released."""
        assert self.made is not None
        return self.made

    def through(self, flat: Tensor) -> Tensor:
        """Apply `Preconditioner.through` to the model's flat weights, or to gradient sums, (R, P)."""
        return self.ready.through(flat, self.weights)

    def table(self, table: Table) -> Table:
        """Return `table` with each trial's row factors; on it, weights passed `through` the root are the model."""
        known = next((made for given, made in self._tables if given is table), None)
        if known is None:
            known = replace(table, factors=self.ready.factors(table.x, table.per_trial))
            self._tables.append((table, known))
        return known
