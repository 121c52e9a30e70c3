"""Attacks on a method's single output: two worst-case neighbours are distinguished over many trials.

Half of the trials train with a worst-case record, half without it. Under zero-out, a record that adds nothing replaces
it; under replace-one, the opposite record does. Each trial gives one number. A test on it counts errors:

- Gaussian release: a known mean (for each data set) plus noise. The number is the log-likelihood ratio along the
  difference of the two means. The noise is checked, too (tier C), and how far the record moves the mean (tier D,
  exact).
- Any other method: the direction and threshold that are best for one half of the trials, tested on the other half.

Except in the last case, the threshold follows from the claimed distribution. Every trial has its own noise, so trials
are independent, and tier A's bound from two error rates assumes nothing more. If the whole release is one Gaussian,
tier B uses the same errors. The worst-case record is alone in its direction, and at least as long as the data allow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit.claim import PrivacyClaim, bound_of, log_ratio, threshold_of_gaussian
from dpsgd_cli.audit.findings import Finding, exact_finding
from dpsgd_cli.audit.stage import run_epochs, smaller, synthetic, without
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors, mu_of_errors
from dpsgd_cli.audit.watch import ObservedNoise, noise_checks
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.data.users import as_users
from dpsgd_cli.engine.context import AuditHook
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import DataOverride, Member, start

_RECORDS = {"output-perturbation": 300}
_FEW_RECORDS = 60
_LONG = 1e3
_LINES = 199
_FEATURES = 20
_SEEDS_APART = 100_000
_CLOSE = 1 + 1e-6


class _Released(AuditHook):
    """Trials on one of two neighbours: each one's release, if it is one Gaussian, and their `output` (R, P)."""

    output: Tensor

    def __init__(self) -> None:
        self.exact: np.ndarray | None = None
        self.noisy: list[np.ndarray] = []

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        del trials
        self.exact = exact[0].double().cpu().numpy() if self.exact is None else self.exact
        self.noisy.append(noisy.double().cpu().numpy().copy())


def attack(
    loaded: SettledRecipe, outline: data.Outline, whole: Plan, trials: int, confidence: float
) -> tuple[list[Finding], dict[str, int]]:
    """Train `trials` trials on each of two neighbours, and distinguish the neighbours by what is released.

    Returns findings and the size of the attack.
    """
    records = min(_RECORDS.get(loaded.recipe.method.kind, _FEW_RECORDS), whole.sampling.records)
    small, _ = smaller(loaded, trials, min(whole.sampling.batch_size, records))
    shape = outline.input_shape
    shape = (min(shape[0], _FEATURES),) if len(shape) == 1 else shape
    small_outline = dataclasses.replace(outline, train_records=records, files=(records,), input_shape=shape)
    plan = plan_of(small, small_outline)
    assert plan is not None
    sides = [_side(small, small_outline, plan, present) for present in (True, False)]
    found = list(_findings(sides, plan, confidence))
    return found, {"trials": 2 * trials, "records": records, "features": math.prod(shape)}


def _side(small: SettledRecipe, outline: data.Outline, plan: Plan, present: bool) -> _Released:
    seed = (small.recipe.seed or 0) + (0 if present else _SEEDS_APART)
    own = dataclasses.replace(small, recipe=small.recipe.changed(seed=seed))
    absent, seen = not present and plan.sampling.adjacency == "add-remove", _Released()
    made = _dataset(own, outline, plan.sampling.records, present, plan.sampling.adjacency == "replace-one")
    dataset = as_users(made, small.recipe.data)
    override = DataOverride(dataset, watcher=seen)
    if absent:
        override = dataclasses.replace(override, share=without(-1, small.recipe.trials))
    at = start([Member(own, plan)], override=override)
    run_epochs(at)
    seen.output = at.method.output.double()
    return seen


def _findings(sides: Sequence[_Released], plan: Plan, confidence: float) -> Iterator[Finding]:
    stated = plan.guarantee().epsilon
    mechanism = next((one.mechanism for one in plan.releases if one.count), None)
    if sides[0].exact is not None and isinstance(mechanism, GaussianSum):
        yield from _parts(sides, mechanism, confidence)
        errors, mu = _by_gaussian(sides, mechanism, confidence)
    else:
        present, absent = (side.output.cpu().numpy() for side in sides)
        errors, mu = told_apart(present, absent, confidence), None
    alone = epsilon_of_errors(errors, plan.delta, confidence)
    counts = (
        f"{errors.false_positives} of {errors.negatives} false positives, {errors.false_negatives} of"
        f" {errors.positives} false negatives"
    )
    law = "" if mu is None else f"; these neighbours' law allows {gaussian_epsilon(mu, plan.delta):.3f}"
    claimed = f"at most {epsilon_text(stated)}"
    yield Finding("A", "neighbours told apart", f"epsilon at least {alone:.3f}: {counts}{law}", claimed,
                  lambda level: epsilon_of_errors(errors, plan.delta, level) > stated, epsilon=alone)  # fmt: skip
    released = [release for release in plan.releases if release.count]
    if all(isinstance(r.mechanism, GaussianSum) and not r.mechanism.sampled for r in released) and released:
        claim = PrivacyClaim(tuple(released), stated, plan.delta)
        bound = bound_of(claim.standing(errors, confidence))
        yield Finding("B", "neighbours told apart", f"epsilon at least {bound:.3f}: {counts}", claimed,
                      lambda level: claim.refuted_by(errors, level), epsilon=bound)  # fmt: skip


