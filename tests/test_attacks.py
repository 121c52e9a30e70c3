"""Attacks on the statement of add-remove: files that differ in one record, told apart by the published weights.

An attacker sees the weights of one training and guesses which of two files it was on. Under mu-Gaussian privacy they
are right with probability at most Phi(mu / 2) (Dong, Roth and Su 2022). Their score is linear, learnt on half of the
trials of both files and judged on the other half.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, norm
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

import dpsgd_cli as dpsgd
from dpsgd_cli.data.settings import Data

TRIALS = 400
RECIPE = """
name: attacked
data:
  path: own.csv
  target: malignant
  classes: ["no", "yes"]
  bounds: {mean radius: [5, 30], mean texture: [5, 40], mean concavity: [0, 0.5]}
  preprocess: [{scale: {}}]
model: {kind: linear}
method: {kind: dp-sgd, batching: full}
epochs: 20
privacy: {budget: {epsilon: 0.5, delta: 1.0e-5}, noise_source: secure}
"""
OF_USERS = {"privacy.unit": {"column": "who", "most_rows": 1}}


def patients() -> pd.DataFrame:
    """500 records of three measurements."""
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer(as_frame=True).frame[["mean radius", "mean texture", "mean concavity", "target"]][:500]
    table["malignant"] = table.pop("target").map({0: "yes", 1: "no"})
    return table


def weights(table: pd.DataFrame, folder: Path, overrides: dict[str, Any]) -> np.ndarray:
    """Published weights (TRIALS, P) of trainings with noise of the operating system."""
    folder.mkdir()
    table.to_csv(folder / "own.csv", index=False)
    (folder / "own.yaml").write_text(RECIPE)
    result = dpsgd.train(folder / "own.yaml", out=folder, overrides=overrides | {"repeats": TRIALS})
    models = result.trained.bundle.weights
    return np.stack([np.concatenate([own.numpy().ravel() for own in one.values()]) for one in models])


def mu_of(epsilon: float, delta: float) -> float:
    """The mu of a Gaussian mechanism with delta at epsilon (Balle and Wang 2018, Theorem 8)."""
    return float(
        brentq(
            lambda m: norm.cdf(m / 2 - epsilon / m) - np.exp(epsilon) * norm.cdf(-m / 2 - epsilon / m) - delta, 0.01, 9
        )
    )


def right(first: np.ndarray, second: np.ndarray) -> int:
    """How often of TRIALS judged trainings the attacker names the file."""
    half = TRIALS // 2
    truth = np.repeat([0, 1], half)
    attacker = LinearDiscriminantAnalysis().fit(np.concatenate([first[:half], second[:half]]), truth)
    return int((attacker.predict(np.concatenate([first[half:], second[half:]])) == truth).sum())


@pytest.mark.parametrize("users", [False, True], ids=["records", "users"])
@pytest.mark.parametrize("by_place", [False, True], ids=["by content", "control: by place"])
def test_the_first_record_removed_is_not_found_by_a_linear_score(
    users: bool, by_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most what epsilon allows, to a chance of 1e-6; with splits by place the same attacker is far beyond it."""
    if by_place:
        usual = Data.protecting

        def by_places(self: Data, unit: Any, folds: int | None = None, by_place: bool = False) -> Data:
            return usual(self, unit, folds, by_place=True)

        monkeypatch.setattr(Data, "protecting", by_places)
    table = patients()
    if users:
        table["who"] = [f"p{row:03}" for row in range(len(table))]
    overrides = OF_USERS if users else {}
    fewer = table.iloc[1:]
    first, second = (weights(own, tmp_path / name, overrides) for own, name in ((table, "all"), (fewer, "fewer")))
    found, allowed = right(first, second), norm.cdf(mu_of(0.5, 1e-5) / 2)
    most = binom.ppf(1 - 1e-6, TRIALS, allowed)
    assert (found > most) == by_place, f"right in {found} of {TRIALS}; {allowed:.1%} allowed"
