"""Assembly of the rows of `result.json`, `trials.csv` and `history.csv` from the records of trials.

A function that makes public fields takes a `Released` and sees nothing else (`result.py`). Every epsilon is computed
from a ledger. Where a method chooses its releases adaptively, epsilon is the budget of the privacy filter
(`accounting/ledger.py`). The part of it that such a trial spent is under `spent`, and by epoch in `history.csv`: any
reader of the releases can compute this number, and it is not a guarantee.

A number that is not finite is stored as None: null in JSON, an empty cell in a table.
Training itself is in `training/loop.py`, files are in `store.py`, versions and hashes in `results/provenance.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.adjacency import Adjacency, adjacency_label
from dpsgd_cli.accounting.joint_composition import Run
from dpsgd_cli.accounting.ledger import Ledger, priced_parts, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, merge
from dpsgd_cli.accounting.plan import Plan, noise_text
from dpsgd_cli.accounting.search import ExactSum
from dpsgd_cli.accounting.statement import warnings_of
from dpsgd_cli.common.text_format import count
from dpsgd_cli.noise.settings import describe_noise, noise_source
from dpsgd_cli.recipe.loading import LoadedRecipe, resolved
from dpsgd_cli.results import prices, provenance
from dpsgd_cli.results.earlier import total
from dpsgd_cli.results.evaluated import read_from, records_of, tested_section
from dpsgd_cli.results.files import finite
from dpsgd_cli.results.guarantee import scope
from dpsgd_cli.results.result import (
    Released,
    ResultContent,
    Row,
    Stopped,
    Unreleased,
    diverged,
    mark_nonprivate,
    summarise_columns,
    together,
    warnings_of_rows,
    warnings_of_training,
)
from dpsgd_cli.training.plans import declared_by_model


@dataclass(frozen=True)
class EpochRecord:
    """Record of one epoch: metrics by name, (R,) each (empty when not evaluated), and non-private sums, (R,) each."""

    epoch: int
    metrics: dict[str, list[float]]
    counts: dict[str, list[float]]

    def of(self, span: slice) -> EpochRecord:
        """Return the record of the trials in `span` alone."""
        metrics = {name: values[span] for name, values in self.metrics.items()}
        return EpochRecord(self.epoch, metrics, {name: values[span] for name, values in self.counts.items()})


@dataclass(frozen=True)
class PrivacyCost:
    """Price of one trial's ledger: the guaranteed bound, and the spending by the end of each epoch.

    `spent` has epsilon and rho of all releases where the guarantee is the budget instead of their price; else None.
    """

    epsilon: float | None
    delta: float | None
    rho: float | None
    epochs: list[Row]
    spent: Row | None = None


def result(released: Released, unreleased: Unreleased) -> ResultContent:
    """Return the result of a finished run. Closes its ledgers first (`_close`)."""
    for ledger in released.ledgers:
        _close(ledger, released.plan, released.stopped)
    seeds, privacy = released.loaded.recipe.seeds, released.loaded.recipe.privacy
    bound = privacy is not None and privacy.clipping.plain
    own = _spendings(released.plan, released.ledgers, len(released.epochs))
    spendings = own if released.start is None else [_with_start(cost, released.start) for cost in own]
    none: list[Row] = [{}] * len(seeds)
    claimed, measured = released.findings or none, unreleased.findings or none
    trials = together(
        [row | own for row, own in zip(_trials(released, spendings), claimed, strict=True)],
        [row | own for row, own in zip(_by_trial(unreleased.metrics, len(seeds)), measured, strict=True)],
    )
    hashes = {"nonprivate_data_sha256": unreleased.data_sha256}
    return ResultContent(
        name=released.loaded.recipe.name,
        privacy=_privacy(released, spendings, own),
        metrics=summarise_columns({**released.metrics, **_columns(claimed)})
        | mark_nonprivate(summarise_columns({**unreleased.metrics, **_columns(measured)})),
        timing=released.timing | mark_nonprivate(unreleased.timing),
        provenance=provenance.provenance(released.loaded, released.data_sha256, released.device) | hashes,
        trials=trials,
        history=_history(released, unreleased, [spent.epochs for spent in spendings]),
        ledger=[line for i, ledger in enumerate(released.ledgers) for line in to_lines(ledger.entries, i, seeds[i])],
        evaluation=[measured.record() for measured in released.measured],
        warnings=[*released.warnings, *_warnings(released, spendings)],
        nonprivate_warnings=warnings_of_rows(unreleased, released.finite, bound, _advice(released)),
        diverged=diverged(released),
    )


def _close(ledger: Ledger, plan: Plan | None, stopped: Stopped | None) -> None:
    """Add to the ledger of an ended trial what its bound includes beside its releases.

    After an early stop these are the planned releases that `Plan.rest` charges for.
    """
    if stopped is None or plan is None:
        ledger.close()
        return
    for entry in plan.rest(ledger.entries, stopped.done):
        ledger.entries.append(entry)


def _of_stopping(stopped: Stopped, plan: Plan) -> str:
    """Return the declaration of a training that was stopped early: the scope of its statement, and what is outside."""
    told = f"Training was stopped after {stopped.done} of at most {count(stopped.epochs, 'epoch')}."
    outside = (
        " What somebody learnt of the training from the checkpoint, from how long it took or from an error message is"
        " outside of the statement."
    )
    if plan.is_adaptive:
        return f"{told} The statement is of the whole budget, because the method chooses by what it released.{outside}"
    return (
        f"{told} The statement is of these epochs. Nothing that they released was shown before the end, so the moment"
        f" was not chosen by it.{outside}"
    )


def _trials(released: Released, spendings: Sequence[PrivacyCost]) -> list[Row]:
    """Return the public columns of `trials.csv`, one row per trial."""
    recipe, metrics = released.loaded.recipe, _by_trial(released.metrics, len(spendings))
    trials = []
    for i, (seed, spent) in enumerate(zip(recipe.seeds, spendings, strict=True)):
        # after an early stop, more epochs may be charged for than were trained
        trained = len(spent.epochs) if released.stopped is None else len(released.epochs)
        row: Row = {"trial": i, "seed": seed, "epochs": trained}
        if recipe.folds is not None:
            row.update(fold=i % recipe.folds, repeat=i // recipe.folds)
        row.update(metrics[i], epsilon=spent.epsilon, delta=spent.delta, rho=spent.rho)
        row.update({f"spent_{name}": value for name, value in (spent.spent or {}).items()})
        trials.append(row)
    return trials


def _by_trial(columns: dict[str, list[float]], trials: int) -> list[Row]:
    """Convert columns of R numbers to R rows."""
    return [{name: finite(values[i]) for name, values in columns.items()} for i in range(trials)]


def _columns(rows: Sequence[Row]) -> dict[str, list[float | None]]:
    """Return the numeric columns of R rows."""
    return {
        name: [row[name] for row in rows]
        for name in rows[0]
        if all(row[name] is None or isinstance(row[name], int | float) for row in rows)
    }


def _warnings(released: Released, spendings: Sequence[PrivacyCost]) -> list[str]:
    """Return public warnings: an early stop, a weak guarantee, and failures that published weights or metrics show."""
    plan, stopped, told = released.plan, released.stopped, []
    if stopped is not None:
        told.append(f"training was stopped after {stopped.done} of at most {count(stopped.epochs, 'epoch')}")
    if plan is not None:
        epsilon = prices.largest([spent.epsilon for spent in spendings])
        assert spendings[0].delta is not None
        told += warnings_of(epsilon, spendings[0].delta, plan.sampling.records)
    return told + warnings_of_training(released, _advice(released))


def _advice(released: Released) -> str:
    """Return what to change after a divergence: a key that the recipe's own method or model has, or the budget."""
    recipe = released.loaded.recipe
    rates = [f"lower method.{key}" for key in ("learning_rate", "alpha_max") if hasattr(recipe.method, key)]
    return rates[0] if rates else f"raise {'model.l2 or ' * hasattr(recipe.model, 'l2')}the budget"


