"""Results and plans as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.budget import format_budget
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Release, ZeroConcentrated
from dpsgd_cli.accounting.plan import Plan, noise_text
from dpsgd_cli.common.text_format import count, interval_text, metric_text
from dpsgd_cli.engine.metrics import METRICS, is_of_class
from dpsgd_cli.recipe.loading import AutoChoice
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results.guarantee import (
    EXPERIMENT,
    book_words,
    brief_protection,
    epsilon_words,
    price_terms,
    rates_words,
    setting_terms,
)
from dpsgd_cli.results.result import Row, public
from dpsgd_cli.users.settings import PERSON

_SHOWN = tuple(f"test_{name}" for name in METRICS)


def brief_text(document: Row, directory: Path) -> str:
    """Return what decides about a result, for a terminal: who is protected, quality, price, attacks, and where it is.

    What no budget covers is never left out. It has no non-private value, so it may be shown.
    """
    document = public(document)
    privacy = document["privacy"]
    lines = [_title(document), f"  protected   {brief_protection(privacy)}", *_quality_lines(document)]
    if privacy["accountant"] is not None:
        apart = "" if len(document["trials"]) == 1 else "; each trial on its own"
        seeded = "" if privacy["noise_source"] == "secure" else f"; {EXPERIMENT}"
        lines.append(f"  epsilon     {epsilon_words(privacy)}{apart}{seeded}")
    if (attacker := privacy.get("attacker")) is not None:
        rates = {float(rate): share for rate, share in attacker["true_positives"].items()}
        lines.append(f"  attacks     {rates_words(rates)}")
    lines += [f"  NOT covered {step}" for step in privacy.get("uncovered_steps", [])]
    lines += [f"  charged to  {book_words(privacy['book'])}"] if "book" in privacy else []
    return "\n".join([*lines, f"  result      {directory}"])


def _quality_lines(document: Row) -> list[str]:
    """Return the first metric of a result beside its baseline; nothing if no rows were measured."""
    released, metrics = document.get("evaluation"), document["metrics"]
    if released:
        name, (value, low, high) = next(iter(released[0]["metrics"].items()))
        point = "too noisy to say" if value is None else metric_text(value)
        best = of_constant(released[0], name)
        beside = f"; baseline: {best}" if best else ""
        return [f"  {name:<11} {point} (95% interval {metric_text(low)} to {metric_text(high)}){beside}"]
    name = next((name for name in _SHOWN if name in metrics), None)
    if name is None:
        return []
    return [f"  {name.removeprefix('test_'):<11} {metric_over_trials(metrics[name])}{_beside(metrics, name)}"]


def _title(document: Row) -> str:
    return f"{document['name']}: {count(len(document['trials']), 'trial')}, {_lengths(document['trials'])}"


def result_text(document: Row, directory: Path) -> str:
    """Return the whole summary of `result.json` for a terminal. It has no non-private value, so it may be shown."""
    document = public(document)
    lines, metrics = [_title(document)], document["metrics"]
    shown = [name for name in _SHOWN if name in metrics] + [name for name in metrics if name in document["trials"][0]]
    lines += [
        f"  {name:<26}{metric_over_trials(metrics[name])}{_beside(metrics, name)}"
        for name in dict.fromkeys(shown)
        if not name.startswith("constant_") and not is_of_class(name)
    ]
    lines += _measured_lines(document)
    privacy = document["privacy"]
    lines += [f"  {term:<26}{text}" for term, text in [*price_terms(privacy), *setting_terms(privacy)]]
    lines.append(f"  results in {directory}")
    return "\n".join(lines)


def _measured_lines(document: Row) -> list[str]:
    """Return the metrics of the first trial on private held-out records, with 95% intervals."""
    released = document.get("evaluation")
    if not released:
        return []
    first, trials = released[0], len(released)
    clamped = "" if first["clamp"] is None else f", errors clamped at {metric_text(first['clamp'])}"
    whose = "" if trials == 1 else f", trial 0 of {trials}"
    lines = [
        f"  held-out {first['unit']:<17}about {max(first['records'], 0):.0f}, private{clamped}; 95% intervals{whose}"
    ]
    for name, (value, low, high) in first["metrics"].items():
        point = "" if value is None else f"{metric_text(value)}, "
        beside = of_constant(first, name)
        told = f"; baseline: {beside}" if beside else ""
        lines.append(f"    {name:<24}{point}{metric_text(low)} to {metric_text(high)}{told}")
    if first["kind"] == "two-classes":
        lines.append(f"    {'positive class':<24}{first['classes'][1]}")
    if "groups" in first:
        lines.append(f"    by {', '.join(first['groups'])}: see the report")
    return lines


def of_constant(measured: Row, name: str) -> str:
    """Return a metric of the best constant answer on private held-out records, as text; empty if it is not known."""
    if name not in measured["constants"]:
        return ""
    value = measured["constants"][name][0]
    return "too noisy to say" if value is None else metric_text(value)


def _lengths(trials: Sequence[Row]) -> str:
    lengths = sorted({row["epochs"] for row in trials})
    return count(lengths[0], "epoch") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} epochs"


def _beside(metrics: Row, name: str) -> str:
    """Return the baseline's value of a metric, as text; empty if it is not known."""
    constant = metrics.get(name.replace("test_", "constant_", 1)) if name.startswith("test_") else None
    return "" if constant is None or constant["mean"] is None else f"; baseline: {metric_text(constant['mean'])}"


