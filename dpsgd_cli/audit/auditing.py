"""One audit from a recipe to its document: which tiers apply, what they found, what remains unsaid.

Not here: files, pages and pictures (`report.py`, `picture.py`), any statistic (`statistics.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpsgd_cli import __version__, data
from dpsgd_cli.audit import laws, neighbours, outputs, picture, preparing, training
from dpsgd_cli.audit.claim import Claim, unsupported
from dpsgd_cli.audit.findings import TIERS, UNSEEN, Finding, by_p_value, exact, judged
from dpsgd_cli.audit.parts import checks_of
from dpsgd_cli.audit.stage import Size, cut, without_folds
from dpsgd_cli.audit.statistics import epsilon_of_guesses
from dpsgd_cli.audit.thresholds import errors_at, guesses_of, line_for
from dpsgd_cli.audit.watch import Watch
from dpsgd_cli.core.selection import NoisyChoice
from dpsgd_cli.errors import UsageError
from dpsgd_cli.joint import plan_of, settled
from dpsgd_cli.methods.base import OneShot
from dpsgd_cli.methods.dp_agd import DpAgd
from dpsgd_cli.methods.dp_sgd import DpSgd
from dpsgd_cli.methods.pate import Pate
from dpsgd_cli.methods.private_selection import PrivateSelection
from dpsgd_cli.privacy.mechanism import Mechanism, PureDP
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.privacy.voting_plan import VotingPlan
from dpsgd_cli.recipe.batching import of_whom
from dpsgd_cli.recipe.loading import LoadedRecipe, recipe_hash
from dpsgd_cli.recipe.schema.descriptor import named
from dpsgd_cli.recipe.schema.model import ConvexModel
from dpsgd_cli.rounding import epsilon_text

USUAL = Size(trials=100, canaries=100, rows=1e8)
QUICK = Size(trials=20, canaries=100, rows=3e5)


@dataclass(frozen=True)
class Options:
    """How to audit: numbers that are None are left to `quick`; `curves` are what a picture is drawn from."""

    tiers: tuple[str, ...] = tuple(TIERS)
    confidence: float = 0.95
    trials: int | None = None
    canaries: int | None = None
    quick: bool = False
    curves: bool = True
    say: Callable[[str], None] = lambda text: None

    @property
    def size(self) -> Size:
        usual = QUICK if self.quick else USUAL
        return Size(self.trials or usual.trials, self.canaries or usual.canaries, usual.rows)


def audit(loaded: LoadedRecipe, options: Options) -> dict[str, Any]:
    """Attack the claim of a recipe; the document that says what was found.

    Raises UsageError for a recipe that claims nothing, and as training does.
    """
    begun = time.perf_counter()
    loaded = settled(loaded)
    recipe = loaded.recipe
    if recipe.privacy is None:
        raise UsageError(f"{loaded.source}: trains without privacy, so it claims nothing that an audit could refute")
    outline = data.outline(recipe.data, loaded.base)
    plan = plan_of(without_folds(loaded), outline)
    assert plan is not None
    stated = plan.guarantee()
    if outline.input_shape is None:
        raise UsageError(f"{loaded.source}: the shape of one input is not known, so no canary can be made")
    findings, told, left_out = _by_kind(loaded, outline, plan, options)
    rows = judged(findings, options.confidence)
    refuted = [f"{row['tier']}: {row['name']}" for row in rows if row["refuted"]]
    return {
        "name": recipe.name,
        "recipe": loaded.source,
        "hash": recipe_hash(recipe),
        "claim": {
            "epsilon": stated.epsilon,
            "delta": stated.delta,
            "adjacency": None if stated.adjacency is None else of_whom(stated.adjacency, recipe.data.unit),
            "accountant": stated.accountant,
            "bound": stated.bound,
        },
        "confidence": options.confidence,
        "refuted": bool(refuted),
        "refuted_by": refuted,
        "lower_bounds": {row["tier"]: row["epsilon"] for row in rows if "epsilon" in row},
        "findings": rows,
        "not_audited": left_out,
        "cannot_see": {tier: UNSEEN[tier] for tier in options.tiers if any(row["tier"] == tier for row in rows)},
        **told,
        "seed": recipe.seed,
        "seconds": round(time.perf_counter() - begun, 1),
        "version": __version__,
    }


Found = tuple[list[Finding], dict[str, Any], list[str]]


def _by_kind(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    """Findings, what the document says besides, and what was left out and why."""
    runs = named(loaded.recipe.method.described.runs)
    before = preparing.compare(loaded, plan) if "D" in options.tiers else []
    attacks = next((own for kind, own in _ATTACKS.items() if isinstance(runs, type) and issubclass(runs, kind)), None)
    if attacks is None:
        return before, {}, [f"method {loaded.recipe.method.kind}: no attack on a method of this kind is known to dpsgd"]
    beyond = _beyond(loaded)
    if beyond is not None:
        return before, {}, [beyond]
    findings, told, left_out = attacks(loaded, outline, plan, options)
    return [*before, *(one for one in findings if one.tier in options.tiers)], told, left_out


def _beyond(loaded: LoadedRecipe) -> str | None:
    """Why no attack here fits a recipe's gradients."""
    recipe = loaded.recipe
    if recipe.preconditioner is not None:
        return "gradients: a preconditioner (method.preconditioner) changes the records that canaries are known by"
    return None


