"""Cases from flags: how steps, epochs and batches become releases."""

from __future__ import annotations

import dataclasses

import pytest

from dpsgd_cli.account.cases import FlagCase
from dpsgd_cli.accounting.mechanism import GaussianSum, merge
from dpsgd_cli.errors import UsageError

POISSON = FlagCase("poisson", "add-remove", 1e-5, noise_multiplier=4.0, sampling_rate=0.01, steps=250)


def test_epochs_add_up_to_all_steps() -> None:
    epochs = POISSON.by_epoch()
    assert [releases[0].count for releases in epochs] == [100, 100, 50]
    assert merge([release for releases in epochs for release in releases]) == merge(POISSON.trials()[0])
    assert POISSON.noise_multipliers() == [4.0, 4.0, 4.0]


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 100), (0.3, 4), (1.0, 1), (1 / 235, 235)])
def test_an_epoch_has_as_many_batches_as_it_takes(rate: float, steps: int) -> None:
    case = FlagCase("poisson", "add-remove", 1e-5, 4.0, rate, epochs=3)
    assert case.uses == 3 * steps


def test_shuffled_batches_count_epochs() -> None:
    case = FlagCase("shuffle", "zero-out", 1e-5, 4.0, 0.01, steps=250)
    assert case.uses == 3
    assert case.release(case.uses).mechanism.adjacency == "zero-out"
    with pytest.raises(UsageError, match="counted by epochs"):
        _ = dataclasses.replace(case, sampling_rate=None).uses


def test_what_is_free() -> None:
    assert dataclasses.replace(POISSON, noise_multiplier=None).free() == "noise-multiplier"
    assert dataclasses.replace(POISSON, steps=None).free() == "steps"
    assert dataclasses.replace(POISSON, steps=None, batching="full").free() == "epochs"
    assert POISSON.free() is None


def test_another_value_of_a_parameter() -> None:
    louder = POISSON.with_value("noise-multiplier", 5).trials()[0][0].mechanism
    assert louder == GaussianSum(5.0, "add-remove", "poisson", 0.01)
    assert POISSON.with_value("epochs", 7).trials()[0][0].count == 700
    assert POISSON.with_value("delta", 1e-7).delta == 1e-7
    with pytest.raises(UsageError, match="no parameter of constant noise"):
        POISSON.with_value("decay", 0.1)


def test_trials_together_are_that_many_times_the_uses() -> None:
    case = POISSON.repeated(3)
    assert case.trials()[0][0].count == 750
    assert case.trials()[0][0].count == 750
    assert [releases[0].count for releases in case.by_epoch()] == [300, 300, 150]
    assert case.with_value("steps", 10).trials()[0][0].count == 30
    assert "3 trials together" in case.subject


def test_a_curve_of_millions_of_epochs_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        dataclasses.replace(POISSON, steps=10**10).by_epoch()
