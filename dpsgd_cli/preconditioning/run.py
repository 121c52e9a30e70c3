"""Preconditioners from noisy sums: gradient methods on rows in which all directions have similar scale.

Released, once, before the first step, by its kind:
- second-moment: A = sum over the records of u u^T, plus N(0, s^2) on the diagonal and N(0, s^2 / 2) off it, mirrored.
  u is the record's preprocessed features divided by their own norm.
- marginals: V = sum over the records of v, plus N(0, s^2) in every cell. v is 1 / sqrt(F) in the record's cell of each
  of F columns and 0 in all other cells (`preconditioning/marginals.py`).

Sensitivity: 1 under add-remove and zero-out, sqrt(2) under replace-one. It holds for the upper triangle of A with
off-diagonal entries times sqrt(2), and for V (`preconditioning/price.py`). In both the noise is N(0, s^2) everywhere.

Price: s = z S is a Gaussian mechanism of noise multiplier z. It gets a share of the budget's mu^2, so z is
1 / sqrt(share mu^2). It is charged before training, like private preprocessing. Rows then become unit(x root), or x A
for marginals; root and A are computed from the release and public numbers (`preconditioning/maps.py`). A row is thus a
function of one record and of a release, so steps are priced as on any rows (adaptive composition): each gradient is
clipped to C by its own norm, which depends on the row's, so a step's sensitivity is that of any sum of clipped
gradients, however long rows are. Rows unit(x root) have norm 1 (a null record has 0), so a record's gradient is as long
as the gradient of its loss by the outputs: at most sqrt(2) for softmax, 1 for the logistic loss; with the model's own
bias sqrt(2) times that. Rows x A are not divided by their lengths, so a sum of functions of columns stays one.

With folds, each trial's sum covers the records that the trial trains on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.common.terminal import SILENT
from dpsgd_cli.engine.coded_rows import CodedRows
from dpsgd_cli.engine.coded_table import CodedTable
from dpsgd_cli.engine.context import PackContext
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.errors import UsageError
from dpsgd_cli.noise.run import gaussian
from dpsgd_cli.preconditioning import marginals
from dpsgd_cli.preconditioning import second_moments as moments
from dpsgd_cli.preconditioning.maps import BlockMap, Preconditioner, cut_of
from dpsgd_cli.preconditioning.price import LABELS, Marginals, SecondMoments

RIDGE = 8.0
"""Ridge of marginals, in 1 / (n * mu). It keeps directions below a few times a mean gradient's noise from growing."""
Made = Preconditioner | BlockMap
MOST_MOVED = 1 << 28
"""Most bytes of preconditioned rows that are kept from step to step."""
_ROWS_AT_ONCE = 8192


