"""Recall of a rare class, with and without stated costs and class weights (`docs/your-own-table.md`).

    python -m benchmarks.rare

Made-up tables of `rule.py` with 1.9% positives. Prints, by epsilon and setting, means over three trainings on 8,000
test records: recall, the share of negatives that are taken for positives, balanced accuracy, and AUC.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd

from benchmarks.rule import Table, write_table
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto

RATE = 0.019
SETTINGS = {
    "the likelier class": [],
    "costs 10 to 1": ["data.costs={false-negative: 10, false-positive: 1}"],
    "balanced": [f"data.balanced={{rate: {RATE}}}"],
    "balanced, costs 10 to 1": [
        f"data.balanced={{rate: {RATE}}}",
        "data.costs={false-negative: 10, false-positive: 1}",
    ],
}


def main() -> None:
    """Measure all settings on both tables."""
    for seed, records in ((21, 12_000), (22, 30_000)):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            recipe = str(write_table(folder, Table(records, 7, 9, positive=RATE, strength=1.2), seed))
            test = pd.read_csv(folder / "test.csv")
            positive = test["y"] == 1
            for epsilon in (1, 8):
                for number, (setting, changes) in enumerate(SETTINGS.items()):
                    asked = [f"privacy.budget.epsilon={epsilon}", "repeats=3", "save_model=true", *changes]
                    options = loop.Options(folder / f"{epsilon}-{number}")
                    result = loop.run(resolve_auto(load_recipe(recipe, asked)), options)
                    means = pd.read_csv(result / "trials.csv").mean(numeric_only=True)
                    trained = Trained.load(result)
                    rows = trained.rows(test)
                    told = pd.DataFrame({trial: trained.predict(rows, trial) == 1 for trial in range(3)})
                    print(
                        f"{records} records, epsilon {epsilon}, {setting}: recall {told[positive].mean().mean():.3f},"
                        f" alarms {told[~positive].mean().mean():.3f}, balanced accuracy"
                        f" {means['test_balanced_accuracy']:.3f}, AUC {means['test_auc']:.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