def _parts(sides: Sequence[_Released], mechanism: GaussianSum, confidence: float) -> Iterator[Finding]:
    """Compare the noise of a Gaussian release with the ledger's, and how far the record moved the mean."""
    made = ObservedNoise()
    for side in sides:
        assert side.exact is not None
        rows = (np.concatenate(side.noisy) - side.exact) / (mechanism.noise_multiplier * mechanism.sensitivity)
        made.add(0, rows)
    yield from noise_checks(made, confidence)
    moved = float(np.linalg.norm(_apart(sides))) / mechanism.sensitivity
    yield exact_finding("D", "release", f"{moved:.6f} sensitivities", "at most 1", not moved <= _CLOSE)


def _apart(sides: Sequence[_Released]) -> np.ndarray:
    present, absent = (side.exact for side in sides)
    assert present is not None and absent is not None
    return np.asarray(present - absent)


def _by_gaussian(sides: Sequence[_Released], mechanism: GaussianSum, confidence: float) -> tuple[Errors, float]:
    """Return errors of the likelihood ratio of two known means under the ledger's noise, and mu, their distance.

    mu is in standard deviations of the noise.
    """
    apart, scale = _apart(sides), mechanism.noise_multiplier * mechanism.sensitivity
    scores = [
        log_ratio((np.concatenate(side.noisy) - sides[1].exact) @ apart, float(apart @ apart), scale, 1.0)
        for side in sides
    ]
    mu = float(np.linalg.norm(apart)) / scale
    line = threshold_of_gaussian(mu, len(scores[0]), len(scores[1]), confidence)
    return _errors(scores[0], scores[1], line), mu


def told_apart(present: np.ndarray, absent: np.ndarray, confidence: float) -> Errors:
    """Return errors on the second halves of weights (R, P), at the direction and threshold best for the first."""
    half = len(present) // 2
    first, second = (present[:half], absent[:half]), (present[half:], absent[half:])
    spread = (first[0].var(axis=0) + first[1].var(axis=0)) / 2
    apart = first[0].mean(axis=0) - first[1].mean(axis=0)
    direction = np.divide(apart, spread, out=np.zeros_like(apart), where=spread > 0)
    # drop coordinates whose means differ by no more than chance: they would only add noise
    direction[np.abs(apart) < 3 * np.sqrt(2 * spread / half)] = 0.0
    if not direction.any():
        direction[int(np.argmax(np.abs(apart) / np.sqrt(spread + 1e-300)))] = 1.0
    seen = [rows @ direction for rows in first]
    lines = np.quantile(np.concatenate(seen), np.linspace(0.005, 0.995, _LINES))
    best = max(lines, key=lambda line: mu_of_errors(_errors(seen[0], seen[1], float(line)), confidence))
    return _errors(second[0] @ direction, second[1] @ direction, float(best))


def _errors(present: np.ndarray, absent: np.ndarray, line: float) -> Errors:
    return Errors(int((absent > line).sum()), len(absent), int((present <= line).sum()), len(present))


def _dataset(loaded: SettledRecipe, outline: data.Outline, records: int, present: bool, replaced: bool) -> data.Dataset:
    """Return random rows whose first feature is 0, and a last row in which every other feature is 0."""
    random = np.random.default_rng(0)
    shape, outputs = outline.input_shape, outline.outputs
    scale = 0.5 * (outline.norm_bound or 1.0) / math.sqrt(math.prod(shape))

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = (random.random((count, *shape)) * scale).astype(np.float32)
        x.reshape(count, -1)[:, 0] = 0.0
        # equal numbers of each class: if a method counts classes, one more record decides
        y = np.arange(count) % outputs if outputs > 1 else random.random(count, dtype=np.float32)
        return x, y

    (x, y), held = rows(records), rows(8)
    x[-1], y[-1] = 0.0, 1
    x[-1].reshape(-1)[0] = _LONG if present else (-_LONG if replaced else np.nan)
    return synthetic(
        outline, (x, y), held, validation_x=held[0], validation_y=held[1], public_x=held[0], public_y=held[1],
        keys=Keys.of_places([records + 8]), columns=outline.columns,
    )  # fmt: skip
