"""Tiers A, B and C of one training with canaries: membership by scores, noise, and batches.

The recipe's trials are stopped halfway, resumed from a checkpoint, and observed step by step.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import Ledger
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, ZeroConcentrated, merge
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit.claim import (
    GRADIENT,
    PrivacyClaim,
    before_gradients,
    best_cutoffs,
    bound_of,
    errors_at,
    gradients,
    guesses_of,
    unsupported,
)
from dpsgd_cli.audit.findings import AuditOptions, Finding, by_p_value
from dpsgd_cli.audit.parts import checks_of
from dpsgd_cli.audit.stage import SizedRecipe, StagedTrials, at_audit_size, build_canaries
from dpsgd_cli.audit.statistics import epsilon_of_guesses
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.common.rounding import epsilon_text
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.recipe.loading import SettledRecipe

Found = tuple[list[Finding], dict[str, Any], list[str]]
"""Findings, further entries of the audit's document, and what was not audited, with the reason."""


_CURVE_POINTS = 61
_LEAST_RATE = 1e-6


def train(made: SizedRecipe) -> tuple[Watch, PrivacyClaim]:
    """Train all trials; return the observations and the claim in the trials' ledgers."""
    watch = Watch()
    staged = build_canaries(made, watch)
    watch.begin(staged)
    half = staged.trials.method.epochs // 2
    _epochs(staged, half)
    if half and not staged.trials.method.finished:
        staged = _resumed(staged, made, watch)
        watch.begin(staged)
    _epochs(staged, staged.trials.method.epochs)
    return watch, claim_of(staged)


def _epochs(staged: StagedTrials, until: int) -> None:
    trials = staged.trials
    while trials.done < until and not trials.method.finished:
        trials.method.run_epoch(trials.done)
        trials.done += 1


def _resumed(staged: StagedTrials, made: SizedRecipe, watch: Watch) -> StagedTrials:
    """Return the training as another process would continue it from its checkpoint."""
    content = _through_a_file(staged.trials.checkpoint(staged.trials.snapshot()))
    again = build_canaries(made, watch, content)
    again.trials.restore(content, Path("the audit's checkpoint"))
    return again


