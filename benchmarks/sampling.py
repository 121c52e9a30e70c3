"""How long a Poisson batch takes to draw and to read, by the number of records.

    python benchmarks/sampling.py [--batches 50] [--folder FOLDER] [--largest 100000000]

Drawing: `PoissonSampler` (expected batch 1,024), and a Bernoulli mask over all records, as samplers that look at every
record make it. Reading: the rows of those batches from a `.npy` file of 32 bytes a record (3.2 GB at 10^8), when
nothing of it is in memory ("cold": the system was asked to forget the file) and when all that is read is ("warm"); and
by how much the process's own memory has grown after it. The files are made in FOLDER and removed. Times are medians.
Exit code 1 when a batch takes 10 ms to draw and read warm, or more.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from dpsgd_cli.core.sampling import PoissonSampler
from dpsgd_cli.core.streams import SecureStreams, SeededStreams
from dpsgd_cli.data.mapped import MappedRows, Selection, Stored

BATCH, BYTES = 1024, 32


def median_ms(run: Callable[[int], object], steps: int) -> float:
    """Median of `run(step)`, in milliseconds."""
    times = []
    for step in range(steps):
        begun = time.perf_counter()
        run(step)
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times)


def mask(records: int, step: int) -> torch.Tensor:
    """One uniform a record."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(records, generator=generator) < BATCH / records).nonzero()


def drawing(records: int, batches: int) -> tuple[float, float, float]:
    """Seeded, secure, and by mask."""
    seeded = PoissonSampler([SeededStreams(0)], records, BATCH)
    secure = PoissonSampler([SecureStreams()], records, BATCH)
    of_all = median_ms(lambda step: mask(records, step), 5)
    return median_ms(seeded.batch, batches), median_ms(secure.batch, batches), of_all


def write(path: Path, records: int) -> None:
    """A file of random bytes, in pieces."""
    array = np.lib.format.open_memmap(path, "w+", np.uint8, (records, BYTES))
    rng, piece = np.random.default_rng(0), 1 << 20
    for start in range(0, records, piece):
        array[start : start + piece] = rng.integers(0, 256, (min(piece, records - start), BYTES), np.uint8)
    array.flush()


def reading(records: int, batches: int, folder: Path) -> tuple[float, float, float]:
    """Cold and warm, and the growth of the process's own memory, in MiB."""
    path = folder / "rows.npy"
    write(path, records)
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    sampler = PoissonSampler([SeededStreams(1)], records, BATCH)
    before = resident()
    rows = MappedRows(Stored(path), Selection(records))

    def read(step: int) -> None:
        drawn = sampler.batch(step).rows
        assert isinstance(drawn, np.ndarray)
        rows.at(drawn)

    cold, warm = median_ms(read, batches), median_ms(read, batches)
    grown = resident() - before
    path.unlink()
    return cold, warm, grown


def resident() -> float:
    """MiB that this process holds of its own (Linux); what it has mapped of files is the system's."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no RssAnon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--largest", type=int, default=10**8)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, NumPy {np.__version__}, {torch.get_num_threads()} threads, load {load:.1f}")
    print("| records | draw, seeded | draw, secure | mask | draw and read, cold | warm | MiB more |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for records in (10**6, 10**7, 10**8):
        if records > options.largest:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            drawn = drawing(records, options.batches)
            read = reading(records, options.batches, Path(folder))
        cells = [f"{value:.2f}" for value in (*drawn, *read[:2])]
        print(f"| {records:,} | {' | '.join(cells)} | {read[2]:.0f} |", flush=True)
        if read[1] >= 10:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
