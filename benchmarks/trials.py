"""Whole trials of Yu et al.: ten in one pack beside one after the other, and one beside a loop without privacy.

    DPSGD_DATA=... OMP_NUM_THREADS=1 python benchmarks/trials.py [--rounds 5]
    DPSGD_DATA=... python -m benchmarks.trials --table-2 [--rounds 3]

The first: the Cancer recipe (500 full-batch epochs, three hidden layers), whole runs in one process, reading and
writing included, in turns. Target: 4 times. The second: a trial of Table II (71 epochs of the MLP, evaluated after
each), training alone and whole, over a plain loop of as many epochs and evaluations. Target: 1.4 times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto

TRIALS = 10


def seconds(*overrides: str) -> float:
    """One whole run."""
    with TemporaryDirectory() as out:
        begun = time.perf_counter()
        loop.run(resolve_auto(load_recipe("yu2019/cancer-uniform", overrides)), loop.Options(Path(out)))
        return time.perf_counter() - begun


def table_2(rounds: int) -> None:
    """One trial of the exponential schedule beside `step.plain_training` on rows of the same shape."""
    from benchmarks.step import plain_training

    random = np.random.default_rng(0)
    x = random.standard_normal((70_000, 60)).astype(np.float32)
    y = x[:, :10].argmax(axis=1)
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        plain_training(x, y, 71)
        plain = time.perf_counter() - begun
        with TemporaryDirectory() as out:
            begun = time.perf_counter()
            loaded = load_recipe("yu2019/mnist-exponential", ("repeats=1",))
            directory = loop.run(resolve_auto(loaded), loop.Options(Path(out)))
            whole = time.perf_counter() - begun
            training = store.read_document(directory)["timing"]["nonprivate_train_seconds"]
        found.append((training / plain, whole / plain))
        print(f"plain {plain:.1f} s; training {training:.1f} s, whole {whole:.1f} s")
    training, whole = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"medians: training {training:.2f} x, whole {whole:.2f} x")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table-2", action="store_true", help="the second question")
    settings = parser.parse_args()
    rounds = settings.rounds
    if settings.table_2:
        table_2(rounds)
        return 0
    if not (Path(os.environ.get("DPSGD_DATA", "")) / "breast-cancer-wisconsin").is_dir():
        print("needs DPSGD_DATA with the data set breast-cancer-wisconsin", file=sys.stderr)
        return 0
    seconds("repeats=1")
    found = []
    for _ in range(rounds):
        pack = seconds(f"repeats={TRIALS}")
        alone = sum(seconds("repeats=1", f"seed={seed}") for seed in range(TRIALS))
        found.append((pack, alone, alone / pack))
    pack, alone, ratio = (statistics.median(column) for column in zip(*found, strict=True))
    print(f"ten repeats in one pack {pack:.2f} s, one after the other {alone:.2f} s: {ratio:.1f} times")
    print(f"least and largest ratio: {min(row[2] for row in found):.1f}, {max(row[2] for row in found):.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
