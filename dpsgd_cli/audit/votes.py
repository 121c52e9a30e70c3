"""Attacks on teachers' votes: how far one record moves them, and what is released of worst-case counts, many times.

The method's own rule releases results from counts, with the noise that its ledger charges for. Neighbours differ by one
vote, which moves two counts by 1. The attack counts one event: the label of a tie, or whether a query at the edge of
the rule's test is answered. Tier C checks on the trained method that a run has this noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from dpsgd_cli import data
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, Release
from dpsgd_cli.audit.claim import PrivacyClaim, bound_of
from dpsgd_cli.audit.findings import Finding, by_p_value, exact
from dpsgd_cli.audit.stage import smaller
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors, far_from
from dpsgd_cli.common.rounding import epsilon_text
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.methods.pate.price import VotingPlan
from dpsgd_cli.methods.pate.run import Pate
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.methods.pate.votes import GAP, Aggregation, ConfidentMax, GaussianMax, LaplaceMax, StableMode
from dpsgd_cli.noise.run import laplace_of
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import Member, Stage, start

_DELTA = 1e-9
_TEACHERS, _RECORDS, _QUERIES = 4, 16, 12
_ASKED, _WRONG = 4000, 1.5
_SURE = 20.0
"""Margin, in units of noise, of a count that always passes."""


@dataclass(frozen=True)
class _Release:
    """A release from counts, and the event that attacks it: the query is answered (`answered`), or its label is 0.

    - `edge` (2, K): counts of the worst neighbours.
    - `apart` (K,): counts at which only the noise decides the event's probability.
    - `rate`: that probability, given the noise as a multiple of the ledger's.
    """

    name: str
    told: str
    mechanism: Mechanism
    answered: bool
    edge: np.ndarray
    apart: np.ndarray
    rate: Callable[[float], float]

    def of(self, found: np.ndarray) -> np.ndarray:
        return (found >= 0) if self.answered else (found == 0)


def attack(
    loaded: SettledRecipe, outline: data.Outline, plan: VotingPlan, draws: int, confidence: float
) -> list[Finding]:
    """Return the findings on votes moved by one record, on `draws` of each release (0: none), and on a run's noise."""
    method, found = _moved_votes(loaded, outline)
    rule, adjacency = plan.aggregation, plan.sampling.adjacency
    assert rule is not None
    if not draws:
        return found
    made = _releases(rule, rule.answered(adjacency), rule.asked(adjacency), max(2, outline.outputs))
    for one in made:
        found += _of_law(one, _errors(rule, one, draws), plan, confidence)
    # last, because it replaces the method's plan
    return [*found, *(_as_run(method, plan, one) for one in made)]


def _releases(rule: Aggregation, label: Mechanism | None, test: Mechanism | None, classes: int) -> list[_Release]:
    found = []
    if isinstance(rule, LaplaceMax | GaussianMax) and label is not None:
        laplace = isinstance(rule, LaplaceMax)
        noise = rule.scale if isinstance(rule, LaplaceMax) else rule.noise
        top = _SURE * (1 + noise)
        if isinstance(rule, ConfidentMax):
            top += rule.test.threshold + _SURE * rule.test.threshold_noise
        gap = noise if laplace else math.sqrt(2) * noise
        # for the difference of two Laplace or two normal numbers
        rate = _two_laplace if laplace else _one_normal
        tie = _counts(classes, (top, top), (top + 1, top - 1))
        found.append(
            _Release("a vote", "the label of a tie", label, False, tie, _counts(classes, (top + gap, top))[0], rate)
        )
    if isinstance(rule, ConfidentMax) and test is not None:
        passed, noise = max(1.0, rule.test.threshold), rule.test.threshold_noise
        edge, apart = _counts(classes, (passed, 1), (passed + 1, 0)), _counts(classes, (passed + noise, 0))[0]
        found.append(_Release("an answer", "at the threshold", test, True, edge, apart, _one_normal))
    if isinstance(rule, StableMode) and test is not None:
        lead = GAP / rule.settings.epsilon
        edge = _counts(classes, (math.floor(rule.bar), 1), (math.floor(rule.bar) + 1, 0))
        apart = _counts(classes, (rule.bar + lead, 0))[0]
        found.append(_Release("an answer", "at the edge of the test", test, True, edge, apart, _one_laplace))
    return found


