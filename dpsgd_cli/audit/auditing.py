"""One audit, from a recipe to its document: the attacks that fit the recipe's method, and what they leave out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dpsgd_cli import __version__, data
from dpsgd_cli.accounting.adjacency import adjacency_label
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit import data_neighbours, neighbours, outputs
from dpsgd_cli.audit.claim import (
    PrivacyClaim,
    best_cutoffs,
    bound_of,
    claim_of,
    errors_at,
    guesses_of,
    law_of,
    unsupported,
)
from dpsgd_cli.audit.findings import TIERS, UNSEEN, AuditOptions, Finding, judged, lines, write
from dpsgd_cli.audit.stage import build_canaries, run_epochs, without_folds
from dpsgd_cli.audit.statistics import epsilon_of_guesses
from dpsgd_cli.audit.watch import Watch, batch_checks, noise_checks
from dpsgd_cli.common.interrupts import kill_is_interrupt
from dpsgd_cli.common.plugins import named, trusting
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.engine.settings import ConvexModel
from dpsgd_cli.errors import DataError, RunError, UsageError
from dpsgd_cli.methods.base import OneShot, own_factory
from dpsgd_cli.methods.dp_agd import DpAgd
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.pate.run import Pate
from dpsgd_cli.methods.private_selection import PrivateSelection
from dpsgd_cli.methods.settings import PythonMethod
from dpsgd_cli.recipe.loading import LoadedRecipe, SettledRecipe, recipe_hash
from dpsgd_cli.results import report as pages
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import plan_of, resolve_auto

Found = tuple[list[Finding], dict[str, Any], list[str]]
"""Findings, further entries of the audit's document, and what was not audited, with the reason."""


def audit(loaded: SettledRecipe, options: AuditOptions) -> dict[str, Any]:
    """Attack the privacy claim of a recipe, and return the document of findings.

    Raises UsageError for a recipe without a privacy claim; and the errors of training.
    """
    begun = time.perf_counter()
    recipe = loaded.recipe
    if recipe.privacy is not None and recipe.privacy.book is not None:
        # attacks draw from seeds, on random records, which no book counts
        options = dataclasses.replace(options, reads_file=False)
        recipe = recipe.changed(privacy=recipe.privacy.changed(book=None))
        loaded = dataclasses.replace(loaded, recipe=recipe)
    if recipe.privacy is not None and recipe.privacy.start is not None:
        raise UsageError(f"{loaded.source}: audit its own releases without the earlier result: privacy.start=null")
    if recipe.privacy is None:
        raise UsageError(f"{loaded.source}: trains without privacy, so it claims nothing that an audit could refute")
    outline = data.outline(recipe.data, loaded.base)
    plan = plan_of(without_folds(loaded), outline)
    assert plan is not None
    stated = plan.guarantee()
    findings, told, left_out = attack_recipe(loaded, outline, plan, options)
    rows = judged(findings, options.confidence)
    refuted = [f"{row['tier']}: {row['name']}" for row in rows if row["refuted"]]
    bounds = {tier: [row["epsilon"] for row in rows if row["tier"] == tier and "epsilon" in row] for tier in TIERS}
    return {
        "name": recipe.name,
        "recipe": loaded.source,
        "hash": recipe_hash(recipe),
        "seed": recipe.seed,
        "claim": {
            "epsilon": stated.epsilon,
            "delta": stated.delta,
            "adjacency": None if stated.adjacency is None else adjacency_label(stated.adjacency, recipe.data.unit),
            "accountant": stated.accountant,
            "bound": stated.bound,
        },
        "confidence": options.confidence,
        "refuted": bool(refuted),
        "refuted_by": refuted,
        "lower_bounds": {tier: max(own) for tier, own in bounds.items() if own},
        "findings": rows,
        "not_audited": left_out,
        "cannot_see": {tier: UNSEEN[tier] for tier in options.tiers if any(row["tier"] == tier for row in rows)},
        **told,
        "seconds": round(time.perf_counter() - begun, 1),
        "version": __version__,
    }


