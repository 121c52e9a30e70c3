"""Application of the steps of `data.preprocess` to rows, one step after the other.

All trials share the steps before the first private one. From there on each trial has its own rows, because it has its
own noise. `preparation.py` chooses the steps and the rows; its caller charges the releases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import numpy as np

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.data.dataset import Layout, Noised, Part, PrivateStep, RawDataset, Step
from dpsgd_cli.data.on_disk import DiskRows, Rows, Transform, TrialRows
from dpsgd_cli.data.projections import Rotation
from dpsgd_cli.errors import DataError

Noising = Callable[[int, str, np.ndarray, GaussianSum], np.ndarray]
"""Function of (trial, purpose, exact sum, mechanism) that returns the sum with the noise of the mechanism."""
Released = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, the output of private ones, and the source of their noise.

    `fitted` is the state of other steps: entries that are there are used, others are computed and added. Rows that
    enter the pipeline have been through the first `done` steps.
    """

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released
    noised: Noising
    fitted: Released = field(default_factory=dict)
    done: int = 0

    def before_cut(self, source: RawDataset) -> tuple[RawDataset, Pipeline]:
        """Return the source after the first steps that may precede the cut, and the pipeline from there.

        Such steps act on each record alone and are fitted on none, so they are applied once, however rows are cut.
        """
        done = next((index for index, step in enumerate(self.steps) if not step.before_cut), len(self.steps))
        names = ("train", "test", "public")
        parts = {name: part for name in names if isinstance(part := getattr(source, name), Part)}
        if not done or "train" not in parts:
            return source, self
        rows: Sequence[Rows] = [part.x for part in parts.values()]
        for index in range(done):
            rows = self._without_noise(index, rows, f"{index}", False)
        made: dict[str, Any] = {
            name: dataclasses.replace(part, x=cast(np.ndarray, x))
            for (name, part), x in zip(parts.items(), rows, strict=True)
        }
        return dataclasses.replace(source, **made), dataclasses.replace(self, done=done)

    def run(self, parts: Sequence[Rows], trials: int, has_public: bool = False) -> tuple[list[Rows], bool]:
        """Return all parts, transformed, and True if each trial has its own.

        The first part is the training rows. If `has_public`, the last part is the public rows. Rows that stay on disk
        are transformed when they are read.
        """
        private = [index for index, step in enumerate(self.steps) if step.release is not None]
        first = private[0] if private else len(self.steps)
        for index in range(self.done, first):
            parts = self._without_noise(index, parts, f"{index}", has_public)
        if not private:
            return [_through(_float32, part) for part in parts], False
        learn_shared = cache(lambda: self._learn(first, parts[0]))
        shape = self.layouts[-1].shape
        rooms: list[Any] = [
            [] if isinstance(part, DiskRows) else np.empty((trials, len(part), *shape), np.float32) for part in parts
        ]
        for trial in range(trials):
            own = list(parts)
            for index in range(first, len(self.steps)):
                if self.steps[index].release is None:
                    own = self._without_noise(index, own, f"{trial}/{index}", has_public)
                    continue
                learn = learn_shared if index == first else partial(self._learn, index, own[0])
                transform = self._private(learn, trial, index)
                own = [_through(transform, part) for part in own]
            for room, rows in zip(rooms, own, strict=True):
                if isinstance(rows, DiskRows):
                    room.append(rows.then(_float32))
                else:
                    room[trial] = _float32(cast(np.ndarray, rows))
        pairs = zip(parts, rooms, strict=True)
        return [TrialRows(part, room) if isinstance(part, DiskRows) else room for part, room in pairs], True

    def kept(self, noiselessly: bool) -> Released:
        """Return the state of steps without a release: if `noiselessly`, of those with `nonprivate`, else of others."""
        return {
            key: held
            for key, held in self.fitted.items()
            if (self.steps[int(key.rpartition("/")[2])].nonprivate is not None) == noiselessly
        }

    def _without_noise(self, index: int, parts: Sequence[Rows], key: str, has_public: bool) -> list[Rows]:
        """Return all parts after a step that draws no noise; it is fitted first if its state is not known."""
        step, layout = self.steps[index], self.layouts[index]
        if key not in self.fitted and step.fitted_on != "nothing":
            rows = self._rows_to_fit(step, index, parts, has_public)
            # rows on disk support the array operations of these steps; `preparation.py` refuses other steps
            kept = step.kept(cast(np.ndarray, rows), layout)
            self.fitted.update({} if kept is None else {key: kept})
        transform = step.transform(layout, self.fitted.get(key))
        return [_through(transform, part) for part in parts]

    def _rows_to_fit(self, step: Step, index: int, parts: Sequence[Rows], has_public: bool) -> Rows:
        """Return the rows that a step without a release states to be fitted on.

        Raises TypeError for a step that reads training rows and has neither a declaration nor `nonprivate`.
        """
        if step.fitted_on == "synthetic":
            assert isinstance(step, Rotation)
            return self._synthetic(step, index)
        if step.fitted_on == "public":
            if not has_public:
                raise DataError("pca: of: public needs data.public, say {from: test, records: 1000}")
            return parts[-1]
        if step.fitted_on != "training" or not step.covered:
            raise TypeError(f"step {type(step).__name__} is fitted on {step.fitted_on} rows, which nothing covers")
        return parts[0]

    def _synthetic(self, step: Rotation, index: int) -> np.ndarray:
        """Return data-independent images after the steps before `index`, none of which was fitted on records."""
        rows = step.drawn(self.layouts[0])
        for before in range(index):
            rows = self.steps[before].transform(self.layouts[before], self.fitted.get(f"{before}"))(rows)
        return rows

    def _learn(self, index: int, rows: Rows) -> Callable[[Noised], np.ndarray]:
        step = self.steps[index]
        assert isinstance(step, PrivateStep)
        return step.learn(cast(np.ndarray, rows), self.layouts[index])

    def _noised(self, trial: int, index: int, exact: np.ndarray) -> np.ndarray:
        mechanism = self.steps[index].release
        assert mechanism is not None
        return self.noised(trial, f"preprocess-{index}", exact, mechanism)

    def _private(self, learn: Callable[[], Callable[[Noised], np.ndarray]], trial: int, index: int) -> Transform:
        """Return the transform of a private step. `learn` reads the rows, and only if nothing was released before.

        The purpose of the noise includes the step's index, so that no two steps of a trial share noise.
        """
        step, key = self.steps[index], f"{trial}/{index}"
        assert isinstance(step, PrivateStep)
        if key not in self.released:
            self.released[key] = learn()(partial(self._noised, trial, index))
        return step.transform(self.layouts[index], self.released[key])


def _through(transform: Transform, rows: Rows) -> Any:
    return rows.then(transform) if isinstance(rows, DiskRows) else transform(cast(np.ndarray, rows))


def _float32(x: np.ndarray) -> np.ndarray:
    # the cached rows of a file are read-only; training gets a writable copy
    return np.require(x, np.float32, ["C", "W"])
