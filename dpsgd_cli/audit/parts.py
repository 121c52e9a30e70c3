"""Tier C: the parts of a mechanism, from a run's own noise and batches, each compared with the ledger.

Every check has a control: the same check of a claim that is wrong by a known amount, such as 3/2 times the noise or the
rate, or a correlation of 0.8. If its control is not refuted, a check had too few observations, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from scipy import stats

from dpsgd_cli.accounting.mechanism import CorrelatedSums, GaussianSum, TruncatedSum
from dpsgd_cli.audit.claim import rows_of
from dpsgd_cli.audit.findings import Finding, by_p_value
from dpsgd_cli.audit.statistics import far_from, noise_bound, normal, too_little_noise
from dpsgd_cli.audit.watch import BEFORE, ObservedNoise, Watch

_WRONG = 1.5
_MIXED = 0.8
_MOST_TESTED = 200_000
_CLOSE = 1 + 1e-4
_LONGEST = 1500
_FEW = 200


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
    yield from _uncorrelated("trials apart from the steps", noise)


def _uncorrelated(what: str, rows: np.ndarray) -> Iterator[Finding]:
    """Check the correlations of any two of `rows` (n, m)."""
    if len(rows) < 2 or rows.shape[1] < 8:
        return
    mixed = rows.copy()
    mixed[1] = _MIXED * mixed[0] + math.sqrt(1 - _MIXED**2) * mixed[1]
    largest, p = largest_correlation(rows)
    yield _check(f"independence of {what}", f"correlation of at most {largest:.3f} in any pair", "0", p,
                 largest_correlation(mixed)[1])  # fmt: skip


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
    if not drew.noise:
        return
    seen = np.stack(drew.noise)  # (T, R, c)
    yield from _by_coordinate(seen)
    few = seen.ravel()[:: max(1, seen.size // _MOST_TESTED)]
    flat = np.random.default_rng(1).uniform(-math.sqrt(3), math.sqrt(3), len(few))
    yield _check("normality", "Kolmogorov and Smirnov", "standard normal", normal(few), normal(flat))
    ways = {"steps": seen, "trials": seen.transpose(1, 0, 2), "coordinates": seen.transpose(2, 0, 1)}
    for what, rows in ways.items():
        yield from _uncorrelated(what, rows.reshape(len(rows), -1))


def _by_coordinate(seen: np.ndarray) -> Iterator[Finding]:
    """Check the coordinate with the least noise of (T, R, c). A missing noise would not show in the average."""
    draws = seen.shape[0] * seen.shape[1]
    if draws < _FEW:
        return
    each = np.square(seen, dtype=np.float64).sum(axis=(0, 1))
    least, count = float(each.min()), len(each)
    yield _check(
        "noise of each coordinate", f"at least {math.sqrt(least / draws):.4f} times the ledger's, of {count}", "1",
        min(1.0, count * too_little_noise(least, draws)), min(1.0, count * too_little_noise(least / _WRONG**2, draws)),
    )  # fmt: skip


def _two_sided(squares: float, count: int) -> float:
    return float(min(1.0, 2 * min(stats.chi2.cdf(squares, count), stats.chi2.sf(squares, count))))


def largest_correlation(rows: np.ndarray) -> tuple[float, float]:
    """Return the largest correlation of any two of `rows` (n, m) of standard normals, and its p-value over all pairs.

    For independent normals, (m - 2)^(1/2) r / (1 - r^2)^(1/2) has Student's t distribution. Bonferroni covers the
    pairs.
    """
    if len(rows) > _LONGEST:
        rows = rows[np.unique(np.linspace(0, len(rows) - 1, _LONGEST).astype(int))]
    rows = rows.astype(np.float32)
    length = rows.shape[1]
    rows = rows - rows.mean(axis=1, keepdims=True)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-30)
    products = np.abs(np.triu(rows @ rows.T, 1))
    r = min(float(products.max()), 1 - 1e-7)
    pairs = len(rows) * (len(rows) - 1) / 2
    t = r * math.sqrt((length - 2) / (1 - r * r))
    return r, float(min(1.0, pairs * 2 * stats.t.sf(t, length - 2)))


def norm_checks(watch: Watch) -> Iterator[Finding]:
    """Check how far one canary moved a sum, in sensitivities. Exact: the sum was observed before noise.

    A canary of several rows, each of which is drawn and clipped by itself, moves it by one sensitivity a row.
    """
    most = 1 if watch.mechanism is None else rows_of(watch.mechanism)
    if watch.largest > 0:
        p, control = (0.0 if by > most * _CLOSE else 1.0 for by in (watch.largest, _WRONG * watch.largest))
        yield _check("clipped norm", f"{watch.largest:.6f} sensitivities at most", f"at most {most}", p, control)


def batch_checks(watch: Watch) -> Iterator[Finding]:
    mechanism = watch.mechanism
    assert mechanism is not None
    law = (_CORRELATED if isinstance(mechanism, CorrelatedSums) else _LAWS).get(mechanism.batching)
    if law is not None and watch.batches.sizes:
        yield from law(watch, mechanism)
    elif mechanism.sampled:
        yield _check("batches", "no batch was drawn by a sampler", f"{mechanism.batching} batches", 0.0, 0.0)


def _cyclic(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    """Check that every record is in the steps of one group only (exact), and that the batches of a cycle are Poisson.

    A cycle holds each record at most once.
    """
    assert isinstance(mechanism, CorrelatedSums)
    bands, held, sizes = mechanism.bands, watch.held(), np.stack(watch.batches.sizes)
    cycles = len(held) // bands
    if not cycles:
        return
    within = held[: cycles * bands].reshape(cycles, bands, *held.shape[1:])
    groups = within.any(axis=0).sum(axis=0)
    broken = float((groups > 1).mean())
    yield _check("groups of records", f"{broken:.4%} of records in steps of two groups", "none",
                0.0 if broken else 1.0, 0.0)  # fmt: skip
    yield from _independent(watch, mechanism, sizes[: cycles * bands].reshape(cycles, bands, -1).sum(axis=1),
                            np.asarray(within.any(axis=1)))  # fmt: skip


def _poisson(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    yield from _independent(watch, mechanism, np.stack(watch.batches.sizes), watch.held())


def _truncated(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    """Check that sizes are binomial, cut at the largest batch, and that each batch is a uniform set of records."""
    assert isinstance(mechanism, TruncatedSum)
    sizes, held = np.stack(watch.batches.sizes), watch.held()
    records, largest = mechanism.records, mechanism.largest_batch
    over = float((sizes > largest).mean())
    yield _check("largest batch", f"{int(sizes.max())} records", f"at most {largest}", 0.0 if over else 1.0, 0.0)
    law = stats.binom(records, mechanism.sampling_rate)
    drawn = np.arange(records + 1)
    chances, kept = law.pmf(drawn), np.minimum(drawn, largest)
    mean = float(chances @ kept)
    spread = math.sqrt(float(chances @ np.square(kept - mean)) / sizes.size)

    def p_value(found: float) -> float:
        return float(2 * stats.norm.sf(abs(found - mean) / spread)) if spread else float(found == mean)

    yield _check("mean batch size", f"{sizes.mean():.3f} ({sizes.size:,} batches)", f"{mean:.3f}",
                p_value(float(sizes.mean())), p_value(_WRONG * float(sizes.mean())))  # fmt: skip
    yield from _each_record(held, mean / records)
    yield from _over_time(held, mean / records)


def _each_record(held: np.ndarray, rate: float) -> Iterator[Finding]:
    """Check how often each watched record is in a batch: binomial for each record."""
    each = held.sum(axis=(0, 1))
    times = held.shape[0] * held.shape[1]
    # the rarest or the commonest record has the least p-value
    p, control = (
        min(far_from(float(count), times, q) for count in (each.min(), each.max())) * len(each)
        for q in (rate, min(1.0, _WRONG * rate))
    )
    yield _check("inclusion of each record", f"{each.min() / times:.4f} to {each.max() / times:.4f}", f"{rate:.4f}",
                min(1.0, p), min(1.0, control))  # fmt: skip


def _independent(watch: Watch, mechanism: GaussianSum, sizes: np.ndarray, held: np.ndarray) -> Iterator[Finding]:
    """Check that each record is independently in each of T batches.

    `sizes` (T, R) are the sizes of the batches; `held` (T, R, W) has the watched records in them.
    """
    staged = watch.staged
    rate, records = mechanism.sampling_rate, staged.plan.sampling.records
    total, draws = int(sizes.sum()), records * sizes.size
    yield _inclusion(total, draws, rate)
    variance = records * rate * (1 - rate)
    squares = float(np.square(sizes - records * rate).sum() / variance)
    yield _check(
        "spread of batch sizes", f"{squares / sizes.size:.3f} times a binomial's variance", "1",
        _two_sided_normal(squares, sizes.size, records, rate),
        _two_sided_normal(squares / _WRONG, sizes.size, records, rate),
    )  # fmt: skip
    yield from _each_record(held, rate)
    yield from _over_time(held, rate)
    if held.shape[2] > 1:
        yield _both("inclusion of pairs of records", held[:, :, 0:-1:2], held[:, :, 1::2], rate)


def _inclusion(total: int, draws: int, rate: float) -> Finding:
    """Check how often records are in batches, over all draws."""
    return _check("inclusion rate", f"{total / draws:.6f} ({draws:,} draws)", f"{rate:.6f}",
                  far_from(total, draws, rate), far_from(total, draws, min(1.0, _WRONG * rate)))  # fmt: skip


def _both(name: str, one: np.ndarray, other: np.ndarray, rate: float) -> Finding:
    """Check how often two events of probability `rate` happen together: binomial of rate^2 if independent."""
    both = int((one & other).sum())
    return _check(name, f"{both / one.size:.6f}", f"{rate**2:.6f}", far_from(both, one.size, rate**2),
                  far_from(int(one.sum()), one.size, rate**2))  # fmt: skip


def _over_time(held: np.ndarray, rate: float) -> Iterator[Finding]:
    """Check how often a record is in both of two batches."""
    steps, trials, _ = held.shape
    ways: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    if steps > 1:
        ways["a step and the next"] = (held[: steps // 2 * 2 : 2], held[1 : steps // 2 * 2 : 2])
    if steps > 3:
        ways["a step and one half of the training later"] = (held[: steps // 2], held[steps // 2 : steps // 2 * 2])
    if trials > 1:
        ways["a trial and the next"] = (held[:, : trials // 2 * 2 : 2], held[:, 1 : trials // 2 * 2 : 2])
    for what, (one, other) in ways.items():
        yield _both(f"inclusion in {what}", one, other, rate)


def _two_sided_normal(squares: float, count: int, records: int, rate: float) -> float:
    """Return the p-value of a sum of squared standardised binomials: normal, with the binomial's own fourth moment."""
    variance = records * rate * (1 - rate)
    spread = math.sqrt(count * (2 + (1 - 6 * rate * (1 - rate)) / variance)) if variance > 0 else math.inf
    return float(2 * stats.norm.sf(abs(squares - count) / spread))