def _spendings(plan: Plan | None, ledgers: Sequence[Ledger], epochs: int) -> list[PrivacyCost]:
    """Price every ledger. Trials with equal releases are priced once."""
    if plan is None:
        return [PrivacyCost(None, None, None, [{}] * epochs) for _ in ledgers]
    known: dict[tuple[tuple[Release, ...], ...], PrivacyCost] = {}
    spendings = []
    for ledger in ledgers:
        released = (*_by_epoch(ledger), *((),) * plan.postprocessing_epochs) or ((),) * epochs
        if released not in known:
            known[released] = _spending(plan, ledger, released)
        spendings.append(known[released])
    return spendings


def _with_start(cost: PrivacyCost, start: Row) -> PrivacyCost:
    """Return the cost of a trial with the earlier result that it started from: a sum (`results/earlier.py`)."""
    assert cost.delta is not None
    epsilon, delta = total(cost.epsilon, cost.delta, start)
    epochs = [row | {"rho": None, "epsilon": total(row["epsilon"], cost.delta, start)[0]} for row in cost.epochs]
    return replace(cost, epsilon=epsilon, delta=delta, rho=None, epochs=epochs)


def _by_epoch(ledger: Ledger) -> tuple[tuple[Release, ...], ...]:
    """Group releases by epoch, up to the last epoch with one. Releases before training belong to epoch 0."""
    last = max((entry.epoch or 0 for entry in ledger.training), default=-1)
    epochs: list[list[Release]] = [[] for _ in range(last + 1)]
    for entry in ledger.training:
        epochs[entry.epoch or 0].append(entry.release)
    return tuple(tuple(releases) for releases in epochs)


