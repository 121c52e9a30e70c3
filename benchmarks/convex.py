"""Convex problems beside the obvious code: full-batch clipped gradients, and a whole DP-AGD run.

    python benchmarks/convex.py            (with DPSGD_DATA naming the data sets; a stand-in otherwise)

Prints milliseconds of one clipped full-batch logistic gradient on 48,842 x 108 rows: record by record in NumPy as
DP-AGD's published code does it, factored in NumPy, and ours for 1, 8 and 32 trials; then seconds a trial of DP-AGD at
epsilon 0.8 on Bank in a pack of 20. Wall and processor time: on a shared machine only the second is ours.

Not here: correctness (tests/engine/problems, tests/methods).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from dpsgd_cli.common.text_format import count
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.methods.risks.linear import LinearRisk
from dpsgd_cli.methods.risks.losses import margin_loss
from dpsgd_cli.methods.risks.rows import SignedRows
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto

RECORDS, FEATURES = 48_842, 108


def timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Milliseconds of wall and processor time of one call, after one to warm up."""
    work()
    wall, own = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - wall) / repeats * 1e3, (time.process_time() - own) / repeats * 1e3


def per_example(z: np.ndarray, w: np.ndarray, bound: float) -> np.ndarray:
    """The published way: all gradients, their norms, then the sum."""
    gradients = -z / (1 + np.exp(z @ w))[:, None]
    norms = np.maximum(1, np.linalg.norm(gradients, axis=1) / bound)
    return np.asarray((gradients / norms[:, None]).sum(axis=0))


def factored(z: np.ndarray, norms: np.ndarray, w: np.ndarray, bound: float) -> np.ndarray:
    slope = -1 / (1 + np.exp(z @ w))
    return np.asarray(np.clip(slope, -bound / norms, bound / norms) @ z)


def gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.rand(RECORDS, FEATURES, generator=generator) < 0.12).float()
    y = torch.randint(2, (RECORDS,), generator=generator)
    rows = SignedRows.load(x, y, residual=False, bias=True)
    z, norms = rows.z.numpy().astype(np.float64), rows.norms.numpy().astype(np.float64)
    w = np.zeros(FEATURES + 1)
    print(f"{'one clipped gradient a trial':<42}{'wall ms':>10}{'cpu ms':>10}")
    for name, work in (
        ("NumPy, record by record (as published)", lambda: per_example(z, w, 1.0)),
        ("NumPy, factored", lambda: factored(z, norms, w, 1.0)),
    ):
        wall, own = timed(work, 5)
        print(f"{name:<42}{wall:>10.2f}{own:>10.2f}")
    for trials in (1, 8, 32):
        held = Keys.of_places([RECORDS]).folds(4, trials // 4, seed=0)
        weights = None if trials == 1 else (~torch.from_numpy(held)).float()
        risk = LinearRisk(SignedRows(rows.z, None, rows.norms, weights), margin_loss("logistic"))
        values, bounds = torch.zeros(trials, FEATURES + 1), torch.ones(trials)
        wall, own = timed(lambda risk=risk, v=values, b=bounds: risk.gradient_sums_at(v, b), 20)  # type: ignore[misc]
        what = f"dpsgd, {count(trials, 'trial')}{' with folds' if weights is not None else ''}"
        print(f"{what:<42}", end="")
        print(f"{wall / trials:>10.2f}{own / trials:>10.2f}")


def whole_run() -> None:
    root = os.environ.get("DPSGD_DATA")
    if root is None or not (Path(root) / "bank").is_dir():
        print("DP-AGD on Bank: needs DPSGD_DATA with the data set bank")
        return
    changes = ["data.name=bank", "privacy.budget.epsilon=0.8", "repeats=4", "runtime.evaluate_every=100000"]
    loaded = load_recipe("lee2018/dp-agd", changes)
    with TemporaryDirectory() as out:
        own = time.process_time()
        directory = loop.run(resolve_auto(loaded), loop.Options(Path(out)))
        own = time.process_time() - own
        document = store.read_document(directory)
        selections = sum('"pure"' in line for line in (directory / "ledger.jsonl").read_text().splitlines())
    trials = len(document["trials"])
    seconds = document["timing"]["nonprivate_train_seconds"] / trials
    print(
        f"DP-AGD, Bank, epsilon 0.8, pack of {trials}: {selections / trials:.0f} selections of 20 candidates a trial,"
    )
    print(f"  {seconds:.2f} s a trial (wall, training); {own / trials:.2f} s of processor time with all else")


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} thread(s)")
    gradients()
    whole_run()
