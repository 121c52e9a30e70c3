"""Processor time of a private step with Kronecker factors, over that without; writes `results/kfac/cost.csv`.

    python -m benchmarks.kfac.cost

On one thread, in turns, so that a noisy machine disturbs all alike; each figure is the fastest of `TURNS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from benchmarks.pages import RESULTS
from dpsgd_cli.clipping.run import Clipping, Diagnostics, add_clipped_sums
from dpsgd_cli.engine import models
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.packing import Pack, Placement
from dpsgd_cli.engine.settings import CnnModel, MlpModel, Model
from dpsgd_cli.preconditioning.kronecker import PROBES, KroneckerFactors
from dpsgd_cli.preconditioning.settings import Kfac

TURNS = 8
BETWEEN = 50
"""Steps between two renewals."""
NETWORKS: dict[str, tuple[Model, tuple[int, ...], int]] = {
    "tanh CNN, MNIST": (CnnModel(layout="mnist"), (1, 28, 28), 512),
    "tanh CNN, CIFAR-10": (CnnModel(layout="cifar10"), (3, 32, 32), 128),
    "MLP of Yu et al.": (MlpModel(hidden=[1000]), (60,), 600),
}


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def measured(model: Model, shape: tuple[int, ...], rows: int) -> dict[str, float]:
    """Time of a step with each kind of factors, and with its share of a renewal, over that of a plain step."""
    pack = Pack(models.builder(model, shape, 10, Path()), [0], Placement(torch.device("cpu")), trusted=True)
    batch = torch.rand(1, rows, *shape), torch.randint(10, (1, rows)), None
    clipping, probes, cost = Clipping(torch.full((1, 1), 0.1)), torch.rand(PROBES, *shape), {}
    made = {
        kind: KroneckerFactors(pack, probes, cross_entropy, Kfac(probes="uniform", factors=kind))
        for kind in ("inputs", "both")
    }
    times: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for kind in ("plain", *made):
            pack.preconditioned = []
            if kind in made:
                times.setdefault(f"{kind} renewal", []).append(seconds(lambda kind=kind: made[kind].renew(0)))  # type: ignore[misc]
            step = lambda: add_clipped_sums(pack, batch, cross_entropy, clipping, Diagnostics(1, pack.values.device))  # noqa: E731
            times.setdefault(kind, []).append(seconds(step))
    fastest = {kind: min(own) for kind, own in times.items()}
    for kind in made:
        cost[kind] = fastest[kind] / fastest["plain"]
        cost[f"{kind}, with renewals"] = cost[kind] + fastest[f"{kind} renewal"] / BETWEEN / fastest["plain"]
    return cost


def main() -> None:
    torch.set_num_threads(1)
    found = [{"network": name, "rows": task[2], **measured(*task)} for name, task in NETWORKS.items()]
    (RESULTS / "kfac").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(found).to_csv(RESULTS / "kfac" / "cost.csv", index=False, float_format="%.3f")
    print(pd.DataFrame(found).to_string(index=False))


if __name__ == "__main__":
    main()
