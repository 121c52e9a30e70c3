"""How much a sweep gains by training its cells together: 64 cells of logistic regression on Adult.

    DPSGD_DATA=... python benchmarks/sweep.py [--calls 64] [--epochs 5] [--cells 64] [--finished 10000]

Measured, in this order: the sweep in packs; the same sweep one trial at a time in one process; `--calls` separate
`dpsgd train` processes, scaled to all cells; the runner's own time a cell (everything in `run_job` but epochs, with
data, prices, evaluation and files); and how long `compare` takes to read `--finished` results and write its table.
Targets: 8 times faster than separate calls, 3 times faster than one by one, 50 ms a cell, 5 s. Exit code 1 when one is
missed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPE = """\
name: adult-logistic
data: {{name: adult, preprocess: [{{scale: {{}}}}, {{one-hot: {{}}}}, {{unit-norm: {{}}}}]}}
model: {{kind: linear}}
method: {{kind: dp-sgd, batching: poisson, batch_size: 256, learning_rate: 1}}
privacy:
  clipping: {{kind: flat, norm: 1}}
  budget: {{epsilon: 1, delta: 1e-5}}
epochs: {epochs}
seed: 0
"""
SWEEP = """\
name: speed
recipes: [adult-logistic.yaml]
grid:
  privacy.clipping.norm: [0.1, 0.2, 0.4, 0.5, 0.8, 1, 1.5, 2]
zip:
  method.learning_rate: {rates}
"""


def main() -> None:
    options = _options()
    if not (Path(os.environ.get("DPSGD_DATA", "")) / "adult" / "adult.data").is_file():
        print("left out: needs the Adult data (`dpsgd data fetch adult`, and DPSGD_DATA set to where it lies)")
        return
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rates = [round(0.1 * 2**i, 3) for i in range(options.cells // 8)]
        (folder / "adult-logistic.yaml").write_text(RECIPE.format(epochs=options.epochs))
        (folder / "sweep.yaml").write_text(SWEEP.format(rates=rates))
        cells = 8 * len(rates)
        together = _timed("sweep", folder, "sweep.yaml", "--out", "together")
        one_by_one = _timed("sweep", folder, "sweep.yaml", "--out", "alone", "most_trials=1")
        begun = time.perf_counter()
        for call in range(options.calls):
            rate = rates[call % len(rates)]
            _dpsgd(folder, "train", "adult-logistic.yaml", f"method.learning_rate={rate}", "--out", f"calls-{call}")
        separate = (time.perf_counter() - begun) * cells / options.calls
        overhead = _overhead(folder, cells)
        reading = _reading(folder, options.finished)
    print(f"{'what':<52}{'seconds':>10}{'times the sweep':>17}")
    for what, seconds in (("the sweep, in packs", together), ("one trial at a time, one process", one_by_one),
                          (f"{cells} dpsgd train calls (from {options.calls})", separate)):  # fmt: skip
        print(f"{what:<52}{seconds:>10.2f}{seconds / together:>17.1f}")
    print(f"runner's own time: {1000 * overhead:.1f} ms a cell")
    print(f"compare of {options.finished} finished cells: {reading:.2f} s")
    kept = (separate >= 8 * together, one_by_one >= 3 * together, overhead < 0.05, reading < 5)
    print("all targets are met" if all(kept) else f"missed: {kept}")
    sys.exit(not all(kept))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cells", type=int, default=64)
    parser.add_argument("--finished", type=int, default=10_000)
    return parser.parse_args()


def _dpsgd(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "dpsgd_cli", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def _timed(command: str, folder: Path, *arguments: str) -> float:
    begun = time.perf_counter()
    _dpsgd(folder, command, *arguments)
    return time.perf_counter() - begun


def _overhead(folder: Path, cells: int) -> float:
    """Seconds a cell of a pack's run that are not epochs; the second of two runs, so that imports are not in it."""
    from dpsgd_cli.results import store
    from dpsgd_cli.sweep.running import run_job
    from dpsgd_cli.sweep.session import SweepSession

    spent = []
    for number in range(2):
        session = SweepSession.open(str(folder / "sweep.yaml"), [f"seed={number}"], folder / f"overhead-{number}")
        session.begin()
        begun = time.perf_counter()
        for job in session.jobs(False, False):
            run_job(job)
        whole = time.perf_counter() - begun
        documents = [store.read_document(session.out / cell.directory) for cell in session.cells]
        spent.append((whole - sum(document["timing"]["nonprivate_train_seconds"] for document in documents)) / cells)
    return spent[-1]


def _reading(folder: Path, count: int) -> float:
    """Seconds that `compare` takes for `count` results, which are copies of one with other seeds."""
    from dpsgd_cli.results import comparison, reading, tables

    source = next(path for path in (folder / "together").iterdir() if path.is_dir())
    document = json.loads((source / "result.json").read_text())
    many = folder / "many"
    for number in range(count):
        place = many / f"cell-{number:08x}"
        place.mkdir(parents=True)
        shutil.copy(source / "recipe.yaml", place)
        document["trials"][0]["seed"] = number
        (place / "result.json").write_text(json.dumps(reading.sealed(document)))
    begun = time.perf_counter()
    found = comparison.compare(comparison.read_entries(many), None, None)
    tables.write(found, folder / "compared")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