def _counts(classes: int, *firsts: tuple[float, float]) -> np.ndarray:
    """Return counts (n, K), all 0 except the first two of each row."""
    counts = np.zeros((len(firsts), classes))
    counts[:, :2] = firsts
    return counts


def _one_normal(scale: float) -> float:
    """Return P[Z < 1] for a normal number of standard deviation `scale`."""
    return float(ndtr(1 / scale))


def _one_laplace(scale: float) -> float:
    return 1 - math.exp(-1 / scale) / 2


def _two_laplace(scale: float) -> float:
    """Return P[Z <= g] for the sum Z of two Laplace numbers of scale b, with b / g = `scale`.

    P[Z > g] = (2 + g / b) e^(-g / b) / 4.
    """
    return 1 - (2 + 1 / scale) * math.exp(-1 / scale) / 4


def _errors(rule: Aggregation, release: _Release, draws: int) -> Errors:
    """Count how often the event happens on either neighbour."""
    noise = FloatNoise(np.random.default_rng(31))
    asked = rule.accepts if release.answered else lambda counts, noise: rule.label(counts, noise) == 0
    seen = [sum(bool(asked(counts, noise)) for _ in range(draws)) for counts in release.edge]
    return Errors(seen[0], draws, draws - seen[1], draws)


@dataclass(frozen=True)
class FloatNoise:
    """Floating-point noise on votes: fast, for attacks only."""

    random: np.random.Generator

    def gaussian(self, purpose: str, exact: np.ndarray, mechanism: GaussianSum) -> np.ndarray:
        del purpose
        scale = mechanism.noise_multiplier * mechanism.sensitivity
        return np.asarray(exact + scale * self.random.standard_normal(exact.shape))

    def laplace(self, purpose: str, exact: np.ndarray, epsilon: float, sensitivity: float, changed: int) -> np.ndarray:
        del purpose, changed
        return np.asarray(exact + sensitivity / epsilon * laplace_of(self.random.standard_normal((*exact.shape, 4))))


def _as_run(method: Pate, plan: VotingPlan, release: _Release) -> Finding:
    """Check how often the event happens in the trained method with its own random streams (tier C).

    The plan is replaced by one without a limit, so that the ledger does not stop the many queries.
    """
    free = dataclasses.replace(plan, queries=_ASKED, answers=_ASKED, is_adaptive=False, epochs=((),), most=None)
    method.plans = [free]
    count = int(release.of(method.answer(0, free, np.repeat(release.apart[None], _ASKED, axis=0))).sum())
    rate, wrong = release.rate(1.0), release.rate(_WRONG)
    return by_p_value(
        "C", f"noise of {release.name}", (f"{count / _ASKED:.4f} of {_ASKED:,} as with it", f"{rate:.4f}"),
        far_from(count, _ASKED, rate), far_from(count, _ASKED, wrong),
    )  # fmt: skip


