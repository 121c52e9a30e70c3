"""Compare what recipes train to with what another commit trained, to the bit.

    python -m tests.behaviour OUT                  # trains each recipe and records it in the folder OUT
    python -m tests.behaviour OUT --against OLD    # and says where weights, ledgers and metrics differ from OLD

Every shipped recipe is trained for an epoch on stand-in records, and each of `VARIANTS` on small tables, for what no
shipped recipe sets. Run it in a checkout of each commit; the second run compares. Left out: timings, versions, and
metrics or recipes that OLD does not have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import recipe_writer
from tests.test_recipes_run import RECIPES, on_stand_in

_SGD: dict[str, Any] = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 12, "learning_rate": 0.5}
_SHUFFLED = _SGD | {"batching": "shuffle"}
_FIXED: dict[str, Any] = {"schedule": {"kind": "uniform", "initial": 4}, "delta": 1e-3}
_MLP = {"kind": "mlp", "hidden": [5]}
_USERS = {"path": "who.npz", "bounds": [0, 1], "classes": [0, 1, 2]}
_BINNED = {"name": "breast-cancer", "preprocess": [{"bin": {}}]}
_PIECES = [{"epochs": 2, "schedule": {"kind": "uniform", "initial": 6}},
           {"schedule": {"kind": "exponential", "initial": 6, "decay": 0.1}}]  # fmt: skip
_VOTES: dict[str, Any] = {"kind": "pate", "teachers": {"count": 4, "epochs": 2}, "queries": 8,
                          "student": {"epochs": 2}}  # fmt: skip
_PATE: dict[str, Any] = {
    "data": {"path": "tiny.npz", "bounds": [0, 1], "classes": [0, 1, 2], "public": {"from": "test", "records": 9}},
    "privacy": {"delta": 1e-3},
    "epochs": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "adam": {"method": _SGD | {"optimizer": {"kind": "adam"}}},
    "momentum and tail": {
        "method": _SGD | {"optimizer": {"kind": "sgd", "momentum": 0.9}, "averaging": {"kind": "tail"}}
    },
    "ema": {"method": _SGD | {"averaging": {"kind": "ema"}}},
    "cosine": {"method": _SGD | {"learning_rate": {"kind": "cosine", "initial": 0.5}}},
    "piecewise": {"privacy": {"schedule": {"kind": "piecewise", "parts": _PIECES}, "delta": 1e-3}},
    "marginals": {
        "data": _BINNED,
        "model": {"kind": "convex"},
        "method": {"kind": "dp-gd", "learning_rate": 1, "preconditioner": {"kind": "marginals"}},
        "privacy": {"budget": {"epsilon": 2, "delta": 1e-4}},
    },
    "second moment": {
        "data": {"name": "breast-cancer"},
        "model": {"kind": "convex"},
        "method": {"kind": "dp-gd", "learning_rate": 1, "preconditioner": {"kind": "second-moment"}},
        "privacy": {"budget": {"epsilon": 2, "delta": 1e-4}},
    },
    "users": {"data": _USERS, "privacy": _FIXED | {"unit": {"column": "who", "most_rows": 2}}},
    "users in folds": {"data": _USERS, "folds": 3, "privacy": _FIXED | {"unit": {"column": "who", "most_rows": 2}}},
    "folds": {"folds": 3, "repeats": 3},
    "per layer": {"model": _MLP, "privacy": _FIXED | {"clipping": {"kind": "per-layer", "norm": [1, 0.5]}}},
    "per layer as published": {
        "model": _MLP,
        "method": _SHUFFLED,
        "privacy": _FIXED | {"clipping": {"kind": "per-layer", "norm": 1, "noise": "as-published"}},
    },
    "quantile": {"model": _MLP, "privacy": _FIXED | {"clipping": {"kind": "quantile", "count_noise": 8}}},
    "quantile, shuffled": {
        "model": _MLP,
        "method": _SHUFFLED,
        "privacy": _FIXED | {"clipping": {"kind": "quantile", "count_noise": 8}},
    },
    "banded, shuffled": {"method": _SHUFFLED, "privacy": _FIXED | {"noise": {"kind": "banded", "bands": 2}}},
    "banded": {"privacy": _FIXED | {"noise": {"kind": "banded", "bands": 2}}},
    "pate, lnmax": _PATE | {"method": _VOTES | {"aggregation": {"kind": "lnmax", "noise": 20}}},
    "pate, gnmax": _PATE | {"method": _VOTES | {"aggregation": {"kind": "gnmax", "noise": 40}}},
}
"""What no shipped recipe sets: sections of `recipe_writer`'s recipe that are replaced."""


