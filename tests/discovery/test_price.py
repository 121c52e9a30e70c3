"""What private bounds and categories cost: expected values by SciPy and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom, chi2, norm

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import Gaussian
from dpsgd_cli.accounting.adjacency import Adjacency
from dpsgd_cli.accounting.budget import EpsilonBudget, RhoBudget, enforce, mu_squared_left, over_budget
from dpsgd_cli.accounting.groups import of_group
from dpsgd_cli.accounting.mechanism import GaussianSum, Release, Threshold
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.discover import Discover
from dpsgd_cli.data.preparation import shares_of
from dpsgd_cli.discovery import price
from dpsgd_cli.discovery.run import CELLS, Counts, Found, code
from dpsgd_cli.discovery.settings import Discovery
from dpsgd_cli.engine.streams import SecureStreams
from dpsgd_cli.errors import BudgetExceeded, InfeasibleBudget, PrivacyError, UnsupportedMechanism
from dpsgd_cli.noise.run import Grid, gaussian

ADJACENCIES: tuple[Adjacency, ...] = ("add-remove", "replace-one", "zero-out")
LAYOUT = Layout(
    (4,),
    (
        Column("income", private="bounds"),
        Column("age", private="bounds"),
        Column("job", private="categories"),
        Column("town", private="categories"),
    ),
)
KINDS = {"income": False, "age": False, "job": True, "town": True}
HARD = [
    *[
        (number, number, code("new"), code("new"))
        for number in (0.0, -1e300, 1e300, 5e-324, math.inf, math.nan, 2.0**40)
    ],
    (7.0, -7.0, code("a"), code("b")),
    (math.nan, math.nan, math.nan, math.nan),
    (1.0, 2.0, code("a"), math.nan),
]
"""Records that are hard to count once."""


def step(adjacency: Adjacency = "add-remove", noise: float = 5.0, delta: float = 0.01) -> Discover:
    return Discover(Discovery(noise_multiplier=noise, delta=delta), adjacency, KINDS, 1)


def counted(rows: np.ndarray, adjacency: Adjacency = "add-remove") -> dict[object, float]:
    """All counts of rows, by column and cell or category."""
    return by_place(step(adjacency).counts(rows, LAYOUT))


def by_place(made: Counts) -> dict[object, float]:
    found: dict[object, float] = {(name, cell): n for name, own in made.numbers.items() for cell, n in enumerate(own)}
    for name, (counts, texts) in made.codes.items():
        found |= {(name, text): n for text, n in zip(texts, counts.tolist(), strict=True)}
    return found


def apart(one: dict[object, float], other: dict[object, float]) -> float:
    return math.sqrt(sum((one.get(key, 0) - other.get(key, 0)) ** 2 for key in one.keys() | other.keys()))


@pytest.mark.parametrize(("adjacency", "most"), [("add-remove", 2.0), ("zero-out", 2.0), ("replace-one", 8**0.5)])
def test_a_record_moves_the_counts_of_four_columns_by_this_much_and_no_more(adjacency: Adjacency, most: float) -> None:
    others = np.array([(1.0, 2.0, code("a"), code("b"))] * 3)
    sets = [counted(np.vstack([others, record])) for record in HARD]
    neighbours = sets if adjacency == "replace-one" else [counted(others)]
    largest = max(apart(one, other) for one in sets for other in neighbours)
    assert price.sensitivity(adjacency, 4) == pytest.approx(most, rel=1e-15)
    assert largest == pytest.approx(most, rel=1e-15)
    release = step(adjacency).release
    assert release is not None and release.sensitivity == pytest.approx(most, rel=1e-15)


@pytest.mark.parametrize(("adjacency", "most"), [("add-remove", 2.0), ("replace-one", 8**0.5)])
def test_a_user_with_three_rows_moves_the_counts_no_further_than_a_record(adjacency: Adjacency, most: float) -> None:
    """Users have one hard row, three of them, three different ones, or five, of which three are used."""
    others = [(1.0, 2.0, code("a"), code("b"))] * 3
    users = [[one] * times for one in HARD for times in (1, 3)]
    users += [[HARD[0], HARD[1], HARD[7]], [HARD[8], HARD[0], HARD[7]], [HARD[0], HARD[0], HARD[0], HARD[1], HARD[1]]]
    made = Discover(Discovery(noise_multiplier=5.0, delta=0.01), adjacency, KINDS, most_rows=3)

    def of(own: Sequence[tuple[float, ...]]) -> dict[object, float]:
        rows, keys = np.array([*others, *own]), [0, 1, 2, *[9] * len(own)]
        counts = made.counts(rows, LAYOUT, shares_of(np.array(keys), 3))
        found: dict[object, float] = {
            (name, cell): n for name, held in counts.numbers.items() for cell, n in enumerate(held)
        }
        for name, (held, texts) in counts.codes.items():
            found |= {(name, text): n for text, n in zip(texts, held.tolist(), strict=True)}
        return found

    sets = [of(own) for own in users]
    neighbours = sets if adjacency == "replace-one" else [of([])]
    assert max(apart(one, other) for one in sets for other in neighbours) == pytest.approx(most, rel=1e-15)
    release = made.release
    assert release is not None and release.sensitivity == pytest.approx(most, rel=1e-15)


@pytest.mark.parametrize("scale", [0.01, 40.0])
@pytest.mark.parametrize(("delta", "categorical", "rows"), [(1e-2, 1, 1), (1e-6, 50, 1), (1e-12, 3, 1), (1e-6, 2, 20)])
def test_a_category_of_one_record_passes_with_at_most_its_share_of_delta(
    scale: float, delta: float, categorical: int, rows: int
) -> None:
    """By SciPy's normal, at the largest noise that the grid of a billion records may have; a user has several."""
    found = price.threshold(scale, delta, categorical, rows)
    raised = Grid.of(10**6, 10**9, [scale]).raised
    named = norm.sf((found - 1) / (scale * raised))
    assert categorical * rows * named <= delta
    assert found - 1 <= 1.03 * scale * norm.isf(delta / (categorical * rows))


