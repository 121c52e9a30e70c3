"""TensorBoard event files: the scalars of `history.csv` by epoch, a run for each trial, under the columns' names.

While training, `Watching` shows epochs that a checkpoint already holds, and no later ones. A run that is stopped goes
on after its last checkpoint with fresh noise; had anybody seen epochs beyond it, those would be releases that no
ledger has. Its files lie beside the checkpoint and, like it, are for their owner only; the result gets its own.

The events carry the clock's time, which tells how long epochs took: like the columns that are marked `nonprivate_`, and
unlike the others, that is not to be published.

Not here: what an epoch's row says (`training/assemble.py`).
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpsgd_cli.errors import UsageError
from dpsgd_cli.results import files
from dpsgd_cli.results.result import Row

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
MOST_RUNS = 32
"""Trials of one result that get event files; each is an open file while training."""
_NO_SCALARS = ("trial", "seed", "epoch")


def check_installed() -> None:
    """Raise UsageError where TensorBoard, which writes the files, is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("runtime.tensorboard: true needs TensorBoard: pip install 'dpsgd[tensorboard]'")


def left_out(trials: int) -> list[str]:
    """What to tell the user where some of a result's trials get no event files."""
    if trials <= MOST_RUNS:
        return []
    return [f"tensorboard shows trials 0 to {MOST_RUNS - 1} of {trials}; history.csv has all of them"]


def write(folder: Path, rows: Sequence[Row], times: Sequence[float]) -> None:
    """Write the event files of a finished history to `folder`; `times[t]` is when epoch t was over."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    watching = _Runs(folder)
    try:
        watching.add(rows, times)
    finally:
        watching.close()


def remove_live(checkpoint: Path) -> bool:
    """Remove what this process, and those that were killed, showed of the run with this checkpoint; was there any?"""
    return files.remove(_live(checkpoint))


def _live(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(f".{FOLDER}")


class Watching:
    """Event files of the pack that has this checkpoint, while it trains."""

    def __init__(self, checkpoint: Path) -> None:
        # a folder of this process alone: another run of the same recipe may end before, and clean up after itself
        self.folder = files.hidden_name(_live(checkpoint))
        self._results: dict[str, _Runs] = {}

    def show(self, result: str, rows: Sequence[Row], times: Sequence[float]) -> None:
        """Add what `rows`, the whole history of a result so far, say of epochs that were not shown before."""
        if result not in self._results:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._results[result] = _Runs(self.folder / result)
        self._results[result].add(rows, times)

    def close(self) -> None:
        for runs in self._results.values():
            runs.close()
        self._results.clear()


class _Runs:
    """The event files of one result's trials."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[int, SummaryWriter] = {}
        self._shown: defaultdict[int, int] = defaultdict(lambda: -1)

    def add(self, rows: Sequence[Row], times: Sequence[float]) -> None:
        """Add each trial's rows of epochs after those that it has."""
        for row in rows:
            trial, epoch = row["trial"], row["epoch"]
            if trial >= MOST_RUNS or epoch <= self._shown[trial]:
                continue
            for name, value in row.items():
                if name not in _NO_SCALARS and value is not None:
                    self._writer(trial).add_scalar(name, float(value), epoch, times[epoch])
            self._shown[trial] = epoch
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, trial: int) -> SummaryWriter:
        """The file of a trial; its first record tells a viewer to forget what an earlier file of this run said."""
        if trial not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            self._writers[trial] = SummaryWriter(str(self._folder / f"trial-{trial}"), purge_step=0)
        return self._writers[trial]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
