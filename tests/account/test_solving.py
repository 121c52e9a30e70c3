"""Solutions spend the budget and never pass it."""

from __future__ import annotations

import pytest

from dpsgd_cli.account.cases import FlagCase
from dpsgd_cli.account.solving import Target, solve
from dpsgd_cli.errors import InfeasibleBudget, UsageError
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.accountants.zcdp import total_rho

SHUFFLED = FlagCase("shuffle", "zero-out", 1e-5, epochs=100)


@pytest.mark.parametrize("rho", [1e-4, 0.3, 7.0])
def test_noise_for_rho(rho: float) -> None:
    found = solve(SHUFFLED, "noise-multiplier", Target(rho=rho), accountants.get("zcdp"))
    spent = total_rho(found.case.trials()[0])
    assert spent <= rho
    assert spent > rho * (1 - 1e-5)


@pytest.mark.parametrize("epsilon", [0.5, 3.0, 40.0])
def test_most_epochs_for_epsilon(epsilon: float) -> None:
    gaussian = accountants.get("gaussian")
    case = FlagCase("shuffle", "zero-out", 1e-5, noise_multiplier=20.0)
    found = solve(case, "epochs", Target(epsilon=epsilon), gaussian)
    assert gaussian.epsilon(found.case.trials()[0], 1e-5) <= epsilon
    assert gaussian.epsilon(case.with_value("epochs", found.value + 1).trials()[0], 1e-5) > epsilon


def test_what_cannot_be_solved_is_said() -> None:
    gaussian = accountants.get("gaussian")
    loud = FlagCase("shuffle", "zero-out", 1e-5, noise_multiplier=0.5)
    with pytest.raises(InfeasibleBudget, match="not one of the epochs fits"):
        solve(loud, "epochs", Target(epsilon=1.0), gaussian)
    with pytest.raises(InfeasibleBudget, match="nothing limits them"):
        solve(FlagCase("shuffle", "zero-out", 1e-5, noise_multiplier=1e90), "epochs", Target(epsilon=1.0), gaussian)
    with pytest.raises(UsageError, match="cannot solve for decay here; one of: noise-multiplier, epochs"):
        solve(SHUFFLED, "decay", Target(epsilon=1.0), gaussian)
    with pytest.raises(UsageError, match="give a budget"):
        solve(SHUFFLED, "noise-multiplier", Target(), gaussian)
