"""Tier C: the noise of a run's releases and the rate of its batches, each compared with the ledger.

Every check has a control: the same check of a claim that is wrong by a known amount, 3/2 times the noise or the rate.
If its control is not refuted, a check had too few observations, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from dpsgd_cli.accounting.mechanism import CorrelatedSums
from dpsgd_cli.audit.findings import Finding, by_p_value
from dpsgd_cli.audit.statistics import far_from, noise_bound, too_little_noise
from dpsgd_cli.audit.watch import BEFORE, ObservedNoise, Watch

_WRONG = 1.5
_CLOSE = 1 + 1e-4


def _check(name: str, found: str, claimed: str, p_value: float, control: float) -> Finding:
    """Return the finding on one part of a mechanism, with the p-values of the claim and of a wrong claim."""
    return by_p_value("C", name, (found, claimed), p_value, control)


def checks_of(watch: Watch, confidence: float) -> list[Finding]:
    """Return every check that the run allows."""
    apart = [check for noise in watch.apart for check in _apart(noise)]
    return [*apart, *noise_checks(watch.drew, confidence), *batch_checks(watch), *norm_checks(watch)]


def _apart(noise: np.ndarray) -> Iterator[Finding]:
    """Check noise (R, n) of a release apart from the steps, in units of the ledger's noise."""
    squares, count = float(np.square(noise).sum()), noise.size
    yield _check(
        "noise apart from the steps", f"{math.sqrt(squares / count):.4f} times the ledger's ({count:,} draws)", "1",
        too_little_noise(squares, count), too_little_noise(squares / _WRONG**2, count),
    )  # fmt: skip


def noise_checks(drew: ObservedNoise, confidence: float) -> Iterator[Finding]:
    squares, count = sum(drew.squares.values()), sum(drew.counts.values())
    if not count:
        return
    bound = noise_bound(squares, count, confidence)
    yield _check(
        "noise",
        f"at most {bound:.4f} times the ledger's ({count:,} draws)",
        "1",
        too_little_noise(squares, count),
        too_little_noise(squares / _WRONG**2, count),
    )
    epochs = sorted(drew.squares)
    if len(epochs) > 1:
        # each epoch must have the claimed noise; too much is no breach of privacy, but still contradicts the claim
        each = [_two_sided(drew.squares[e], drew.counts[e]) for e in epochs]
        wrong = [_two_sided(drew.squares[e] / _WRONG**2, drew.counts[e]) for e in epochs]
        worst = epochs[int(np.argmin(each))]
        ratio = math.sqrt(drew.squares[worst] / drew.counts[worst])
        place = "the preconditioner" if worst == BEFORE else f"epoch {worst}"
        yield _check(
            "noise of each epoch",
            f"{ratio:.4f} times the ledger's in {place}, the farthest",
            "1",
            min(1.0, min(each) * len(each)),
            min(1.0, min(wrong) * len(wrong)),
        )


def _two_sided(squares: float, count: int) -> float:
    return float(min(1.0, 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))))


def norm_checks(watch: Watch) -> Iterator[Finding]:
    """Check how far one canary moved a sum, in sensitivities. Exact: the sum was observed before noise."""
    if watch.largest > 0:
        p, control = (0.0 if by > _CLOSE else 1.0 for by in (watch.largest, _WRONG * watch.largest))
        yield _check("clipped norm", f"{watch.largest:.6f} sensitivities at most", "at most 1", p, control)


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
    yield _check("inclusion rate", found, f"{rate:.6f}", far_from(total, draws, rate) if draws else 0.0,
                 far_from(total, draws, min(1.0, _WRONG * rate)) if draws else 0.0)  # fmt: skip
