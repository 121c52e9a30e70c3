"""Records of releases: what is impossible is refused, and a JSON line holds everything."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    PureDP,
    Release,
    from_record,
    merge,
    to_record,
)
from dpsgd_cli.errors import PrivacyError

POSITIVE = st.floats(min_value=1e-6, max_value=1e6)
ADJACENCIES = st.sampled_from(["add-remove", "replace-one", "zero-out"])
GAUSSIANS = st.builds(GaussianSum, POSITIVE, ADJACENCIES, st.sampled_from(["full", "shuffle"]), sensitivity=POSITIVE)
SAMPLED = st.builds(GaussianSum, POSITIVE, ADJACENCIES, st.sampled_from(["poisson", "fixed"]), st.floats(0, 1))
CYCLES = st.builds(
    CorrelatedSums, POSITIVE, ADJACENCIES, st.just("poisson"), st.floats(0, 1), bands=st.integers(1, 10**6)
)
PASSES = st.builds(
    CorrelatedSums,
    POSITIVE,
    ADJACENCIES,
    st.just("shuffle"),
    correlation=st.sampled_from(["banded", "buffered"]),
    bands=st.integers(1, 9),
)
PURE = st.builds(PureDP, POSITIVE, ADJACENCIES, st.sampled_from(["laplace", "exponential", "pure"]))
APPROXIMATE = st.builds(ApproximateDP, POSITIVE, st.floats(0, 0.5), ADJACENCIES, st.text(max_size=5))
RELEASES = st.builds(Release, GAUSSIANS | SAMPLED | CYCLES | PASSES | PURE | APPROXIMATE, st.integers(0, 10**9))


@settings(max_examples=40)
@given(RELEASES)
def test_a_release_survives_its_json_line(release: Release) -> None:
    record = json.loads(json.dumps(to_record(release)))
    assert from_record(record) == from_record({"trial": 3, "epoch": None, **record}) == release


@pytest.mark.parametrize(
    ("kind", "changed", "named"),
    [
        (GaussianSum, {"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        (GaussianSum, {"noise_multiplier": math.nan}, "noise_multiplier is nan"),
        (GaussianSum, {"noise_multiplier": 1.0, "sampling_rate": 1.5, "batching": "poisson"}, "sampling_rate is 1.5"),
        (GaussianSum, {"noise_multiplier": 1.0, "sampling_rate": 0.5}, "must be 1 for full batching"),
        (GaussianSum, {"noise_multiplier": 1.0, "sensitivity": 0.0}, "sensitivity is 0.0"),
        (GaussianSum, {"noise_multiplier": 1.0, "sensitivity": math.inf}, "sensitivity is inf"),
        (GaussianSum, {"noise_multiplier": 1.0, "batching": "ordered"}, "batching is 'ordered'"),
        (PureDP, {"epsilon": -0.1}, "epsilon is -0.1"),
        (PureDP, {"epsilon": 1.0, "source": "gaussian"}, "source is 'gaussian'"),
        (ApproximateDP, {"epsilon": 1.0, "delta": 1.0}, "delta is 1.0"),
        (ApproximateDP, {"epsilon": math.nan, "delta": 0.0}, "epsilon is nan"),
        (
            GaussianSum,
            {"noise_multiplier": 1.0, "adjacency": "nobody"},
            "adjacency is 'nobody', but must be one of",
        ),
        (PureDP, {"epsilon": 1.0, "adjacency": "nobody"}, "adjacency is 'nobody'"),
        (ApproximateDP, {"epsilon": 1.0, "delta": 0.0, "adjacency": "nobody"}, "adjacency is 'nobody'"),
    ],
)
def test_impossible_values_are_refused_by_name(kind: Any, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(PrivacyError, match=named):
        kind(**{"adjacency": "zero-out", **changed})


@pytest.mark.parametrize("count", [-1, 1.5])
def test_counts_are_whole(count: Any) -> None:
    with pytest.raises(PrivacyError, match="count is"):
        Release(GaussianSum(1.0, "zero-out"), count)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"mechanism": "laplace"},
        {"mechanism": "gaussian"},
        {"mechanism": "gaussian", "noise_multiplier": "much", "adjacency": "zero-out"},
        {"mechanism": "pure", "epsilon": 1.0, "adjacency": "zero-out", "count": "two"},
        {"mechanism": "pure", "epsilon": None, "adjacency": "zero-out"},
    ],
)
def test_a_damaged_record_is_a_privacy_error(record: dict[str, Any]) -> None:
    with pytest.raises(PrivacyError, match=r"mechanism|damaged"):
        from_record(record)


@given(st.lists(RELEASES, max_size=20))
def test_merging_keeps_every_count_and_the_order_of_first_use(releases: list[Release]) -> None:
    merged = merge(releases)
    counts = {r.mechanism: sum(s.count for s in releases if s.mechanism == r.mechanism) for r in releases}
    assert {r.mechanism: r.count for r in merged} == {m: n for m, n in counts.items() if n}
    assert [r.mechanism for r in merged] == [m for m in counts if counts[m]]
