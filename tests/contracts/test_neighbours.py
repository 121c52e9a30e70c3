"""Neighbouring data sets through the whole of `dpsgd train`, with one seed: nothing public tells them apart but noise.

For each method the command runs on D and on its neighbours, which differ in one record, or in all rows of one user.
Names of files, columns and keys, the text that is printed, warnings, errors, exit codes, the privacy section and the
ledger must be the same; only what begins with `nonprivate_`, times, and what noised weights decide (metrics, and of
methods that choose also what they chose to spend) may differ.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file

from dpsgd_cli.audit.auditing import audit
from dpsgd_cli.audit.findings import AuditOptions
from dpsgd_cli.engine.metrics import METRICS
from dpsgd_cli.main import main
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import resolve_auto

ROWS = 24
Rows = list[list[str]]

DP_SGD = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 6, "learning_rate": 0.5}
FLAT = {"clipping": {"kind": "flat", "norm": 1.0}, "schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-5}
PLANNED = {"model": {"kind": "linear"}, "privacy": FLAT, "epochs": 2}
BUDGET = {"budget": {"epsilon": 2.0, "delta": 1e-5}}
CONVEX = {"model": {"kind": "convex", "l2": 0.1}, "privacy": BUDGET}
RAW: dict[str, Any] = {"preprocess": []}
DESCENT = {"epochs": 2, "learning_rate": 1.0}
PATE = {"kind": "pate", "teachers": {"count": 4, **DESCENT}, "student": {**DESCENT}}
VOTES = {"model": {"kind": "linear"}, "privacy": {"delta": 1e-5}, "data": {"public": {"from": "test", "records": 5}}}
MOMENTS = {"preconditioner": {"kind": "second-moment"}}
LOGISTIC = {"model": {"kind": "convex"}, "privacy": BUDGET, "epochs": 2}
PYTHON = """
import torch
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.accounting.plan import Plan

class Own(DpSgd):
    pass