def _of_law(release: _Release, errors: Errors, plan: VotingPlan, confidence: float) -> Iterator[Finding]:
    """Yield findings on one release, and on all that the plan allows if all have the same kind of noise."""
    name, told, mechanism = release.name, release.told, release.mechanism
    if isinstance(mechanism, PureDP | ApproximateDP):
        delta = getattr(mechanism, "delta", _DELTA)
        alone = epsilon_of_errors(errors, delta, confidence)
        yield Finding(
            "A", name, f"epsilon of one at least {alone:.4f} ({told})", f"at most {epsilon_text(mechanism.epsilon)}",
            lambda level: epsilon_of_errors(errors, delta, level) > mechanism.epsilon,
        )  # fmt: skip
    if isinstance(mechanism, GaussianSum):
        claim = PrivacyClaim((Release(mechanism),), math.inf, plan.delta)
        stands, whole = claim.standing(errors, confidence), _whole(plan)
        found, bound = f"epsilon of one at least {bound_of(stands):.4f} ({told})", None
        if whole is not None:
            noise = math.inf if stands is None else stands.first.noise_multiplier / mechanism.noise_multiplier
            bound = 0.0 if stands is None else whole.member(noise).own_epsilon
            found += f"; of the whole, if all have its noise, at least {bound:.4f}"
        yield Finding(
            "B", name, found, f"at most {epsilon_text(claim.own_epsilon)}",
            lambda level: claim.refuted_by(errors, level), epsilon=bound,
        )  # fmt: skip


def _whole(plan: VotingPlan) -> PrivacyClaim | None:
    """Return the claim on all that votes may release, if it is Gaussian; else None."""
    made = plan.releases if plan.budget_cap is None else [Release(plan.budget_cap)]
    if not made or not all(isinstance(one.mechanism, GaussianSum) for one in made):
        return None
    return PrivacyClaim(tuple(made), plan.guarantee().epsilon, plan.delta)


def _moved_votes(loaded: SettledRecipe, outline: data.Outline) -> tuple[Pate, list[Finding]]:
    """Train teachers on neighbouring records with the same seeds (tier D); return a trained method and the findings."""
    settings = loaded.recipe.method
    assert isinstance(settings, PateMethod) and outline.input_shape is not None
    teachers = settings.teachers.changed(count=_TEACHERS)
    method = settings.changed(teachers=teachers, queries=None)
    small, _ = smaller(loaded, 1, 1)
    recipe = small.recipe.changed(method=method, seed=small.recipe.seed or 0)
    small = dataclasses.replace(small, recipe=recipe)
    known = dataclasses.replace(
        outline, train_records=_RECORDS, files=(_RECORDS,), public_records=min(outline.public_records, _QUERIES)
    )
    plan = plan_of(small, known)
    assert isinstance(plan, VotingPlan) and plan.aggregation is not None
    seen: list[np.ndarray] = []
    methods: list[Pate] = []
    for changed in range(1 + _TEACHERS):
        at = start([Member(small, plan)], stage=Stage(_voters(known, changed)))
        assert isinstance(at.method, Pate)
        at.method.run_epoch(0)
        seen.append(at.method.votes[0].astype(float))
        methods.append(at.method)
    moved = max(float(np.abs(one - seen[0]).sum(axis=1).max()) for one in seen[1:])
    allowed = 2.0  # one teacher's vote goes from one class to another
    cast = float(seen[0].sum(axis=1).max())
    return methods[0], [
        exact("D", "votes", f"{moved:g} votes of a query moved at most", f"at most {allowed:g}", moved > allowed),
        exact("D", "voters", f"{cast:g} votes of {_TEACHERS} teachers", "as many", cast > _TEACHERS),
    ]


def _voters(outline: data.Outline, changed: int) -> data.Dataset:
    """Return random rows for teachers and queries.

    With `changed` above 0, that record (counted from 1) has the opposite features, scaled, and another label.
    """
    random = np.random.default_rng(5)
    shape, outputs = outline.input_shape, max(2, outline.outputs)
    assert shape is not None

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.random((count, *shape), dtype=np.float32), random.integers(outputs, size=count)

    (x, y), test, public = rows(_RECORDS), rows(8), rows(outline.public_records)
    if changed:
        x[changed - 1], y[changed - 1] = -50 * x[changed - 1], (y[changed - 1] + 1) % outputs
    return data.Dataset(
        outline.name, x, y, *test, False, tuple(range(outputs)), (), (), {}, norm_bound=outline.norm_bound,
        public_x=public[0], public_y=public[1], keys=Keys.of_places([_RECORDS + len(test[1])]),
    )  # fmt: skip
