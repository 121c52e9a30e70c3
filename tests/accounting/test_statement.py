"""What is stated where nobody names an accountant."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from dpsgd_cli.account import answers
from dpsgd_cli.account.cases import Numbers
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.rdp import Rdp
from dpsgd_cli.accounting.conversions import gaussian_epsilon
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.accounting.statement import BestAccountant, epsilon_at_least
from dpsgd_cli.errors import BudgetExceeded, UnsupportedMechanism

CASE = Numbers("poisson", "add-remove", 1e-5, noise_multiplier=4.0, sampling_rate=0.01, steps=250).case()


class Broken(Rdp):
    """An accountant whose numbers fail."""

    name = "broken"
    bound = "upper"
    note = ""

    def __init__(self, answer: float | Exception) -> None:
        super().__init__()
        self.answer = answer

    def epsilon(self, releases: Sequence[Release], delta: float) -> float:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.mark.parametrize("answer", [math.nan, OverflowError("too large"), ValueError("math domain error")])
def test_an_accountant_that_fails_is_a_refused_row_and_never_the_best(answer: float | Exception) -> None:
    row = answers.price(CASE, Broken(answer))
    assert row.epsilon is None
    assert row.note.startswith("refused: its numbers fail here")
    good = answers.price(CASE, accountants.get("rdp"))
    assert answers.ranked([row, good])[0] == good
    with pytest.raises(BudgetExceeded, match="no accountant asked proves a bound"):
        answers.check_gate([CASE], [row], 1e9)


def test_many_exponential_mechanisms_are_stated_by_their_divergences_and_few_by_their_losses() -> None:
    """eps^2/8-zCDP beats one dominating loss for all ranges from a few dozen uses on."""
    many, few = [Release(PureDP(0.1, "add-remove", "exponential"), n) for n in (100, 2)]
    assert BestAccountant().best([many], 1e-5) == (accountants.get("rdp").epsilon([many], 1e-5), "rdp")
    assert BestAccountant().best([many], 1e-5)[0] < 0.95 * accountants.get("pld").epsilon([many], 1e-5)
    assert BestAccountant().best([few], 1e-5)[1] == "pld"


def test_one_draw_of_fixed_size_is_stated_by_its_amplified_gaussian() -> None:
    once = [Release(GaussianSum(1.0, "replace-one", "fixed", 0.01))]
    epsilon, name = BestAccountant().best(once, 1e-6)
    assert name == "basic-composition"
    assert epsilon < accountants.get("rdp").epsilon(once, 1e-6)


def test_what_nobody_covers_is_refused_with_the_reasons_of_all() -> None:
    mixed = [Release(GaussianSum(1.0, "add-remove")), Release(GaussianSum(1.0, "zero-out"))]
    with pytest.raises(UnsupportedMechanism, match="different adjacencies"):
        BestAccountant().best(mixed, 1e-5)


def test_estimates_are_never_stated() -> None:
    """zcdp-rs estimates less than any bound here; the exact composition is above .9."""
    releases = [Release(GaussianSum(6.0, "add-remove", "poisson", 0.001), 10**4)]
    estimate = accountants.get("zcdp-rs").epsilon(releases, 1e-5)
    known = accountants.get("pld").epsilon(releases, 1e-5)
    assert BestAccountant(("zcdp-rs", "pld")).best(releases, 1e-5) == (known, "pld")
    assert BestAccountant(("zcdp-rs", "basic-composition")).best(releases, 1e-5)[0] > estimate


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("batches", [1, 10, 1000])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_the_lower_bound_of_shuffling_is_never_above_the_upper_one(noise: float, batches: int, delta: float) -> None:
    assert epsilon_at_least(noise, batches, delta) <= gaussian_epsilon(1 / noise, delta) * (1 + 1e-9)
