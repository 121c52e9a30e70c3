"""The safety net of a rearrangement: what every shipped recipe trains to, to be compared with another commit's.

    python -m tests.behaviour OUT                  # trains each shipped recipe for an epoch on stand-in records
    python -m tests.behaviour OUT --against OLD    # and says where weights, ledgers and metrics differ from OLD

Run it in a checkout of each commit; the second run compares. Timings and versions are left out, and
metrics that OLD does not have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from safetensors.torch import load_file, save_file

from dpsgd_cli.data import catalog, opening, readers
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.test_recipes_run import RECIPES, RECORDS, shrink, stand_in


def trained(name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of one shipped recipe, shrunk and trained on stand-in records, and its ledger, metrics and epsilon."""
    file = RECIPES[name]
    recipe = load_recipe(str(file)).recipe
    card = catalog.load_card(str(recipe.data.name))
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(readers, "read", stand_in)
        patch.setattr(opening, "_kept", {})
        patch.setattr(catalog, "records", lambda card, file: RECORDS)
        small = shrink(recipe, any(file.part == "test" for file in card.files)).model_copy(update={"save_model": True})
        directory = loop.run(resolve_auto(LoadedRecipe(small, file.parent, str(file))), loop.Options(out=Path(folder)))
        document = json.loads((directory / "result.json").read_text())
        ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
        held = load_file(directory / "model.safetensors")
    weights = {name: value for name, value in held.items() if "preprocess/" not in name}
    return weights, {"ledger": ledger, "metrics": document["metrics"], "epsilon": document["privacy"]["epsilon"]}


def record(name: str, out: Path) -> None:
    """Train one recipe; its weights go to `<name>.safetensors`, its ledger, metrics and privacy to `<name>.json`."""
    weights, kept = trained(name)
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
    """Record what every shipped recipe trains to, and compare it with another commit's record."""
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    told: dict[str, Any] = {}
    for name in RECIPES:
        record(name, out)
        place = name.replace("/", "-")
        told[name] = differences(out / place, against / place) if against is not None else []
        click.echo(f"{name}: {'; '.join(told[name]) or ('the same to the bit' if against else 'recorded')}")
    sys.exit(any(told.values()))


if __name__ == "__main__":
    main()
