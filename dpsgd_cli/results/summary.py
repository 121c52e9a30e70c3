"""Results and plans as text for a terminal, and the first lines of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from dpsgd_cli.accounting.adjacency import NEIGHBOURS, adjacency_label
from dpsgd_cli.accounting.budget import format_budget
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Release, ZeroConcentrated
from dpsgd_cli.accounting.plan import Plan, noise_text
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.common.text_format import count, epsilon_text, interval_text, metric_text
from dpsgd_cli.engine.metrics import METRICS, in_words, is_of_class, less_is_better, usual_metric
from dpsgd_cli.errors import DataError
from dpsgd_cli.evaluation.estimates import WHOLE
from dpsgd_cli.recipe.loading import AutoChoice
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.results import guarantee, reading
from dpsgd_cli.results.document import Box, Cards
from dpsgd_cli.results.result import Row, baseline_of, public
from dpsgd_cli.users.settings import PERSON

STRONG, REASONABLE = 1.0, 10.0
"""Epsilons up to which a guarantee counts as strong, and as reasonable (Ponomareva et al. 2023, "How to DP-fy ML")."""
NOISY = "too noisy to say"
_SHOWN = tuple(f"test_{name}" for name in METRICS)


def brief_text(document: Row, directory: Path) -> str:
    """Return what decides about a result, for a terminal: who is protected, quality, price, attacks, and where it is.

    What no budget covers is never left out. It has no non-private value, so it may be shown.
    """
    document = public(document)
    privacy = document["privacy"]
    lines = [_title(document), f"  protected   {guarantee.brief_protection(privacy)}", *_quality_lines(document)]
    if privacy["accountant"] is not None:
        apart = "" if len(document["trials"]) == 1 else "; each trial on its own"
        seeded = "" if privacy["noise_source"] == "secure" else f"; {guarantee.EXPERIMENT}"
        lines.append(f"  epsilon     {guarantee.epsilon_words(privacy)}{apart}{seeded}")
    if (begun := privacy.get("start")) is not None:
        lines.append(f"  of both     {guarantee.start_words(begun)}")
    if (attacker := privacy.get("attacker")) is not None:
        lines.append(f"  attacks     {guarantee.rates_words(attacker['true_positives'])}")
    lines += [f"  NOT covered {step}" for step in privacy.get("uncovered_steps", [])]
    lines += [f"  charged to  {guarantee.book_words(privacy['book'])}"] if "book" in privacy else []
    return "\n".join([*lines, f"  result      {directory}"])


def _quality_lines(document: Row) -> list[str]:
    """Return the first metric of a result beside its baseline; nothing if no rows were measured."""
    released, metrics = document.get("evaluation"), document["metrics"]
    if released:
        name, (value, low, high) = next(iter(released[0]["metrics"].items()))
        best = of_constant(released[0], name)
        beside = f"; baseline: {best}" if best else ""
        within = f"95% interval {metric_text(low)} to {metric_text(high)}{clamped(released[0])}"
        return [f"  {name:<11} {point_text(value)} ({within}){beside}"]
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
    lines += [
        f"  {term:<26}{text}" for term, text in [*guarantee.price_terms(privacy), *guarantee.setting_terms(privacy)]
    ]
    lines.append(f"  results in {directory}")
    return "\n".join(lines)


def _measured_lines(document: Row) -> list[str]:
    """Return the metrics of the first trial on private held-out records, with 95% intervals."""
    released = document.get("evaluation")
    if not released:
        return []
    first, trials = released[0], len(released)
    whose = "" if trials == 1 else f", trial 0 of {trials}"
    about = f"about {max(first['records'], 0):.0f}, private{clamped(first)}; 95% intervals{whose}"
    lines = [f"  held-out {first['unit']:<17}{about}"]
    for name, (value, low, high) in first["metrics"].items():
        point = "" if value is None else f"{metric_text(value)}, "
        within = NOISY if (low, high) in WHOLE else f"{point}{metric_text(low)} to {metric_text(high)}"
        beside = of_constant(first, name)
        lines.append(f"    {name:<24}{within}" + (f"; baseline: {beside}" if beside else ""))
    if first["kind"] == "two-classes":
        lines.append(f"    {'positive class':<24}{first['classes'][1]}")
    if "groups" in first:
        lines.append(f"    by {', '.join(first['groups'])}: see the report")
    return lines


def clamped(measured: Row) -> str:
    """Return at what errors on private held-out records are clamped, as a remark; empty for classes."""
    return "" if measured.get("clamp") is None else f", errors clamped at {metric_text(measured['clamp'])}"


def of_constant(measured: Row, name: str) -> str:
    """Return a metric of the best constant answer on private held-out records, as text; empty if it is not known."""
    if name not in measured["constants"]:
        return ""
    return point_text(measured["constants"][name][0])


def point_text(point: float | None) -> str:
    """Return the point of an estimate as text; None is one that noise hides."""
    return NOISY if point is None else metric_text(point)


def _lengths(trials: Sequence[Row]) -> str:
    lengths = sorted({row["epochs"] for row in trials})
    return count(lengths[0], "epoch") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} epochs"


def _beside(metrics: Row, name: str) -> str:
    """Return the baseline's value of a metric, as text; empty if it is not known."""
    constant = baseline_of(metrics, name)
    return "" if constant is None else f"; baseline: {metric_text(constant['mean'])}"


