"""Tier C: the noise of a run's releases and the rate of its batches, each compared with the ledger."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from dpsgd_cli.accounting.mechanism import CorrelatedSums
from dpsgd_cli.audit.findings import Finding, by_p_value
from dpsgd_cli.audit.statistics import far_from, noise_bound, too_little_noise
from dpsgd_cli.audit.watch import BEFORE, ObservedNoise, Watch


def noise_checks(drew: ObservedNoise, confidence: float) -> Iterator[Finding]:
    """Check that all noise together is not below the ledger's, and that each epoch has that of its own charge."""
    squares, count = sum(drew.squares.values()), sum(drew.counts.values())
    if not count:
        return
    bound = f"at most {noise_bound(squares, count, confidence):.4f} times the ledger's ({count:,} draws)"
    yield by_p_value("C", "noise", bound, "1", too_little_noise(squares, count))
    epochs = sorted(drew.squares)
    if len(epochs) > 1:
        # too much noise is no breach of privacy, but still contradicts the claim
        each = [_two_sided(drew.squares[epoch], drew.counts[epoch]) for epoch in epochs]
        worst = epochs[int(np.argmin(each))]
        ratio = math.sqrt(drew.squares[worst] / drew.counts[worst])
        place = "releases before training" if worst == BEFORE else f"epoch {worst}"
        found = f"{ratio:.4f} times the ledger's in {place}, the farthest"
        yield by_p_value("C", "noise of each epoch", found, "1", min(1.0, min(each) * len(each)))


def _two_sided(squares: float, count: int) -> float:
    return float(min(1.0, 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))))


def batch_checks(watch: Watch) -> Iterator[Finding]:
    """Check how often records are in batches, over all draws of a sampler."""
    mechanism = watch.mechanism
    assert mechanism is not None
    if not mechanism.sampled:
        return
    sizes, records = np.array(watch.sizes), watch.staged.plan.sampling.records
    turns = mechanism.bands if isinstance(mechanism, CorrelatedSums) and mechanism.batching == "poisson" else 1
    total, draws, rate = int(sizes.sum()), records * sizes.size, mechanism.sampling_rate / turns
    found = f"{total / draws:.6f} ({draws:,} draws)" if draws else "no batch was drawn by a sampler"
    yield by_p_value("C", "inclusion rate", found, f"{rate:.6f}", far_from(total, draws, rate) if draws else 0.0)
