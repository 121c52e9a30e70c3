"""The worked numbers that the literature states, by the accountants that state them."""

from __future__ import annotations

import pytest

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.mechanism import Release
from tests.accounting.releases import poisson, shuffled

ABADI = poisson(0.01, 4, 10**4)
YU = poisson(0.01, 6, 4 * 10**4)


@pytest.mark.parametrize(
    ("name", "release", "stated"),
    [
        ("moments", ABADI, 1.2586),
        ("rdp", ABADI, 1.0355),
        ("pld", ABADI, 0.9469),
        ("strong-composition-published", ABADI, 9.34),
        ("strong-composition", ABADI, 26.4),
        ("moments", YU, 1.6705),
        ("rdp", YU, 1.3999),
        ("zcdp", shuffled(6, 400), 21.5506),
        ("zcdp", shuffled(6, 200), 14.0880),
        ("zcdp-rs", YU, 2.3732),
        ("zcdp-rs", poisson(0.01, 6, 2 * 10**4), 1.6551),
        ("rdp-markov", poisson(256 / 60000, 1.1, 14062), 3.0083),
        ("rdp", poisson(256 / 60000, 1.1, 14062), 2.5966),
        ("moments", poisson(4096 / 50000, 10, 875), 1.2043),
        ("rdp", poisson(4096 / 50000, 10, 875), 0.9877),
        ("pld", poisson(4096 / 50000, 10, 875), 0.9028),
        ("zcdp", shuffled(8, 100), 6.78),
        ("gaussian", shuffled(8, 100), 5.68),
    ],
)
def test_published_epsilon_at_delta_1e5_to_all_its_digits(name: str, release: Release, stated: float) -> None:
    digits = len(str(stated).split(".")[1])
    assert round(accountants.get(name).epsilon([release], 1e-5), digits) == stated


@pytest.mark.parametrize(
    ("release", "stated"),
    [(YU, 1.2833), (poisson(256 / 60000, 1.1, 14062), 2.3816), (ABADI, 0.9469)],
)
def test_pld_within_the_references_spread_and_never_above_rdp(release: Release, stated: float) -> None:
    # The references were computed with cells of 1e-4; ours are finer, and the bound a little tighter.
    epsilon = accountants.get("pld").epsilon([release], 1e-5)
    assert epsilon == pytest.approx(stated, abs=1e-3)
    assert epsilon < accountants.get("rdp").epsilon([release], 1e-5)


def test_integer_moments_of_the_tutorial_differ_from_its_fractional_ones_in_the_third_digit() -> None:
    release = poisson(256 / 60000, 1.1, 14062)
    integer = accountants.get("moments").epsilon([release], 1e-5)
    assert 3.0083 < integer < 3.0092


def test_linear_amplification_is_marked_as_no_bound() -> None:
    assert accountants.get("strong-composition-published").bound == "estimate"
    assert accountants.get("strong-composition").bound == "upper"
    assert accountants.get("zcdp-rs").bound == "estimate"


def test_poisson_number_for_shuffled_batches_is_five_times_too_small() -> None:
    sampled = accountants.get("pld").epsilon([poisson(1e-4, 0.5, 10**4)], 1e-6)
    assert round(sampled, 2) == 1.95
    upper = accountants.get("gaussian").epsilon([shuffled(0.5)], 1e-6)
    assert upper == pytest.approx(10.9972, abs=1e-4)
    assert upper / sampled > 5