def variant(name: str, folder: Path) -> Path:
    """Write the recipe of one of `VARIANTS` and its data to `folder`; returns the recipe's path."""
    write = recipe_writer(folder)
    with np.load(folder / "tiny.npz") as held:
        np.savez(folder / "who.npz", **held, who=np.arange(48) // 3, who_test=np.arange(12) + 100)
    given: dict[str, Any] = {"privacy": _FIXED, "save_model": True} | VARIANTS[name]
    return write(**given | {"privacy": given["privacy"] | {"noise_source": "seeded"}})


def trained_variant(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of one of `VARIANTS`, and its ledger, metrics and epsilon."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_recipe(str(variant(name, Path(folder))))
        return _results(loop.run(resolve_auto(loaded), loop.Options(out=Path(folder) / "out")))


def _results(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    document = json.loads((directory / "result.json").read_text())
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    held = load_file(directory / "model.safetensors")
    weights = {name: value for name, value in held.items() if "preprocess/" not in name}
    return weights, {"ledger": ledger, "metrics": document["metrics"], "epsilon": document["privacy"]["epsilon"]}


def trained(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of one shipped recipe, shrunk and trained on stand-in records, and its ledger, metrics and epsilon."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        small = on_stand_in(RECIPES[name], Path(folder), patch)
        runtime = small.recipe.runtime.model_copy(update={"device": "cpu"})
        recipe = small.recipe.model_copy(update={"save_model": True, "runtime": runtime})
        directory = loop.run(resolve_auto(replace(small, recipe=recipe)), loop.Options(out=Path(folder)))
        return _results(directory)


def record(name: str, out: Path) -> None:
    """Train a recipe or variant; write `<name>.safetensors` (weights) and `<name>.json` (ledger, metrics, epsilon)."""
    weights, kept = trained(name) if name in RECIPES else trained_variant(name)
    place = out / name.replace("/", "-")
    save_file(weights, place.with_suffix(".safetensors"))
    place.with_suffix(".json").write_text(json.dumps(kept))


def differences(ours: Path, theirs: Path) -> list[str]:
    """What differs between two recorded recipes, in words."""
    found = []
    if not theirs.with_suffix(".json").exists():
        return []  # the other commit had no such recipe
    new, old = (json.loads(path.with_suffix(".json").read_text()) for path in (ours, theirs))
    found += [f"another {key}" for key in ("ledger", "epsilon") if new[key] != old[key]]
    weights, before = (load_file(path.with_suffix(".safetensors")) for path in (ours, theirs))
    if weights.keys() != before.keys():
        return [*found, "other tensors"]
    moved = max((_moved(weights[name], before[name]) for name in weights), default=0.0)
    if moved:
        found.append(f"weights differ by {moved:.2g} of their size")
    others = [name for name, metric in old["metrics"].items() if new["metrics"].get(name) != metric]
    if others:
        found.append(f"other metrics: {', '.join(others)}")
    return found


def _moved(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).double().norm() / theirs.double().norm().clamp_min(1e-30))


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="What another commit recorded.")
def main(out: Path, against: Path | None) -> None:
    """Record what every recipe trains to, and compare it with another commit's record."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for name in (*RECIPES, *VARIANTS):
        record(name, out)
        place = name.replace("/", "-")
        told[name] = differences(out / place, against / place) if against is not None else []
        click.echo(f"{name}: {'; '.join(told[name]) or ('the same to the bit' if against else 'recorded')}")
    sys.exit(any(told.values()))


if __name__ == "__main__":
    main()
