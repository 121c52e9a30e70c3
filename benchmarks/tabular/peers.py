"""Other tools on the same records: columns, public bounds and folds as dpsgd gets them.

A peer returns, for the records that a fold holds out, the share that it gives to the second class; of numbers its
predictions on the scale of training, on which public bounds are -1 and 1 (and of logarithms, where a table says so).
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.data.opening import load_raw
from dpsgd_cli.data.preparation import held_out_of
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.table import predicted, target_scale
from dpsgd_cli.preconditioning.second_moments import with_noise

DELTA = 1e-5
FOLDS = 5


@dataclass(frozen=True)
class Rows:
    """Records as every tool gets them: columns of numbers and of codes, with what is public of each.

    `held` (N, trials) says which records each trial holds out: fold t % 5 of repeat t // 5.
    """

    x: np.ndarray
    y: np.ndarray
    columns: tuple[Any, ...]
    held: np.ndarray
    settings: Data

    @property
    def of_numbers(self) -> bool:
        return self.settings.task == "regression"

    @property
    def coded(self) -> list[bool]:
        """Which columns are codes of categories."""
        return [column.values is not None for column in self.columns]

    def expanded(self, every: bool = True) -> tuple[np.ndarray, float]:
        """Columns scaled to [0, 1] by their bounds and one-hot codes, and the bound on a row's norm.

        Unless `every` category gets a feature, a column's first one and that of gaps, of which there are none, do not,
        and numbers are within [-1/2, 1/2]: for sums whose noise follows from that norm, beside a constant.
        """
        parts, squares = [], sum(1.0 if every or coded else 0.25 for coded in self.coded)
        for index, column in enumerate(self.columns):
            values = self.x[:, index]
            if column.values is not None:
                kept = [at for at, value in enumerate(column.values) if every or (at and value)]
                parts.append(np.eye(len(column.values))[values.astype(int)][:, kept])
            else:
                low, high = column.bounds
                parts.append(np.clip((values - low) / (high - low), 0, 1)[:, None] - (not every) / 2)
        return np.hstack(parts).astype(np.float32), math.sqrt(squares)

    def judged(self, held: np.ndarray, outputs: np.ndarray) -> dict[str, float]:
        """Accuracy and AUC, or R2 and the mean absolute error in the target's own unit, of the records held out."""
        from sklearn.metrics import accuracy_score, mean_absolute_error, r2_score, roc_auc_score

        truth = self.y[held]
        if not self.of_numbers:
            return {"accuracy": accuracy_score(truth, outputs > 0.5), "auc": roc_auc_score(truth, outputs)}
        truth = target_scale(self.settings).outward(truth.astype(np.float64))
        found = predicted(self.settings, outputs)
        return {"r2": r2_score(truth, found), "mae": mean_absolute_error(truth, found)}


def rows_of(settings: Data, base: Path, repeats: int) -> Rows:
    """All records that a recipe names, and the folds of each trial."""
    settings = settings.protecting(None, FOLDS)
    part, layout = held_out_of(settings, base, folds=True), load_raw(settings, base).layout
    assert layout.columns is not None
    return Rows(part.x, part.y, layout.columns, part.known_keys.folds(FOLDS, repeats, seed=0), settings)


