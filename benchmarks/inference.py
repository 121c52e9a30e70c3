"""Coverage of 95% intervals of coefficients, on simulated tables and on draws and splits of Adult.

Run `python -m benchmarks.inference [REPEATS] [--only KIND ...] [--out CSV]` (default 1,000 tables a row: half an hour
of one core; 100: minutes). Adult is read from `$DPSGD_DATA`. For each kind of table, number of records and epsilon at
delta 1e-5 a row has the share of coefficients that have an interval, the share of these intervals that hold the truth,
the median of their half-widths over those of the non-private counterpart, and the latter's coverage: OLS or logistic
regression with the usual standard errors on the same records. Intervals come from `dpsgd_cli.intervals`, as in a
training; the model that the rounds start from is descent on clipped residuals with noise.

Truths: the coefficients of the simulation, or of a fit to 4 million records where the model is wrong; on `adult-drawn`
those of a fit to all 48,842 records, from which tables are drawn with replacement; on `adult-split` those of a fit to
the other half, whose own variance is added to the interval's.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from dpsgd_cli.accounting.budget import EpsilonBudget, mu_squared_left
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.intervals.coding import Coding, chosen
from dpsgd_cli.intervals.law import NORMAL, Law
from dpsgd_cli.intervals.price import ROUNDS, sensitivity
from dpsgd_cli.intervals.run import LogisticRelease, SquaresRelease, release_rounds
from dpsgd_cli.methods.least_squares import SQUARES
from dpsgd_cli.preconditioning.maps import cut_of
from dpsgd_cli.preconditioning.price import joint_sensitivity
from dpsgd_cli.preconditioning.second_moments import as_vector, exactly_one, from_vector

EPSILONS = (0.5, 1.0, 3.0)
SHARE, SHARE_BEFORE = 0.3, 0.15
CLIP, STEPS, RATE, MOMENTUM = 0.5, 150, 8.0, 0.9


@dataclass(frozen=True)
class Kind:
    """A way to draw tables: features (n, D), the last a constant, and targets (n,). `truth` is None if it is fitted."""

    draw: Callable[[int, np.random.Generator], tuple[np.ndarray, np.ndarray]]
    logistic: bool
    truth: np.ndarray | None
    numbers: tuple[int, ...]
    preconditioned: bool = False
    split: bool = False


def features(n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw three even numbers, two indicators, one skewed number, all within [0, 1], and the constant."""
    numbers = [rng.uniform(0, 1, (n, 3)), rng.random((n, 2)) < 0.4, rng.beta(2, 5, (n, 1)), np.ones((n, 1))]
    return np.hstack(numbers).astype(np.float64)


