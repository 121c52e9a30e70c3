"""From what trials recorded to the rows of `result.json`, `trials.csv` and `history.csv`.

Columns computed on private rows without noise begin with `nonprivate_`. Epsilons come from the ledgers: what bounds
them, which is the filter's budget where a method chooses what to release from what it released (`privacy/ledger.py`).
What such a trial spent of it stands under `spent`, and by epoch in `history.csv`: a number that any reader of the
releases can compute, and no guarantee.
A number that is not finite has no cell: None, which is null in JSON and empty in a table.
Not here: training (`experiment.py`), files (`store.py`), versions and hashes (`origin.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dpsgd_cli.data import Dataset
from dpsgd_cli.data.facts import of_model
from dpsgd_cli.methods import Context
from dpsgd_cli.privacy import accountants, together
from dpsgd_cli.privacy.budget import rho_of
from dpsgd_cli.privacy.cautions import cautions
from dpsgd_cli.privacy.exact_sum import ExactSum
from dpsgd_cli.privacy.ledger import Ledger, to_lines
from dpsgd_cli.privacy.mechanism import GaussianSum, Release
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.recipe.schema import describe_noise, noise_source
from dpsgd_cli.results import origin, prices
from dpsgd_cli.results.parts import parts
from dpsgd_cli.results.result import Result, Row, summarise_trials
from dpsgd_cli.wording import count


@dataclass(frozen=True)
class EpochRecord:
    """What one epoch left: metrics by name, (R,) each (empty when not evaluated), and non-private sums, (R,) each.

    `ended` is when it was over, in seconds since 1970.
    """

    epoch: int
    metrics: dict[str, list[float]]
    counts: dict[str, list[float]]
    ended: float = 0.0


def part(record: EpochRecord, span: slice) -> EpochRecord:
    """What an epoch left of some of the trials."""
    return EpochRecord(
        record.epoch,
        {name: values[span] for name, values in record.metrics.items()},
        {name: values[span] for name, values in record.counts.items()},
        record.ended,
    )


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
    theory: list[Row] | None = None


@dataclass(frozen=True)
class Spending:
    """What one trial's ledger says: what bounds it, and what was spent by the end of each epoch.

    `spent` has epsilon and rho of all that was released, where that is not the bound.
    """

    epsilon: float | None
    delta: float | None
    rho: float | None
    epochs: list[Row]
    spent: Row | None = None


def result(finished: Finished) -> Result:
    """The record of a finished run."""
    recipe, ledgers = finished.loaded.recipe, finished.context.ledgers
    for ledger in ledgers:
        ledger.close()
    seeds = recipe.seeds
    spendings = _spendings(finished.plan, ledgers, len(finished.history))
    trials = []
    for i, (seed, spent) in enumerate(zip(seeds, spendings, strict=True)):
        row: Row = {"trial": i, "seed": seed, "epochs": len(spent.epochs)}
        if recipe.folds is not None:
            row.update(fold=i % recipe.folds, repeat=i // recipe.folds)
        row.update({name: _cell(values[i]) for name, values in finished.final.items()})
        row.update(epsilon=spent.epsilon, delta=spent.delta, rho=spent.rho)
        row.update({f"spent_{name}": value for name, value in (spent.spent or {}).items()})
        trials.append(row)
    return Result(
        name=recipe.name,
        privacy=_privacy(finished, spendings),
        metrics=summarise_trials(trials, list(finished.final)),
        timing=finished.timing,
        provenance=origin.provenance(finished.loaded, finished.dataset, finished.context.pack.values.device),
        trials=trials,
        history=_history(finished, [spent.epochs for spent in spendings]),
        ledger=[line for i, ledger in enumerate(ledgers) for line in to_lines(ledger.entries, i, seeds[i])],
        warnings=[*finished.dataset.warnings, *_cautions(finished.plan, spendings), *_warnings(finished, trials)],
        nonprivate_warnings=_nonprivate_warnings(finished),
        theory=finished.theory,
    )


def history_so_far(finished: Finished) -> list[Row]:
    """The rows of `history.csv` for the epochs that are over, while the trials still train."""
    plan, ledgers = finished.plan, finished.context.ledgers
    if plan is None:
        return _history(finished, [[{}] * len(finished.history)] * len(ledgers))
    # what a fixed plan will have spent is priced once for the whole run, and not anew at every look
    planned = tuple((*(plan.before if epoch == 0 else ()), *own) for epoch, own in enumerate(plan.epochs))
    return _history(finished, [_spent_by_epoch(plan, ledger, planned or _by_epoch(ledger)) for ledger in ledgers])


def _cell(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cautions(plan: Plan | None, spendings: Sequence[Spending]) -> list[str]:
    if plan is None:
        return []
    return cautions(_largest([spent.epsilon for spent in spendings]), plan.delta, plan.sampling.records)


def _warnings(finished: Finished, trials: list[Row]) -> list[str]:
    """What went wrong without stopping the run."""
    told = []
    diverged = [str(row["trial"]) for row in trials if any(row[name] is None for name in finished.final)]
    if diverged:
        several = f"{len(diverged)} of {len(trials)} trials diverged (trial {', '.join(diverged)})"
        told.append(
            f"{several if len(trials) > 1 else 'the training diverged'}: weights or losses are not finite, so there is"
            " no metric; lower method.learning_rate"
        )
    return told


def _nonprivate_warnings(finished: Finished) -> list[str]:
    """The same, where saying it tells something of the training rows."""
    bad = sum(sum(record.counts["nonfinite"]) for record in finished.history)
    return [f"not finite and replaced by zero: {count(int(bad), 'per-example gradient')}"] if bad else []


def _spendings(plan: Plan | None, ledgers: Sequence[Ledger], epochs: int) -> list[Spending]:
    """Every ledger priced; trials that released the same are priced once."""
    if plan is None:
        return [Spending(None, None, None, [{}] * epochs) for _ in ledgers]
    known: dict[tuple[tuple[Release, ...], ...], Spending] = {}
    spendings = []
    for ledger in ledgers:
        released = _by_epoch(ledger) or ((),) * epochs
        if released not in known:
            known[released] = _spending(plan, ledger, released)
        spendings.append(known[released])
    return spendings


def _by_epoch(ledger: Ledger) -> tuple[tuple[Release, ...], ...]:
    """Releases of each epoch until the last that released; what came before training counts to epoch 0."""
    last = max((entry.epoch or 0 for entry in ledger.entries), default=-1)
    epochs: list[list[Release]] = [[] for _ in range(last + 1)]
    for entry in ledger.entries:
        epochs[entry.epoch or 0].append(entry.release)
    return tuple(tuple(releases) for releases in epochs)


def _spending(plan: Plan, ledger: Ledger, released: Sequence[Sequence[Release]]) -> Spending:
    epochs = _spent_by_epoch(plan, ledger, released)
    epsilon = _cell(prices.epsilon(plan.accountant, ledger.bounding, plan.delta))
    if plan.cap is None:
        return Spending(epsilon, plan.delta, epochs[-1]["rho"] if epochs else 0.0, epochs)
    everything = _cell(prices.epsilon(plan.accountant, ledger.releases, plan.delta))
    spent = {"epsilon": everything, "rho": rho_of(ledger.releases)}
    return Spending(epsilon, plan.delta, rho_of(ledger.bounding), epochs, spent)


def _spent_by_epoch(plan: Plan, ledger: Ledger, released: Sequence[Sequence[Release]]) -> list[Row]:
    """What `released` had cost by the end of each epoch, and the noise that `ledger` has of it."""
    noise: dict[int | None, float] = {}
    for entry in ledger.entries:
        if isinstance(entry.release.mechanism, GaussianSum):
            noise.setdefault(entry.epoch, entry.release.mechanism.noise_multiplier)
    rho: ExactSum | None = ExactSum()
    epochs: list[Row] = []
    for epoch, spent in enumerate(prices.curve(plan.accountant, released, plan.delta)):
        cost = rho_of(released[epoch])
        if rho is not None and cost is not None:
            rho.add(cost)
        else:
            rho = None
        total = None if rho is None else _cell(rho.total())
        epochs.append({"noise_multiplier": noise.get(epoch), "rho": total, "epsilon": _cell(spent)})
    return epochs


def _history(finished: Finished, spent: Sequence[Sequence[Row]]) -> list[Row]:
    """A row a trial and epoch; `spent` has what each trial's epochs had cost by their ends."""
    rows = []
    for i, (seed, by_epoch) in enumerate(zip(finished.loaded.recipe.seeds, spent, strict=True)):
        # a trial whose own training was over before that of others has no more rows
        for record, spending in zip(finished.history, by_epoch, strict=False):
            row: Row = {"trial": i, "seed": seed, "epoch": record.epoch, **spending}
            row.update({name: _cell(values[i]) for name, values in record.metrics.items()})
            counts = {name: values[i] for name, values in record.counts.items()}
            row.update(_diagnostics(counts, finished.plan is not None))
            rows.append(row)
    return rows