def _by_training(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    findings: list[Finding] = []
    told: dict[str, Any] = {}
    left_out: list[str] = []
    if "D" in options.tiers:
        options.say("Tier D: neighbouring data, side by side")
        findings += [
            exact("D", one.name, f"{one.found}{f' ({one.worst})' if one.worst else ''}", one.allowed, one.refuted)
            for one in neighbours.compare(loaded, outline, plan)
        ]
    if not set("ABC") & set(options.tiers):
        return findings, told, left_out
    watched, told, left_out = _watched(loaded, outline, plan, options)
    del told["charged"]
    return [*findings, *watched], told, left_out


def _watched(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    """Tiers A, B and C of one training with canaries; `charged` is what its first trial's ledger holds."""
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
    """Tiers A and B of the scores that a training gave its canaries.

    Many canaries of one trial are one run. Tier B counts them as independent, which they are in every member of the
    claim's family: each has a lane and a coin of its own, noise on different coordinates is independent, and so is who
    is in a Poisson batch (who is in a shuffled one is told to the attacker, as the theorem that prices it allows).
    Tier C looks whether that is so. Tier A may not assume it, and does not: its bound is that of guesses of one run,
    for which coins alone have to be independent (`statistics.one_run_p_value`).
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
    bound = 0.0 if stands is None else stands.own_epsilon
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
    """False-negative rates that are allowed, by false-positive rate: by the claim, and by what was not refuted."""
    at = picture.points()
    allowed = [[1 - one.curve.power(float(rate)) for rate in at] for one in (claim, stands) if one is not None]
    blind = list(1 - at)
    return {"false_positive": list(at), "claimed": allowed[0], "refuted": allowed[1] if len(allowed) > 1 else blind}


def _by_outputs(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    """Neighbours told apart by what is published; and every kind of choice that was charged, by its law."""
    trials = options.trials or (_FEW if options.quick else _MANY).get(loaded.recipe.method.kind, _USUALLY)
    options.say(f"Tiers A, B: {trials} trials on each of two neighbours")
    found = outputs.attack(loaded, outline, plan, trials, options.confidence)
    told = {"neighbours": {"trials": 2 * found.trials, "records": found.records}}
    findings = [*found.findings, *_choices(loaded, [entry.release.mechanism for entry in found.entries], options)]
    left_out = ["tier C: the method's noise and batches are not watched, what it publishes is"]
    return findings, told, left_out


def _by_both(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    """Lanes where a method measures gradients and chooses; and its choices, by their law."""
    if not isinstance(loaded.recipe.model, ConvexModel):
        return _by_outputs(loaded, outline, plan, options)
    findings, told, left_out = _watched(loaded, outline, plan, options)
    charged = [mechanism for mechanism in told.pop("charged") if isinstance(mechanism, PureDP)]
    return [*findings, *_choices(loaded, charged, options)], told, left_out


def _choices(loaded: LoadedRecipe, charged: Sequence[Mechanism], options: Options) -> list[Finding]:
    method = loaded.recipe.method
    kind: NoisyChoice = getattr(method, "selection", "exponential")
    many = next((getattr(method, name) for name in _CANDIDATES if hasattr(method, name)), None)
    if many is None:
        return []
    count = len(many) if isinstance(many, list) else int(many)
    kinds = dict.fromkeys(one for one in charged if isinstance(one, PureDP))
    return [laws.choices(one, kind, count, options.confidence) for one in kinds]


def _by_votes(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    assert isinstance(plan, VotingPlan)
    options.say("Tiers B, D: votes of teachers, and one answer by its law")
    left_out = ["tier C: the noise of answers is not watched", "the student, which sees nothing but what was released"]
    return laws.votes(loaded, outline, plan, options.confidence), {}, left_out


def _by_choice(loaded: LoadedRecipe, outline: data.Outline, plan: Plan, options: Options) -> Found:
    del outline
    charged = [release.mechanism for release in plan.releases]
    left_out = ["the candidates' trainings: audit the recipe with method.kind dp-sgd and one of the schedules"]
    return _choices(loaded, charged, options), {}, left_out


_CANDIDATES = ("step_candidates", "population", "candidates")
_USUALLY = 400
_MANY = {"output-perturbation": 2000, "objective-perturbation": 1000, "majority": 2000, "dp-agd": 100, "privgene": 100}
_FEW = {"output-perturbation": 400, "objective-perturbation": 200, "dp-agd": 20, "privgene": 20}
_ATTACKS: dict[type, Callable[[LoadedRecipe, data.Outline, Plan, Options], Found]] = {
    DpSgd: _by_training,
    Pate: _by_votes,
    PrivateSelection: _by_choice,
    DpAgd: _by_both,
    OneShot: _by_outputs,
}
