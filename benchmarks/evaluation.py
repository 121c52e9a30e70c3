"""Coverage of private evaluation by simulation: intervals of metrics, and prediction sets.

Run `python benchmarks/evaluation.py [REPEATS]` (default 2,000: about an hour; 200: a few minutes). Records come from
populations with known metrics, measured by `dpsgd_cli.evaluation`, and compared with the truth. The table has, for each
population, number of held-out records and epsilon at delta 1e-5, the share of 95% intervals that hold the truth and
their median half-width; for sets of ten classes, mean coverage and size beside split conformal prediction.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
from scipy.special import ndtri
from scipy.stats import rankdata

from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.evaluation import run, sets
from dpsgd_cli.evaluation.price import held_out_release, held_out_releases

NUMBERS = (100, 500, 2_000, 10_000)
EPSILONS = (0.5, 1.0, 3.0, 8.0)
DELTA = 1e-5
LARGE = 2_000_000
Drawn = tuple[np.ndarray, np.ndarray]


def calibrated(n: int, rng: np.random.Generator) -> Drawn:
    """AUC .8, prevalence .3, calibrated margins."""
    y, d = rng.random(n) < 0.3, math.sqrt(2) * ndtri(0.8)
    return y.astype(int), rng.normal(np.where(y, 1, -1) * d * d / 2 + math.log(3 / 7), d)


def heavy(n: int, rng: np.random.Generator) -> Drawn:
    """Balanced classes, margins with heavy tails that are not calibrated."""
    y = rng.random(n) < 0.5
    return y.astype(int), rng.standard_t(3, n) * 1.5 + np.where(y, 1.5, -1.0)


def rare(n: int, rng: np.random.Generator) -> Drawn:
    """Prevalence .08, well separated."""
    y = rng.random(n) < 0.08
    return y.astype(int), rng.normal(np.where(y, 1.0, -4.0), 1.5)


def normal_errors(n: int, rng: np.random.Generator) -> Drawn:
    """Targets in [-1, 1] with normal errors of standard deviation .08."""
    y = rng.normal(0, 0.3, n).clip(-1, 1)
    return y, y - rng.normal(0, 0.08, n)


def heavy_errors(n: int, rng: np.random.Generator) -> Drawn:
    """Targets in [-1, 1] with errors of a t law with four degrees of freedom."""
    y = rng.normal(0, 0.3, n).clip(-1, 1)
    return y, y - rng.standard_t(4, n) * 0.05


def true_of_classes(y: np.ndarray, margin: np.ndarray) -> dict[str, float]:
    """Return the metrics of a large sample, from unbinned margins."""
    p = 1 / (1 + np.exp(-margin))
    clipped = p.clip(0.01, 0.99)
    positives, ranks = int(y.sum()), rankdata(margin)
    recall, specificity = (margin[y == 1] > 0).mean(), (margin[y == 0] <= 0).mean()
    return {
        "accuracy": ((margin > 0) == (y == 1)).mean(),
        "balanced_accuracy": (recall + specificity) / 2,
        "sensitivity": recall,
        "auc": (ranks[y == 1].sum() - positives * (positives + 1) / 2) / (positives * (len(y) - positives)),
        "log_loss": -np.log(np.where(y == 1, clipped, 1 - clipped)).mean(),
        "brier": ((p - y) ** 2).mean(),
    }


def true_of_numbers(y: np.ndarray, told: np.ndarray, clamp: float) -> dict[str, float]:
    """Return the metrics of a large sample, with errors clamped at `clamp`."""
    error = np.minimum(np.abs(y - told), clamp)
    return {"mae": error.mean(), "rmse": math.sqrt((error**2).mean()), "r2": 1 - (error**2).mean() / y.var()}


def metrics(draw: Callable[[int, np.random.Generator], Drawn], repeats: int, regression: bool) -> None:
    """Print coverage and half-widths of one population."""
    rng = np.random.default_rng(0)
    large = draw(LARGE, rng)
    for n in NUMBERS:
        for epsilon in EPSILONS:
            release = held_out_releases(held_out_release("gaussian", epsilon, DELTA, "add-remove"), regression)
            held: dict[str, list[tuple[bool, float]]] = {}
            for repeat in range(repeats):
                y, told = draw(n, rng)
                stream = SeededStreams(repeat)
                if regression:
                    found = run.measure_numbers(y, told, (-1.0, 1.0), release, stream, n)
                    truth = true_of_numbers(*large, found.clamp or 2.0)
                else:
                    found = run.measure_classes(y, told[:, None], release, stream, n)
                    truth = true_of_classes(*large) if not held else truth
                for name, value in truth.items():
                    own = found.metrics[name]
                    held.setdefault(name, []).append((own.low <= value <= own.high, (own.high - own.low) / 2))
            cells = [
                f"{name} {np.mean([hit for hit, _ in rows]):.3f} +-{np.median([wide for _, wide in rows]):.4f}"
                for name, rows in held.items()
            ]
            print(f"{draw.__name__:14} n {n:6} epsilon {epsilon:3g}  " + "  ".join(cells), flush=True)


def sets_of_ten(repeats: int, coverage: float = 0.9) -> None:
    """Print mean coverage and size of private sets and of split conformal sets."""
    rng = np.random.default_rng(0)

    def draw(n: int) -> Drawn:
        y = rng.integers(0, 10, n)
        logits = rng.normal(0, 1, (n, 10))
        logits[np.arange(n), y] += 2
        return y, 2 * logits

    y, logits = draw(100_000)
    scores = run.margins_of(logits)
    true = scores[np.arange(len(y)), y]
    for n in NUMBERS[1:]:
        for epsilon in EPSILONS:
            release = held_out_releases(held_out_release("gaussian", epsilon, DELTA, "add-remove"), False)
            rows = []
            for repeat in range(repeats):
                labels, outputs = draw(n)
                found = run.measure_classes(labels, outputs, release, SeededStreams(repeat), n)
                edge = sets.threshold_of_classes(found.noised, False, coverage).edge
                least = -np.inf if edge is None else edge
                own = np.sort(run.margins_of(outputs)[np.arange(n), labels])
                split = own[math.floor((1 - coverage) * (n + 1)) - 1]
                rows.append(
                    [
                        (true >= t).mean() if k < 2 else (scores >= t).sum(axis=1).mean()
                        for k, t in enumerate((least, split, least, split))
                    ]
                )
            covered, split_covered, size, split_size = np.mean(rows, axis=0)
            print(
                f"sets of {coverage:.0%}    n {n:6} epsilon {epsilon:3g}  covered {covered:.4f}"
                f" (split {split_covered:.4f})  size {size:.3f} (split {split_size:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    for population in (calibrated, heavy, rare):
        metrics(population, many, regression=False)
    for population in (normal_errors, heavy_errors):
        metrics(population, many, regression=True)
    sets_of_ten(max(many // 20, 10))