class _Matrix:
    """Second moments: from rows of `features` numbers to the released sum, and from it to the map.

    `columns` are those that the features consist of; None if that is not known.
    """

    def __init__(self, context: PackContext, columns: marginals.Columns | None) -> None:
        del columns
        self.features = math.prod(context.table.input_shape)
        self.like = context.pack.values

    def exact(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        """Return the sum over rows, given in pieces (n, D), as the vector whose sensitivity is bounded. Private."""
        return moments.as_vector(moments.second_moments(pieces, self.features, exactly=True))

    def exact_of_codes(self, coded: CodedRows) -> np.ndarray:
        """Return the sum over rows that are kept as codes. Private."""
        return self.exact(coded[start : start + _ROWS_AT_ONCE] for start in range(0, len(coded), _ROWS_AT_ONCE))

    def made(self, noisy: Sequence[np.ndarray], scales: Sequence[float], ridges: Sequence[float]) -> Preconditioner:
        """Return the maps of all trials from their sums, the noise's scales, and RIDGE / (n * mu) of each."""
        del ridges
        return self.loaded([cut_of(moments.from_vector(own), scale) for own, scale in zip(noisy, scales, strict=True)])

    def loaded(self, kept: Sequence[Tensor]) -> Preconditioner:
        """Return the maps of all trials from the tensors that they keep."""
        return Preconditioner([cut.to(self.like) for cut in kept])


class _Counts:
    """Marginals: from rows to the released counts, and from these to the map."""

    def __init__(self, context: PackContext, columns: marginals.Columns | None) -> None:
        self.records, self.like = len(context.table), context.pack.values
        # rows that were not made from columns, as in an audit: each feature is a cell of one column
        every = np.arange(math.prod(context.table.input_shape))
        cells = [marginals.ColumnCells(every, np.eye(len(every)))]
        self.columns = columns if columns is not None and columns.cells else marginals.Columns(cells)

    def exact(self, pieces: Iterable[np.ndarray]) -> np.ndarray:
        return marginals.counted(pieces, self.columns.cells)

    def exact_of_codes(self, coded: CodedRows) -> np.ndarray:
        return marginals.counted_codes(coded, self.columns.cells)

    def made(self, noisy: Sequence[np.ndarray], scales: Sequence[float], ridges: Sequence[float]) -> BlockMap:
        del scales
        pairs = zip(noisy, ridges, strict=True)
        return BlockMap.of(
            [marginals.scaling(own, self.columns, self.records, ridge) for own, ridge in pairs], self.like
        )

    def loaded(self, kept: Sequence[Tensor]) -> BlockMap:
        return BlockMap([one.to(self.like.device) for one in kept])


_WAYS: dict[type, type[_Matrix | _Counts]] = {SecondMoments: _Matrix, Marginals: _Counts}


class Preconditioning:
    """Preconditioners of a pack's trials, all of one kind, released before the first step or loaded."""

    def __init__(
        self,
        context: PackContext,
        plans: Sequence[Plan],
        settings: Sequence[SecondMoments | Marginals],
        columns: Callable[[], marginals.Columns | None],
    ) -> None:
        """Begin with the trials' `settings`. `columns` makes the columns that features consist of, where known."""
        table = context.table
        if not isinstance(table, CodedTable) and table.x.shape[int(table.per_trial)] < table.rows:
            raise UsageError(
                "method.preconditioner: takes rows in memory, or codes, and these rows stay on disk; give null, or end"
                " data.preprocess with bin: {grid: 2048}"
            )
        self.context, self.settings = context, settings
        self.mechanisms = [plan.mechanisms(*LABELS)[0] for plan in plans]
        self.weights = next(shape for _, shape in context.pack.spans.values()).numel()
        self.made: Made | None = None
        self.way = _WAYS[type(settings[0])](context, columns())
        self._tables: list[tuple[Table, Table]] = []
        self._rows: dict[tuple[object, ...], Tensor] = {}

    def prepare(self) -> None:
        """Release the preconditioners, unless done before."""
        if self.made is not None:
            return
        table, trials = self.context.table, range(self.context.trials)
        shared = cache(partial(self._exact, 0))
        alone = table.per_trial or table.held_out is not None
        noisy = self._noisy([self._exact(trial) if alone else shared() for trial in trials])
        scales = [one.noise_multiplier * one.sensitivity for one in self.mechanisms]
        ridges = [RIDGE / (self._mu(trial) * len(table)) for trial in trials]
        self.made = self.way.made(noisy, scales, ridges)

    @np.errstate(**SILENT)
    def _exact(self, trial: int) -> np.ndarray:
        """Return the sum over the records that a trial trains on. Private."""
        table = self.context.table
        if isinstance(table, CodedTable):
            return self.way.exact_of_codes(table.coded)
        rows = (table.x[trial] if table.per_trial else table.x).flatten(1).cpu().numpy()
        taken = None if table.held_out is None else ~table.held_out[:, trial].cpu().numpy()
        return self.way.exact(moments.blocks(rows, taken))

    def _noisy(self, exact: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the trials' sums with noise, and show both to the watcher, if there is one."""
        context = self.context
        noisy = np.stack(
            [
                gaussian(stream, mechanism.label, 0, own, mechanism, context.table.summed)
                for stream, mechanism, own in zip(context.streams, self.mechanisms, exact, strict=True)
            ]
        )
        if context.watcher is not None:  # which may change `noisy`, whose memory the tensor shares
            context.watcher.prepared(self.mechanisms[0], torch.from_numpy(np.stack(exact)), torch.from_numpy(noisy))
        return list(noisy)

    def _mu(self, trial: int) -> float:
        """Return mu of the whole budget, of which the release has its share."""
        return 1 / (math.sqrt(self.settings[trial].share) * self.mechanisms[trial].noise_multiplier)

    @property
    def cuts(self) -> Sequence[Tensor]:
        """Cuts that predictions need, computed from the releases; empty before these, and for marginals."""
        return self.made.cuts if isinstance(self.made, Preconditioner) else ()

    @property
    def maps(self) -> Sequence[np.ndarray]:
        """Dense maps A (D, D) of the trials, float32, computed from the releases of marginals; else empty."""
        return self.made.dense() if isinstance(self.made, BlockMap) else ()

    @property
    def kept(self) -> list[Tensor]:
        """Tensors from which `load` makes the preconditioners again; empty before the releases."""
        return [] if self.made is None else self.made.kept

    def load(self, kept: Sequence[Tensor]) -> None:
        """Use tensors of `kept`, computed from the releases."""
        self.made = self.way.loaded(kept)
        self._tables.clear()
        self._rows.clear()

    @property
    def ready(self) -> Made:
        """Preconditioner of all trials; it must have been released."""
        assert self.made is not None
        return self.made

    def units(self, x: Tensor) -> Tensor:
        """Return rows x (R or 1, B, ...), preconditioned, (R, B, D).

        Rows that lie in the table's own memory are the same in each step that passes them. Up to `MOST_MOVED` bytes of
        them are kept, so that full batches are moved once.
        """
        whole = self.context.table.x
        if x.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return self.ready.units(x)
        place = (x.data_ptr(), x.shape, x.stride(), whole._version)
        found = self._rows.get(place)
        if found is None:
            found = self.ready.units(x)
            if sum(one.nbytes for one in self._rows.values()) + found.nbytes <= MOST_MOVED:
                self._rows[place] = found
        return found

    def through(self, flat: Tensor) -> Tensor:
        """Return flat weights (R, P) of the preconditioned rows as weights of the rows of `table`."""
        return self.ready.through(flat, self.weights)

    def back(self, flat: Tensor) -> Tensor:
        """Return gradient sums (R, P) over the rows of `table` as sums over the preconditioned rows."""
        return self.ready.back(flat, self.weights)

    def table(self, table: Table) -> Table:
        """Return `table` with each trial's row factors, if any; on it, weights passed `through` are the model."""
        if not isinstance(self.ready, Preconditioner):
            return table
        known = next((made for given, made in self._tables if given is table), None)
        if known is None:
            known = replace(table, factors=self.ready.factors(table.x, table.per_trial))
            self._tables.append((table, known))
        return known
