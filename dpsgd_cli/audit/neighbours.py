"""Tier D: neighbouring data sets with the same randomness, compared step by step from equal weights.

All trainings have the same seed, and thus the same batches, noise and initial weights. Their records are the same but
for one. The first training lacks that record (under replace-one: has an ordinary one instead). Each other training has
a different worst case: huge, infinite or NaN values, another label, the opposite direction. After each step, all
trainings continue from the first one's update, so every step compares sums from equal weights. The checks are exact,
not statistical: sums move by at most the ledger's sensitivity, and public values do not move at all.

`watch.py` checks that the noise is as large as the ledger says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpsgd_cli import data
from dpsgd_cli.accounting.ledger import LedgerEntry
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism
from dpsgd_cli.accounting.plan import Plan
from dpsgd_cli.audit.findings import AuditSize, Finding, exact_finding
from dpsgd_cli.audit.stage import random_inputs, random_labels, sized, smaller, synthetic, without
from dpsgd_cli.audit.watch import StepObserver
from dpsgd_cli.data.settings import ValidationSet
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.data.users import as_users
from dpsgd_cli.engine.tensors import Batch
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.pate.price import VotingPlan
from dpsgd_cli.methods.pate.run import Pate
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.methods.private_selection import PrivateSelection, SelectionPlan
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.results.result import public
from dpsgd_cli.training.evaluation import record, results_of
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import DataOverride, Member, start

_RECORDS = 48
_STEPS = 40
_MOST_KEPT = 1 << 24
_CLOSE = 1 + 1e-4
_ROUNDED = 1e-4
_PLACE = 5
_TEACHERS, _VOTERS, _QUERIES = 4, 16, 12


@dataclass
class _Seen:
    """Observations of one training: batches, exact sums, noisy means, charges and published values.

    - `apart`: for each release apart from the steps, the mechanism, and the sums before and after noise.
    - `looks`: how often validation records were used.
    - `public`: all public values of the result that the training would write; empty for methods that choose weights.
    """

    batches: list[tuple[Tensor, ...]] = field(default_factory=list)
    apart: list[tuple[Mechanism, Tensor, Tensor]] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    entries: list[LedgerEntry] = field(default_factory=list)
    output: Tensor | None = None
    epochs: int = 0
    looks: int = 0
    public: dict[str, Any] = field(default_factory=dict)


class _Follower(StepObserver):
    """Observer of a training. Given a `first` training, it replaces noisy means by those of the first."""

    def __init__(self, first: _Seen | None) -> None:
        self.first = first
        self.seen = _Seen()

    def drawn(self, step: int, batch: Batch) -> None:
        del step
        parts = [torch.as_tensor(part).clone() for part in (batch.rows, batch.mask) if part is not None]
        self.seen.batches.append(tuple(parts))

    def prepared(self, mechanism: Mechanism, exact: Tensor, noisy: Tensor) -> None:
        self.seen.apart.append((mechanism, exact.clone(), noisy.clone()))
        if self.first is not None:
            noisy.copy_(self.first.apart[len(self.seen.apart) - 1][2])

    def released(self, epoch: int, step: int, exact: Tensor, mean: Tensor) -> None:
        del epoch
        self.seen.sums.append(exact.clone())
        self.seen.means.append(mean.clone())
        if self.first is not None and step < len(self.first.means):
            mean.copy_(self.first.means[step])


def worst_rows(outline: data.Outline) -> dict[str, tuple[np.ndarray, Any]]:
    """Return records that are hard to bound, by name: features and label. Integers are tokens of any vocabulary."""
    random, outputs, shape = np.random.default_rng(7), outline.outputs, outline.input_shape
    if outline.integers:
        tokens = random.integers(2, size=shape)
        return {
            "an ordinary record": (tokens, 0),
            "the same, of another label": (tokens, outputs - 1),
            "the opposite": (1 - tokens, outputs - 1),
            "zeros": (np.zeros_like(tokens), outputs - 1),
            "ones": (np.ones_like(tokens), 0),
        }
    usual = random.random(shape, dtype=np.float32)
    last = outputs - 1 if outputs > 1 else 1.0
    return {
        "an ordinary record": (usual, 0),
        "the same, of another label": (usual, last),
        "the opposite": (-usual, last),
        "far out": (usual * 1e3, 0),
        "far out, of another label": (-usual * 1e3, last),
        "huge": (np.full(shape, 1e30, np.float32), last),
        "infinite": (np.full(shape, np.inf, np.float32), 0),
        "not a number": (np.full(shape, np.nan, np.float32), last),
        "zeros": (np.zeros(shape, np.float32), last),
    }


def compare(loaded: SettledRecipe, outline: data.Outline, whole: Plan) -> list[Finding]:
    """Train on each neighbour with a recipe whose plan is `whole`, and return the differences."""
    rows = worst_rows(outline)
    size = AuditSize(1, _RECORDS // 3, 0)
    records, batch = sized(whole, size, False)
    small, _ = smaller(loaded, 1, batch)
    small = dataclasses.replace(small, recipe=small.recipe.changed(seed=small.recipe.seed or 0))
    plan = plan_of(small, dataclasses.replace(outline, train_records=records, files=(records,)))
    assert plan is not None
    stands: dict[str, tuple[np.ndarray, Any] | None] = {**rows}
    if isinstance(plan, SelectionPlan):
        stands = {"nobody": rows["not a number"], **rows}  # its table has no empty places
    elif plan.sampling.adjacency != "replace-one":
        stands = {"nobody": None, **rows}
    seen: dict[str, _Seen] = {}
    first: _Seen | None = None
    for name, row in stands.items():
        dataset = as_users(_dataset(outline, records, row), loaded.recipe.data)
        seen[name] = _trained(Member(small, plan), dataset, row is None, first)
        first = first or seen[name]
    return _differences(seen, plan, small.recipe.data.validation)


def _trained(member: Member, dataset: data.Dataset, lacks: bool, first: _Seen | None) -> _Seen:
    """Train on `dataset`, and return the observations. With `lacks`, the place of one record is empty."""
    follower = _Follower(first)
    override = DataOverride(dataset, watcher=follower)
    at = start([member], override=dataclasses.replace(override, share=without(_PLACE)) if lacks else override)
    most = max(2, min(_STEPS, _MOST_KEPT // at.context.pack.size))
    while at.done < at.method.epochs and not at.method.finished and len(follower.seen.sums) < most:
        noted = at.method.run_epoch(at.done)
        at.history.append(record(at, at.done, noted, wanted=True))
        at.done += 1
    at.method.after_training()
    follower.seen.entries, follower.seen.epochs = list(at.context.ledgers[0].entries), at.method.epochs
    # all candidates were trained, whichever is chosen
    trained = at.method.inner if isinstance(at.method, PrivateSelection) else at.method
    follower.seen.output = trained.output.clone()
    if isinstance(at.method, DpSgd):
        follower.seen.looks = sum(len(run.noise.seen) for run in at.method.adaptive.runs.values())
    if not isinstance(at.method, PrivateSelection):
        result = results_of(at)[0]
        named = {"history": result.history, "ledger": result.ledger, **result.document(), "provenance": None}
        follower.seen.public = public(named)
    return follower.seen


def _judged(name: str, found: str, allowed: str, worst: str, refuted: bool) -> Finding:
    """Return the finding on one comparison: its subject, what was found and is allowed, and the worst neighbour."""
    return exact_finding("D", name, f"{found}{f' ({worst})' if worst else ''}", allowed, refuted)


def _differences(seen: dict[str, _Seen], plan: Plan, cut: ValidationSet | None) -> list[Finding]:
    base = next(iter(seen.values()))
    mechanism = next(
        m for e in base.entries if isinstance(m := e.release.mechanism, GaussianSum) and e.phase == "train"
    )
    sensitivity = mechanism.sensitivity
    moved, noise, others = {}, {}, {}
    for name, one in seen.items():
        pairs = list(zip(one.sums, base.sums, strict=False))
        apart = [float(torch.linalg.vector_norm(ours - theirs)) / sensitivity for ours, theirs in pairs]
        moved[name] = max(math.inf if math.isnan(value) else value for value in apart)
        noise[name] = max(
            _apart(mean.double() * plan.sampling.batch_size - ours, of.double() * plan.sampling.batch_size - theirs)
            for (ours, theirs), mean, of in zip(pairs, one.means, base.means, strict=False)
        )
        others[name] = {
            "batches": [[part.tolist() for part in parts] for parts in one.batches],
            "ledger, steps and epochs": (one.entries, one.epochs, len(one.sums)),
            "weights, from equal noisy sums": None if one.output is None else one.output.tolist(),
            "public columns, from equal noisy sums": repr(one.public),
        }
    worst, noisy = max(moved, key=lambda name: moved[name]), max(noise, key=lambda name: noise[name])
    found = [
        _judged("summed gradients", f"{moved[worst]:.6f} sensitivities at most, in {len(base.sums)} steps",
                   "at most 1", worst, moved[worst] > _CLOSE),
        _judged("noise", f"{noise[noisy]:.2g} of its largest", "nothing", noisy, noise[noisy] > _ROUNDED),
    ]  # fmt: skip
    found += _of_others(seen)
    if base.looks and cut is not None and not cut.public:
        mechanisms = [entry.release.mechanism for entry in base.entries]
        charged = sum(isinstance(m, GaussianSum) and m.label == "validation" for m in mechanisms)
        told = f"{base.looks} taken, {charged} charged"
        found.append(_judged("looks at validation records", told, "as many", "", charged < base.looks))
    usual = others[next(iter(seen))]
    for what in usual:
        differ = [name for name in others if others[name][what] != usual[what]]
        found.append(_judged(what, "differ" if differ else "the same", "the same", ", ".join(differ), bool(differ)))
    return found


def _of_others(seen: dict[str, _Seen]) -> Iterator[Finding]:
    """Yield how far neighbours move each sum released apart from the steps, and its noise, which must not move.

    Each sum must be charged before the steps.
    """
    base = next(iter(seen.values()))
    charged = [e.release.mechanism for e in base.entries if e.phase == "before"]
    for number, (mechanism, exact, noisy) in enumerate(base.apart):
        assert isinstance(mechanism, GaussianSum)
        name = f"{mechanism.label}, apart from the steps"
        own = next((m for m in charged if isinstance(m, GaussianSum) and m.label == mechanism.label), None)
        if own is None:
            yield _judged(name, "not charged", "charged", "", True)
            continue
        others = {which: one.apart[number][1:] for which, one in seen.items()}
        moves = {which: float(torch.linalg.vector_norm(ours - exact)) for which, (ours, _) in others.items()}
        worst = max(moves, key=lambda which: moves[which])
        moved = moves[worst] / own.sensitivity
        noise = max(_apart(drawn - ours, noisy - exact) for ours, drawn in others.values())
        told = f"{moved:.6f} sensitivities at most, its noise {noise:.2g} of its largest"
        yield _judged(name, told, "at most 1, and nothing", worst, not moved <= _CLOSE or not noise <= _ROUNDED)


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))


def _dataset(outline: data.Outline, records: int, row: tuple[np.ndarray, Any] | None) -> data.Dataset:
    """Return ordinary records with `row` instead of one of them, or with zeros there for an empty place."""
    random = np.random.default_rng(0)
    x, y = random_inputs(random, records, outline), random_labels(random, records, outline)
    x[_PLACE], y[_PLACE] = (0.0, 0) if row is None else row
    held, truth = random_inputs(random, 8, outline), random_labels(random, 8, outline)
    return synthetic(outline, (x, y), (held, truth), validation_x=held, validation_y=truth, columns=outline.columns)


def compare_votes(loaded: SettledRecipe, outline: data.Outline) -> list[Finding]:
    """Train teachers on neighbouring records with the same seeds, and return how far one record moved the votes."""
    settings = loaded.recipe.method
    assert isinstance(settings, PateMethod)
    teachers = settings.teachers.changed(count=_TEACHERS)
    method = settings.changed(teachers=teachers, queries=None)
    small, _ = smaller(loaded, 1, 1)
    recipe = small.recipe.changed(method=method, seed=small.recipe.seed or 0)
    small = dataclasses.replace(small, recipe=recipe)
    known = dataclasses.replace(
        outline, train_records=_VOTERS, files=(_VOTERS,), public_records=min(outline.public_records, _QUERIES)
    )
    plan = plan_of(small, known)
    assert isinstance(plan, VotingPlan) and plan.aggregation is not None
    seen: list[np.ndarray] = []
    for changed in range(1 + _TEACHERS):
        at = start([Member(small, plan)], override=DataOverride(_voters(known, changed)))
        assert isinstance(at.method, Pate)
        at.method.run_epoch(0)
        seen.append(at.method.votes[0].astype(float))
    moved = max(float(np.abs(one - seen[0]).sum(axis=1).max()) for one in seen[1:])
    cast = float(seen[0].sum(axis=1).max())
    return [
        # one teacher's vote goes from one class to another
        exact_finding("D", "votes", f"{moved:g} votes of a query moved at most", "at most 2", moved > 2),
        exact_finding("D", "voters", f"{cast:g} votes of {_TEACHERS} teachers", "as many", cast > _TEACHERS),
    ]


def _voters(outline: data.Outline, changed: int) -> data.Dataset:
    """Return random rows for teachers and queries.

    With `changed` above 0, that record (counted from 1) has the opposite features, scaled, and another label.
    """
    random = np.random.default_rng(5)
    shape, outputs = outline.input_shape, max(2, outline.outputs)

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.random((count, *shape), dtype=np.float32), random.integers(outputs, size=count)

    (x, y), test, public = rows(_VOTERS), rows(8), rows(outline.public_records)
    if changed:
        x[changed - 1], y[changed - 1] = -50 * x[changed - 1], (y[changed - 1] + 1) % outputs
    keys = Keys.of_places([_VOTERS + len(test[1])])
    outline = dataclasses.replace(outline, outputs=outputs)
    return synthetic(outline, (x, y), test, public_x=public[0], public_y=public[1], keys=keys)