def linear(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Targets of a linear model, with even errors."""
    x = features(n, rng)
    return x, x @ LINEAR + rng.uniform(-0.25, 0.25, n)


def uneven(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Targets whose errors grow with a feature, which least squares assumes they do not."""
    x = features(n, rng)
    return x, x @ LINEAR + rng.uniform(-0.4, 0.4, n) * x[:, 0]


def logistic(n: int, rng: np.random.Generator, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Classes of a logistic model."""
    x = features(n, rng)
    return x, (rng.random(n) < 1 / (1 + np.exp(-(x @ LOGISTIC) - shift))).astype(float)


def wrong(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Classes whose log-odds hold a square and a product, which the model lacks."""
    x = features(n, rng)
    margin = 4 * x[:, 0] ** 2 * x[:, 1] - 2 * x[:, 1] + x[:, 3] - 0.5
    return x, (rng.random(n) < 1 / (1 + np.exp(-margin))).astype(float)


LINEAR = np.array([0.3, -0.2, 0.0, 0.1, 0.0, 0.0, -0.2])
LOGISTIC = np.array([2.0, -2.0, 0.0, 1.0, 0.0, 0.0, -1.0])


def adult() -> tuple[np.ndarray, np.ndarray]:
    """Return Adult's age, years of education and hours, scaled by public bounds, sex, race and marriage."""
    folder = Path(os.environ["DPSGD_DATA"]) / "adult"
    names = [
        *("age", "work", "weight", "education", "years", "marital", "job", "relationship", "race", "sex", "gain"),
        *("loss", "hours", "country", "income"),
    ]
    parts = [
        pd.read_csv(folder / file, names=names, skipinitialspace=True, comment="|").dropna()
        for file in ("adult.data", "adult.test")
    ]
    frame = pd.concat(parts, ignore_index=True)
    numbers = [(frame[name] - low) / (high - low) for name, low, high in ADULT_NUMBERS]
    married = frame["marital"].isin(["Married-civ-spouse", "Married-AF-spouse"])
    never = frame["marital"] == "Never-married"
    # the most frequent category of each column is left out, as a reference
    words = [frame["sex"] == "Female", frame["race"] != "White", never, ~never & ~married]
    x = np.column_stack([*numbers, *words, np.ones(len(frame))]).astype(np.float64)
    return x, frame["income"].str.startswith(">50K").to_numpy(float)


ADULT_NUMBERS = (("age", 17, 90), ("years", 1, 16), ("hours", 1, 99))


def fitted(
    x: np.ndarray, y: np.ndarray, is_logistic: bool, start: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the coefficients of a fit without privacy (D,), and their usual covariance (D, D)."""
    if not is_logistic:
        inverse = np.linalg.inv(x.T @ x)
        found = inverse @ (x.T @ y)
        return found, inverse * float(np.square(y - x @ found).mean())
    found = np.zeros(x.shape[1]) if start is None else start
    for _ in range(12):
        p = 1 / (1 + np.exp(-(x @ found)))
        inverse = np.linalg.inv((x.T * (p * (1 - p))) @ x)
        step = inverse @ (x.T @ (p - y))
        found = found - step
        if np.abs(step).max() < 1e-6:
            break
    return found, inverse


def noisy(exact: np.ndarray, deviation: float, rng: np.random.Generator) -> np.ndarray:
    return exact + deviation * rng.standard_normal(exact.shape)


def descended(u: np.ndarray, y: np.ndarray, mu: float, rng: np.random.Generator) -> np.ndarray:
    """Return the trained model: descent with momentum on clipped residuals, with noise, from 0; mean of the last half.

    To save time it runs on the first 4,000 records, which makes a worse start, with the noise of all.
    """
    mu *= len(u) / 4000
    u, y = u[:4000], y[:4000]
    theta, kept, total = np.zeros(u.shape[1]), np.zeros(u.shape[1]), np.zeros(u.shape[1])
    for step in range(STEPS):
        residual = (1 / (1 + np.exp(-(u @ theta))) - y).clip(-CLIP, CLIP)
        gradient = noisy(residual @ u, CLIP * math.sqrt(STEPS) / mu, rng) / len(u)
        kept = MOMENTUM * kept + gradient
        theta = theta - RATE * kept
        total += theta if step >= STEPS // 2 else 0
    return total / (STEPS - STEPS // 2)


def private_logistic(
    x: np.ndarray, y: np.ndarray, mu: float, root: np.ndarray | None, rng: np.random.Generator, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return estimates, half-widths, and which are told, for the coefficients of the features `seen`."""
    size, left = x.shape[1], mu**2 * (1.0 if root is None else 1 - SHARE_BEFORE)
    rows, bound = (x, BOUND) if root is None else (x @ root, math.sqrt(2))
    root, u = np.eye(size) if root is None else root, rows / bound
    start = descended(u, y, math.sqrt(left * (1 - SHARE)), rng)
    rounds = [GaussianSum((SHARE * part * left) ** -0.5, "add-remove", sensitivity=sensitivity("add-remove"))
              for part in ROUNDS]  # fmt: skip

    def noised(number: int, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        return noisy(exact, mechanism.noise_multiplier * mechanism.sensitivity, rng)

    made = release_rounds(lambda: iter([(u, y)]), start, bound, rounds, noised)
    read = LogisticRelease.from_vector(made.vector)
    coding = chosen(x[:500], *read.seen, root, True)
    law = read.law(coding.matrix, True)
    return _told(law, coding, root / bound, seen)


def preconditioned(x: np.ndarray, mu: float, rng: np.random.Generator) -> np.ndarray:
    """Release second moments of the features (n, D - 1), and return the root (D, D) of the preconditioner."""
    own, deviation = exactly_one(x[:, :-1]), 1 / (mu * math.sqrt(SHARE_BEFORE))
    cut = cut_of(from_vector(noisy(as_vector(own.T @ own), deviation, rng)), deviation).double().numpy()
    root = np.eye(x.shape[1])
    root[:-1, :-1] -= cut @ cut.T
    return root


def divided(x: np.ndarray, root: np.ndarray) -> np.ndarray:
    """Return features divided by their length behind the preconditioner, beside the constant: the model's inputs."""
    lengths = np.linalg.norm(x[:, :-1] @ root[:-1, :-1], axis=1, keepdims=True)
    return np.hstack([x[:, :-1] / lengths, x[:, -1:]])


def private_squares(
    x: np.ndarray, y: np.ndarray, mu: float, rng: np.random.Generator, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return estimates, half-widths, and which are told, for the coefficients of the features `seen`."""
    u = x / BOUND
    deviation = joint_sensitivity("add-remove", 1.0, SQUARES) / mu
    moments = from_vector(noisy(as_vector(u.T @ u), deviation, rng))
    products, squares = noisy(u.T @ y, deviation, rng)[:, None], noisy(np.array([y @ y]), deviation / SQUARES, rng)
    kept = SquaresRelease(BOUND, deviation, 1.0, moments, products, squares).vector
    read = SquaresRelease.from_vector(kept)
    coding = chosen(x[:500], *read.seen, np.eye(x.shape[1]), True)
    law = read.law(coding.matrix, np.ones(1), read.records(True, len(x)), False)
    return _told(law, coding, np.eye(x.shape[1]) / BOUND, seen)


def _told(
    law: Law | None, coding: Coding, scale: np.ndarray, seen: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the intervals of the coefficients of `seen`, if just these and no others are free."""
    if law is None or coding.free != list(seen):
        unknown = np.full(len(seen), np.nan)
        return unknown, unknown, np.zeros(len(seen), bool)
    found = law.of(coding.coded @ scale)
    return found.value, (found.high - found.low) / 2, found.told


BOUND = math.sqrt(7)


def coverage(name: str, kind: Kind, n: int, epsilon: float, repeats: int) -> dict[str, object]:
    """Return a row of the table."""
    rng = np.random.default_rng(hash((n, int(10 * epsilon), len(name))) % 2**32)
    mu = math.sqrt(mu_squared_left(EpsilonBudget(epsilon=epsilon, delta=1e-5), []))
    large = None if kind.split else kind.draw(4_000_000 if kind.truth is None else 10, np.random.default_rng(1))
    truth = kind.truth
    if truth is None and large is not None:
        truth = fitted(*large, kind.logistic)[0]
    hits, counterparts, widths, told_share = [], [], [], []
    for _ in range(repeats):
        x, y = kind.draw(n, rng)
        beside, half = np.zeros(x.shape[1]), len(x) // 2 if kind.split else len(x)
        root = preconditioned(x[:half], mu, rng) if kind.preconditioned else None
        x = x if root is None else divided(x, root)
        if kind.split:
            truth, variance = fitted(x[half:], y[half:], kind.logistic)
            x, y, beside = x[:half], y[:half], np.diag(variance)
        elif root is not None and large is not None:
            truth = fitted(divided(large[0], root), large[1], True)[0]
        own, covariance = fitted(x, y, kind.logistic, truth)
        usual = np.sqrt(np.diag(covariance))
        seen = np.arange(x.shape[1])
        made = private_logistic(x, y, mu, root, rng, seen) if kind.logistic else private_squares(x, y, mu, rng, seen)
        value, reach, told = made
        assert truth is not None
        hits += list((np.abs(value - truth) <= np.hypot(reach, NORMAL * np.sqrt(beside)))[told])
        counterparts += list(np.abs(own - truth) <= NORMAL * np.sqrt(usual**2 + beside))
        widths += list((reach / (NORMAL * usual))[told])
        told_share.append(told.mean())
    return {
        "table": name,
        "records": n // 2 if kind.split else n,
        "epsilon": epsilon,
        "tables": repeats,
        "told": round(float(np.mean(told_share)), 3),
        "coverage": round(float(np.mean(hits)), 4) if hits else "",
        "width": round(float(np.median(widths)), 2) if hits else "",
        "not_private": round(float(np.mean(counterparts)), 4),
    }


def kinds() -> dict[str, Kind]:
    """Return every kind of table."""
    found = {
        "linear": Kind(linear, False, LINEAR, (10_000, 40_000)),
        "linear, uneven errors": Kind(uneven, False, LINEAR, (10_000, 40_000)),
        "logistic": Kind(logistic, True, LOGISTIC, (20_000, 60_000)),
        "logistic, rare": Kind(
            partial(logistic, shift=-1.5), True, LOGISTIC - [0, 0, 0, 0, 0, 0, 1.5], (20_000, 60_000)
        ),
        "logistic, wrong model": Kind(wrong, True, None, (20_000, 60_000)),
    }
    if "DPSGD_DATA" in os.environ:
        x, y = adult()

        def drawn(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            rows = np.arange(len(x)) if n > 1_000_000 else rng.integers(0, len(x), n)
            return x[rows], y[rows]

        def split(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
            rows = rng.permutation(len(x))[:n]
            return x[rows], y[rows]

        found |= {
            "adult-drawn": Kind(drawn, True, None, (48_842,)),
            "adult-drawn, preconditioned": Kind(drawn, True, None, (48_842,), preconditioned=True),
            "adult-split, preconditioned": Kind(split, True, None, (48_842,), preconditioned=True, split=True),
            "adult-split": Kind(split, True, None, (48_842,), split=True),
            "adult-drawn, least squares": Kind(drawn, False, None, (48_842,)),
            "adult-split, least squares": Kind(split, False, None, (48_842,), split=True),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repeats", nargs="?", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    rows = []
    for name, kind in kinds().items():
        if asked.only and name not in asked.only:
            continue
        for n in kind.numbers:
            for epsilon in EPSILONS:
                rows.append(coverage(name, kind, n, epsilon, asked.repeats))
                print(*rows[-1].values(), sep=" | ", flush=True)
                if asked.out is not None:
                    pd.DataFrame(rows).to_csv(asked.out, index=False)


if __name__ == "__main__":
    main()
