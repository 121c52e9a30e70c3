"""How long a Poisson batch takes to draw and to read, by the number of records.

    python benchmarks/sampling.py [--batches 50] [--folder FOLDER] [--largest 100000000]

Drawing: `PoissonSampler` (expected batch 1,024), and a Bernoulli mask over all records, as samplers that look at every
record make it. Drawing and reading: the rows of those batches from a `.npy` file of 32 bytes a record (3.2 GB at 10^8),
when the system was asked to forget the file ("cold"), when its cache holds those rows ("warm"), and through numpy's
memory map then ("map"); each with MiB by which the process has grown. The files are made in FOLDER and removed. Times
are medians, in milliseconds. Exit code 1 when drawing and reading takes 10 ms or more, warm.
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

from dpsgd_cli.batching.run import PoissonSampler
from dpsgd_cli.data.on_disk import DiskRows, Selection, Stored
from dpsgd_cli.engine.streams import SecureStreams, SeededStreams

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


def reading(records: int, batches: int, folder: Path) -> list[str]:
    """Cold, warm and through a map, with growth in MiB."""
    path = folder / "rows.npy"
    write(path, records)
    sampler = PoissonSampler([SeededStreams(1)], records, BATCH)
    rows = DiskRows(Stored(path), Selection(records))
    cells = []
    forget(path)
    for how, first in (("cold", 0), ("warm", batches), ("map", 2 * batches)):
        source: DiskRows | np.ndarray = np.load(path, mmap_mode="r") if how == "map" else rows
        before, times = resident(), []
        for step in range(first, first + batches):
            if how != "cold":
                rows.at(drawn(sampler, step))
            begun = time.perf_counter()
            places = drawn(sampler, step)
            source.at(places) if isinstance(source, DiskRows) else source[places]
            times.append(time.perf_counter() - begun)
        cells += [f"{1000 * statistics.median(times):.2f}", f"{resident() - before:.0f}"]
    path.unlink()
    return cells


def drawn(sampler: PoissonSampler, step: int) -> np.ndarray:
    """The rows of a step's batch."""
    rows = sampler.batch(step).rows
    assert isinstance(rows, np.ndarray)
    return rows


def forget(path: Path) -> None:
    """Ask the system to keep nothing of the file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident() -> float:
    """MiB that this process holds, maps of files included (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise OSError("/proc/self/status has no VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--largest", type=int, default=10**8)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"torch {torch.__version__}, NumPy {np.__version__}, {torch.get_num_threads()} threads, load {load:.1f}")
    print("| records | seeded | secure | mask | cold | MiB | warm | MiB | map | MiB |")
    print("| ---: |" + 9 * " ---: |")
    missed = False
    for records in (10**6, 10**7, 10**8):
        if records > options.largest:
            continue
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            cells = [f"{value:.2f}" for value in drawing(records, options.batches)]
            cells += reading(records, options.batches, Path(folder))
        print(f"| {records:,} | {' | '.join(cells)} |", flush=True)
        missed |= float(cells[5]) >= 10
    raise SystemExit(int(missed))


if __name__ == "__main__":
    main()
