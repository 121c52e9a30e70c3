"""Private choices and teachers' votes, attacked by their distribution: the methods' own code, over many draws.

The attack counts one event on two worst-case neighbours.

Choices: one more record raises each score by at most D. Worst for one choice among n: all scores but one rise, so that
the one is chosen more often. Worst for many choices: half of the scores rise, so that each choice is as informative for
either outcome.

Votes: neighbours differ by one vote, which moves two counts by 1. The event is the label of a tie, or whether a query
at the edge of the rule's test is answered. Tier C checks on the trained method that a run has the ledger's noise.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from scipy import stats
from scipy.optimize import brentq
from scipy.special import ndtr

from dpsgd_cli import data
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, Mechanism, PureDP, Release
from dpsgd_cli.audit.claim import PrivacyClaim, bound_of
from dpsgd_cli.audit.findings import Finding, by_p_value, exact_finding
from dpsgd_cli.audit.stage import smaller, synthetic
from dpsgd_cli.audit.statistics import Errors, epsilon_of_errors, far_from
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.data.splits import Keys
from dpsgd_cli.methods.pate.price import VotingPlan
from dpsgd_cli.methods.pate.run import Pate
from dpsgd_cli.methods.pate.settings import PateMethod
from dpsgd_cli.methods.pate.votes import GAP, Aggregation, ConfidentMax, GaussianMax, LaplaceMax, StableMode
from dpsgd_cli.noise import selection
from dpsgd_cli.noise.run import laplace_of
from dpsgd_cli.noise.selection import NORMALS_PER_SCORE, NoisyChoice
from dpsgd_cli.recipe.loading import SettledRecipe
from dpsgd_cli.training.plans import plan_of
from dpsgd_cli.training.start import DataOverride, Member, start

_AT_ONCE = 1 << 23
_DELTA = 1e-9
_MOST_EPSILON = 50.0
_TEACHERS, _RECORDS, _QUERIES = 4, 16, 12
_ASKED, _WRONG = 4000, 1.5
_SURE = 20.0
"""Margin, in units of noise, of a count that always passes."""


@dataclass(frozen=True)
class Choosing:
    """Setting of an attack: the `kind` of choice, the number of `candidates`, and the `draws` on each neighbour."""

    kind: NoisyChoice
    candidates: int
    draws: int


def one_choice(mechanism: PureDP, choosing: Choosing, confidence: float) -> Finding:
    """Return the finding of tier A for one choice that is charged as `mechanism`.

    Under replace-one, scores may move both ways, and methods double D. In units of D the worst pair is unchanged.
    """
    errors = _errors(mechanism, choosing, 1)
    found = epsilon_of_errors(errors, _DELTA, confidence)
    counts = f"{errors.false_positives} and {errors.positives - errors.false_negatives} of {errors.positives} draws"
    return Finding(
        "A", "a choice", f"epsilon of one at least {found:.4f}: {counts} (of {choosing.candidates}, {choosing.kind})",
        f"at most {epsilon_text(mechanism.epsilon)}",
        lambda level: epsilon_of_errors(errors, _DELTA, level) > mechanism.epsilon,
    )  # fmt: skip


@dataclass(frozen=True)
class Whole:
    """The claim on `times` choices together."""

    times: int
    epsilon: float
    delta: float


def all_choices(mechanism: PureDP, choosing: Choosing, whole: Whole, confidence: float) -> Finding:
    """Return the finding of tier B for all choices of the exponential mechanism.

    The family of the claim has one epsilon for each choice, the same for all.
    """
    errors = _errors(mechanism, choosing, choosing.candidates // 2)
    share = choosing.candidates // 2 / choosing.candidates

    def bound(level: float) -> float:
        return composed(odds_ratio(errors, level), share, whole.times, whole.delta)

    return Finding(
        "B", "all choices", f"epsilon of {whole.times} at least {bound(confidence):.4f} ({2 * choosing.draws:,} draws)",
        f"at most {epsilon_text(whole.epsilon)}", lambda level: bound(level) > whole.epsilon,
        epsilon=bound(confidence),
    )  # fmt: skip


def odds_ratio(errors: Errors, confidence: float) -> float:
    """Return a lower bound on the log odds ratio of an event between two neighbours (its bounded range)."""
    positive, negative = errors.upper(confidence)
    if not (0 < positive < 1 and 0 < negative < 1):
        return 0.0
    return max(0.0, math.log((1 - negative) / negative) - math.log(positive / (1 - positive)))


def composed(epsilon: float, share: float, times: int, delta: float) -> float:
    """Return epsilon at `delta` > 0 of `times` events, whose odds are those of `share` or e^epsilon times those.

    The divergence is that of two binomials, computed exactly. The result is at most 50.

    >>> round(composed(1.0, 0.5, 1, 1e-3), 4), round(math.log((math.e / (1 + math.e) - 1e-3) / 0.5), 4)
    (0.3785, 0.3785)
    """
    odds = share / (1 - share) * math.exp(epsilon)
    number = range(times + 1)
    own, other = stats.binom.pmf(number, times, odds / (1 + odds)), stats.binom.pmf(number, times, share)

    def over(level: float) -> float:
        return float((own - math.exp(level) * other).clip(min=0.0).sum()) - delta

    if over(0.0) <= 0:
        return 0.0
    return _MOST_EPSILON if over(_MOST_EPSILON) > 0 else float(brentq(over, 0.0, _MOST_EPSILON, xtol=1e-6))


def _errors(mechanism: PureDP, choosing: Choosing, still: int) -> Errors:
    """Count how often one of the first `still` scores is chosen, if no score rises and if all others rise."""
    generator = torch.Generator().manual_seed(29)
    moved = torch.ones(choosing.candidates, dtype=torch.float64)
    moved[:still] = 0.0
    draw = partial(_first, mechanism.epsilon, choosing, generator)
    counts = [_in_pieces(draw, scores, still, choosing) for scores in (torch.zeros_like(moved), moved)]
    return Errors(counts[0], choosing.draws, choosing.draws - counts[1], choosing.draws)


def _in_pieces(draw: Callable[..., int], scores: torch.Tensor, still: int, choosing: Choosing) -> int:
    size = max(1, _AT_ONCE // (choosing.candidates * NORMALS_PER_SCORE[choosing.kind]))
    return sum(draw(scores, still, min(size, choosing.draws - done)) for done in range(0, choosing.draws, size))


def _first(
    epsilon: float, choosing: Choosing, generator: torch.Generator, scores: torch.Tensor, still: int, draws: int
) -> int:
    """Count how often one of the first `still` of `scores` is chosen; scores are in units of the sensitivity."""
    shape = (draws, len(scores), NORMALS_PER_SCORE[choosing.kind])
    normals = torch.randn(shape, dtype=torch.float64, generator=generator)
    both = torch.full((2, draws), 1.0, dtype=torch.float64)
    both[0] = epsilon
    chosen = selection.select_least(scores.repeat(draws, 1), both[0], both[1], choosing.kind, normals)
    return int((chosen < still).sum())


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


def attack_votes(
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
        found += _of_law(one, _errors_of_votes(rule, one, draws), plan, confidence)
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


def _errors_of_votes(rule: Aggregation, release: _Release, draws: int) -> Errors:
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
        at = start([Member(small, plan)], override=DataOverride(_voters(known, changed)))
        assert isinstance(at.method, Pate)
        at.method.run_epoch(0)
        seen.append(at.method.votes[0].astype(float))
        methods.append(at.method)
    moved = max(float(np.abs(one - seen[0]).sum(axis=1).max()) for one in seen[1:])
    cast = float(seen[0].sum(axis=1).max())
    return methods[0], [
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
    assert shape is not None

    def rows(count: int) -> tuple[np.ndarray, np.ndarray]:
        return random.random((count, *shape), dtype=np.float32), random.integers(outputs, size=count)

    (x, y), test, public = rows(_RECORDS), rows(8), rows(outline.public_records)
    if changed:
        x[changed - 1], y[changed - 1] = -50 * x[changed - 1], (y[changed - 1] + 1) % outputs
    keys = Keys.of_places([_RECORDS + len(test[1])])
    outline = dataclasses.replace(outline, outputs=outputs)
    return synthetic(outline, (x, y), test, public_x=public[0], public_y=public[1], keys=keys)
