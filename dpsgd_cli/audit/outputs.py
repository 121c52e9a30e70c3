"""Attacks on what a method releases once, whatever it does in between: worst neighbours, told apart over many trials.

Half of the trials train with a worst-case record, half without it (under zero-out and replace-one: with one that adds
nothing, or with the opposite one). Each trial gives one number, and the errors of one test on it are counted:

- a Gaussian release: what is released is its known mean under either data set and noise, so the number is the
  log-likelihood ratio, along what the two means differ by; noise itself is looked at, too (tier C), and how far the
  record moves the mean (tier D, exactly);
- objective perturbation: weights near a minimiser tell the random term that they minimise with, under either data set;
  the number is the ratio of their densities (`_density`);
- anything else: a direction and a line that serve one half of the trials best, tried on the other half.

Thresholds are fixed by the law that is claimed. Every trial has noise of its own, so trials are independent, and tier
A's bound of two error rates assumes nothing more. Where all that is released is one Gaussian, tier B's is of the same
errors. The worst record is one alone in its direction, and as long as the data allow or longer; for objective
perturbation all others are in that direction as well and of the other label, so that its loss is as steep as it gets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.ledger import LedgerEntry
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit.claim import Claim, bound_of, log_ratio
from dpsgd_cli.audit.findings import Finding, by_p_value, exact
from dpsgd_cli.audit.parts import noise_checks
from dpsgd_cli.audit.stage import smaller
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors, mu_of_errors
from dpsgd_cli.audit.thresholds import errors_at, threshold_of_gaussian
from dpsgd_cli.audit.watch import Noise
from dpsgd_cli.common.naming import named
from dpsgd_cli.common.rounding import epsilon_text
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.data.users import as_users
from dpsgd_cli.engine.context import Watcher
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.methods.perturbation import run as perturbations
from dpsgd_cli.methods.perturbation.run import ObjectivePerturbation
from dpsgd_cli.methods.risks.linear import LinearRisk
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import Member, Stage, Trials, start

_RECORDS = {"output-perturbation": 300}
_FEW_RECORDS = 60
_LONG = 1e3
_LINES = 199
_FEATURES = 20
_SEEDS_APART = 100_000
_CLOSE = 1 + 1e-6


@dataclasses.dataclass(frozen=True)
class Attack:
    """What `attack` found: rows of the audit, what the first trial's ledger holds, and what was trained on."""

    findings: list[Finding]
    entries: list[LedgerEntry]
    told: dict[str, int]


class _Released:
    """Notes the release of each trial, if it is one Gaussian's."""

    def __init__(self) -> None:
        self.exact: np.ndarray | None = None
        self.noisy: list[np.ndarray] = []

    def measured(self, trials: Sequence[int], exact: Tensor, noisy: Tensor) -> None:
        del trials
        self.exact = exact[0].double().cpu().numpy() if self.exact is None else self.exact
        self.noisy.append(noisy.double().cpu().numpy().copy())

    def drawn(self, step: int, batch: Batch) -> None:
        del step, batch

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        raise AssertionError("only what is released once is noted")

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        raise AssertionError("only what is released once is noted")

    def preconditioned(self, trial: int, exact: np.ndarray, noisy: np.ndarray) -> None:
        raise AssertionError("only what is released once is noted")


@dataclasses.dataclass(frozen=True)
class _Side:
    """The trials of one of two neighbours."""

    trials: Trials
    seen: _Released

    @property
    def weights(self) -> Tensor:
        return self.trials.method.output.double()


def attack(loaded: LoadedRecipe, outline: data.Outline, whole: Plan, trials: int, confidence: float) -> Attack:
    """Train `trials` trials on each of two neighbours, and tell them apart."""
    records = min(_RECORDS.get(loaded.recipe.method.kind, _FEW_RECORDS), whole.sampling.records)
    small, _ = smaller(loaded, trials, min(whole.sampling.batch_size, records))
    shape = outline.input_shape
    assert shape is not None
    shape = (min(shape[0], _FEATURES),) if len(shape) == 1 else shape
    small_outline = dataclasses.replace(outline, train_records=records, files=(records,), input_shape=shape)
    plan = plan_of(small, small_outline)
    assert plan is not None
    sides = [_side(small, small_outline, plan, present) for present in (True, False)]
    found = list(_findings(sides, plan, confidence))
    entries = list(sides[0].trials.context.ledgers[0].entries)
    return Attack(found, entries, {"trials": 2 * trials, "records": records, "features": math.prod(shape)})