def metric_over_trials(metric: Row) -> str:
    """Return a metric's mean over trials as text, with its interval if there are several trials."""
    if metric["mean"] is None:
        return "none: not every trial stayed finite"
    interval = "" if metric["ci95"] is None else f" (95% CI, {count(metric['n'], 'trial')})"
    return f"{interval_text(metric['mean'], metric['ci95'])}{interval}"


def plan_text(plan: Plan, recipe: Recipe, declarations: Sequence[str], chosen: Sequence[AutoChoice] = ()) -> str:
    """Return the output of `--dry-run`: everything that is decided before data is read."""
    sampling, guarantee, rho = plan.sampling, plan.guarantee(), plan.rho()
    unit, stated = recipe.data.unit, {"epsilon": guarantee.epsilon, "delta": plan.delta, "bound": guarantee.bound}
    drawn_from = count(sampling.records, "record" if unit is None else PERSON)
    size = "all" if sampling.batching == "full" else str(sampling.batch_size)
    lines = [
        f"{recipe.name}: {_planned_length(plan)}",
        f"  sampler                   {sampling.batching}, {size} of {drawn_from}"
        + (f", rate {sampling.rate:.6g}" if sampling.kind.sampled else ""),
        f"  adjacency                 {adjacency_label(sampling.adjacency, unit)}",
        f"  sensitivity of a sum      {plan.sensitivity:.6g}",
        *([] if plan.correlated is None else [f"  noise                     {noise_text(plan.correlated)}"]),
        *([f"  noise multiplier          {_multipliers(plan.noise_multipliers)}"] if plan.noise_multipliers else []),
        *[f"  chosen                    {choice}" for choice in chosen],
        *[f"  before training           {_released(release)}" for release in plan.preprocessing_releases],
        *[f"  declared public           {said}" for said in declarations],
        f"  epsilon                   {epsilon_words(stated)}, by {guarantee.accountant}",
        f"  rho                       {_rho_text(rho)}",
        f"  budget                    {format_budget(plan.budget)}{'' if plan.covers_before else ' (training only)'}",
    ]
    return "\n".join(lines)


def _rho_text(rho: float | None) -> str:
    if rho is None:
        return "none for sampled batches"
    return format(rho, ".6g") if rho < math.inf else "none, as part of it has a delta"


def _released(release: Release) -> str:
    mechanism = release.mechanism
    if isinstance(mechanism, ZeroConcentrated):
        return f"{mechanism.label}: rho {mechanism.rho:g}"
    if not isinstance(mechanism, GaussianSum):
        of = f", delta {mechanism.delta:g}" if isinstance(mechanism, ApproximateDP) else ""
        return f"{mechanism.label}: epsilon {mechanism.epsilon:g}{of}"
    return f"{mechanism.label}: noise multiplier {mechanism.noise_multiplier:g}"


def _planned_length(plan: Plan) -> str:
    """Return the number of epochs; a plan that decides during training knows at most an upper bound."""
    steps = f"of {count(plan.sampling.steps_per_epoch, 'step')}"
    if plan.epochs:
        return f"{count(len(plan.epochs), 'epoch')} {steps}"
    return f"at most {count(plan.most_epochs, 'epoch')} {steps}" if plan.most_epochs else "until the budget is spent"


def _multipliers(values: Sequence[float]) -> str:
    """Return the noise multipliers of the first and the last epoch as text, and where to read those between them."""
    if len(values) == 1:
        return f"{values[0]:.6g} in epoch 0"
    if len(set(values)) == 1:
        return f"{values[0]:.6g} in each epoch"
    return f"{values[0]:.6g} in epoch 0, {values[-1]:.6g} in epoch {len(values) - 1} (`dpsgd account RECIPE --curve`)"