def release_many(make: Callable[[int], Found], times: int) -> int:
    """How often the category that one record has is named."""
    return sum("alone" in make(number).categories["job"] for number in range(times))


def of_one_record(settings: Discovery, own: int = 1, used: int = 1, weighed: bool = True) -> Callable[[int], Found]:
    """Releases of 30 records with a category in common, and one user whose `own` rows have theirs; without a seed.

    At most `used` of them count: as one together, if they are `weighed`.
    """
    texts = {code(text): text for text in ("common", "alone")}
    made = Discover(settings, "add-remove", {"job": True}, used)
    made.texts = {"job": texts}
    layout = Layout((1,), (Column("job", private="categories"),))
    rows = np.array([[code("common")]] * 30 + [[code("alone")]] * own)
    shares = shares_of(np.minimum(np.arange(len(rows)), 30), used) if weighed else np.ones(len(rows))
    learn, stream, mechanism = made.learn(rows, layout, shares), SecureStreams(), made.release
    assert mechanism is not None

    def release(number: int) -> Found:
        return Found.from_array(learn(lambda exact: gaussian(stream, "preprocess-0", number, exact, mechanism, 31)))

    return release


def test_an_attack_on_a_category_of_one_record_wins_no_more_often_than_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    """False failures: once in a million runs. Without the threshold the same attack wins half of the time."""
    times, settings = 4000, Discovery(noise_multiplier=3.0, delta=0.01)
    won = release_many(of_one_record(settings), times)
    assert won <= binom.isf(1e-6, times, 0.01)
    assert won >= binom.ppf(1e-6, times, 0.007)
    monkeypatch.setattr(price, "threshold", lambda *_: 1.0)
    assert release_many(of_one_record(settings), 300) > binom.isf(1e-6, 300, 0.01)


def test_an_attack_on_a_category_of_one_user_wins_no_more_often_than_its_share_of_delta() -> None:
    """False failures: once in a million runs. Rows that count in full win far more often."""
    times, settings = 1500, Discovery(noise_multiplier=3.0, delta=0.01)
    assert release_many(of_one_record(settings, own=7, used=4), times) <= binom.isf(1e-6, times, 0.01 / 4)
    assert release_many(of_one_record(settings, own=7, used=4, weighed=False), 400) > binom.isf(1e-6, 400, 0.01 / 4)


@pytest.mark.parametrize("planted", [1.0, 0.9])
def test_the_noise_is_the_one_that_is_charged_in_every_count(planted: float) -> None:
    """By chi-squared, at a false-failure rate of 1e-9; noise of nine tenths is refuted."""
    made, rows = step(noise=5.0), np.array([HARD[7]] * 5)
    seen: list[np.ndarray] = []
    mechanism, stream = made.release, SecureStreams()
    assert mechanism is not None

    def noised(exact: np.ndarray) -> np.ndarray:
        seen.append(planted * (gaussian(stream, "preprocess-0", 0, exact, mechanism, 5) - exact))
        return exact

    for _ in range(4):
        made.learn(rows, LAYOUT)(noised)
    noise = np.concatenate(seen) / (5.0 * 2.0)
    assert len(noise) == 4 * (2 * CELLS + 2)
    assert (chi2.cdf(np.square(noise).sum(), len(noise)) > 1e-9) == (planted == 1.0)


