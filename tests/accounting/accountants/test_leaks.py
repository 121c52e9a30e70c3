"""What (epsilon, delta)-DP releases cost beside others, by every accountant that takes them."""

from __future__ import annotations

import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import ApproximateDP, GaussianSum, PureDP, Release

LEAK = 1 - (1 - 2e-6) ** 3
GAUSSIANS = {
    "full": Release(GaussianSum(200.0, "add-remove"), 2),
    "poisson": Release(GaussianSum(12.0, "add-remove", "poisson", 0.005), 50),
}
COVERED = [
    *((name, "full") for name in ("basic-composition", "advanced-composition", "gaussian", "rdp", "pld", "zcdp")),
    *((name, "full") for name in ("zcdp-tight", "strong-composition", "strong-composition-published")),
    *((name, "poisson") for name in ("basic-composition", "advanced-composition", "moments", "rdp", "rdp-markov")),
    *((name, "poisson") for name in ("pld", "zcdp-rs", "strong-composition", "strong-composition-published")),
]


@pytest.mark.parametrize(("name", "batching"), COVERED)
def test_a_leak_is_taken_from_delta_once(name: str, batching: str) -> None:
    """An (epsilon, delta)-DP release is pure but for telling all with probability delta (Kairouz, Oh and Viswanath
    2017): three of them leave delta - (1 - (1 - delta_1)^3) to the pure ones, and add as much to their delta."""
    accountant, others = accountants.get(name), GAUSSIANS[batching]
    leaky = [Release(ApproximateDP(0.005, 2e-6, "add-remove"), 3), others]
    pure = [Release(PureDP(0.005, "add-remove"), 3), others]
    stated = accountant.epsilon(leaky, 1e-5)
    assert stated == pytest.approx(accountant.epsilon(pure, 1e-5 - LEAK), rel=1e-4)
    assert stated > accountant.epsilon(pure, 1e-5) * (1 + 1e-3)
    assert accountant.delta(leaky, stated) == pytest.approx(1e-5, rel=1e-2)
    assert accountant.delta(leaky, stated) == pytest.approx(LEAK + accountant.delta(pure, stated), rel=1e-2)
    assert accountant.delta(leaky, 100.0) >= LEAK