def _diagnostics(counts: dict[str, float], private: bool) -> Row:
    seen = max(counts["examples"], 1.0)
    row: Row = {"nonprivate_train_loss": _cell(counts["loss"] / seen), "nonprivate_examples": int(counts["examples"])}
    if private:
        row["nonprivate_gradient_norm"] = _cell(counts["norm"] / seen)
        row["nonprivate_clipped_fraction"] = counts["clipped"] / seen
        row["nonprivate_nonfinite"] = int(counts["nonfinite"])
    return row


def _privacy(finished: Finished, spendings: Sequence[Spending]) -> Row:
    plan, recipe = finished.plan, finished.loaded.recipe
    if plan is None:
        keys = ("epsilon", "delta", "rho", "adjacency", "accountant", "bound", "noise_source")
        return {**dict.fromkeys(keys), "declarations": []}
    of_parts = parts(finished.context.ledgers, plan.accountant, plan.delta)
    return {
        "epsilon": _largest([spent.epsilon for spent in spendings]),
        "delta": plan.delta,
        "rho": _largest([spent.rho for spent in spendings]),
        **({"parts": of_parts, "spent": None} if plan.cap is None else {"spent": _spent(spendings, of_parts)}),
        "adjacency": plan.sampling.adjacency,
        "batching": plan.sampling.batching,
        "sampling_rate": plan.sampling.rate,
        "accountant": plan.accountant,
        "bound": accountants.get(plan.accountant).bound,
        "scope": together.scope(_run(finished, plan.sampling.adjacency)),
        "budget": None if plan.budget is None else plan.budget.model_dump(),
        "budget_covers": "total" if plan.covers_before else "training",
        "sensitivity": plan.sensitivity,
        "noise_source": describe_noise(noise_source(recipe.seed)),
        "declarations": [*finished.dataset.declarations, *of_model(recipe), *_own_code(finished.loaded)],
        "nonprivate_steps": list(finished.dataset.nonprivate),
    }


def _spent(spendings: Sequence[Spending], of_parts: Row) -> Row:
    """What the dearest trial spent of its budget, and on what: no guarantee, but a function of what was released."""
    spent = [one.spent or {} for one in spendings]
    largest = {name: _largest([one.get(name) for one in spent]) for name in ("epsilon", "rho")}
    return {**largest, "parts": of_parts}


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest of all trials; None (no finite bound, no rho) is larger than any number."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _run(finished: Finished, adjacency: str) -> together.Run:
    recipe = finished.loaded.recipe
    records = together.records_of(resolved(recipe)["data"], recipe.folds, finished.dataset.sha256)
    return together.Run(recipe.name, recipe.seeds, adjacency, records)


def _own_code(loaded: LoadedRecipe) -> list[str]:
    """What the statement takes on trust from code that came with the recipe."""
    return [
        f"The code of {name} is trusted: it is public and does not use training data by other ways."
        for name in origin.own_code(loaded)
    ]