def test_a_threshold_counts_on_the_noise_that_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of noise multiplier 5 and four columns, whose counts a record moves by 2."""
    seen: list[float] = []

    def threshold(scale: float, *others: object) -> float:
        seen.append(scale)
        return 1e9

    monkeypatch.setattr("dpsgd_cli.discovery.price.threshold", threshold)
    step(noise=5.0).learn(np.array([HARD[7]]), LAYOUT)(lambda exact: exact)
    assert seen == [10.0]


def test_two_releases_are_charged_and_each_by_its_own_number() -> None:
    assert step("zero-out", 5.0, 1e-6).releases == (
        GaussianSum(5.0, "zero-out", sensitivity=2.0, label="discovery"),
        Threshold(0.0, 1e-6, "zero-out", "categories"),
    )
    numbers = Discover(Discovery(noise_multiplier=5.0, delta=1e-6), "add-remove", {"income": False}, 1)
    assert numbers.releases == (GaussianSum(5.0, "add-remove", sensitivity=1.0, label="discovery"),)


def test_a_threshold_is_within_delta_and_the_rest_of_the_budget_is_for_what_is_left_of_delta() -> None:
    """Expected: Balle and Wang 2018, Theorem 8, at delta less the threshold's."""
    budget, named = EpsilonBudget(epsilon=1.0, delta=1e-5), Release(Threshold(0.0, 2e-6, "add-remove"))
    mu = brentq(lambda m: norm.cdf(m / 2 - 1 / m) - math.e * norm.cdf(-m / 2 - 1 / m) - 8e-6, 0.01, 1)
    assert mu_squared_left(budget, [named]) == pytest.approx(mu**2, rel=1e-6)
    assert mu_squared_left(budget, [named]) < mu**2 < mu_squared_left(budget, [])
    fits, too_much = (Release(GaussianSum(z / mu, "add-remove")) for z in (1.0001, 0.9999))
    for one, sign in ((fits, -1), (too_much, 1)):
        assert over_budget(budget, Gaussian(), [named, one]) * sign > 0
        filter_ = enforce(budget, Gaussian(), [named, one])
        filter_.admit(named)
        with pytest.raises(BudgetExceeded):
            filter_.admit(named)
        if sign > 0:
            with pytest.raises(BudgetExceeded):
                filter_.admit(one)
        else:
            filter_.admit(one)
    assert accountants.get("gaussian").epsilon([named, fits], 1e-5) == pytest.approx(1.0, rel=1e-3)
    with pytest.raises(InfeasibleBudget, match="alone spend the budget's delta"):
        mu_squared_left(budget, [Release(Threshold(0.0, 1e-5, "add-remove"))])
    assert over_budget(RhoBudget(rho=1.0), Gaussian(), [named]) == math.inf


def test_epsilon_by_epoch_counts_the_threshold_from_its_epoch_on() -> None:
    named, step_ = Release(Threshold(0.0, 2e-6, "add-remove")), Release(GaussianSum(9.0, "add-remove"))
    priced = Gaussian()
    curve = priced.curve([[step_], [named, step_], [step_]], 1e-5)
    released = [step_, named, step_, step_]
    assert curve == [priced.epsilon(released[:end], 1e-5) for end in (1, 3, 4)]
    assert priced.curve([[named]], 1e-6) == [math.inf]


def test_nothing_is_said_of_a_group_which_may_have_a_category_to_itself() -> None:
    """Five records with a category of their own are named far more often than five times delta."""
    settings = Discovery(noise_multiplier=3.0, delta=0.01)
    together = norm.sf((price.threshold(3.0, 0.01, 1, 1) - 5) / 3.0)
    assert together > 5 * 0.01
    assert settings.delta == 0.01
    with pytest.raises(UnsupportedMechanism, match="a group of 5 may have one to itself"):
        of_group(Threshold(0.0, 0.01, "add-remove"), 5)


def test_a_threshold_has_no_epsilon() -> None:
    with pytest.raises(PrivacyError, match=r"epsilon is 0\.1"):
        Threshold(0.1, 1e-6, "add-remove")


def test_noise_that_is_too_coarse_for_the_margin_is_refused() -> None:
    counts = Counts({}, {"job": (np.zeros(10), [str(n) for n in range(10)])}, 1)
    with pytest.raises(ValueError, match="too coarse"):
        counts.released(lambda exact: exact, Discovery.model_construct(noise_multiplier=3e10, delta=0.01), 1)