def _spending(plan: Plan, ledger: Ledger, released: Sequence[Sequence[Release]]) -> PrivacyCost:
    epochs = _spent_by_epoch(plan, ledger, released)
    training, *held_out = priced_parts(ledger.entries)
    epsilon = finite(max(prices.epsilon(plan.accountant, part, plan.delta) for part in (training, *held_out)))
    measured = [rho_of(part) for part in held_out]
    if plan.budget_cap is None:
        trained = epochs[-1]["rho"] if epochs else 0.0
        return PrivacyCost(epsilon, plan.delta, prices.largest([trained, *measured]), epochs)
    made = merge([entry.release for entry in ledger.training])
    spent = {"epsilon": finite(prices.epsilon(plan.accountant, made, plan.delta)), "rho": rho_of(made)}
    return PrivacyCost(epsilon, plan.delta, prices.largest([rho_of(training), *measured]), epochs, spent)


def _spent_by_epoch(plan: Plan, ledger: Ledger, released: Sequence[Sequence[Release]]) -> list[Row]:
    """Return the cumulative rho and epsilon of `released` at the end of each epoch.

    Each row also has the epoch's first noise multiplier in `ledger`, or None.
    """
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
        total = None if rho is None else finite(rho.total())
        epochs.append({"noise_multiplier": noise.get(epoch), "rho": total, "epsilon": finite(spent)})
    return epochs


