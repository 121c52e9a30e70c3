"""Several processes that train one pack together, started by `torchrun`: who does what, and what is said between them.

What is released, and why it is the release of one process. Let D be the data and b_t the batch of step t, a function
of the trial's streams alone. Every process draws the same b_t: with a seed because streams are functions of the seed,
without one because process 0 sends all of them one key (`SharedStreams`). Process r adds up the clipped gradients of
the r-th part of b_t only; the parts are disjoint and together b_t, so the sum of their sums is

    sum over b_t of clip(g_i),

the same sum, of the same Poisson (or shuffled, or full) batch of the WHOLE data, as in one process, to the order of
floating-point additions. No process draws a sample of the whole data for itself, which would let one record into a step
twice. Ledgers are charged alike everywhere; process 0's is written.

Noise. Each of the R P numbers of a sum has one owner (`Team.owned`): the process on which the sums of that number are
added up (`Team.add_up`), which adds the noise, and which sends the noisy number to all others (`Team.share`):
post-processing. There are two cases.

- Process 0 owns all numbers. The mechanism that the ledger was charged for adds its noise there, from process 0's own
  stream. No other process draws noise (with streams of the operating system it could not: `SharedStreams.normal` raises
  there).
- Process r owns the r-th slice, where noise is Gaussian, independent between numbers and steps, and without a seed. A
  Gaussian mechanism is noise N(0, s^2) on each number, independently. The owner rounds a number S to the grid and adds
  floor(N 2^42) (`digits.py`) from its own operating system. That map is of one number, with public s and grid, so the
  joint law of all numbers is that of process 0 doing all of it: keys of different draws are independent, in one process
  or in several. The slices are disjoint and cover all numbers, so each gets noise exactly once.

A number without noise is on its owner only, and in parts (a process's own sum) on the others. Nothing of it is sent
again before the owner's noise; the owner's message then overwrites what the others had. So noise is neither left out
nor added once for each process. With a seed, process 0 owns all: the numbers are those of one process. Process 0 also
draws whatever is no Gaussian noise of a step's gradients: coins, choices, counts, histograms, correlated noise.

What is added up is float64, as sums are: rounding it to float32 would move a sum by up to 2 N 2^-24 C more, which is
not charged (`precision.py`). What comes back has noise, and is rounded to the dtype of the parameters, as one process
rounds it.

What goes between processes is not encrypted and holds sums without noise: the network between them is trusted
as their memory is.

Not here: how batches and noise are drawn (`batching/run.py`, `noise/run.py`), what a process trains
(`training/start.py`).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from dpsgd_cli.common.interrupts import heed_no_more
from dpsgd_cli.engine.streams import SharedStreams, Streams
from dpsgd_cli.errors import DpsgdError, SaidElsewhere, UsageError

Value = TypeVar("Value")

PATIENCE = datetime.timedelta(seconds=3)
"""Time that a failed process waits to learn whether process 0 reports the same error."""
TIMEOUT = datetime.timedelta(minutes=30)
"""Time that a process waits for one that is alive but silent. On CPUs, the end of a process is noticed at once. On
GPUs, where transfers are asynchronous, the launcher ends the remaining processes."""


class Team:
    """This process, `rank` of `size`, and the others that train the same pack (none by default).

    `store` is the key-value store for messages between processes; a single process needs none.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.first = rank == 0
        """True for process 0, which adds all noise that has no other owner, evaluates, prints and writes."""

    def part(self, count: int) -> slice:
        """Return this process's slice of `count` items; the slices of all processes are disjoint and cover them."""
        return self._part(self.rank, count)

    def _part(self, rank: int, count: int) -> slice:
        return slice(rank * count // self.size, (rank + 1) * count // self.size)

    def owned(self, count: int, apart: bool) -> list[tuple[int, slice]]:
        """Return the pieces of `count` numbers, and the process that adds noise to each.

        It is process 0 for all of them, or with `apart` the process whose `part` they are.
        """
        parts = [(rank, self._part(rank, count)) for rank in range(self.size)] if apart else [(0, slice(0, count))]
        return [(rank, part) for rank, part in parts if part.start < part.stop]

    def add_up(self, sums: Tensor, apart: bool = False) -> None:
        """Add up the `sums` of all processes in place, each number where its noise is added (`owned`).

        On other processes the number is then undefined.
        """
        if self.size > 1:
            flat = sums.view(-1)
            with self.in_touch():
                for owner, part in self.owned(len(flat), apart):
                    torch.distributed.reduce(flat[part], dst=owner)

    def share(self, sums: Tensor, apart: bool = False) -> None:
        """Send the `sums` of process 0, or with `apart` each process's part, to all others, in place.

        They must be private by now: each part has the noise of the process that sends it.
        """
        if self.size > 1:
            flat = sums.view(-1)
            with self.in_touch():
                for owner, part in self.owned(len(flat), apart):
                    torch.distributed.broadcast(flat[part], src=owner)

    def total(self, sums: dict[str, list[float]]) -> dict[str, Tensor]:
        """Return the diagnostics of all processes together; valid on process 0 only."""
        stacked = torch.tensor(list(sums.values()), dtype=torch.float64)
        self.add_up(stacked)
        return dict(zip(sums, stacked, strict=True))

    def tell(self, make: Callable[[], Value]) -> Value:
        """Run `make` on process 0 only and return its result on all processes.

        If `make` raises DpsgdError, process 0 raises that error and the others raise SaidElsewhere.
        """
        if self.size == 1:
            return make()
        said: list[Any] = [None, None]
        failed: DpsgdError | None = None
        if self.first:
            try:
                said[0] = make()
            except DpsgdError as error:
                failed, said[1] = error, error.exit_code
        with self.in_touch():
            torch.distributed.broadcast_object_list(said, src=0)
        if failed is not None:
            raise failed
        if said[1] is not None:
            raise SaidElsewhere(said[1])
        value: Value = said[0]
        return value

    def say_of(self, error: DpsgdError) -> DpsgdError:
        """Return the error with the number of this process added.

        Raises SaidElsewhere if process 0 already reports the error.
        """
        if self.size == 1:
            return error
        with suppress(RuntimeError):
            self._store.set(f"ended/{self.rank}", str(error))
            if not self.first:
                self._store.wait(["ended/0"], PATIENCE)
                if isinstance(error.__cause__, ConnectionError) or self._store.get("ended/0").decode() == str(error):
                    raise SaidElsewhere(error.exit_code)
        if self.first:
            return error
        told = type(error)(f"process {self.rank} of {self.size}: {error}")
        told.exit_code = error.exit_code
        return told

    @contextmanager
    def in_touch(self) -> Iterator[None]:
        """Convert the failure of a collective operation, always caused by another process, into ConnectionError."""
        try:
            yield
        except RuntimeError as error:
            # the launcher is about to end this process too: leave it the time to write its checkpoint
            heed_no_more()
            raise ConnectionError(self._lost(str(error).strip().splitlines()[0][:200])) from error

    def _lost(self, why: str) -> str:
        with suppress(RuntimeError):
            for rank in range(self.size):
                if rank != self.rank and self._store.check([f"ended/{rank}"]):
                    return f"process {rank} of {self.size} failed ({self._store.get(f'ended/{rank}').decode()})"
        return f"another of the {self.size} processes ended, is out of reach, or said nothing for {TIMEOUT} ({why})"

    def streams(self, own: Sequence[Streams]) -> tuple[Streams, ...]:
        """Return streams of every trial from which all processes draw the same batches."""
        if self.size == 1:
            return tuple(own)
        key = self.tell(lambda: os.urandom(32))
        return tuple(
            stream if stream.reproducible else SharedStreams(key + trial.to_bytes(8, "little"), self.first)
            for trial, stream in enumerate(own)
        )

    def device(self, asked: torch.device) -> torch.device:
        """Return the device of this process: with several processes, `cuda` becomes one GPU for each.

        Raises UsageError if `asked` names one GPU for several processes, or if there are too few GPUs.
        """
        if self.size == 1 or asked.type != "cuda":
            return asked
        if asked.index is not None:
            raise UsageError(
                f"runtime.device {asked} is one GPU for {self.size} processes; give cuda or auto: each takes its own"
            )
        local, found = int(os.environ.get("LOCAL_RANK", self.rank)), torch.cuda.device_count()
        if local >= found:
            raise UsageError(
                f"runtime.device {asked}: process {self.rank} is number {local} on this computer, which has"
                f" {found} GPUs; start as many processes as there are GPUs, or give runtime.device=cpu"
            )
        own = torch.device("cuda", local)
        torch.cuda.set_device(own)
        return own


class Reduction:
    """The sums (R, P) of a step, added up over all processes before noise; an `AroundNoise`.

    With `apart`, each process adds noise to its part of the numbers (`Team.owned`).
    """

    def __init__(self, team: Team, sums: Tensor, apart: bool = False) -> None:
        self._team, self._sums, self.apart = team, sums, apart
        self.adds_noise = team.first or apart

    def before_noise(self, beside: Sequence[Tensor]) -> None:
        self._team.add_up(self._sums, self.apart)
        for sums in beside:
            self._team.add_up(sums)

    def after_noise(self, epoch: int, step: int, mean: Tensor, beside: Sequence[Tensor]) -> None:
        del epoch, step
        for sums in beside:
            self._team.share(sums)
        self._team.share(mean, self.apart)


def started_by_a_launcher() -> bool:
    """Return True if `torchrun`, or a launcher that sets its variables, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def join() -> Iterator[Team]:
    """Join the other processes that `torchrun` started; without `torchrun`, yield a `Team` of one.

    Raises UsageError if the processes do not meet.
    """
    if not started_by_a_launcher():
        yield Team()
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    distributed: Any = torch.distributed
    try:
        store, rank, size = next(iter(distributed.rendezvous("env://", timeout=TIMEOUT)))
        group = distributed.PrefixStore("group", store)
        distributed.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the processes that WORLD_SIZE={os.environ['WORLD_SIZE']} announces did not come together"
            f" ({str(error).splitlines()[0]}); start them with torchrun --nproc-per-node N -m dpsgd_cli train ..."
        ) from error
    yield Team(rank, size, distributed.PrefixStore("dpsgd", store))
    # only after success: where a process was lost, the backend may wait for it here
    distributed.destroy_process_group()
