"""Trains the public half of the comparison with public data, once, where the cases of its private half look for it.

DPSGD_DATA=... python -m benchmarks.lectures.public
"""

from __future__ import annotations

from benchmarks.lectures.cases import FOUND, PUBLIC
from dpsgd_cli import experiment


def main() -> None:
    if not FOUND.is_dir():
        directory = experiment.run(PUBLIC.loaded(), experiment.Options(out=FOUND.parent))
        directory.rename(FOUND)
    print(FOUND)


if __name__ == "__main__":
    main()