def _history(released: Released, unreleased: Unreleased, spent: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row per trial and epoch; `spent` has the cumulative price of each trial at the end of each epoch."""
    rows = []
    for i, (seed, by_epoch) in enumerate(zip(released.loaded.recipe.seeds, spent, strict=True)):
        # a trial that ended before the others has fewer rows
        both = zip(released.epochs, unreleased.epochs, by_epoch, strict=False)
        for epoch, (metrics, sums, spending) in enumerate(both):
            row: Row = {"trial": i, "seed": seed, "epoch": epoch, **spending}
            row.update({name: finite(values[i]) for name, values in metrics.items()})
            own = {name: values[i] for name, values in sums.items()}
            rows.append(row | mark_nonprivate(_diagnostics(own, released.plan is not None)))
    return rows


def _diagnostics(sums: dict[str, float], private: bool) -> Row:
    seen = max(sums["examples"], 1.0)
    row: Row = {"train_loss": finite(sums["loss"] / seen), "examples": int(sums["examples"])}
    if private:
        row["gradient_norm"] = finite(sums["norm"] / seen)
        row["clipped_fraction"] = sums["clipped"] / seen
        row["nonfinite"] = int(sums["nonfinite"])
    return row


def _privacy(released: Released, spendings: Sequence[PrivacyCost], own: Sequence[PrivacyCost]) -> Row:
    """Return the statement. `spendings` are those of trials with what they started from, `own` without it."""
    plan = released.plan
    if plan is None:
        keys = ("epsilon", "delta", "rho", "adjacency", "accountant", "bound", "noise_source")
        return {**dict.fromkeys(keys), "declarations": []}
    stopping = [] if released.stopped is None else [_of_stopping(released.stopped, plan)]
    start = released.start
    if start is not None:
        alone = {"epsilon": prices.largest([cost.epsilon for cost in own]), "delta": plan.delta}
        start = {**start, "own": alone}
    of_parts = prices.parts(released.ledgers, plan.accountant, plan.delta) if start is None else {}
    return {
        "epsilon": prices.largest([spent.epsilon for spent in spendings]),
        "delta": spendings[0].delta,
        "rho": prices.largest([spent.rho for spent in spendings]),
        **({"parts": of_parts, "spent": None} if plan.budget_cap is None else {"spent": _spent(spendings, of_parts)}),
        "adjacency": plan.sampling.adjacency,
        "batching": plan.sampling.batching,
        "sampling_rate": plan.sampling.rate,
        "accountant": plan.accountant,
        "bound": accountants.get(plan.accountant).bound,
        "attacker": prices.attacker(released.ledgers) if start is None else None,
        **({} if start is None else {"start": start}),
        "budget": None if plan.budget is None else plan.budget.model_dump(exclude_none=True),
        "budget_covers": "total" if plan.covers_before else "training",
        "sensitivity": plan.sensitivity,
        **({} if plan.correlated is None else {"correlated_noise": noise_text(plan.correlated)}),
        **({} if plan.correlated is None else {"predicted_error_ratio": plan.correlated.ratio}),
        "declarations": [*released.declarations, *declared_by(released.loaded), *stopping],
        "uncovered_steps": list(released.uncovered_steps),
        **({"discovered": [list(lines) for lines in released.discovered]} if released.discovered else {}),
        **({} if not plan.held_out else {"evaluation": "private"}),
        **said_by(released.loaded, plan.sampling.adjacency, start is not None),
    }


def said_by(loaded: LoadedRecipe, adjacency: Adjacency, started: bool) -> Row:
    """Return the fields of a statement that a recipe decides by itself; `started`: from an earlier result."""
    recipe, data = loaded.recipe, tested_section(resolved(loaded.recipe))
    unit = recipe.data.unit
    # all trials use the same files, so that file names identify contents here
    records = records_of(data, recipe.folds, {file: file for file in read_from(data)})
    return {
        **({} if unit is None else {"unit": unit.model_dump()}),
        "scope": scope(Run(recipe.name, recipe.seeds, adjacency_label(adjacency, unit), records, started)),
        "noise_source": describe_noise(noise_source(recipe.seed)),
    }


def declared_by(loaded: LoadedRecipe) -> list[str]:
    """Return what a recipe declares public beside its data: of its model, and its code."""
    return [
        *declared_by_model(loaded),
        *(
            f"The code of {name} is trusted: it is public and does not use training data by other ways."
            for name in loaded.own_code
        ),
    ]


def _spent(spendings: Sequence[PrivacyCost], of_parts: Row) -> Row:
    """Return the largest spending of any trial, in total and by part: computed from releases, not a guarantee."""
    spent = [one.spent or {} for one in spendings]
    largest = {name: prices.largest([one.get(name) for one in spent]) for name in ("epsilon", "rho")}
    return {**largest, "parts": of_parts}
