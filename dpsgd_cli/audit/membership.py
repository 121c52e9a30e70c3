"""Tiers A, B and C of one training: membership of canaries by their scores, noise, and batches."""

from __future__ import annotations

from typing import Any

from dpsgd_cli import data
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit import picture, training
from dpsgd_cli.audit.claim import Claim, bound_of, unsupported
from dpsgd_cli.audit.findings import Finding, by_p_value
from dpsgd_cli.audit.options import Options
from dpsgd_cli.audit.parts import checks_of
from dpsgd_cli.audit.stage import cut
from dpsgd_cli.audit.statistics import epsilon_of_guesses
from dpsgd_cli.audit.thresholds import errors_at, guesses_of, line_for
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.common.rounding import epsilon_text
from dpsgd_cli.recipe.loading import SettledRecipe

Found = tuple[list[Finding], dict[str, Any], list[str]]
"""Findings, further entries of the audit's document, and what was not audited, with the reason."""


def watched(loaded: SettledRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    """Return tiers A, B and C of one training with canaries.

    The entry `charged` has all mechanisms of the first trial's ledger.
    """
    findings: list[Finding] = []
    told: dict[str, Any] = {}
    left_out: list[str] = []
    size = options.size
    options.say(f"Tiers A, B, C: {size.trials} trials, {size.canaries} canaries each")
    watch, claim = training.train(cut(loaded, outline, plan, size))
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
    watch: Watch, claim: Claim, options: Options, told: dict[str, Any], left_out: list[str]
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
    line = line_for(training.law_of(staged), positives, negatives, confidence)
    errors, guesses = errors_at(watch.scores, inside, line.threshold), guesses_of(watch.scores, inside, line)
    alone = epsilon_of_guesses(guesses, delta, confidence)
    sharp = claim.curve.proved_by != "rdp"
    stands = claim.standing(errors, confidence) if sharp else None
    bound = bound_of(stands)
    names = ("false_positive", "false_negative")
    told["membership"] = {
        "threshold": line.threshold,
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


def _curves(claim: Claim, stands: Claim | None) -> dict[str, list[float]]:
    """Return the false negative rates that the claim allows, and those not refuted, by false positive rate."""
    at = picture.points()
    allowed = [[1 - one.curve.power(float(rate)) for rate in at] for one in (claim, stands) if one is not None]
    blind = list(1 - at)
    return {"false_positive": list(at), "claimed": allowed[0], "refuted": allowed[1] if len(allowed) > 1 else blind}