def _side(small: LoadedRecipe, outline: data.Outline, plan: Plan, present: bool) -> _Side:
    seed = (small.recipe.seed or 0) + (0 if present else _SEEDS_APART)
    own = dataclasses.replace(small, recipe=small.recipe.model_copy(update={"seed": seed}))
    absent, seen = not present and plan.sampling.adjacency == "add-remove", _Released()
    share = partial(_without_last, small.recipe.trials) if absent else _whole
    made = _dataset(own, outline, plan.sampling.records, present, plan.sampling.adjacency == "replace-one")
    dataset = as_users(made, small.recipe.data.unit)
    at = start([Member(own, plan)], stage=Stage(dataset, share=share, watcher=seen))
    while at.done < at.method.epochs and not at.method.finished:
        at.method.run_epoch(at.done)
        at.done += 1
    return _Side(at, seen)


def without_seed(loaded: LoadedRecipe, outline: data.Outline, whole: Plan, watcher: Watcher) -> Trials:
    """One trial on the rows of the neighbour with the worst record, with the operating system's noise."""
    records = min(_FEW_RECORDS, whole.sampling.records)
    small, _ = smaller(loaded, 1, min(whole.sampling.batch_size, records))
    shape = outline.input_shape
    assert shape is not None
    known = dataclasses.replace(outline, train_records=records, files=(records,), input_shape=shape)
    made = _dataset(small, known, records, True, whole.sampling.adjacency == "replace-one")
    dataset = as_users(made, small.recipe.data.unit)
    return start([Member(small, plan_of(small, known))], stage=Stage(dataset, share=_whole, watcher=watcher))


def _findings(sides: Sequence[_Side], plan: Plan, confidence: float) -> Iterator[Finding]:
    stated = plan.guarantee().epsilon
    mechanism = next((one.mechanism for one in plan.releases if one.count), None)
    if sides[0].seen.exact is not None and isinstance(mechanism, GaussianSum):
        yield from _parts(sides, mechanism, confidence)
        errors, mu = _by_gaussian(sides, mechanism, confidence)
    elif isinstance(sides[0].trials.method, ObjectivePerturbation):
        errors, mu = _by_density(sides, confidence)
    else:
        present, absent = (side.weights.cpu().numpy() for side in sides)
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
        claim = Claim(tuple(released), stated, plan.delta)
        bound = bound_of(claim.standing(errors, confidence))
        yield Finding("B", "neighbours told apart", f"epsilon at least {bound:.3f}: {counts}", claimed,
                      lambda level: claim.refuted_by(errors, level), epsilon=bound)  # fmt: skip


def _parts(sides: Sequence[_Side], mechanism: GaussianSum, confidence: float) -> Iterator[Finding]:
    """Noise of a Gaussian release against the ledger's, and how far the record moved its mean."""
    made = Noise()
    for side in sides:
        assert side.seen.exact is not None
        rows = (np.concatenate(side.seen.noisy) - side.seen.exact) / (
            mechanism.noise_multiplier * mechanism.sensitivity
        )
        made.add(0, rows)
        made.noise.append(rows.astype(np.float32))
    for one in noise_checks(made, confidence):
        yield by_p_value("C", one.name, (one.found, one.claimed), one.p_value, one.control)
    moved = float(np.linalg.norm(_apart(sides))) / mechanism.sensitivity
    yield exact("D", "release", f"{moved:.6f} sensitivities", "at most 1", not moved <= _CLOSE)


def _apart(sides: Sequence[_Side]) -> np.ndarray:
    present, absent = (side.seen.exact for side in sides)
    assert present is not None and absent is not None
    return np.asarray(present - absent)


def _by_gaussian(sides: Sequence[_Side], mechanism: GaussianSum, confidence: float) -> tuple[Errors, float]:
    """Errors of the likelihood ratio of two known means under the ledger's noise; and mu, their distance in noise."""
    apart, scale = _apart(sides), mechanism.noise_multiplier * mechanism.sensitivity
    scores = [
        log_ratio((np.concatenate(side.seen.noisy) - sides[1].seen.exact) @ apart, float(apart @ apart), scale, 1.0)
        for side in sides
    ]
    mu = float(np.linalg.norm(apart)) / scale
    return _counted(scores, mu, confidence), mu


def _counted(scores: Sequence[np.ndarray], mu: float, confidence: float) -> Errors:
    """Errors at the threshold that is best for log-likelihood ratios of one Gaussian of `mu`; present, then absent."""
    line = threshold_of_gaussian(mu, len(scores[0]), len(scores[1]), confidence)
    return errors_at(np.concatenate(scores), np.repeat([True, False], [len(one) for one in scores]), line)


def _by_density(sides: Sequence[_Side], confidence: float) -> tuple[Errors, float]:
    """Errors of the ratio of densities that published weights have under either data set; mu is one of b's law."""
    scores = [(_density(sides[0], side.weights) - _density(sides[1], side.weights)).cpu().numpy() for side in sides]
    method = sides[0].trials.method
    assert isinstance(method, ObjectivePerturbation)
    mu = method.constants[0].lipschitz / _noise(method).tilt
    return _counted(scores, mu, confidence), mu