def mean_text(metric: Row) -> str:
    """Return a metric's mean over trials as text, with the half-width of its interval if there are several trials."""
    if metric["mean"] is None:
        return "none: not every trial stayed finite"
    return interval_text(metric["mean"], metric["ci95"])


def metric_over_trials(metric: Row) -> str:
    """Return `mean_text`, and what its interval is."""
    return mean_text(metric) + ("" if metric["ci95"] is None else f" (95% CI, {count(metric['n'], 'trial')})")


def plan_text(plan: Plan, recipe: Recipe, declarations: Sequence[str], chosen: Sequence[AutoChoice] = ()) -> str:
    """Return the output of `--dry-run`: everything that is decided before data is read."""
    sampling, price, rho = plan.sampling, plan.guarantee(), plan.rho()
    unit, stated = recipe.data.unit, {"epsilon": price.epsilon, "delta": plan.delta, "bound": price.bound}
    drawn_from = count(sampling.records, "record") if unit is None else f"at most {count(sampling.records, PERSON)}"
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
        f"  epsilon                   {guarantee.epsilon_words(stated)}, by {price.accountant}",
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


def headline(document: Row) -> str:
    """Return a result's name, its usual test metric beside the baseline, and its epsilon, on one line."""
    privacy, metrics = document["privacy"], document["metrics"]
    parts = []
    name = usual_metric(list(metrics))
    if name is not None and metrics[name]["mean"] is not None:
        constant = baseline_of(metrics, name)
        beside = "" if constant is None else f" (baseline {metric_text(constant['mean'])})"
        at = clamped(document["evaluation"][0]) if document.get("evaluation") else ""
        parts.append(f"{in_words(name)} {metric_text(metrics[name]['mean'])}{beside}{at}")
    if privacy["accountant"] is None:
        parts.append(guarantee.NO_PRIVACY)
    elif privacy["epsilon"] is None:
        parts.append(f"no finite epsilon at delta {privacy['delta']:g}")
    else:
        parts.append(f"epsilon {epsilon_text(privacy['epsilon'])} at delta {privacy['delta']:g}")
    return f"{document['name']}: {', '.join(parts)}"


def strength(privacy: Row) -> str:
    """Return a sentence on how strong a private result's guarantee is, at its epsilon.

    >>> strength({"epsilon": 0.5}).split(":")[0], strength({"epsilon": 8.0}).split(":")[0]
    ('A strong guarantee', 'A guarantee that is usual for machine learning, but not a strong one')
    """
    epsilon = privacy["epsilon"]
    if epsilon is None:
        return "No guarantee: no finite epsilon holds at this delta."
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 700 else "more than 10^304"
    odds = f"what is published can change the odds that somebody is in the data by at most a factor of {factor}"
    if epsilon <= STRONG:
        return f"A strong guarantee: {odds}, plus a slack of delta."
    if epsilon <= REASONABLE:
        return (
            f"A guarantee that is usual for machine learning, but not a strong one: {odds}, plus a slack"
            " of delta. Less epsilon protects more."
        )
    return (
        f"A weak guarantee: {odds}, which by itself rules out next to nothing. Do not rest the protection of people on"
        " this number; audits and attacks say how far a model really leaks."
    )


def cards(document: Row, attacker: Attacker | str | None) -> Cards:
    """Return the boxes of the first screen: who is protected, what an attacker gains, how good the model is."""
    return Cards([_protected(document["privacy"]), _gain(document["privacy"], attacker), *_quality(document)])


