"""Attacks on what a method publishes, whatever it does in between: neighbours told apart by many trials' weights.

Half of the trials train with a worst-case record, half without it (under zero-out and replace-one: with one that adds
nothing, or with the opposite one). A direction and a threshold are found on the first half of each; the errors on the
second are counted. Every trial has noise of its own, so trials are independent, and tier A's bound of two error rates
assumes nothing more. Where all that is released is one Gaussian, tier B's bound is of the same errors.

For methods without steps whose noise could be watched. The worst record for a method is known to its proof and not to
this attack, which takes one that is: alone in its direction, and as long as the data allow or longer.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import torch

from dpsgd_cli import data
from dpsgd_cli.audit.claim import Claim
from dpsgd_cli.audit.findings import Finding
from dpsgd_cli.audit.stage import smaller
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors, mu_of_errors
from dpsgd_cli.core.tensors import Table
from dpsgd_cli.data.units import as_users
from dpsgd_cli.joint import plan_of
from dpsgd_cli.privacy.ledger import LedgerEntry
from dpsgd_cli.privacy.mechanism import GaussianSum
from dpsgd_cli.privacy.plan import Plan
from dpsgd_cli.recipe.loading import LoadedRecipe
from dpsgd_cli.rounding import epsilon_text
from dpsgd_cli.trials import Member, Stage, start

_RECORDS = 60
_LONG = 1e3
_LINES = 199
_SEEDS_APART = 100_000


@dataclasses.dataclass(frozen=True)
class Attack:
    """What `attack` found: rows of the audit, and what the first trial's ledger holds."""

    findings: list[Finding]
    entries: list[LedgerEntry]
    trials: int
    records: int


def attack(loaded: LoadedRecipe, outline: data.Outline, whole: Plan, trials: int, confidence: float) -> Attack:
    """Train `trials` trials on each of two neighbours, and tell them apart."""
    records = min(_RECORDS, whole.sampling.records)
    small, _ = smaller(loaded, trials, min(whole.sampling.batch_size, records))
    shape = outline.input_shape
    assert shape is not None
    small_outline = dataclasses.replace(outline, train_records=records, files=(records,))
    plan = plan_of(small, small_outline)
    assert plan is not None
    values: list[np.ndarray] = []
    entries: list[LedgerEntry] = []
    for present in (True, False):
        seed = (small.recipe.seed or 0) + (0 if present else _SEEDS_APART)
        own = dataclasses.replace(small, recipe=small.recipe.model_copy(update={"seed": seed}))
        absent = not present and plan.sampling.adjacency == "add-remove"
        made = _dataset(outline, records, present, plan.sampling.adjacency == "replace-one")
        dataset = as_users(made, loaded.recipe.data.unit)
        at = start(
            [Member(own, plan)], stage=Stage(dataset, share=partial(_without_last, trials) if absent else _whole)
        )
        while at.done < at.method.epochs and not at.method.finished:
            at.method.run_epoch(at.done)
            at.done += 1
        values.append(at.method.output.double().cpu().numpy())
        entries = entries or list(at.context.ledgers[0].entries)
    errors = told_apart(values[0], values[1], confidence)
    stated = plan.guarantee()
    return Attack(_findings(errors, plan, stated.epsilon, confidence), entries, trials, records)


def _findings(errors: Errors, plan: Plan, stated: float, confidence: float) -> list[Finding]:
    alone = epsilon_of_errors(errors, plan.delta, confidence)
    counts = (
        f"{errors.false_positives} of {errors.negatives} false positives, {errors.false_negatives} of"
        f" {errors.positives} false negatives"
    )
    claimed = f"at most {epsilon_text(stated)}"
    found = [
        Finding("A", "neighbours told apart", f"epsilon at least {alone:.3f}: {counts}", claimed,
                lambda level: epsilon_of_errors(errors, plan.delta, level) > stated, epsilon=alone),
    ]  # fmt: skip
    released = [release for release in plan.releases if release.count]
    if all(isinstance(r.mechanism, GaussianSum) and not r.mechanism.sampled for r in released) and released:
        claim = Claim(tuple(released), stated, plan.delta)
        stands = claim.standing(errors, confidence)
        bound = 0.0 if stands is None else stands.own_epsilon
        found.append(
            Finding("B", "neighbours told apart", f"epsilon at least {bound:.3f}: {counts}", claimed,
                    lambda level: claim.refuted_by(errors, level), epsilon=bound)
        )  # fmt: skip
    return found


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


def _dataset(outline: data.Outline, records: int, present: bool, replaced: bool) -> data.Dataset:
    """Rows of chance without the first feature, and a last one that has nothing else."""
    random = np.random.default_rng(0)
    shape, outputs = outline.input_shape, outline.outputs
    assert shape is not None
    scale = 0.5 * (outline.norm_bound or 1.0) / math.sqrt(math.prod(shape))

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        x = (random.random((count, *shape)) * scale).astype(np.float32)
        x.reshape(count, -1)[:, 0] = 0.0
        # in equal numbers: where classes are counted, one record more decides
        y = np.arange(count) % outputs if outputs > 1 else random.random(count, dtype=np.float32)
        return x, y

    (x, y), held = rows(records), rows(8)
    x[-1], y[-1] = 0.0, 1
    x[-1].reshape(-1)[0] = _LONG if present else (-_LONG if replaced else np.nan)
    classes = tuple(range(outputs)) if outputs > 1 else None
    return data.Dataset(
        outline.name, x, y, *held, False, classes, (), (), {}, norm_bound=outline.norm_bound,
        validation_x=held[0], validation_y=held[1], public_x=held[0], public_y=held[1], places=np.arange(records + 8),
    )  # fmt: skip


def _whole(table: Table) -> Table:
    return table


def _without_last(trials: int, table: Table) -> Table:
    own = torch.arange(table.rows, device=table.y.device)
    own[-1] = -1
    held = (own < 0)[:, None].repeat(1, trials)
    return dataclasses.replace(table, own=own.repeat(trials, 1), held_out=held, filled=False)
