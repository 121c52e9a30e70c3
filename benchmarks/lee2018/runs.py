"""Running cases as packs, and reading what they left: every budget of a method trains together, finished cells stay.

What a pack cost is kept beside the runs (`seconds.json`), for packs that were run whole. Not here: which cases
(`cases.py`), tables (`page.py`).
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.lee2018 import cases
from dpsgd_cli import experiment
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.trials import Member

Named = tuple[str, list[str]]


@dataclass(frozen=True)
class Cell:
    """Mean and 95% half-width of accuracy on held-out folds, mean training objective, and how many trials."""

    accuracy: float
    margin: float
    objective: float
    trials: int


@dataclass(frozen=True)
class Asked:
    """What to run: where results go, the budgets, and how often every fold is repeated."""

    out: Path
    epsilons: tuple[float, ...] = cases.EPSILONS
    repeats: int = 4
    large_repeats: int = 1
    study_repeats: int = 2
    variant_repeats: int = 2
    train: bool = True

    @property
    def runs(self) -> Path:
        return self.out / "runs"

    def repeats_of(self, data: str) -> int:
        return self.large_repeats if data in cases.LARGE else self.repeats

    def budgets(self, name: str, changes: list[str]) -> list[Named]:
        """One recipe at every budget."""
        return [(f"lee2018/{name}", [*changes, f"privacy.budget.epsilon={epsilon}"]) for epsilon in self.epsilons]


@dataclass(frozen=True)
class Figure:
    """Every method of one data set and loss at every budget, and why some methods are missing."""

    data: str
    loss: str
    cells: dict[str, dict[float, Cell]]
    failed: dict[str, str]


class NotRun(DpsgdError):
    """A case has no result, and none is to be made."""


def run(recipes: list[Named], asked: Asked, clock: str | None = None) -> list[Cell]:
    """Results of recipes that may train together, in order; the time of a pack run whole is kept under `clock`.

    Raises NotRun for what is not finished when nothing is to be trained.
    """
    out = asked.runs
    loaded = [load_recipe(name, changes) for name, changes in recipes]
    todo = [one for one in loaded if not experiment.is_finished(one, experiment.result_directory(one, out))]
    if todo and not asked.train:
        raise NotRun("not run")
    if todo:
        wall, own = time.monotonic(), time.process_time()
        members = [Member(one, experiment.plan_recipe(one)[0]) for one in todo]
        experiment.run_pack(members, experiment.Options(out))
        if clock is not None and len(todo) == len(loaded):
            _keep_seconds(out, clock, time.process_time() - own, time.monotonic() - wall)
    return [_read(experiment.result_directory(one, out)) for one in loaded]


def _read(directory: Path) -> Cell:
    document = store.read_document(directory)
    accuracy = document["metrics"]["test_accuracy"]
    objective = document["metrics"]["nonprivate_train_objective"]["mean"]
    return Cell(accuracy["mean"], accuracy["ci95"] or 0.0, objective, len(document["trials"]))


def seconds(out: Path) -> dict[str, dict[str, float]]:
    """Processor and wall seconds of packs, by clock."""
    path = out / "seconds.json"
    found: dict[str, dict[str, float]] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return found


def _keep_seconds(out: Path, clock: str, processor: float, wall: float) -> None:
    kept = seconds(out) | {clock: {"processor": processor, "wall": wall}}
    (out / "seconds.json").write_text(json.dumps(kept, indent=1), encoding="utf-8")


def clock_of(data: str, loss: str, method: str, asked: Asked) -> str:
    """The name under which the time of a method's pack is kept."""
    return f"{data} {loss} {method}, {len(asked.epsilons)} budgets x 5 folds x {asked.repeats_of(data)}"