def _protected(privacy: Row) -> Box:
    about, unit = "Who is protected", privacy.get("unit")
    if privacy["accountant"] is None:
        return Box(about, "Nobody", "The model was trained without privacy and may reveal its training records.", True)
    kind = NEIGHBOURS[privacy["adjacency"]]
    if unit is None:
        hidden = kind.hides.partition(":")[0]
        meaning = f"One row at a time. What is hidden: {hidden}. A person with several rows is protected less."
        return Box(about, "Each record", meaning)
    hidden = kind.hides_of_users.partition(":")[0]
    return Box(about, "Each user", f"All rows with one value of `{unit['column']}` together. What is hidden: {hidden}.")


def _gain(privacy: Row, attacker: Attacker | str | None) -> Box:
    if privacy["accountant"] is None:
        return Box("What an attacker gains", "Unlimited", "No epsilon: nothing bounds what the model reveals.", True)
    epsilon = privacy["epsilon"]
    shown = "no finite epsilon" if epsilon is None else f"epsilon {epsilon_text(epsilon)}"
    about = f"What an attacker gains · {shown}"
    experiment = "" if privacy["noise_source"] == "secure" else f" This is {guarantee.EXPERIMENT}."
    warned = bool(experiment) or epsilon is None or epsilon > REASONABLE or privacy["bound"] != "upper"
    if not isinstance(attacker, Attacker):
        verdict, _, meaning = strength(privacy).partition(": ")
        return Box(about, f"{verdict}.", f"{meaning.capitalize()}{experiment}", warned)
    meaning = (
        f"An attacker who knows all other records says whether {guarantee.one_unit(privacy)} took part, and may not"
        f" decline to answer. At most this share of answers is right; of a coin's, 50%.{experiment}"
    )
    return Box(about, f"{guarantee.percent(attacker.right)} instead of 50%", meaning, warned)


def _quality(document: Row) -> list[Box]:
    """Return the box of the first metric beside its baseline; none if no rows were measured."""
    about = "How good the model is"
    if released := document.get("evaluation"):
        first = released[0]
        name, (point, low, high) = next(iter(first["metrics"].items()))
        value = point_text(point)
        within = f"95% interval {metric_text(low)} to {metric_text(high)}, on held-out {first['unit']}, in private"
        within += f"{clamped(first)}."
        constant, gain = of_constant(first, name), first["gain"]
        if constant:
            within += f" The best constant answer {'is' if constant == NOISY else 'has'} {constant}."
        better = gain is None or gain[1] > 0
        within += "" if better else " The measurement does not show that the model is better."
        words = in_words(f"test_{name}").removeprefix("test ").capitalize()
        return [Box(about, f"{words} {value}", within, not better)]
    metrics = document["metrics"]
    usual = usual_metric(list(metrics))
    if usual is None or metrics[usual]["mean"] is None:
        return []
    model, words = metrics[usual]["mean"], in_words(usual).removeprefix("test ").capitalize()
    baseline = baseline_of(metrics, usual)
    if baseline is None:
        return [Box(about, f"{words} {metric_text(model)}", "On test records that are declared public.")]
    gain = (baseline["mean"] - model) if less_is_better(usual) else (model - baseline["mean"])
    beside = f"The best constant answer has {metric_text(baseline['mean'])}, on test records that are declared public."
    if gain > 0:
        return [Box(about, f"{words} {metric_text(model)}", beside)]
    return [Box(about, "No better than a constant", f"{words} {metric_text(model)}. {beside}", True)]


def origin(document: Row, directory: Path) -> str:
    """Return a sentence with the day, the version and the data of a result.

    Hashes are those of public files. The hash of a user's own file depends on every record, so it is named only.
    """
    made = datetime.fromtimestamp((directory / "result.json").stat().st_mtime, UTC).date()
    fetched = document["provenance"].get("data_sha256", {})
    names = [f"`{name}` (SHA-256 {sha256[:12]}...)" for name, sha256 in fetched.items()]
    try:
        section, _ = reading.data_and_folds(reading.recipe_text_of(directory / "recipe.yaml"))
    except DataError:
        section = {}
    given = [section[key] for key in ("path", "test_path") if section.get(key) is not None]
    kept = "nonprivate_data_sha256" in document["provenance"]
    hashed = " (its hash is in `result.json`, and not to be published)" if kept else ""
    own = [f"`{Path(name).name}`{hashed}" for name in given]
    told = ", ".join([*names, *own]) or "the data set of its recipe"
    return f"Written on {made} by dpsgd {document['provenance'].get('version', '(version not told)')}. Data: {told}."