def _noise(method: ObjectivePerturbation) -> perturbations.Noise:
    promised = method.promised[0]
    size, records = method.context.pack.size, len(method.context.table)
    return perturbations.noise_of(method.constants[0], records, size, promised.epsilon, promised.delta)


def _density(side: _Side, weights: Tensor) -> Tensor:
    """Log-density (R,) of a minimiser at `weights`, up to what neighbours share.

    b is what makes the gradient of the whole objective 0 there; the Jacobian is the Hessian, and as all rows of
    `_dataset` are on one line, its only eigenvalue that is not k is the sum of phi'' |z|^2, plus k.
    """
    method = side.trials.method
    assert isinstance(method, ObjectivePerturbation)
    noise, rows = _noise(method), method.rows
    weights = weights.to(rows.z)
    sums = LinearRisk(rows, method.loss).gradient_sums_at(weights, weights.new_full((1,), math.inf))
    tilt = sums.double() + noise.curvature * weights
    curved = method.loss.curvature(rows.z @ weights.T) * rows.norms.square()[:, None]
    curved = (curved if rows.weights is None else curved * rows.weights).sum(dim=0)
    return torch.log(curved + noise.curvature) - tilt.square().sum(dim=1) / (2 * noise.tilt**2)


def told_apart(present: np.ndarray, absent: np.ndarray, confidence: float) -> Errors:
    """Errors on the second halves of weights (R, P), by the direction and line that serve the first halves best."""
    half = len(present) // 2
    first, second = (present[:half], absent[:half]), (present[half:], absent[half:])
    spread = (first[0].var(axis=0) + first[1].var(axis=0)) / 2
    apart = first[0].mean(axis=0) - first[1].mean(axis=0)
    direction = np.divide(apart, spread, out=np.zeros_like(apart), where=spread > 0)
    # coordinates whose means differ by no more than chance would only add noise
    direction[np.abs(apart) < 3 * np.sqrt(2 * spread / half)] = 0.0
    if not direction.any():
        direction[int(np.argmax(np.abs(apart) / np.sqrt(spread + 1e-300)))] = 1.0
    seen = [rows @ direction for rows in first]
    lines = np.quantile(np.concatenate(seen), np.linspace(0.005, 0.995, _LINES))
    best = max(lines, key=lambda line: mu_of_errors(_errors(seen[0], seen[1], float(line)), confidence))
    return _errors(second[0] @ direction, second[1] @ direction, float(best))


def _errors(present: np.ndarray, absent: np.ndarray, line: float) -> Errors:
    return Errors(int((absent > line).sum()), len(absent), int((present <= line).sum()), len(present))


def _dataset(loaded: LoadedRecipe, outline: data.Outline, records: int, present: bool, replaced: bool) -> data.Dataset:
    """Rows of chance without the first feature, and a last one that has nothing else.

    Of objective perturbation: all rows are that one, but of the other label.
    """
    random = np.random.default_rng(0)
    shape, outputs = outline.input_shape, outline.outputs
    assert shape is not None
    scale = 0.5 * (outline.norm_bound or 1.0) / math.sqrt(math.prod(shape))
    runs = named(loaded.recipe.method.described.runs)
    against = isinstance(runs, type) and issubclass(runs, ObjectivePerturbation)

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = (random.random((count, *shape)) * scale).astype(np.float32)
        x.reshape(count, -1)[:, 0] = 0.0
        # in equal numbers: where classes are counted, one record more decides
        y = np.arange(count) % outputs if outputs > 1 else random.random(count, dtype=np.float32)
        if against and outputs > 1:
            x[:], y = 0.0, np.zeros_like(y)
            x.reshape(count, -1)[:, 0] = _LONG
        return x, y

    (x, y), held = rows(records), rows(8)
    x[-1], y[-1] = 0.0, 1
    x[-1].reshape(-1)[0] = _LONG if present else (-_LONG if replaced else np.nan)
    classes = tuple(range(outputs)) if outputs > 1 else None
    return data.Dataset(
        outline.name, x, y, *held, False, classes, (), (), {}, norm_bound=outline.norm_bound,
        validation_x=held[0], validation_y=held[1], public_x=held[0], public_y=held[1],
        keys=Keys.of_places([records + 8]), cells=outline.cells,
    )  # fmt: skip


def _whole(table: Table) -> Table:
    return table


def _without_last(trials: int, table: Table) -> Table:
    own = torch.arange(table.rows, device=table.y.device)
    own[-1] = -1
    held = (own < 0)[:, None].repeat(1, trials)
    return dataclasses.replace(table, own=own.repeat(trials, 1), held_out=held, filled=False)
