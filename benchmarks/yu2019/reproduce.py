"""Reproduce Yu et al. 2019, "Differentially Private Model Publishing for Deep Learning", end to end.

    DPSGD_DATA=... make reproduce-yu2019            (or: python -m benchmarks.yu2019.reproduce --help)

Trains every case of `cases.py` and writes `results/yu2019/README.md` with its pictures. A case that is finished is not
trained again, so the same command continues after a stop. `--page-only` writes the page from what there is.
Not here: what is trained (`cases.py`), the page (`page.py`).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from benchmarks.yu2019.cases import Case, cases


def train(case: Case, out: Path) -> tuple[str, float, str]:
    """Train one case (or find it trained): its name, the seconds it took, and what went wrong."""
    from dpsgd_cli import experiment
    from dpsgd_cli.errors import DpsgdError
    from dpsgd_cli.recipe.loading import load_recipe

    begun = time.monotonic()
    try:
        experiment.run(load_recipe(case.recipe, case.overrides), experiment.Options(out, resume=True))
    except (DpsgdError, OSError) as error:
        return case.name, time.monotonic() - begun, str(error)
    return case.name, time.monotonic() - begun, ""


def train_all(chosen: list[Case], out: Path, workers: int) -> list[str]:
    """Train `chosen` side by side, one thread each; returns what failed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    failed, begun = [], time.monotonic()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(train, case, out) for case in chosen]
        for number, job in enumerate(as_completed(jobs), start=1):
            name, seconds, problem = job.result()
            passed = time.monotonic() - begun
            print(f"{passed:6.0f} s  {number}/{len(jobs)}  {name}  {seconds:.1f} s  {problem}", flush=True)
            failed += [f"{name}: {problem}"] if problem else []
    return failed


def main() -> int:
    """Train, then write the page."""
    parser = argparse.ArgumentParser(description="Reproduce Yu et al. 2019.")
    parser.add_argument("--out", type=Path, default=Path("results/yu2019"), help="where the page and runs/ go")
    parser.add_argument("--repeats", type=int, default=3, help="trials of each training (the paper: 10)")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1), help="trainings side by side")
    parser.add_argument("--only", default="", help="only cases whose name begins so, as table2 or cancer/uniform")
    parser.add_argument("--skip", default=" ", help="no cases whose name begins so")
    parser.add_argument("--page-only", action="store_true", help="train nothing")
    settings = parser.parse_args()
    chosen = [case for case in cases(settings.repeats) if case.name.startswith(settings.only)]
    chosen = [case for case in chosen if not case.name.startswith(settings.skip)]
    failed = [] if settings.page_only else train_all(chosen, settings.out / "runs", settings.workers)

    from benchmarks.yu2019 import page

    page.write(settings.out, settings.repeats)
    print(f"wrote {settings.out / 'README.md'}")
    print("\n".join(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
