"""Every figure beside a price is of what was priced: closed forms and exact attacks, which no bound may be below."""

from __future__ import annotations

import csv
import io
import json
import math

import mpmath
import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.groups import splits_of
from dpsgd_cli.accounting.mechanism import GaussianSum, PureDP, Release
from dpsgd_cli.accounting.statement import LEAST_DELTA, Composition
from dpsgd_cli.errors import UnsupportedMechanism
from tests.cli.accounting import rows, run
from tests.conftest import Train, WriteRecipe

SAMPLED = ["--noise-multiplier", "1", "--sampling-rate", "0.01", "--steps", "1000"]
FULL = ["--batching", "full", "--noise-multiplier", "1", "--steps", "1"]
RATES = ("true_positives_at_0.01", "true_positives_at_0.001")


@pytest.mark.parametrize(
    ("asked", "exact"),
    [
        (["--group", "5", "--accountant", "pld"], (0.384, 0.154)),
        (["--group", "10", "--accountant", "pld"], (0.935, 0.7925)),
        (["--best-of", "10"], (0.0395, 0.00545)),
    ],
)
def test_no_attack_beside_a_price_is_below_an_exact_one(asked: list[str], exact: tuple[float, float]) -> None:
    """Attacks on a group, and on the best of 10 (geometric; the score is the loss), by their likelihood ratios."""
    (found,) = rows(*SAMPLED, *asked, "--attacker").values()
    assert all(found[rate] >= least for rate, least in zip(RATES, exact, strict=True))
    if "--group" in asked:
        assert all(found[rate] <= least + 0.002 for rate, least in zip(RATES, exact, strict=True))


def test_a_group_of_ten_has_ten_times_the_mu_and_a_hundred_times_the_rho() -> None:
    """Dong, Roth and Su 2022, Theorem 2.14; Bun and Steinke 2016, Proposition 1.9."""
    found = rows(*FULL, "--group", "10", "--attacker", "--accountant", "gaussian")["gaussian"]
    assert found["mu"] == pytest.approx(10) and found["rho"] == pytest.approx(50)


def test_no_rho_is_stated_of_a_best_of_several() -> None:
    """Of order 2 it needs 1.642, where rho .5 of one trial allows 1."""
    assert rows(*FULL, "--best-of", "10")["rdp"]["rho"] is None
    assert "rho" not in run(*FULL, "--best-of", "10").stdout
    assert "rho" not in run(*FULL, "--best-of", "10", "--curve").stdout
    told = run("--batching", "full", "--steps", "1", "--best-of", "10", "--target-rho", "0.5")
    assert (told.exit_code, "no rho is proved" in told.stderr) == (2, True)


def test_a_best_of_several_in_a_group_is_priced_for_the_group() -> None:
    """At least one trial of a group of five, which is 5-Gaussian-DP."""
    found = rows(*FULL, "--best-of", "10", "--group", "5")["rdp"]["epsilon"]
    assert found > rows(*FULL, "--group", "5", "--accountant", "gaussian")["gaussian"]["epsilon"]


def test_a_gaussian_is_never_pure() -> None:
    """At z 10 and epsilon 5 delta is 4e-546, and no accountant may state 0. A pure release of epsilon 1 has delta 0."""
    with mpmath.workdps(30):
        assert 0 < mpmath.ncdf(-49.95) - mpmath.exp(5) * mpmath.ncdf(-50.05) < mpmath.mpf(10) ** -500
    at = ["--batching", "full", "--noise-multiplier", "10", "--steps", "1", "--at-epsilon", "5"]
    assert all(row["delta"] > 0 for row in rows(*at).values() if row["epsilon"] is not None)
    pure = Composition.of([[[Release(PureDP(1.0, "add-remove"))]]])
    gaussian = Composition.of([[[Release(GaussianSum(10.0, "add-remove"))]]])
    for name in ("pld", "rdp", "zcdp", "gaussian"):
        assert gaussian.delta(accountants.get(name), 5.0) >= LEAST_DELTA > 0
    assert pure.delta(accountants.get("pld"), 1.0) == 0


def test_noise_in_units_of_the_clip_norm_is_what_others_call_the_multiplier() -> None:
    """Full batches of noise 5 C under replace-one move by 2 C: z 2.5, and 25 steps are 2-Gaussian-DP."""
    full = ["--batching", "full", "--steps", "25", "--adjacency", "replace-one", "--accountant", "gaussian"]
    over_clip = rows(*full, "--noise-over-clip", "5")["gaussian"]
    assert over_clip["epsilon"] == pytest.approx(9.9973, abs=1e-4) and over_clip["noise_multiplier"] == 2.5
    by_sensitivity = rows(*full, "--noise-multiplier", "5")["gaussian"]
    assert by_sensitivity["epsilon"] == pytest.approx(4.3772, abs=1e-4) and by_sensitivity["noise_over_clip"] == 10
    assert "z 5 (noise 10 C)" in run(*full, "--noise-multiplier", "5").stdout
    fixed = ["--batching", "fixed", "--batch-size", "256", "--records", "60000", "--epochs", "1"]
    for noise, epsilon in (("1", 5.1436), ("2", 0.4370)):
        found = rows(*fixed, "--noise-over-clip", noise, "--accountant", "pld")["pld"]["epsilon"]
        assert found == pytest.approx(epsilon, abs=2e-4)
    both = run(*fixed, "--batching", "poisson", "--noise-over-clip", "1", "--accountant", "pld").stdout
    assert "noise / C" in both and "noise / C" not in run(*full, "--noise-multiplier", "5").stdout


