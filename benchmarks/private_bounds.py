"""What it costs not to know bounds and categories: Adult with the card's, and with private ones, at epsilon 1.

    DPSGD_DATA=data python -m benchmarks.private_bounds --trials 5

The records are those of the card `adult`, as a file with a header that anybody might have. Accuracy and AUC on the test
file, mean and standard deviation over trials, which differ in seed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

import dpsgd_cli as dpsgd
from dpsgd_cli.data import card_files
from dpsgd_cli.data.cards import Card, load_card

METRICS = ("test_accuracy", "test_auc")
WAYS = {
    "stated": (False, False),
    "bounds private": (True, False),
    "categories private": (False, True),
    "all private": (True, True),
}
"""Whether bounds and categories are private."""


def write_tables(card: Card, folder: Path) -> None:
    """Write the card's files as train.csv and test.csv, with a header."""
    for part in ("train", "test"):
        (file,) = card.part(part)
        path = card_files.locate(card, file)
        if path is None:
            raise SystemExit("no Adult data: `dpsgd data fetch adult`, or set DPSGD_DATA")
        frame = pd.read_csv(path, names=list(card.columns or ()), comment="|", skipinitialspace=True, dtype=str)
        frame["income"] = frame["income"].str.rstrip(".")
        frame.to_csv(folder / f"{part}.csv", index=False)


def recipe_of(card: Card, epsilon: float, seed: int, way: tuple[bool, bool]) -> dict[str, Any]:
    """Return the recipe with the card's bounds and values, or with private ones."""
    bounds = {name: "private" if way[0] else list(c.bounds) for name, c in card.features.items() if c.bounds}
    values = {name: "private" if way[1] else c.values for name, c in card.features.items() if c.values}
    table = {"path": "train.csv", "test_path": "test.csv", "target": "income", "classes": ["<=50K", ">50K"]}
    return {
        "name": "adult",
        "data": table | {"bounds": bounds, "categorical": values, "preprocess": [{"bin": {}}]},
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "full"},
        "privacy": {"budget": {"epsilon": epsilon, "delta": 1e-5}},
        "seed": seed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    asked = parser.parse_args()
    card = load_card("adult")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tables(card, folder)
        for way in asked.ways:
            found = []
            for seed in range(asked.trials):
                path = folder / "recipe.yaml"
                path.write_text(yaml.safe_dump(recipe_of(card, asked.epsilon, seed, WAYS[way])))
                result = dpsgd.train(path, out=folder / way / str(seed))
                found.append([result.metrics[metric]["mean"] for metric in METRICS])
            means, spread = np.mean(found, axis=0), np.std(found, axis=0, ddof=1) if len(found) > 1 else np.zeros(2)
            told = (f"{metric[5:]} {m:.4f} +- {s:.4f}" for metric, m, s in zip(METRICS, means, spread, strict=True))
            print(f"{way:<20}", *told, flush=True)


if __name__ == "__main__":
    main()