"""

METHOD: dict[str, dict[str, Any]] = {
    "poisson": {**PLANNED, "method": DP_SGD},
    "shuffle": {
        **PLANNED,
        "method": {**DP_SGD, "batching": "shuffle"},
        "privacy": {**FLAT, "adjacency": "zero-out"},
    },
    "replaced": {**PLANNED, "method": DP_SGD, "privacy": {**FLAT, "adjacency": "replace-one"}},
    "fixed": {**PLANNED, "method": {**DP_SGD, "batching": "fixed"}},
    "random-allocation": {**PLANNED, "method": {**DP_SGD, "batching": "random-allocation"}},
    "full": {**PLANNED, "method": {"kind": "dp-sgd", "batching": "full"}},
    "single": {
        **CONVEX,
        "method": {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1},
        "privacy": {**BUDGET, "adjacency": "replace-one", "clipping": {"kind": "flat", "norm": 1.0}},
        "epochs": 1,
    },
    "dp-gd": {**CONVEX, "method": {"kind": "dp-gd"}, "epochs": 2},
    "rdp-markov": {**PLANNED, "method": DP_SGD, "privacy": {**BUDGET, "accountant": "rdp-markov"}},
    "strong-composition": {**PLANNED, "method": DP_SGD, "privacy": {**BUDGET, "accountant": "strong-composition"}},
    "dp-agd": {**CONVEX, "method": {"kind": "dp-agd", "splits": 10}},
    "privgene": {**CONVEX, "method": {"kind": "privgene", "rounds": 2, "population": 8, "survivors": 2}},
    "objective-perturbation": {**CONVEX, "method": {"kind": "objective-perturbation"}},
    "output-perturbation": {**CONVEX, "method": {"kind": "output-perturbation", "steps": 5}},
    "majority": {**CONVEX, "method": {"kind": "majority"}},
    "private-selection": {
        "model": {"kind": "linear"},
        "method": {
            "kind": "private-selection",
            "batching": "shuffle",
            "batch_size": 4,
            "candidates": [{"kind": "uniform", "initial": 4}, {"kind": "uniform", "initial": 5}],
        },
        "privacy": {"clipping": FLAT["clipping"], "budget": {"rho": 0.5}, "delta": 1e-5, "adjacency": "zero-out"},
        "epochs": 2,
    },
    "validation": {
        **PLANNED,
        "method": {**DP_SGD, "batching": "shuffle"},
        "data": {"validation": {"records": 6, "noise_multiplier": 4}},
        "privacy": {
            **FLAT,
            "schedule": {"kind": "validation", "initial": 4, "decay": 0.7},
            "budget": {"rho": 0.5},
            "adjacency": "zero-out",
        },
        "epochs": "until-budget",
    },
    "raw poisson": {**PLANNED, "method": DP_SGD, "data": RAW},
    "raw full": {**PLANNED, "method": {"kind": "dp-sgd", "batching": "full"}, "data": RAW},
    "raw single": {
        **CONVEX,
        "method": {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1},
        "privacy": {**BUDGET, "adjacency": "replace-one", "clipping": {"kind": "flat", "norm": 1.0}},
        "epochs": 1,
        "data": RAW,
    },
    "raw dp-gd": {**CONVEX, "method": {"kind": "dp-gd"}, "epochs": 2, "data": RAW},
    "raw dp-agd": {**CONVEX, "method": {"kind": "dp-agd", "splits": 10}, "data": RAW},
    "raw dp-agd, network": {
        "model": {"kind": "mlp", "hidden": [3]},
        "privacy": BUDGET,
        "method": {"kind": "dp-agd", "splits": 10},
        "data": RAW,
    },
    "raw privgene": {
        **CONVEX,
        "method": {"kind": "privgene", "rounds": 2, "population": 8, "survivors": 2},
        "data": RAW,
    },
    "regression": {
        "model": {"kind": "convex", "l2": 0.1, "loss": "squared", "target_bound": 1.0},
        "privacy": FLAT,
        "method": {"kind": "dp-gd"},
        "epochs": 2,
        "data": {"target": "b", "task": "regression", "classes": "", "drop": ["y"], "bounds": {"a": [0, 1]}},
    },
    "calibrated": {
        "model": {"kind": "convex", "loss": "squared", "bias": True},
        "privacy": BUDGET,
        "method": {"kind": "dp-gd", "preconditioner": {"kind": "marginals"}, "calibration": {"share": 0.3}},
        "epochs": 2,
        "data": {
            "target": "b",
            "task": "regression",
            "classes": "",
            "target_bounds": [0, 1],
            "drop": ["y"],
            "bounds": {"a": [0, 1]},
            "preprocess": [{"bin": {"waves": 4}}],
        },
    },
    "raw pca": {
        **PLANNED,
        "method": DP_SGD,
        "data": {"preprocess": [{"pca": {"components": 1, "noise_multiplier": 5}}]},
    },
    "preconditioned": {**PLANNED, "method": {"kind": "dp-gd", **MOMENTS}, "privacy": BUDGET},
    "raw preconditioned": {**PLANNED, "method": {"kind": "dp-gd", **MOMENTS}, "privacy": BUDGET, "data": RAW},
    "raw preconditioned batches": {**PLANNED, "method": {**DP_SGD, **MOMENTS}, "privacy": BUDGET, "data": RAW},
    "raw preconditioned margins": {**LOGISTIC, "method": {"kind": "dp-gd", **MOMENTS}, "data": RAW},
    "counted": {
        **LOGISTIC,
        "method": {"kind": "dp-gd", "preconditioner": {"kind": "marginals"}},
        "data": {"preprocess": [{"bin": {"waves": 4}}]},
    },
    "dp-least-squares": {"model": {"kind": "linear"}, "method": {"kind": "dp-least-squares"}, "privacy": BUDGET},
    "pate": {**VOTES, "method": {**PATE, "aggregation": {"kind": "gnmax", "noise": 2}}},
    "confident pate": {**VOTES, "method": {**PATE, "aggregation": {"kind": "confident-gnmax", "threshold": 2}}},
    "python": {**PLANNED, "method": {**DP_SGD, "kind": "python", "file": "own.py", "factory": "Own"}},
}
WHO, UNIT = "u4", {"unit": {"column": "user", "most_rows": 2}}
# by this seed WHO is one of 7 users that train, by name and by rank
SPLIT = {"test_path": "", "split": {"test": 0.3, "seed": 38}}


def of_users(sections: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Return sections that protect all rows of a user together."""
    own = sections | own
    return own | {"data": own.get("data", {}) | SPLIT, "privacy": own["privacy"] | UNIT}


LAYERED = {"model": {"kind": "mlp", "hidden": [3]}, "privacy": {**FLAT, "clipping": {"kind": "per-layer", "norm": 0.5}}}
METHOD |= {
    f"{name}, users": of_users(METHOD[name])
    for name in ("poisson", "shuffle", "full", "raw full", "dp-gd", "dp-least-squares")
} | {"full, users, by layer": of_users(METHOD["full"], **LAYERED)}
WITHOUT_STEPS = {"privgene", "majority", "objective-perturbation", "dp-agd"}
PLAIN = {"sgd", "gd", "non-private"}
CHOOSES = {"dp-agd", "validation", "confident pate", "python"}


def kind_of(method: str) -> str:
    """Return the name of a case without what is particular to it: "dp-agd" of "raw dp-agd, network"."""
    return method.removeprefix("raw ").partition(",")[0]