@trusting()
def run(loaded: LoadedRecipe, out: Path | None, result: Path | None, options: AuditOptions) -> None:
    """Audit a claim, write the findings and print them. Raises RunError if the claim is refuted."""
    if result is not None:
        store.read_whole(result)
    settled = resolve_auto(loaded)
    of = loop.result_directory(settled, Path("results")) if result is None else result.resolve()
    directory = store.audit_place(of.parent, of.name) if out is None else out / of.name
    with kill_is_interrupt():
        document = audit(settled, options)
    files = write(document, directory)
    if result is not None and pages.is_written(result):
        pages.write(result)
    for line in lines(document):
        click.echo(line)
    click.echo(f"  written   {', '.join(map(str, files))}")
    if document["refuted"]:
        raise RunError(f"{document['recipe']}: the claim is refuted ({'; '.join(document['refuted_by'])})")


def attack_recipe(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Return the findings, further entries of the audit's document, and what was not audited, with the reason."""
    method = loaded.recipe.method
    runs = own_factory(method, loaded.base) if isinstance(method, PythonMethod) else named(method.described.runs)
    kinds = [own for kind, own in _ATTACKS.items() if isinstance(runs, type) and issubclass(runs, kind)]
    attacks = kinds[0] if kinds else _by_outputs
    before: list[Finding] = []
    left_out: list[str] = []
    if "D" in options.tiers:
        if options.reads_file:
            try:
                before += data_neighbours.compare_file(loaded)
            except DataError as error:
                left_out.append(f"the recipe's own file, which was not read: {error}")
        else:
            left_out.append("the recipe's own file: its book does not cover what is found in it without noise")
    if loaded.recipe.data.private_columns:
        left_out.append("private bounds and categories: the law of their counts is tested, not attacked")
    if plan.held_out:
        left_out.append("the measurement of held-out records: its law is tested, not attacked")
    if loaded.recipe.method.inferred is not None:
        left_out.append("intervals: the rounds of method.inference are released, and charged, but not attacked")
    if loaded.recipe.method.calibrated is not None:
        left_out.append("calibration: its release is compared on neighbours alone (tier D), and no canary attacks it")
    if loaded.recipe.method.conditioned is not None and plan.correlated is not None:
        left_out.append("gradients: no attack on correlated noise behind a preconditioner is known to dpsgd")
        return before, {}, left_out
    findings, told, more = attacks(loaded, outline, plan, options)
    return [*before, *(one for one in findings if one.tier in options.tiers)], told, [*left_out, *more]


def _by_training(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    findings = neighbours.compare(loaded, outline, plan) if "D" in options.tiers else []
    if not set("ABC") & set(options.tiers):
        return findings, {}, []
    seen, told, left_out = watched(loaded, outline, plan, options)
    return [*findings, *seen], told, left_out


def _by_outputs(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Distinguish neighbours by what is published."""
    many, few = _TRIALS.get(loaded.recipe.method.kind, (400, 400))
    trials = options.trials or (few if options.quick else many)
    options.say(f"Tiers A, B: {trials} trials on each of two neighbours")
    findings, size = outputs.attack(loaded, outline, plan, trials, options.confidence)
    noise_was_seen = any(one.tier == "C" for one in findings)
    left_out = [] if noise_was_seen else ["tier C: the method's noise is not watched, what it publishes is"]
    return findings, {"neighbours": size}, left_out


def _by_both(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Attack the gradients of a method that also chooses, by canaries; of other models, what is published."""
    if not isinstance(loaded.recipe.model, ConvexModel):
        return _by_outputs(loaded, outline, plan, options)
    findings, told, left_out = watched(loaded, outline, plan, options)
    return findings, told, [*left_out, "choices: their law is tested, not attacked"]


def _by_votes(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    del plan
    left_out = ["the noise of votes, whose law is tested", "the student, which sees nothing but what was released"]
    if "D" not in options.tiers:
        return [], {}, left_out
    options.say("Tier D: votes of teachers")
    return neighbours.compare_votes(loaded, outline), {}, left_out


def _by_choice(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Attack the whole method by neighbouring data. A candidate is a recipe of dp-sgd, which has its own audit."""
    left_out = ["the choice: its law is tested, not attacked", "the candidates: audit each as a recipe of dp-sgd"]
    return neighbours.compare(loaded, outline, plan) if "D" in options.tiers else [], {}, left_out


def watched(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Return tiers A, B and C of one training with canaries."""
    findings: list[Finding] = []
    told: dict[str, Any] = {}
    left_out: list[str] = []
    size = options.size
    options.say(f"Tiers A, B, C: {size.trials} trials, {size.canaries} canaries each")
    watch = Watch()
    staged = build_canaries(loaded, outline, plan, size, watch)
    watch.begin(staged)
    run_epochs(staged.trials)
    claim, inside = claim_of(staged.plan, staged.trials.context.ledgers), staged.inside
    told["training"] = {
        "trials": len(inside),
        "canaries": inside.shape[1],
        "in": int(inside.sum()),
        "out": int((~inside).sum()),
        "changed": staged.changed,
        "epsilon_audited": claim.epsilon,
        "epsilon_of_gradients": None if unsupported(claim) else claim.own_epsilon,
    }
    if "C" in options.tiers:
        findings += [*noise_checks(watch.drew, options.confidence), *batch_checks(watch)]
    findings += [one for one in membership(watch, claim, options, told, left_out) if one.tier in options.tiers]
    return findings, told, left_out


def membership(
    watch: Watch, claim: PrivacyClaim, options: AuditOptions, told: dict[str, Any], left_out: list[str]
) -> list[Finding]:
    """Return tiers A and B from the canaries' scores; add to `told` and `left_out`.

    The many canaries of one trial belong to one run. Tier B counts them as independent, which they are in every member
    of the claim's family:

    - Each canary has its own coordinate and its own coin, and noise on different coordinates is independent.
    - Membership in Poisson batches is independent.
    - Membership in shuffled batches is known to the attacker, as the theorem that prices them allows.
    - Membership in batches of a fixed or a largest size is negatively associated, so counts vary less.

    Tier A does not assume it: its bound is for guesses about one run, and only the coins
    have to be independent (`statistics.one_run_p_value`).
    """
    reason = unsupported(claim)
    staged = watch.staged
    if reason is not None:
        left_out.append(f"tiers A and B: no trade-off curve is known of the claim: {reason}")
        return []
    inside, confidence, delta = staged.inside, options.confidence, claim.delta
    positives, negatives = int(inside.sum()), int((~inside).sum())
    cutoffs = best_cutoffs(law_of(staged.plan, staged.trials.context.ledgers), positives, negatives, confidence)
    errors, guesses = errors_at(watch.scores, inside, cutoffs.threshold), guesses_of(watch.scores, inside, cutoffs)
    alone = epsilon_of_guesses(guesses, delta, confidence)
    sharp = claim.curve.proved_by != "rdp"
    names = ("false_positive", "false_negative")
    told["membership"] = {
        "threshold": cutoffs.threshold,
        "guesses": {"made": guesses.made, "right": guesses.right, "of": guesses.canaries},
        "errors": vars(errors),
        "rates": dict(zip(names, errors.rates, strict=True)),
        "rates_at_least": dict(zip(names, errors.lower(confidence), strict=True)),
        "rates_at_most": dict(zip(names, errors.upper(confidence), strict=True)),
        "mu": claim.curve.mu,
    }
    claimed = f"at most {epsilon_text(claim.epsilon)}"
    found = [
        Finding(
            "A", "membership guessed, where it is surest",
            f"epsilon at least {alone:.3f}: {guesses.right} of {guesses.made} guesses right",
            claimed, lambda level: epsilon_of_guesses(guesses, delta, level) > claim.epsilon, epsilon=alone,
        )
    ]  # fmt: skip
    if not sharp:
        left_out.append("tier B: of this claim's trade-off curve only a bound by Renyi divergences is known")
        return found
    bound = bound_of(claim.standing(errors, confidence))
    found.append(
        Finding(
            "B", "membership by score", f"epsilon at least {bound:.3f}: {errors.false_positives} of"
            f" {errors.negatives} false positives, {errors.false_negatives} of {errors.positives} false negatives",
            claimed, lambda level: claim.refuted_by(errors, level), epsilon=bound,
        )
    )  # fmt: skip
    return found


_TRIALS = {
    "output-perturbation": (10_000, 2000),
    "objective-perturbation": (4000, 1000),
    "majority": (4000, 1000),
    "dp-agd": (100, 20),
    "privgene": (100, 20),
}
"""Trials on each neighbour of a method whose outputs are attacked, and those of a quick audit; 400 of all others."""
_ATTACKS: dict[type, Callable[[SettledRecipe, data.Outline, Plan, AuditOptions], Found]] = {
    DpSgd: _by_training,
    Pate: _by_votes,
    PrivateSelection: _by_choice,
    DpAgd: _by_both,
    OneShot: _by_outputs,
}