def _shuffled(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    """Check that every record is used once an epoch (exact), and that epochs and trials have independent partitions.

    The sizes of the batches are known. With correlated noise, all epochs have the same partition instead (exact).
    """
    staged = watch.staged
    sizes = np.full(staged.plan.sampling.steps_per_epoch, staged.plan.sampling.batch_size)
    sizes[-1] -= sizes.sum() - staged.plan.sampling.records
    same = float(np.square(sizes / sizes.sum()).sum())
    correlated = isinstance(mechanism, CorrelatedSums)
    yield from _in_each_epoch(watch, {"trials": same} if correlated else {"epochs": same, "trials": same})
    if correlated:
        yield from _in_turn(watch, len(sizes))


def _allocated(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    """Check that every record is used as often in an epoch as is charged (exact), in steps drawn independently.

    The sizes of an epoch's t batches have a fixed sum. Each record is in k of them: the covariance matrix of the sizes
    is N (k / t) (1 - k / t) t / (t - 1) times a projection of rank t - 1.
    """
    staged = watch.staged
    entries = staged.trials.context.ledgers[0].entries
    each = max(e.release.count for e in entries if e.release.mechanism.label == mechanism.label)
    one = mechanism.sampling_rate / each
    per_epoch = staged.plan.sampling.steps_per_epoch
    yield from _in_each_epoch(watch, {"epochs": one, "trials": 1 / per_epoch}, each)
    if isinstance(mechanism, CorrelatedSums):
        yield from _in_turn(watch, per_epoch // mechanism.steps)
        return
    sizes, rate, records = np.stack(watch.batches.sizes), mechanism.sampling_rate, staged.plan.sampling.records
    steps = each * mechanism.steps
    if mechanism.steps > 1:
        squares = float(np.square(sizes - records * rate).sum()) / (records * rate * (1 - rate) * steps / (steps - 1))
        free = sizes.size // steps * (steps - 1)
        yield _check("spread of batch sizes", f"{squares / free:.3f} times a multinomial's", "1",
                    _two_sided(squares, free), _two_sided(squares / _WRONG**2, free))  # fmt: skip


def _in_turn(watch: Watch, groups: int) -> Iterator[Finding]:
    """Check that the steps t of every record have one t mod `groups`, in all epochs (exact)."""
    held = watch.held()
    within = np.stack([held[group::groups].any(axis=0) for group in range(groups)])
    broken = float((within.sum(axis=0) > 1).mean())
    yield _check("groups of records", f"{broken:.4%} of records in steps of two groups", "none",
                0.0 if broken else 1.0, 0.0)  # fmt: skip


def _in_each_epoch(watch: Watch, rates: dict[str, float], each: int = 1) -> Iterator[Finding]:
    """Check that a record is in `each` batches of an epoch, of which one is that of another epoch or trial at `rates`.

    For `each` above 1, also check how often it is in both of the first two batches of t: k (k - 1) / (t (t - 1)).
    """
    staged = watch.staged
    held, per_epoch = watch.held(), staged.plan.sampling.steps_per_epoch
    whole = held[: len(held) // per_epoch * per_epoch].reshape(-1, per_epoch, *held.shape[1:])
    times = "once" if each == 1 else f"{each} times"
    broken = float((whole.sum(axis=1) != each).mean())
    yield _check("records of an epoch", f"{broken:.4%} of records not {times}", f"each {times}",
                0.0 if broken else 1.0, 0.0)  # fmt: skip
    if per_epoch < 2:
        return
    chances = np.random.default_rng(5).random(whole.shape, dtype=np.float32) if each > 1 else np.float32(1)
    batch = (whole * chances).argmax(axis=1)  # (E, R, W): one step of each record
    if each > 1:
        both, rare = whole[:, 0] & whole[:, 1], each * (each - 1) / (per_epoch * (per_epoch - 1))
        yield _check("records in both of two batches", f"{both.mean():.4f}", f"{rare:.4f}",
                    far_from(int(both.sum()), both.size, rare),
                    far_from(int(whole[:, 0].sum()), both.size, rare))  # fmt: skip
    pairs = {"epochs": (batch[:-1:2], batch[1::2]), "trials": (batch[:, :-1:2], batch[:, 1::2])}
    for what, rate in rates.items():
        one, other = pairs[what]
        # at rate 1 all batches of a record are the same, as the groups that take turns say
        if not one.size or rate == 1:
            continue
        same = int((one == other).sum())
        yield _check(f"the same batch in two {what}", f"{same / one.size:.4f}", f"{rate:.4f}",
                    _matching(same, one.size, rate), _matching(one.size, one.size, rate))  # fmt: skip


def _matching(same: int, count: int, rate: float) -> float:
    """Return the p-value of matches of two independent partitions (normal: pairs of records hardly correlate)."""
    spread = math.sqrt(count * rate * (1 - rate))
    return float(2 * stats.norm.sf(max(0.0, abs(same - count * rate) - 0.5) / spread))


def _fixed(watch: Watch, mechanism: GaussianSum) -> Iterator[Finding]:
    """Check that every batch has the same size (exact), and each record's inclusion over time."""
    staged = watch.staged
    held, rate, sizes = watch.held(), mechanism.sampling_rate, np.stack(watch.batches.sizes)
    other = float((sizes != staged.plan.sampling.batch_size).mean())
    yield _check("size of batches", f"{sizes.min()} to {sizes.max()}", f"{staged.plan.sampling.batch_size}",
                0.0 if other else 1.0, 0.0)  # fmt: skip
    yield _inclusion(int(held.sum()), held.size, rate)
    yield from _each_record(held, rate)
    yield from _over_time(held, rate)


_LAWS: dict[str, Callable[[Watch, GaussianSum], Iterator[Finding]]] = {
    "poisson": _poisson,
    "shuffle": _shuffled,
    "fixed": _fixed,
    "truncated-poisson": _truncated,
    "random-allocation": _allocated,
}
_CORRELATED = {"poisson": _cyclic, "shuffle": _shuffled, "random-allocation": _allocated}
