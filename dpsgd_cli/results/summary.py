"""Results and plans as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.budget import format_budget
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Release, ZeroConcentrated
from dpsgd_cli.accounting.plan import Plan, noise_text
from dpsgd_cli.accounting.tradeoff import attacker_text
from dpsgd_cli.common.rounding import epsilon_text, interval_text, metric_text
from dpsgd_cli.common.text_format import count
from dpsgd_cli.engine.metrics import METRICS
from dpsgd_cli.recipe.loading import AutoChoice
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results.guarantee import NO_PRIVACY, epsilon_words
from dpsgd_cli.results.result import Row, public
from dpsgd_cli.users.settings import PERSON

_SHOWN = tuple(f"test_{name}" for name in METRICS)


def result_text(document: Row, directory: Path) -> str:
    """Return the summary of `result.json` for a terminal. It has no non-private value, so it may be shown."""
    document = public(document)
    lines = [f"{document['name']}: {count(len(document['trials']), 'trial')}, {_lengths(document['trials'])}"]
    metrics = document["metrics"]
    shown = [name for name in _SHOWN if name in metrics] + [name for name in metrics if name in document["trials"][0]]
    lines += [
        f"  {name:<26}{metric_over_trials(metrics[name])}{_beside(metrics, name)}"
        for name in dict.fromkeys(shown)
        if not name.startswith("constant_")
    ]
    lines += _privacy_lines(document["privacy"])
    lines.append(f"  results in {directory}")
    return "\n".join(lines)


def _lengths(trials: Sequence[Row]) -> str:
    lengths = sorted({row["epochs"] for row in trials})
    return count(lengths[0], "epoch") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} epochs"


def _beside(metrics: Row, name: str) -> str:
    """Return the baseline's value of a metric, as text; empty if it is not known."""
    constant = metrics.get(name.replace("test_", "constant_", 1)) if name.startswith("test_") else None
    return "" if constant is None or constant["mean"] is None else f"; a constant: {metric_text(constant['mean'])}"


def metric_over_trials(metric: Row) -> str:
    """Return a metric's mean over trials as text, with its interval if there are several trials."""
    if metric["mean"] is None:
        return "none: not every trial stayed finite"
    interval = "" if metric["ci95"] is None else f" (95% CI, {count(metric['n'], 'trial')})"
    return f"{interval_text(metric['mean'], metric['ci95'])}{interval}"


def _privacy_lines(privacy: Row) -> list[str]:
    if privacy["accountant"] is None:
        return [f"  privacy                   none: {NO_PRIVACY}"]
    rho = "" if privacy["rho"] is None else f", rho {privacy['rho']:.6g}"
    return [
        f"  epsilon                   {epsilon_words(privacy)}{rho}",
        *_part_lines(privacy.get("parts", {})),
        *_spent_lines(privacy.get("spent")),
        *_attacker_lines(privacy.get("attacker")),
        f"  adjacency                 {adjacency_label(privacy['adjacency'], privacy.get('unit'))}"
        f" ({privacy['batching']} batches; {privacy['accountant']})",
        *([f"  noise                     {privacy['correlated_noise']}"] if "correlated_noise" in privacy else []),
        f"  noise source              {privacy['noise_source']}",
        *[f"  released                  {said}" for said in discovered(privacy)],
        *[f"  NOT covered               {said}" for said in privacy.get("uncovered_steps", [])],
        *[f"  declared public           {said}" for said in privacy["declarations"]],
    ]


def discovered(privacy: Row) -> list[str]:
    """Return a line for each private column: the bounds or categories that the first trial released."""
    trials = privacy.get("discovered", [])
    of_several = f" (the first of {len(trials)} trials; result.json has all)" if len(trials) > 1 else ""
    return [line + of_several for line in trials[0]] if trials else []


def _attacker_lines(attacker: Row | None) -> list[str]:
    """Return the bound on every attack that decides whether a record was in the data."""
    if attacker is None:
        return []
    rates = {float(rate): share for rate, share in attacker["true_positives"].items()}
    return [f"  best attacker             {attacker_text(attacker['mu'], rates, attacker['proved_by'])}"]


def _spent_lines(spent: Row | None) -> list[str]:
    """Return the spending of a method that chooses its releases; the guarantee is its budget."""
    if spent is None:
        return []
    epsilon = "none" if spent["epsilon"] is None else metric_text(spent["epsilon"])
    rho = "none" if spent["rho"] is None else f"{spent['rho']:.6g}"
    told = f"epsilon {epsilon}, rho {rho}: may be chosen as it ran, so no guarantee; the budget above is"
    return [f"  spent of that             {told}", *_part_lines(spent.get("parts", {}))]


def _part_lines(parts: Row) -> list[str]:
    """Return the price of each kind of release by itself, if there are several kinds."""
    if len(parts) < 2:
        return []
    return [
        f"    of that {label:<18}rho {'none' if part['rho'] is None else format(part['rho'], '.6g')}"
        for label, part in parts.items()
    ]


def plan_text(plan: Plan, recipe: Recipe, declarations: Sequence[str], chosen: Sequence[AutoChoice] = ()) -> str:
    """Return the output of `--dry-run`: everything that is decided before data is read."""
    sampling, guarantee, rho = plan.sampling, plan.guarantee(), plan.rho()
    unit = recipe.data.unit
    drawn_from = count(sampling.records, "record" if unit is None else PERSON)
    size = "all" if sampling.batching == "full" else str(sampling.batch_size)
    lines = [
        f"{recipe.name}: {_planned_length(plan)}",
        f"  sampler                   {sampling.batching}, {size} of {drawn_from}"
        + (f", rate {sampling.rate:.6g}" if sampling.kind.sampled else ""),
        f"  adjacency                 {adjacency_label(sampling.adjacency, unit)}",
        f"  sensitivity of a sum      {plan.sensitivity:.6g}",
        *([] if plan.correlated is None else [f"  noise                     {noise_text(plan.correlated)}"]),
        f"  epsilon                   {epsilon_text(guarantee.epsilon)} at delta {plan.delta:g}"
        f" ({guarantee.accountant}, {guarantee.bound})",
        f"  rho                       {_rho_text(rho)}",
        f"  budget                    {format_budget(plan.budget)}{'' if plan.covers_before else ' (training only)'}",
        *[f"  chosen                    {choice}" for choice in chosen],
        *[f"  before training           {_released(release)}" for release in plan.before],
        *[f"  declared public           {said}" for said in declarations],
        *(["  noise multiplier by epoch"] if plan.noise_multipliers else []),
    ]
    return "\n".join([*lines, *_multiplier_lines(plan)])


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


def _multiplier_lines(plan: Plan) -> list[str]:
    """Return the noise multipliers by epoch, with equal neighbours on one line."""
    lines: list[str] = []
    start = 0
    values = plan.noise_multipliers
    for epoch in range(1, len(values) + 1):
        if epoch == len(values) or values[epoch] != values[start]:
            span = f"{start}" if epoch - start == 1 else f"{start}-{epoch - 1}"
            lines.append(f"    {span:<11} {values[start]:.6g}")
            start = epoch
    return lines
