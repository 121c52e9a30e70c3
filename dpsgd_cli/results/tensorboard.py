"""TensorBoard event files: the scalars of `history.csv` by epoch, under the columns' names, with a run for each trial.

During training, they show only epochs that a checkpoint already holds. A run that is stopped continues after its last
checkpoint with fresh noise. If anybody had seen later epochs, those would be releases that no ledger has. The
files lie beside the checkpoint and, like it, are readable by their owner only; the result gets files of its own.

The events contain the time of day, which reveals how long epochs took. Like columns marked `nonprivate_`, and unlike
other columns, times must not be published.
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
"""Largest number of a result's trials with event files; each is an open file during training."""
_NO_SCALARS = ("trial", "seed", "epoch")


def check_installed() -> None:
    """Raise UsageError if TensorBoard, which writes the files, is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("runtime.tensorboard: true needs TensorBoard: pip install 'dpsgd[tensorboard]'")


def left_out(trials: int) -> list[str]:
    """Return a message if some of a result's trials get no event files."""
    if trials <= MOST_RUNS:
        return []
    return [f"tensorboard shows trials 0 to {MOST_RUNS - 1} of {trials}; history.csv has all of them"]


def write(folder: Path, rows: Sequence[Row], times: Sequence[float]) -> None:
    """Write the event files of a finished history to `folder`; `times[t]` is when epoch t ended."""
    events = EventFiles(folder)
    try:
        events.show("", rows, times)
    finally:
        events.close()


def remove_live(checkpoint: Path) -> bool:
    """Remove this process's and killed processes' live event files for the checkpoint. Returns whether any existed."""
    return files.remove(_live(checkpoint))


def _live(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(f".{FOLDER}")


def live_folder(checkpoint: Path) -> Path:
    """Return a new folder for this process only: another run of the recipe may end earlier and remove its files."""
    return files.hidden_name(_live(checkpoint))


class EventFiles:
    """Event files in a folder: a run for each trial, in a folder for each result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writers: dict[tuple[str, int], SummaryWriter] = {}
        self._shown: defaultdict[tuple[str, int], int] = defaultdict(lambda: -1)

    def show(self, result: str, rows: Sequence[Row], times: Sequence[float]) -> None:
        """Add the epochs that were not shown before. `rows` is the whole history of a result so far."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for row in rows:
            run, epoch = (result, row["trial"]), row["epoch"]
            if row["trial"] >= MOST_RUNS or epoch <= self._shown[run]:
                continue
            for name, value in row.items():
                if name not in _NO_SCALARS and value is not None:
                    self._writer(run).add_scalar(name, float(value), epoch, times[epoch])
            self._shown[run] = epoch
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, run: tuple[str, int]) -> SummaryWriter:
        """Return the writer of a trial. Its first record makes a viewer forget an earlier file of this run."""
        if run not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            place = self.folder / run[0] / f"trial-{run[1]}"
            self._writers[run] = SummaryWriter(str(place), purge_step=0)
        return self._writers[run]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
