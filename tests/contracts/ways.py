"""Ways to train, each a row: sections for `recipe_writer` and the files beside the recipe. A new method adds a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import GRADIENT, OWN, recipe_writer
from tests.conftest import WAYS as BATCHED

CANCER: dict[str, Any] = {"data": {"name": "breast-cancer"}, "model": {"kind": "convex"}}
SPENT: dict[str, Any] = {"privacy": {"budget": {"rho": 0.5}, "delta": 1e-3}, "epochs": None}
BUDGET = {"budget": {"epsilon": 4, "delta": 1e-3}}
FOLDS: dict[str, Any] = {"folds": 3, "repeats": 1}

WAYS: dict[str, dict[str, Any]] = BATCHED | {
    "dp-agd": CANCER | SPENT | {"method": {"kind": "dp-agd", "refresh": 2, "splits": 12}},
    "dp-agd, folds": CANCER | SPENT | FOLDS | {
        "method": {"kind": "dp-agd", "refresh": 2, "splits": 12, "momentum": 0.5},
    },
    "dp-agd, network": SPENT | {"method": {"kind": "dp-agd", "refresh": 20, "splits": 20}},
    "dp-gd, folds": CANCER | FOLDS | {"method": {"kind": "dp-gd"}},
    "dp-gd, tail": CANCER | FOLDS | {
        "method": {"kind": "dp-gd", "learning_rate": 4, "averaging": {"kind": "tail"},
                   "preconditioner": {"kind": "second-moment"}},
        "privacy": BUDGET,
    },
    "sgd-ma": CANCER | FOLDS | {"method": {"kind": "dp-sgd", "batch_size": 50},
                                "privacy": {"budget": {"epsilon": 2, "delta": 1e-3}, "accountant": "rdp-markov"}},
    "gd": CANCER | FOLDS | {"method": {"kind": "gd"}, "privacy": None},
    "sgd": FOLDS | {"method": {"kind": "sgd", "batch_size": 12, "learning_rate": 0.1}, "privacy": None},
    "poisson, folds": FOLDS,
    "shuffle, folds": FOLDS | {"method": GRADIENT | {"batching": "shuffle"}, "privacy": BUDGET},
    "users": {
        "data": OWN | {"path": "who.npz"},
        "method": GRADIENT | {"batch_size": 6},
        "privacy": BUDGET | {"unit": {"column": "who", "most_rows": 3}},
    },
    "on disk": {"data": OWN | {"path": "x.npy", "target": "y.npy",
                               "test_path": "x_test.npy", "test_target": "y_test.npy"}},
    "augmented": {
        "data": {"name": "digits", "split": {"test": 0.9}, "augment": {"copies": 2, "crop": 1}},
        "model": {"kind": "mlp", "hidden": [8]},
        "method": GRADIENT | {"batch_size": 40, "averaging": {"kind": "ema", "decay": 0.9}},
    },
}  # fmt: skip


def write_way(name: str, folder: Path, **sections: Any) -> Path:
    """Write the recipe of a way, which saves its model, and its data; return the recipe's file."""
    path = recipe_writer(folder)(**WAYS[name] | {"save_model": True} | sections)
    with np.load(folder / "tiny.npz") as held:
        arrays = {key: held[key].astype(np.float32) if key[0] == "x" else held[key] for key in held.files}
    for key, values in arrays.items():
        np.save(folder / f"{key}.npy", values)
    np.savez(folder / "who.npz", who=np.sort(np.arange(48) ** 2 % 61 % 16), who_test=np.arange(12) + 100, **arrays)
    return path
