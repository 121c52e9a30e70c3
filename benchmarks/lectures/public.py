"""Trains the public half of the comparison with public data, once, where the cases of its private half look for it.

DPSGD_DATA=... python -m benchmarks.lectures.public
"""

from __future__ import annotations

from benchmarks.lectures import FOUND, PUBLIC
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto


def main() -> None:
    if not FOUND.is_dir():
        directory = loop.run(resolve_auto(PUBLIC.loaded()), loop.Options(out=FOUND.parent))
        directory.rename(FOUND)
    print(FOUND)


if __name__ == "__main__":
    main()