def dp_ebm(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """DP-EBM (Nori et al. 2021): sums of functions of single columns; it has no pairs of columns with privacy."""
    return _dp_ebm(rows, train, test, epsilon, seed, 0.01)


RATES = {0.1: 0.003, 1.0: 0.01, 8.0: 0.03}
"""Learning rates of DP-EBM for numbers by epsilon: the best of .003 to .1 on five of the tables of `real.TARGETS`."""


def dp_ebm_chosen(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """DP-EBM at learning rates that are not its default: .1 for classes, which suits large tables, and `RATES`."""
    return _dp_ebm(rows, train, test, epsilon, seed, RATES[epsilon] if rows.of_numbers else 0.1)


def _dp_ebm(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int, rate: float) -> np.ndarray:
    from interpret.privacy import DPExplainableBoostingClassifier, DPExplainableBoostingRegressor

    known: dict[str, Any] = {
        "feature_types": ["nominal" if coded else "continuous" for coded in rows.coded],
        "privacy_bounds": {i: column.bounds for i, column in enumerate(rows.columns) if column.values is None},
        "epsilon": epsilon,
        "delta": DELTA,
        "learning_rate": rate,
        "random_state": seed,
        "n_jobs": 1,
    }
    if rows.of_numbers:
        model = DPExplainableBoostingRegressor(**known, privacy_target_min=-1.0, privacy_target_max=1.0)
        return np.asarray(model.fit(rows.x[train], rows.y[train]).predict(rows.x[test]))
    model = DPExplainableBoostingClassifier(**known).fit(rows.x[train], rows.y[train])
    return np.asarray(model.predict_proba(rows.x[test])[:, 1])


def opacus_logistic(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """DP-SGD by Opacus: 20 epochs of Poisson batches of 1,000, clip norm 1, learning rate 2. Two classes only."""
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(seed)
    x, y = torch.from_numpy(rows.expanded()[0]), torch.from_numpy(rows.y).float()
    model: Any = torch.nn.Linear(x.shape[1], 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=2.0)
    loader: Any = DataLoader(TensorDataset(x[train], y[train]), batch_size=1000)
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        target_epsilon=epsilon,
        target_delta=DELTA,
        epochs=20,
        max_grad_norm=1.0,
    )
    for _ in range(20):
        for inputs, labels in loader:
            if len(labels):
                optimizer.zero_grad()
                torch.nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(1), labels).backward()
                optimizer.step()
    with torch.no_grad():
        found: np.ndarray = model(x[test]).squeeze(1).sigmoid().numpy()
    return found


def diffprivlib_logistic(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Logistic regression by objective perturbation (diffprivlib's defaults; pure epsilon)."""
    from diffprivlib.models import LogisticRegression

    x, norm = rows.expanded()
    model = LogisticRegression(epsilon=epsilon, data_norm=norm, random_state=seed)
    return np.asarray(model.fit(x[train], rows.y[train]).predict_proba(x[test])[:, 1])


def deviation(epsilon: float, delta: float = DELTA) -> float:
    """Return the standard deviation of each of three Gaussian releases of sensitivity 1 with one guarantee together.

    One release alone needs the s that solves Phi(1 / (2 s) - epsilon s) - e^epsilon Phi(-1 / (2 s) - epsilon s) = delta
    (Balle and Wang 2018, Theorem 8). Three, each of a third of mu^2, need sqrt(3) times that (Dong, Roth and Su 2022).
    """
    from scipy.optimize import brentq
    from scipy.stats import norm

    def excess(s: float) -> float:
        tail = math.exp(epsilon + norm.logcdf(-0.5 / s - epsilon * s))
        return float(norm.cdf(0.5 / s - epsilon * s) - tail - delta)

    return math.sqrt(3) * float(brentq(excess, 0.01, 1e5))


BOOSTED = 10
"""Rounds of boosting: the best of 1, 10 and 100 (the authors' default) on eight tables of `real.TARGETS`."""


def ada_ssp(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int, rounds: int = 1) -> np.ndarray:
    """AdaSSP (Wang 2018, "Revisiting differentially private linear regression", Algorithm 2), for numbers.

    Released of rows with a constant, divided by the bound on their norm, and targets within [-1, 1]: X^T X (noise of
    standard deviation s on the diagonal, s / sqrt(2) off it: a record moves its Frobenius norm by at most 1), the
    smallest eigenvalue (moved by at most 1), and X^T y (by at most 1). The penalty is what the noise and the smallest
    eigenvalue ask for. `rounds` of boosting (Tang et al. 2023) release X^T r for the residuals r, clipped to [-1, 1],
    in each round at sqrt(rounds) times the noise, and add up the solutions. Wang spends a third of epsilon on each
    release; the noise of `deviation` is smaller, and right at every epsilon.
    """
    features, norm = rows.expanded(every=False)
    x = np.hstack([features, np.ones((len(features), 1))]).astype(np.float64) / math.hypot(norm, 1)
    random, noise, size = np.random.default_rng(seed), deviation(epsilon), x.shape[1]
    held, y = x[train], rows.y[train].astype(np.float64).clip(-1, 1)
    exact = held.T @ held
    noisy = with_noise(exact, lambda vector: vector + noise * random.normal(size=vector.shape))
    least = np.linalg.eigvalsh(exact)[0] + noise * (random.normal() - math.sqrt(math.log(6 / DELTA)))
    penalty = max(0.0, noise * math.sqrt(size * math.log(2 * size**2 / 0.05)) - max(0.0, least))
    weights = np.zeros(size)
    for _ in range(rounds):
        residuals = (y - held @ weights).clip(-1, 1)
        moments = held.T @ residuals + noise * math.sqrt(rounds) * random.normal(size=size)
        weights += np.linalg.solve(noisy + penalty * np.eye(size), moments)
    return np.asarray(x[test] @ weights)


def boosting(rows: Rows, train: np.ndarray, test: np.ndarray, epsilon: float, seed: int) -> np.ndarray:
    """Boosted trees of scikit-learn, at their defaults and without privacy."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    assert math.isinf(epsilon)
    known: dict[str, Any] = {"categorical_features": rows.coded, "random_state": seed}
    if rows.of_numbers:
        return np.asarray(
            HistGradientBoostingRegressor(**known).fit(rows.x[train], rows.y[train]).predict(rows.x[test])
        )
    model = HistGradientBoostingClassifier(**known).fit(rows.x[train], rows.y[train])
    return np.asarray(model.predict_proba(rows.x[test])[:, 1])


@dataclass(frozen=True)
class Peer:
    """Another tool: the module that it needs, and its function of records, of both parts, epsilon and seed."""

    module: str
    outputs: Callable[[Rows, np.ndarray, np.ndarray, float, int], np.ndarray]
    private: bool = True
    deals: int | None = None
    """How often the records are dealt to five folds at most: fewer of what takes a minute a fold."""
    of: tuple[bool, ...] = (False, True)
    """Whether it is for classes (False), for numbers (True)."""


PEERS = {
    "DP-EBM (interpret-core)": Peer("interpret.privacy", dp_ebm_chosen),
    "DP-EBM, defaults": Peer("interpret.privacy", dp_ebm),
    "Opacus, logistic": Peer("opacus", opacus_logistic, deals=1),
    "diffprivlib, linear": Peer("diffprivlib.models", diffprivlib_logistic, of=(False,)),
    "AdaSSP": Peer("scipy", ada_ssp, of=(True,)),
    "AdaSSP, boosted": Peer("scipy", partial(ada_ssp, rounds=BOOSTED), of=(True,)),
    "boosting without privacy": Peer("sklearn.ensemble", boosting, private=False),
}


def installed() -> dict[str, Peer]:
    """The peers that can be imported; says which cannot."""
    found = {}
    for name, peer in PEERS.items():
        try:
            __import__(peer.module)
        except ImportError as error:
            print(f"skipped: {name}: {error}", flush=True)
        else:
            found[name] = peer
    return found


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Peers warn of their own internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measured(peer: Peer, rows: Rows, epsilon: float) -> list[dict[str, float]]:
    """A row of metrics and seconds for each fold."""
    found = []
    for trial in range(rows.held.shape[1]):
        held, begun = rows.held[:, trial], time.perf_counter()
        with _silence():
            outputs = peer.outputs(rows, ~held, held, epsilon, trial)
        seconds = time.perf_counter() - begun
        found.append({"trial": trial, **rows.judged(held, outputs), "seconds": seconds})
    return found