def _through_a_file(content: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def claim_of(staged: StagedTrials) -> PrivacyClaim:
    """Return the claim: the first trial's charges if releases are planned, the budget if they are chosen.

    Raises PrivacyError if trials were charged differently.
    """
    plan, ledgers = staged.plan, staged.trials.context.ledgers
    stated = plan.guarantee()
    cap = plan.budget_cap
    if isinstance(cap, GaussianSum):
        return PrivacyClaim((Release(cap),), stated.epsilon, plan.delta)
    if isinstance(cap, ZeroConcentrated):
        # the Gaussian whose zCDP is exactly rho
        one = GaussianSum(1 / math.sqrt(2 * cap.rho), cap.adjacency)
        return PrivacyClaim((Release(one),), stated.epsilon, plan.delta)
    found = [_epochs_of(ledger) for ledger in ledgers]
    if any(one != found[0] for one in found):
        raise PrivacyError("trials of one recipe were charged differently; nothing can be said of all of them together")
    return PrivacyClaim(found[0], stated.epsilon, plan.delta)


def law_of(staged: StagedTrials) -> PrivacyClaim:
    """Return the distribution from which thresholds are chosen, as the first trial's ledger states it.

    If releases are chosen, these are its charges for gradients, less than the claimed budget; else the claim. A ledger
    is public and does not depend on scores.
    """
    claim = claim_of(staged)
    made = [entry.release for entry in staged.trials.context.ledgers[0].entries]
    own = [one for one in made if isinstance(one.mechanism, GaussianSum) and one.mechanism.label == GRADIENT]
    return PrivacyClaim(tuple(merge(own)), claim.epsilon, claim.delta) if staged.plan.is_adaptive else claim


def _epochs_of(ledger: Ledger) -> tuple[Release, ...]:
    return (*before_gradients(ledger), *gradients(ledger).values())


def watched(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: AuditOptions) -> Found:
    """Return tiers A, B and C of one training with canaries.

    The entry `charged` has all mechanisms of the first trial's ledger.
    """
    findings: list[Finding] = []
    told: dict[str, Any] = {}
    left_out: list[str] = []
    size = options.size
    options.say(f"Tiers A, B, C: {size.trials} trials, {size.canaries} canaries each")
    watch, claim = train(at_audit_size(loaded, outline, plan, size))
    staged = watch.staged
    assert staged is not None
    inside = staged.inside
    told["training"] = {
        "trials": len(inside),
        "canaries": inside.shape[1],
        "in": int(inside.sum()),
        "out": int((~inside).sum()),
        "changed": staged.changed,
        "epsilon_audited": claim.epsilon,
        "epsilon_of_gradients": None if unsupported(claim) else claim.own_epsilon,
    }
    told["charged"] = [entry.release.mechanism for entry in staged.trials.context.ledgers[0].entries]
    if "C" in options.tiers:
        findings += [
            by_p_value("C", one.name, (one.found, one.claimed), one.p_value, one.control)
            for one in checks_of(watch, options.confidence)
        ]
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

    Tier C tests the independence. Tier A does not assume it: its bound is for guesses about one run, and only the coins
    have to be independent (`statistics.one_run_p_value`).
    """
    reason = unsupported(claim)
    staged = watch.staged
    assert staged is not None
    if reason is not None:
        left_out.append(f"tiers A and B: no trade-off curve is known of the claim: {reason}")
        return []
    inside, confidence, delta = staged.inside, options.confidence, claim.delta
    positives, negatives = int(inside.sum()), int((~inside).sum())
    cutoffs = best_cutoffs(law_of(staged), positives, negatives, confidence)
    errors, guesses = errors_at(watch.scores, inside, cutoffs.threshold), guesses_of(watch.scores, inside, cutoffs)
    alone = epsilon_of_guesses(guesses, delta, confidence)
    sharp = claim.curve.proved_by != "rdp"
    stands = claim.standing(errors, confidence) if sharp else None
    bound = bound_of(stands)
    names = ("false_positive", "false_negative")
    told["membership"] = {
        "threshold": cutoffs.threshold,
        "guesses": {"made": guesses.made, "right": guesses.right, "of": guesses.canaries},
        "errors": vars(errors),
        "rates": dict(zip(names, errors.rates, strict=True)),
        "rates_at_least": dict(zip(names, errors.lower(confidence), strict=True)),
        "rates_at_most": dict(zip(names, errors.upper(confidence), strict=True)),
        **({"curves": _curves(claim, stands)} if options.curves and sharp else {}),
        "mu": claim.curve.mu,
    }
    claimed = f"at most {epsilon_text(claim.epsilon)}"
    found = [
        Finding(
            "A", "membership guessed", f"epsilon at least {alone:.3f}: {guesses.right} of {guesses.made} guesses right",
            claimed, lambda level: epsilon_of_guesses(guesses, delta, level) > claim.epsilon, epsilon=alone,
        )
    ]  # fmt: skip
    if not sharp:
        left_out.append("tier B: of this claim's trade-off curve only a bound by Renyi divergences is known")
        return found
    found.append(
        Finding(
            "B", "membership by score", f"epsilon at least {bound:.3f}: {errors.false_positives} of"
            f" {errors.negatives} false positives, {errors.false_negatives} of {errors.positives} false negatives",
            claimed, lambda level: claim.refuted_by(errors, level), epsilon=bound,
        )
    )  # fmt: skip
    return found


def _curves(claim: PrivacyClaim, stands: PrivacyClaim | None) -> dict[str, list[float]]:
    """Return the false negative rates that the claim allows, and those not refuted, by false positive rate."""
    # denser near 0, where curves are steep
    at = np.clip(np.linspace(0, 1, _CURVE_POINTS) ** 2, _LEAST_RATE, 1 - _LEAST_RATE)
    allowed = [[1 - one.curve.power(float(rate)) for rate in at] for one in (claim, stands) if one is not None]
    blind = list(1 - at)
    return {"false_positive": list(at), "claimed": allowed[0], "refuted": allowed[1] if len(allowed) > 1 else blind}