def figure(data: str, loss: str, asked: Asked) -> Figure:
    """Every method at every budget; a method that fails is told and left out."""
    found = Figure(data, loss, {}, {})
    for method in cases.methods_of(data):
        begun, clock = time.monotonic(), clock_of(data, loss, method, asked)
        changes = cases.overrides(method, data, loss, asked.repeats_of(data))
        try:
            if method.startswith("non-private"):
                cell = run([("lee2018/non-private", changes)], asked, clock)[0]
                found.cells[method] = dict.fromkeys(asked.epsilons, cell)
            else:
                cells = run(asked.budgets(method, changes), asked, clock)
                found.cells[method] = dict(zip(asked.epsilons, cells, strict=True))
        except DpsgdError as error:
            found.failed[method] = str(error)
            print(f"{data} {loss} {method}: {error}", file=sys.stderr)
            continue
        print(f"{data} {loss} {method}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def study(key: str, asked: Asked) -> dict[float, dict[Any, Cell]]:
    """DP-AGD on Adult with one parameter changed, at a few budgets: all values and budgets train as one pack."""
    asked = replace(asked, epsilons=tuple(e for e in asked.epsilons if e in cases.STUDY_EPSILONS) or asked.epsilons)
    found: dict[float, dict[Any, Cell]] = {epsilon: {} for epsilon in asked.epsilons}
    common = cases.overrides("dp-agd", "adult", "logistic", asked.study_repeats)
    places = [(value, epsilon) for value in cases.STUDIES[key] for epsilon in asked.epsilons]
    named = [one for value in cases.STUDIES[key] for one in asked.budgets("dp-agd", [*common, f"method.{key}={value}"])]
    for (value, epsilon), cell in zip(places, run(named, asked), strict=True):
        found[epsilon][value] = cell
    print(f"study of {key} done", file=sys.stderr, flush=True)
    return found


def kink(asked: Asked) -> dict[str, dict[float, Cell]]:
    """DP-AGD on Adult's SVM, as published, with the better split, and with momentum, at budgets beyond the others."""
    asked = replace(asked, epsilons=cases.KINK_EPSILONS)
    found: dict[str, dict[float, Cell]] = {}
    for method in cases.KINK:
        changes = cases.overrides(method, "adult", "svm", asked.study_repeats)
        found[method] = dict(zip(asked.epsilons, run(asked.budgets(method, changes), asked), strict=True))
    print("DP-AGD at a kink done", file=sys.stderr, flush=True)
    return found


def variants(data: str, asked: Asked) -> dict[str, dict[float, Cell]]:
    """What was tried with DP-GD on a data set, at a few budgets; without what was not run."""
    asked = replace(asked, epsilons=tuple(e for e in asked.epsilons if e in cases.VARIANT_EPSILONS) or asked.epsilons)
    found: dict[str, dict[float, Cell]] = {}
    for label in cases.VARIANTS[data]:
        recipe, changes = cases.variant_overrides(data, label, asked.variant_repeats, asked.repeats)
        with contextlib.suppress(NotRun):
            found[label] = dict(zip(asked.epsilons, run(asked.budgets(recipe, changes), asked), strict=True))
    print(f"variants of DP-GD on {data} done", file=sys.stderr, flush=True)
    return found


def optima(data: str, asked: Asked) -> dict[str, dict[float, Cell]]:
    """The optimum without privacy by features and L2 term; without what was not run.

    The card's features with the paper's L2 term and with none are those of the data set's own table.
    """
    found: dict[str, dict[float, Cell]] = {}
    for features in cases.FEATURES:
        for penalty in cases.PENALTIES:
            own = features == next(iter(cases.FEATURES)) and penalty in (cases.PENALTIES[0], cases.PENALTIES[-1])
            changes = cases.optimum_overrides(features, penalty, data, asked.repeats if own else 1)
            with contextlib.suppress(NotRun):
                cell = run([("lee2018/non-private", changes)], asked)[0]
                found.setdefault(features, {})[penalty] = cell
    print(f"optima of {data} done", file=sys.stderr, flush=True)
    return found