def base_rows(rows: int = ROWS) -> Rows:
    rng = np.random.default_rng(0)
    x = rng.random((rows, 2)).round(3)
    return [[*map(str, row), "no" if row.sum() < 1 else "yes"] for row in x]


def rows_of_users() -> Rows:
    """Three rows of each of ten users."""
    return [[*row, f"u{number % 10}"] for number, row in enumerate(base_rows(30))]


def flipped(rows: Rows) -> Rows:
    return [*rows[:5], [*rows[5][:2], "no" if rows[5][2] == "yes" else "yes"], *rows[6:]]


def huge(rows: Rows) -> Rows:
    """Beyond the declared bounds, beyond float32, and of the other label."""
    return [*rows[:5], ["1e300", "-1e300", "no"], *rows[6:]]


def nulled(rows: Rows) -> Rows:
    return [*rows[:5], ["0", "0", rows[5][2]], *rows[6:]]


def each_of_who(change: Callable[[list[str]], list[str]]) -> Callable[[Rows], Rows]:
    return lambda rows: [change(row) if row[-1] == WHO else row for row in rows]


CHANGES: dict[str, Callable[[Rows], Rows]] = {"flipped": flipped, "huge": huge, "nulled": nulled}
OF_USERS: dict[str, Callable[[Rows], Rows]] = {
    "flipped": each_of_who(lambda row: [*row[:2], "no" if row[2] == "yes" else "yes", WHO]),
    "huge": each_of_who(lambda row: ["1e300", "-1e300", "no", WHO]),
    "one row": lambda rows: [row for number, row in enumerate(rows) if row[-1] != WHO or number < 10],
    "more rows": lambda rows: [*rows, *([["0.1", "0.9", "yes", WHO]] * 5)],
}


def rows_and_changes(method: str) -> tuple[Rows, Mapping[str, Callable[[Rows], Rows]]]:
    """Return the rows that a method trains on, and their neighbours by name."""
    return (rows_of_users(), OF_USERS) if "users" in method else (base_rows(), CHANGES)


def lay_out(folder: Path, rows: Rows, sections: dict[str, Any]) -> Path:
    """Write a recipe and its data into a new folder; the recipe's file."""
    folder.mkdir()
    write(folder / "own.csv", rows)
    write(folder / "test.csv", base_rows()[:8])
    (folder / "own.py").write_text(PYTHON)
    data = {
        "path": "own.csv",
        "test_path": "test.csv",
        "target": "y",
        "classes": ["no", "yes"],
        "bounds": [0, 1],
        **sections.get("data", {}),
    }
    recipe = {
        "name": "own",
        "seed": 0,
        "repeats": 2,
        "save_model": True,
        **sections,
        "data": {k: v for k, v in data.items() if v != ""},
    }
    (folder / "own.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "own.yaml"


class Run:
    """One run of the command in a folder of its own, and everything that it shows."""

    def __init__(self, folder: Path, rows: Rows, sections: dict[str, Any]) -> None:
        arguments = ["train", str(lay_out(folder, rows, sections)), "--out", str(folder / "out")]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.done = CliRunner().invoke(main, arguments)
        self.warned = sorted({str(warning.message) for warning in caught})
        self.folder = folder
        found = [path.parent for path in (folder / "out").rglob("result.json")]
        self.result = found[0] if found else None

    def text(self, text: str) -> str:
        return text.replace(str(self.folder), "FOLDER")

    def shown(self, chooses: bool) -> dict[str, Any]:
        """What may be published, with noised values and times masked."""
        exit_code, out, err = self.done.exit_code, self.text(self.done.stdout), self.text(self.done.stderr)
        told = without_noised(line for line in err.splitlines() if not line.startswith("nonprivate warning:"))
        said: dict[str, Any] = {"exit": exit_code, "stderr": told, "stdout": masked_text(out), "warned": self.warned}
        said["files"] = sorted(str(p.relative_to(self.folder)) for p in (self.folder / "out").rglob("*"))
        if self.result is None:
            return said
        document = json.loads((self.result / "result.json").read_text())
        follows_from_metrics(document)
        document["warnings"] = without_noised(document["warnings"])
        said.update(masked(document, chooses, "result"))
        for name in ("trials.csv", "history.csv"):
            said[name] = table(self.result / name, chooses)
        ledger = (self.result / "ledger.jsonl").read_text()
        said["ledger"] = sorted({json.loads(line)["trial"] for line in ledger.splitlines()}) if chooses else ledger
        weights = load_file(self.result / "model.safetensors")
        said["model"] = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}
        return said


POOR = "no better than the majority-class baseline: test accuracy"


