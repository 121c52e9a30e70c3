"""How much faster do ten repeats train in one pack than one after the other?

    DPSGD_DATA=... OMP_NUM_THREADS=1 python benchmarks/packs.py [--rounds 5]

The Cancer recipe of Yu et al. (500 full-batch epochs, three hidden layers), whole runs in one process, reading and
writing included, in turns. Target: 4 times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from dpsgd_cli import experiment
from dpsgd_cli.recipe.loading import load_recipe

TRIALS = 10


def seconds(*overrides: str) -> float:
    """One whole run."""
    with TemporaryDirectory() as out:
        begun = time.perf_counter()
        experiment.run(load_recipe("yu2019/cancer-uniform", overrides), experiment.Options(Path(out)))
        return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
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
