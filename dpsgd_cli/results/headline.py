"""The first lines of a report: how good the model is at what epsilon, how strong that is, and what it was made of."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.accounting.tradeoff import Attacker
from dpsgd_cli.common.text_format import epsilon_text, metric_text
from dpsgd_cli.engine.metrics import in_words, is_of_class, less_is_better, usual_metric
from dpsgd_cli.errors import DataError
from dpsgd_cli.results import reading
from dpsgd_cli.results.document import Block, Box, Bullets, Cards, Heading, TableBlock, Text, html_part
from dpsgd_cli.results.guarantee import EXPERIMENT, NO_PRIVACY, one_unit, percent
from dpsgd_cli.results.result import Row, public
from dpsgd_cli.results.summary import of_constant

STRONG, REASONABLE = 1.0, 10.0
"""Epsilons up to which a guarantee counts as strong, and as reasonable (Ponomareva et al. 2023, "How to DP-fy ML")."""


def headline(document: Row) -> str:
    """Return a result's name, its usual test metric beside the baseline, and its epsilon, on one line."""
    privacy, metrics = document["privacy"], document["metrics"]
    parts = []
    name = usual_metric(list(metrics))
    if name is not None and metrics[name]["mean"] is not None:
        constant = metrics.get(name.replace("test_", "constant_", 1))
        beside = "" if constant is None or constant["mean"] is None else f" (baseline {metric_text(constant['mean'])})"
        parts.append(f"{in_words(name)} {metric_text(metrics[name]['mean'])}{beside}")
    if privacy["accountant"] is None:
        parts.append(NO_PRIVACY)
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
            " of delta. The table of attackers below says what that means; less epsilon protects more."
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
    weak = epsilon is None or epsilon > REASONABLE or privacy["bound"] != "upper"
    experiment = "" if privacy["noise_source"] == "secure" else f" This is {EXPERIMENT}."
    if not isinstance(attacker, Attacker):
        return Box(
            about, shown.capitalize(), f"{strength(privacy).partition(':')[0]}.{experiment}", weak or bool(experiment)
        )
    return Box(
        about,
        f"{percent(attacker.right)} instead of 50%",
        f"An attacker who knows all other records guesses whether {one_unit(privacy)} took part. At most this share of"
        f" guesses is right; of a coin's, 50%.{experiment}",
        weak or bool(experiment),
    )


def _quality(document: Row) -> list[Box]:
    """Return the box of the first metric beside its baseline; none if no rows were measured."""
    about = "How good the model is"
    if released := document.get("evaluation"):
        first = released[0]
        name, (point, low, high) = next(iter(first["metrics"].items()))
        value = "too noisy to say" if point is None else metric_text(point)
        within = f"95% interval {metric_text(low)} to {metric_text(high)}, on held-out {first['unit']}, in private."
        constant, gain = of_constant(first, name), first["gain"]
        within += f" The best constant answer has {constant}." if constant else ""
        better = gain is None or gain[1] > 0
        within += "" if better else " The measurement does not show that the model is better."
        return [Box(about, f"{name.replace('_', ' ').capitalize()} {value}", within, not better)]
    metrics = document["metrics"]
    usual = usual_metric(list(metrics))
    if usual is None or metrics[usual]["mean"] is None:
        return []
    model, words = metrics[usual]["mean"], in_words(usual).removeprefix("test ").capitalize()
    constant = metrics.get(usual.replace("test_", "constant_", 1))
    if constant is None or constant["mean"] is None:
        return [Box(about, f"{words} {metric_text(model)}", "On test records that are declared public.")]
    gain = (constant["mean"] - model) if less_is_better(usual) else (model - constant["mean"])
    beside = f"The best constant answer has {metric_text(constant['mean'])}, on test records that are declared public."
    if gain > 0:
        return [Box(about, f"{words} {metric_text(model)}", beside)]
    return [Box(about, "No better than a constant", f"{words} {metric_text(model)}. {beside}", True)]


def in_notebook(document: Row) -> str:
    """Return the public part of a result as HTML for a notebook: the headline, metrics, and what was declared."""
    document = public(document)
    privacy, metrics = document["privacy"], document["metrics"]
    names = [name for name in metrics if not name.startswith("constant_") and not is_of_class(name)]
    rows = []
    for name in names:
        constant = metrics.get(name.replace("test_", "constant_", 1), {}) if name.startswith("test_") else {}
        rows.append((in_words(name), _mean(metrics[name]), _mean(constant)))
    said: list[Block] = [Heading(headline(document), 4)]
    if privacy["accountant"] is not None:
        said.append(Text(strength(privacy)))
    if rows:
        said.append(TableBlock(("metric", "of the model", "baseline"), rows))
    uncovered = [f"NOT covered: {step}" for step in privacy.get("uncovered_steps") or []]
    warnings = [f"Warning: {text}" for text in document["warnings"]]
    told = [*warnings, *uncovered, *(f"Declared public: {text}" for text in privacy["declarations"])]
    return html_part([*said, *([Bullets(told)] if told else [])])


def _mean(metric: Row) -> str:
    return "" if metric.get("mean") is None else metric_text(metric["mean"])


def origin(document: Row, directory: Path) -> str:
    """Return a sentence with the day, the version and the data of a result.

    Hashes are those of public files. The hash of a user's own file depends on every record, so it is named only.
    """
    made = datetime.fromtimestamp((directory / "result.json").stat().st_mtime, UTC).date()
    fetched = document["provenance"].get("data_sha256", {})
    names = [f"`{name}` (SHA-256 {sha256[:12]}...)" for name, sha256 in fetched.items()]
    try:
        section = reading.data_in(reading.recipe_text_of(directory / "recipe.yaml"))
    except DataError:
        section = {}
    given = [section[key] for key in ("path", "test_path") if section.get(key) is not None]
    own = [f"`{Path(name).name}` (its hash is in `result.json`, and not to be published)" for name in given]
    told = ", ".join([*names, *own]) or "the data set of its recipe"
    return f"Written on {made} by dpsgd {document['provenance'].get('version', '(version not told)')}. Data: {told}."
