"""Records of releases: what is impossible is refused, and a JSON line holds everything."""

from __future__ import annotations

import json

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


@given(st.lists(RELEASES, max_size=20))
def test_merging_keeps_every_count_and_the_order_of_first_use(releases: list[Release]) -> None:
    merged = merge(releases)
    counts = {r.mechanism: sum(s.count for s in releases if s.mechanism == r.mechanism) for r in releases}
    assert {r.mechanism: r.count for r in merged} == {m: n for m, n in counts.items() if n}
    assert [r.mechanism for r in merged] == [m for m in counts if counts[m]]
