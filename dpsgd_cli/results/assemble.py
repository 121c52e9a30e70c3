"""From what trials recorded to the rows of `result.json`, `trials.csv` and `history.csv`.

Columns computed on private rows without noise begin with `nonprivate_`. Epsilons come from the ledgers.
Not here: training (`experiment.py`), files (`store.py`).
"""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dpsgd_cli
from dpsgd_cli.data import Dataset
from dpsgd_cli.methods import Context
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.ledger import Ledger, to_lines
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.privacy.plan import Plan, rho_of
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.results.result import Result, Row, summarise_trials


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch left: metrics by name, (R,) each (empty when not evaluated), and non-private sums, (R,) each."""

    epoch: int
    metrics: dict[str, list[float]]
    counts: dict[str, list[float]]


@dataclass(frozen=True)
class Finished:
    """Everything that a result is made of."""

    loaded: LoadedRecipe
    plan: Plan | None
    context: Context
    dataset: Dataset
    history: list[EpochRecord]
    timing: Row
    final: dict[str, list[float]]


def result(finished: Finished) -> Result:
    """The record of a finished run."""
    recipe, ledgers = finished.loaded.recipe, finished.context.ledgers
    seeds = [None if recipe.seed is None else recipe.seed + i for i in range(len(ledgers))]
    curves = _curves(finished)
    trials = []
    for i, seed in enumerate(seeds):
        row: Row = {"trial": i, "seed": seed, "epochs": len(curves[i]) if finished.plan else len(finished.history)}
        row.update({name: values[i] for name, values in finished.final.items()})
        row.update(_spent(finished, ledgers[i]))
        trials.append(row)
    warnings = list(finished.dataset.warnings)
    bad = sum(sum(record.counts["nonfinite"]) for record in finished.history)
    if bad:
        warnings.append(
            f"{int(bad)} per-example gradients were not finite and were replaced by zero (a non-private count)"
        )
    return Result(
        name=recipe.name,
        privacy=_privacy(finished, trials),
        metrics=summarise_trials(trials, list(finished.final)),
        timing=finished.timing,
        provenance=_provenance(finished),
        trials=trials,
        history=_history(finished, seeds, curves),
        ledger=[line for i, ledger in enumerate(ledgers) for line in to_lines(ledger, i, seeds[i])],
        warnings=warnings,
    )


def _spent(finished: Finished, ledger: Ledger) -> Row:
    """Price of one trial's whole ledger."""
    plan = finished.plan
    if plan is None:
        return {"epsilon": None, "delta": None, "rho": None}
    epsilon = _epsilon(plan, tuple(ledger.releases))
    return {"epsilon": epsilon, "delta": plan.delta, "rho": rho_of(ledger.releases)}


def _epsilon(plan: Plan, releases: tuple[Release, ...]) -> float:
    """Trials that released the same are priced once."""
    cache = plan._cache
    if releases not in cache:
        cache[releases] = accountants.get(plan.accountant).epsilon(releases, plan.delta)  # type: ignore[index]
    found = cache[releases]  # type: ignore[index]
    assert isinstance(found, float)
    return found


def _curves(finished: Finished) -> list[list[tuple[float, float | None]]]:
    """(epsilon, rho) after each epoch of each trial; empty without privacy."""
    plan = finished.plan
    if plan is None:
        return [[] for _ in finished.context.ledgers]
    known: dict[tuple[tuple[Release, ...], ...], list[tuple[float, float | None]]] = {}
    curves = []
    for ledger in finished.context.ledgers:
        epochs = _by_epoch(ledger)
        if epochs not in known:
            epsilons = accountants.get(plan.accountant).curve(epochs, plan.delta)
            rhos = [rho_of([r for epoch in epochs[: i + 1] for r in epoch]) for i in range(len(epochs))]
            known[epochs] = list(zip(epsilons, rhos, strict=True))
        curves.append(known[epochs])
    return curves


