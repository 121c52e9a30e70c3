"""DP-AGD as its authors' code has it (seed: the listing of a talk on it), with the noise of its choices on either side.

    DPSGD_DATA=... python -m benchmarks.lee2018.published [--seeds 5]      # writes results/lee2018/published.csv

NOT PRIVATE as published: noisy-min adds one-sided exponential noise to losses and takes the least, so the choice is
nearly the least loss; its real epsilon is up to 20 times the nominal one (20 candidates beside staying). `right side`
subtracts the same noise, which is epsilon-DP for losses that all move one way. Everything else is left as it is there,
mistakes too: the candidate before the chosen one is taken, a gradient is paid twice, features are scaled on all rows.
Not here: the package's own DP-AGD, which has none of that (`dpsgd_cli/methods/dp_agd.py`).
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.pages import RESULTS

EPSILON, DELTA, SPLITS, GAMMA, CLIP, CANDIDATES = 0.05, 1e-8, 60, 0.1, 3.0, 20
L2 = 0.001
SIDES = {"as published": 1.0, "right side": -1.0}


def code() -> str:
    """Return a hash of the listing that rows were made by."""
    return hashlib.sha256(inspect.getsource(train).encode()).hexdigest()[:8]


def adult() -> tuple[np.ndarray, np.ndarray]:
    """One-hot categories, numbers scaled to [0, 1] on all rows, a constant; labels -1 and 1."""
    folder = Path(os.environ["DPSGD_DATA"]) / "adult"
    parts = [
        pd.read_csv(folder / name, header=None, skipinitialspace=True, comment="|", na_values="?")
        for name in ("adult.data", "adult.test")
    ]
    rows = pd.concat(parts, ignore_index=True)
    labels = np.where(rows[14].astype(str).str.startswith(">50K"), 1.0, -1.0)
    features = pd.get_dummies(rows.drop(columns=14)).astype(float)
    low, high = features.min(), features.max()
    x = ((features - low) / (high - low).replace(0, 1)).to_numpy(np.float32)
    return np.hstack([x, np.ones((len(x), 1), np.float32)]), labels


def train(x: np.ndarray, y: np.ndarray, side: float, rng: np.random.Generator) -> np.ndarray:
    """The listing, line by line."""
    dim = x.shape[1]
    z = x * y[:, None].astype(np.float32)
    rho = (math.sqrt(EPSILON + math.log(1 / DELTA)) - math.sqrt(math.log(1 / DELTA))) ** 2
    eps_choice = EPSILON * 0.5 / SPLITS
    rho_choice, rho_gradient = 0.5 * eps_choice**2, eps_choice**2 / (4 * math.log(1.25 / DELTA))
    w, longest, chosen = np.zeros(dim), 2.0, []
    norms = np.linalg.norm(x, axis=1)
    while rho > 0:
        slopes = -1 / (1 + np.exp(z @ w.astype(np.float32)))
        slopes *= np.minimum(1, CLIP / np.maximum(np.abs(slopes) * norms, 1e-30))
        gradient = (z.T @ slopes).astype(float)
        noisy = gradient + CLIP / math.sqrt(2 * rho_gradient) * rng.standard_normal(dim)
        whole, direction = noisy, noisy / np.linalg.norm(noisy)
        rho, index = rho - rho_gradient, 0
        while index == 0:
            steps = np.linspace(0, longest, CANDIDATES + 1)
            along, at = z @ direction.astype(np.float32), z @ w.astype(np.float32)
            margins = at[:, None] - along[:, None] * steps.astype(np.float32)
            losses = np.minimum(np.logaddexp(0, -margins), CLIP).sum(axis=0)
            noise = rng.exponential(CLIP / math.sqrt(2 * rho_choice), CANDIDATES + 1)
            index = int(np.argmin(losses + side * noise))
            rho -= rho_choice
            if rho < 0:
                break
            if index > 0:
                w = w - steps[index - 1] * direction
                rho -= rho_gradient
            else:
                before, rho_gradient = rho_gradient, rho_gradient * (1 + GAMMA)
                extra = CLIP / math.sqrt(2 * (rho_gradient - before)) * rng.standard_normal(dim)
                share = before / rho_gradient
                direction = share * whole + (1 - share) * (gradient + extra)
                direction /= np.linalg.norm(direction)
                rho -= rho_gradient - before
            direction = direction + L2 * w
            chosen.append(steps[index])
            if len(chosen) == 10:
                longest, chosen = min(1.1 * max(chosen), 2.0), []
    return w


def main() -> None:
    """Train both on the same four fifths, a seed after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "lee2018" / "published.csv")
    settings = parser.parse_args()
    x, y = adult()
    rows = []
    for seed in range(settings.seeds):
        order = np.random.default_rng(seed).permutation(len(x))
        test, kept = np.split(order, [len(x) // 5])
        majority = float((y[test] == np.sign(y[kept].sum())).mean())
        for name, side in SIDES.items():
            w = train(x[kept], y[kept], side, np.random.default_rng(seed))
            accuracy = float((np.sign(x[test] @ w) == y[test]).mean())
            rows.append((name, code(), seed, EPSILON, accuracy, majority))
            print(*rows[-1], flush=True)
            frame = pd.DataFrame(rows, columns=["noise", "code", "seed", "epsilon", "test_accuracy", "majority"])
            frame.to_csv(settings.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
