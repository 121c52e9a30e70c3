"""Taking rows through the steps of `data.preprocess`, one after the other, for all trials or for each.

Steps before the first private one are shared by all trials; from there on each trial has its own rows, because it has
its own noise. Not here: which steps, and which rows (`preparation.py`), or charging what is released (its caller).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import numpy as np

from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.data.dataset import Layout, Noised, Part, PrivateStep, Rows, Source, Step, Transform
from dpsgd_cli.data.on_disk import DiskRows, TrialRows
from dpsgd_cli.data.rotation import Turn
from dpsgd_cli.errors import DataError

Noising = Callable[[int, str, np.ndarray, GaussianSum], np.ndarray]
"""Of a trial, for a purpose: a sum over training records with the noise of the mechanism."""
Released = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pipeline:
    """Steps with the layout before each of them, what private ones released, and where their draws come from.

    `fitted` is what other steps kept of the training rows: what is there is used, what is not is found and put there.
    Parts come after `done` steps.
    """

    steps: Sequence[Step]
    layouts: Sequence[Layout]
    released: Released
    noised: Noising
    fitted: Released = field(default_factory=dict)
    done: int = 0

    def before_cut(self, source: Source) -> tuple[Source, Pipeline]:
        """The source after the first steps, as far as they are taken before rows are cut, and the pipeline from there.

        Such steps act on each record alone and are fitted on none: however rows are cut, they are taken once.
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
        """Transform all parts; the last value says whether each trial has its own.

        The first are the training rows; the last, where the recipe `has_public` ones, are those.
        Rows that stay on disk are told what to do when they are read.
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
        """What steps without a release kept of rows that are declared public, or of others `noiselessly`."""
        return {
            key: held
            for key, held in self.fitted.items()
            if (self.steps[int(key.rpartition("/")[2])].nonprivate is not None) == noiselessly
        }

    def _without_noise(self, index: int, parts: Sequence[Rows], key: str, has_public: bool) -> list[Rows]:
        """All parts after a step that draws nothing, fitted on the training rows, or on the public ones."""
        step, layout = self.steps[index], self.layouts[index]
        if key not in self.fitted and step.fitted_on != "nothing":
            rows = self._rows_to_fit(step, index, parts, has_public)
            # rows on disk are as much of an array as steps that `preparation.py` lets pass need
            kept = step.kept(cast(np.ndarray, rows), layout)
            self.fitted.update({} if kept is None else {key: kept})
        transform = step.transform(layout, self.fitted.get(key))
        return [_through(transform, part) for part in parts]

    def _rows_to_fit(self, step: Step, index: int, parts: Sequence[Rows], has_public: bool) -> Rows:
        """The rows that a step without a release states to be fitted on.

        Raises TypeError for a step that reads training rows and says nothing that covers it.
        """
        if step.fitted_on == "synthetic":
            assert isinstance(step, Turn)
            return self._synthetic(step, index)
        if step.fitted_on == "public":
            if not has_public:
                raise DataError("pca: of: public needs data.public, say {from: test, records: 1000}")
            return parts[-1]
        if step.fitted_on != "training" or not step.covered:
            raise TypeError(f"step {type(step).__name__} is fitted on {step.fitted_on} rows, which nothing covers")
        return parts[0]

    def _synthetic(self, step: Turn, index: int) -> np.ndarray:
        """Images that no record shaped, after the steps before `index`, none of which was fitted on records."""
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
        """The transform of a private step; `learn` reads the rows, and only where nothing was released before.

        The purpose of its draws names the step's place, so that no two steps of a trial share any.
        """
        step, key = self.steps[index], f"{trial}/{index}"
        assert isinstance(step, PrivateStep)
        if key not in self.released:
            self.released[key] = learn()(partial(self._noised, trial, index))
        return step.transform(self.layouts[index], self.released[key])


def _through(transform: Transform, rows: Rows) -> Any:
    return rows.then(transform) if isinstance(rows, DiskRows) else transform(cast(np.ndarray, rows))


def _float32(x: np.ndarray) -> np.ndarray:
    # what is kept of a file is read-only: whoever trains gets rows of their own
    return np.require(x, np.float32, ["C", "W"])