def without_noised(lines: Iterable[str]) -> list[str]:
    """Without what is said of metrics, which are noised."""
    noised = ("no better than the ", "the test loss rose to", "diverged (trial", "diverged: ")
    return [line for line in lines if not any(one in line for one in noised)]


def follows_from_metrics(document: dict[str, Any]) -> None:
    """See that what is said of metrics is a function of those that are shown."""
    ours, constant = (document["metrics"].get(f"{name}_accuracy", {}).get("mean") for name in ("test", "constant"))
    poor = ours is not None and constant is not None and ours <= constant
    assert any(POOR in line for line in document["warnings"]) == poor
    for trial in document.pop("diverged"):
        row = document["trials"][trial]
        assert poor or row["test_log_loss"] > 2 * row["constant_log_loss"]


def write(path: Path, rows: Rows) -> None:
    header = ["a", "b", "y", "user"][: len(rows[0])]
    path.write_text("\n".join(map(",".join, [header, *rows])) + "\n")


NOISED = r"\.diverged|\.(metrics|trials\[\d+\])\.(test_|answer|chosen_)|\.files\.model\."
CHOSEN = NOISED + r"|\.privacy\.spent\.|\.timing\.steps$|\.trials\[\d+\]\.(spent_|epochs$)|\.files\.ledger\."


def masked(value: Any, chooses: bool, path: str = "") -> dict[str, Any]:
    """The values of a document by where they are, without what is not private; noised ones and times as a mark."""
    if isinstance(value, dict):
        shown = {key: own for key, own in value.items() if not key.startswith("nonprivate_") and key != "trained_from"}
        parts = [masked(own, chooses, f"{path}.{key}") for key, own in shown.items()]
        return {path: sorted(shown), **{key: own for part in parts for key, own in part.items()}}
    if isinstance(value, list):
        parts = [masked(own, chooses, f"{path}[{number}]") for number, own in enumerate(value)]
        return {path: len(value), **{key: own for part in parts for key, own in part.items()}}
    return {path: "#" if value is not None and re.search(CHOSEN if chooses else NOISED, path) else value}


def table(path: Path, chooses: bool) -> Any:
    """Columns, and rows without noised cells; of a method that chooses, when to stop is noised, too."""
    with path.open(encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = list(reader.fieldnames or ())
        kept = [name for name in names if not name.startswith(("nonprivate_", "test_", "answer", "chosen_"))]
        rows = [tuple(row[name] for name in kept) for row in reader]
    if not chooses:
        return names, rows
    return names, [row[0] for row in rows] if path.name == "trials.csv" else []


def masked_text(text: str) -> list[str]:
    """The printed result, with the numbers of lines of metrics, times and what was spent as a mark."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("nonprivate_")]
    varies = re.compile(rf"\s*(test_|answer|chosen_|time|trained|spent|of that|\d+ trial|({'|'.join(METRICS)}) )")
    return [re.sub(r"[-+]?\d[\d.,e+-]*", "#", line) if varies.match(line) else line for line in lines]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Runs by the name of their method and of their change of the rows; each is made once."""
    folder = tmp_path_factory.mktemp("neighbours")

    @functools.cache
    def run(method: str, change: str) -> Run:
        rows, changes = rows_and_changes(method)
        return Run(folder / f"{method}-{change}", changes.get(change, lambda same: same)(rows), METHOD[method])

    return run


def test_every_method_with_a_guarantee_is_tried() -> None:
    tried = {sections["method"]["kind"] for sections in METHOD.values()}
    assert tried == set(METHODS) - PLAIN


@pytest.mark.parametrize(
    ("change", "method"), [(change, method) for method in METHOD for change in rows_and_changes(method)[1]]
)
def test_one_record_changed_shows_in_nothing_public(runs: Callable[..., Run], method: str, change: str) -> None:
    one, other = runs(method, "none"), runs(method, change)
    chooses = kind_of(method) in CHOOSES
    assert one.done.exit_code == 0, one.done.stderr
    ours, theirs = one.shown(chooses), other.shown(chooses)
    assert differing(ours, theirs) == {}


@pytest.mark.parametrize("method", METHOD)
def test_nor_does_it_move_what_steps_add_up_by_more_than_the_ledger_says(method: str, tmp_path: Path) -> None:
    """Step by step, from equal weights: tier D of an audit, of worse records than a file can hold."""
    recipe = lay_out(tmp_path / "own", rows_and_changes(method)[0], METHOD[method])
    found = audit(resolve_auto(load_recipe(str(recipe))), AuditOptions(("D",), trials=4, quick=True))
    assert not found["refuted"], found["refuted_by"]
    assert {row["tier"] for row in found["findings"]} == {"D"} or kind_of(method) in WITHOUT_STEPS


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What two runs show, where it is not the same."""
    return {
        name: (ours.get(name), theirs.get(name))
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
    }