def test_json_and_csv_say_every_condition_that_the_text_says() -> None:
    asked = ["quickstart", "--trials", "10", "--accountant", "rdp", "--delta", "0.01"]
    lines = run(*asked).stdout.splitlines()
    (found,) = json.loads(run(*asked, "--format", "json").stdout)
    assert found["about"] == lines[0] and "10 trials together" in lines[0]
    said = [*found["conditions"], *(f"warning: {text}" for text in found["warnings"])]
    assert said == lines[3:] and len(found["conditions"]) == 2 and found["warnings"]
    assert (found["trials"], found["group"], found["unit"]) == (10, 1, None)
    assert found["uses"] == 10 * 240 and found["sampling_rate"] == pytest.approx(256 / 1438)
    (row,) = csv.DictReader(io.StringIO(run(*asked, "--format", "csv").stdout))
    assert row["about"] == lines[0] and row["conditions"] == "; ".join(found["conditions"])
    (best,) = json.loads(run(*FULL, "--best-of", "3", "--group", "2", "--format", "json").stdout)
    assert (best["best_of"], best["law"], best["group"]) == (3, "geometric", 2)


def test_random_allocation_is_priced_for_the_steps_that_are_printed() -> None:
    """z 1, T 100, 10 epochs: 1.7015 by exact densities. 600 of 50,000 records are 84 steps an epoch."""
    asked = ["--batching", "random-allocation", "--noise-multiplier", "1", "--accountant", "pld"]
    by_rate = rows(*asked, "--sampling-rate", "0.01", "--epochs", "10")["pld"]["epsilon"]
    assert 1.7014 <= by_rate <= 1.7016 * 1.002
    size = [*asked, "--batch-size", "600", "--records", "50000", "--epochs", "1"]
    assert "(84 steps an epoch)" in run(*size).stdout
    assert rows(*size)["pld"]["sampling_rate"] == pytest.approx(1 / 84)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--delta", "0.1"], "delta 0.1 is not below 1 / 10"),
        (["--group", "11"], "a group of 11 is larger than the data, which have 10 records"),
        (["--noise-multiplier", "0.1"], "is above 100: it bounds next to nothing"),
    ],
)
def test_the_warnings_of_train_are_given(more: list[str], words: str) -> None:
    numbers = ["--noise-multiplier", "1", "--batch-size", "1", "--records", "10", "--steps", "9", "--accountant", "pld"]
    assert words in run(*numbers, *more).stdout and words not in run(*numbers).stdout


def test_a_group_over_two_parts_costs_the_dearest_of_its_splits() -> None:
    """k in training and 7 - k held out: mu^2 = k^2 / 4 + (7 - k)^2 / 9, largest at k = 7; at z 2 and 2, both ends."""
    parts = [[Release(GaussianSum(2.0, "add-remove"))], [Release(GaussianSum(3.0, "add-remove"))]]
    mus = [math.sqrt(k * k / 4 + (7 - k) ** 2 / 9) for k in range(8)]
    made = Composition.of([parts], group=7)
    found = made.attack()
    assert found is not None and found.mu == pytest.approx(max(mus))
    assert made.rho() == pytest.approx(max(mus) ** 2 / 2)
    one = [Release(GaussianSum(1 / max(mus), "add-remove"))]
    for name in ("gaussian", "pld", "zcdp"):
        accountant = accountants.get(name)
        assert made.epsilon(accountant, 1e-5) == pytest.approx(accountant.epsilon(one, 1e-5), rel=1e-9)
    assert len(splits_of(parts, 7)) == 8


def test_many_splits_are_bounded_by_few() -> None:
    parts = [[Release(GaussianSum(2.0, "add-remove"))], [Release(GaussianSum(3.0, "add-remove"))]]
    few = splits_of(parts, 1000)
    both = [[one.mechanism for one in split] for split in few if len(split) == 2]
    shares = [
        tuple(
            round(z / one.noise_multiplier)
            for one, z in zip(split, (2, 3), strict=True)
            if isinstance(one, GaussianSum)
        )
        for split in both
    ]
    assert len(few) <= 66
    assert all(any(own >= k and other >= 1000 - k for own, other in shares) for k in range(1, 1000))


def test_an_own_result_with_private_evaluation_has_a_price_for_groups(write_recipe: WriteRecipe, train: Train) -> None:
    """Its evaluation costs no more than training: the dearest split has all seven in training, and 49 times the rho."""
    path = write_recipe(
        data={"path": "tiny.npz", "classes": [0, 1, 2], "bounds": [0, 1], "evaluation": "private"},
        method={"kind": "dp-gd", "learning_rate": 1}, epochs=3, repeats=1,
    )  # fmt: skip
    folder = train(path)
    one, group = (rows(str(folder), "--accountant", "gaussian", *more)["gaussian"] for more in ([], ["--group", "7"]))
    assert one["rho"] is not None and group["rho"] >= 49 * one["rho"] * (1 - 1e-9)
    assert group["epsilon"] > one["epsilon"]
    told = run(str(folder), "--best-of", "3")
    assert "held-out records are private" in " ".join(told.output.split())


def test_a_choice_over_two_parts_is_refused() -> None:
    parts = [[Release(GaussianSum(2.0, "add-remove"))]] * 2
    from dpsgd_cli.accounting.repeated_selection import BestOfTrials, Choice

    made = Composition.of([parts], choice=Choice(3.0))
    with pytest.raises(UnsupportedMechanism, match="held-out records are private"):
        made.epsilon(BestOfTrials(Choice(3.0)), 1e-5)
    assert made.attack() is None and made.rho() is None