def _by_epoch(ledger: Ledger) -> tuple[tuple[Release, ...], ...]:
    """Releases of each epoch; what came before training counts to epoch 0."""
    epochs: dict[int, list[Release]] = {}
    for entry in ledger.entries:
        epochs.setdefault(entry.epoch or 0, []).append(entry.release)
    return tuple(tuple(epochs[epoch]) for epoch in sorted(epochs))


def _history(finished: Finished, seeds: list[int | None], curves: list[list[tuple[float, float | None]]]) -> list[Row]:
    rows = []
    for i, seed in enumerate(seeds):
        for record in finished.history:
            if finished.plan is not None and record.epoch >= len(curves[i]):
                break
            row: Row = {"trial": i, "seed": seed, "epoch": record.epoch}
            if finished.plan is not None:
                epsilon, rho = curves[i][record.epoch]
                row.update(noise_multiplier=_multiplier(finished, i, record.epoch), rho=rho, epsilon=epsilon)
            row.update({name: values[i] for name, values in record.metrics.items()})
            row.update(
                _diagnostics({name: values[i] for name, values in record.counts.items()}, finished.plan is not None)
            )
            rows.append(row)
    return rows


def _multiplier(finished: Finished, trial: int, epoch: int) -> float | None:
    """The noise multiplier that the ledger charged in this epoch."""
    charged = [e.release.mechanism for e in finished.context.ledgers[trial].entries if e.epoch == epoch]
    return next((m.noise_multiplier for m in charged if isinstance(m, GaussianSum)), None)


def _diagnostics(counts: dict[str, float], private: bool) -> Row:
    seen = max(counts["examples"], 1.0)
    row: Row = {"nonprivate_train_loss": counts["loss"] / seen, "nonprivate_examples": int(counts["examples"])}
    if private:
        row["nonprivate_gradient_norm"] = counts["norm"] / seen
        row["nonprivate_clipped_fraction"] = counts["clipped"] / seen
        row["nonprivate_nonfinite"] = int(counts["nonfinite"])
    return row


def _privacy(finished: Finished, trials: list[Row]) -> Row:
    plan, recipe = finished.plan, finished.loaded.recipe
    if plan is None:
        return {
            "accountant": None,
            "epsilon": None,
            "delta": None,
            "rho": None,
            "declarations": [],
            "noise_source": None,
        }
    rhos = [row["rho"] for row in trials]
    return {
        "epsilon": max(row["epsilon"] for row in trials),
        "delta": plan.delta,
        "rho": None if None in rhos else max(rhos),
        "adjacency": plan.sampling.adjacency,
        "batching": plan.sampling.batching,
        "sampling_rate": plan.sampling.rate,
        "accountant": plan.accountant,
        "bound": accountants.get(plan.accountant).bound,
        "scope": "each trial on its own; publishing several trials composes their ledgers",
        "budget": None if plan.budget is None else plan.budget.model_dump(),
        "budget_covers": "total" if plan.covers_before else "training",
        "sensitivity": plan.sensitivity,
        "noise_source": _noise_source(finished),
        "declarations": [*finished.dataset.declarations, *_own_code(recipe)],
        "nonprivate_steps": list(finished.dataset.nonprivate),
    }


def _noise_source(finished: Finished) -> str:
    seeded = all(stream.reproducible for stream in finished.context.streams)
    return "seeded (experiment: whoever knows the seed can take the noise away)" if seeded else "secure"


def _own_code(recipe: Any) -> list[str]:
    """What the statement takes on trust from code that came with the recipe."""
    files = [section.file for section in (recipe.model, recipe.method) if section.kind == "python"]
    return [
        f"The code of {name} is trusted: it is public and does not use training data by other ways." for name in files
    ]


def _provenance(finished: Finished) -> Row:
    recipe = finished.loaded.recipe
    return {
        "version": dpsgd_cli.__version__,
        "git": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": str(finished.context.pack.values.device),
        "threads": torch.get_num_threads(),
        "seed": recipe.seed,
        "noise_source": None if recipe.privacy is None else ("secure" if recipe.seed is None else "seeded"),
        "data_sha256": finished.dataset.sha256,
    }


def _git_commit() -> str | None:
    """The commit of the checkout that the package runs from; None when installed."""
    root = Path(dpsgd_cli.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
