"""Lee and Kifer 2018, Figures 1 to 4, with every method that they compared and what came after.

    python -m benchmarks.lee2018.reproduce --data adult bank --repeats 4

Writes `results/lee2018/README.md` with tables and pictures. Each cell is a recipe of `recipes/lee2018/` with overrides,
run by the same code as `dpsgd train`; all budgets of a method train as one pack. Finished cells are kept, so a
stopped run goes on where it was. Needs the data sets (`dpsgd data fetch adult`) and matplotlib.

Not here: which cases there are (`cases.py`), running them (`runs.py`), the text (`page.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.lee2018 import cases, page, runs
from benchmarks.lee2018.runs import Asked


def sections(arguments: argparse.Namespace, asked: Asked) -> Iterator[list[str]]:
    """The parts of the page in order; each is run when it is asked for."""
    figures = []
    for data in arguments.data:
        for loss in arguments.loss:
            found = runs.figure(data, loss, asked)
            if found.cells:
                figures.append(found)
                yield page.figure(found, asked)
    if arguments.studies and "adult" in arguments.data and "svm" in arguments.loss:
        with contextlib.suppress(runs.NotRun):
            yield page.kink(runs.kink(asked))
    yield page.times(figures, asked)
    if arguments.variants:
        for data in (name for name in cases.VARIANTS if name in arguments.data):
            if tried := runs.variants(data, asked):
                yield page.variants(data, tried)
            if best := runs.optima(data, asked):
                yield page.optima(data, best)
    if arguments.studies:
        for key in cases.STUDIES:
            with contextlib.suppress(runs.NotRun):
                yield page.study(key, runs.study(key, asked), asked)


def write(arguments: argparse.Namespace) -> None:
    """Run what is asked for, and write the page after each part of it."""
    repeats = (arguments.repeats, arguments.large_repeats, arguments.study_repeats, arguments.variant_repeats)
    asked = Asked(arguments.out, tuple(arguments.epsilon), *repeats, train=arguments.train)
    asked.runs.mkdir(parents=True, exist_ok=True)
    text = page.head(" ".join(["python -m benchmarks.lee2018.reproduce", *sys.argv[1:]]))
    for section in sections(arguments, asked):
        text += section
        (asked.out / "README.md").write_text("\n".join(text).rstrip("\n") + "\n", encoding="utf-8")
    print(asked.out / "README.md")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    made.add_argument("--data", nargs="+", choices=cases.DATA, default=list(cases.DATA))
    made.add_argument("--loss", nargs="+", choices=cases.LOSSES, default=list(cases.LOSSES))
    made.add_argument("--epsilon", nargs="+", type=float, default=list(cases.EPSILONS))
    made.add_argument("--repeats", type=int, default=4, help="of every fold; the paper has 20")
    made.add_argument("--large-repeats", type=int, default=1, help=f"the same for {', '.join(cases.LARGE)}")
    made.add_argument("--study-repeats", type=int, default=2, help="the same for studies of DP-AGD's parameters")
    made.add_argument("--variant-repeats", type=int, default=2, help="the same for what was tried with DP-GD")
    made.add_argument("--out", type=Path, default=Path("results/lee2018"))
    made.add_argument("--train", action=argparse.BooleanOptionalAction, default=True, help="or tell what is finished")
    made.add_argument("--studies", action=argparse.BooleanOptionalAction, default=True, help="of DP-AGD's parameters")
    made.add_argument(
        "--variants", action=argparse.BooleanOptionalAction, default=True, help="of DP-GD, and the optima"
    )
    return made


if __name__ == "__main__":
    write(parser().parse_args())
