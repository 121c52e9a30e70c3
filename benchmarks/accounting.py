"""How long accounting takes, beside dp-accounting, Opacus, prv_accountant and Opake, in one run on one machine.

    pip install -e '.[bench]'
    pip install --no-deps prv_accountant opake-accounting opake-base opake-dpsgd opake-engine; pip install optree
    python benchmarks/accounting.py            # some minutes
    python benchmarks/accounting.py --quick    # without the slow peers
    python benchmarks/accounting.py --truth    # random allocation beside the truth, known in two ways

Every line is the least of several repeats, in processor time, measured inside one process after imports. Whole commands
are processes, with their most memory. Peers answer the same question; the epsilons beside the times show that they do.
A peer that is not installed answers nan. Never imported by the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.special import ndtr

from dpsgd_cli.account.cases import Target, afforded
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.allocation_pairs import law_of_ratio
from dpsgd_cli.accounting.ledger import LedgerEntry, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum, GroupSum, Release
from dpsgd_cli.accounting.tradeoff import best_attacker

RATE, STEPS, DELTA = 0.01, 100, 1e-5
NOISES = [10 * math.exp(-0.005 * epoch) for epoch in range(200)]
ALLOCATED = "random allocation, 10 epochs of 100 steps"


@dataclass(frozen=True)
class Line:
    """One measurement: what, by whom, seconds, the answer, and the bar it has to beat (seconds)."""

    what: str
    who: str
    seconds: float
    answer: float
    bar: float | None = None


def main() -> None:
    """Measure everything and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="leave out peers that take seconds")
    parser.add_argument("parts", nargs="*", help="query, levels, calibration, history, new or commands; all of them")
    parser.add_argument("--truth", action="store_true", help="compare random allocation with a bound from below")
    asked = parser.parse_args()
    if asked.truth:
        allocation_truth()
        return
    parts: dict[str, Callable[[bool], Iterable[Line]]] = {
        "query": one_query, "levels": many_multipliers, "calibration": calibration, "history": history,
        "new": new_questions, "commands": whole_commands,
    }  # fmt: skip
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    print(f"{'question':<44}{'by':<22}{'ms':>10}{'bar':>8}  {'answer':>13}")
    for part in asked.parts or parts:
        for line in parts[part](asked.quick):
            bar = "" if line.bar is None else f"{1e3 * line.bar:.0f}"
            beaten = "" if line.bar is None else "  ok" if line.seconds < line.bar else "  MISSED"
            print(f"{line.what:<44}{line.who:<22}{1e3 * line.seconds:>10.2f}{bar:>8}  {line.answer:>13.6g}{beaten}",
                  flush=True)  # fmt: skip


def one_query(quick: bool) -> list[Line]:
    """q = 0.01, z = 4, 10^4 steps, delta 1e-5."""
    del quick
    releases = [Release(GaussianSum(4.0, "add-remove", "poisson", RATE), 10**4)]
    rdp, pld = accountants.get("rdp"), accountants.get("pld")
    measured = [
        timed("rdp", lambda: rdp.epsilon(releases, DELTA)),
        timed("pld", lambda: pld.epsilon(releases, DELTA)),
        timed("dp-accounting rdp", lambda: peer("rdp", [(4.0, 10**4)]), 3),
        timed("dp-accounting pld", lambda: peer("pld", [(4.0, 10**4)]), 3),
        timed("prv_accountant", lambda: peer_prv(4.0, 10**4), 1),
        timed("Opake", lambda: peer_opake([(4.0, 10**4)]), 2),
    ]
    return [Line("one query: 10^4 equal steps", *line) for line in measured]


def many_multipliers(quick: bool) -> list[Line]:
    """200 different noise multipliers (exponential decay), 100 steps each, q = 0.01."""
    what = "200 noise multipliers, 100 steps each"
    releases = [Release(GaussianSum(noise, "add-remove", "poisson", RATE), STEPS) for noise in NOISES]
    counts = [(noise, STEPS) for noise in NOISES]
    lines = [
        Line(what, *timed("rdp", lambda: accountants.get("rdp").epsilon(releases, DELTA)), bar=0.02),
        Line(what, *timed("pld", lambda: accountants.get("pld").epsilon(releases, DELTA)), bar=1.0),
    ]
    peers: dict[str, Callable[[], float]] = {
        "dp-accounting rdp": lambda: peer("rdp", counts),
        "dp-accounting pld": lambda: peer("pld", counts),
        "opacus rdp": lambda: peer_opacus("rdp", counts),
        "opacus prv": lambda: peer_opacus("prv", counts),
        "Opake": lambda: peer_opake(counts),
    }
    lines += [Line(what, *timed(who, work, 1)) for who, work in peers.items() if not quick]
    return lines


def calibration(quick: bool) -> list[Line]:
    """The least initial noise of that schedule for epsilon 1, and of constant noise for epsilon 3."""

    def schedule(initial: float) -> list[Release]:
        return [Release(GaussianSum(initial * z / 10, "add-remove", "poisson", RATE), STEPS) for z in NOISES]

    def constant(noise: float) -> list[Release]:
        return [Release(GaussianSum(noise, "add-remove", "poisson", RATE), 6000)]

    def calibrate(build: Callable[[float], list[Release]], accountant: Accountant, epsilon: float) -> float:
        return afforded(lambda noise: accountant.epsilon(build(noise), DELTA), "noise-multiplier", Target(epsilon))

    rdp, pld = accountants.get("rdp"), accountants.get("pld")
    lines = [
        Line("calibrate the schedule to epsilon 1", *timed("rdp", lambda: calibrate(schedule, rdp, 1)), bar=0.2),
        Line("calibrate 6000 equal steps to epsilon 3", *timed("rdp", lambda: calibrate(constant, rdp, 3))),
        Line("calibrate 6000 equal steps to epsilon 3", *timed("pld", lambda: calibrate(constant, pld, 3), 3)),
    ]
    if not quick:
        what = "calibrate 6000 equal steps to epsilon 3"
        lines.append(Line(what, *timed("dp-accounting rdp", peer_calibrate, 1)))
        lines.append(Line(what, *timed("opacus rdp", peer_opacus_calibrate, 1)))
    return lines


def history(quick: bool) -> list[Line]:
    """Epsilon after each of the 200 epochs, as `history.csv` needs it."""
    del quick
    epochs = [[Release(GaussianSum(noise, "add-remove", "poisson", RATE), STEPS)] for noise in NOISES]
    rdp, pld = accountants.get("rdp"), accountants.get("pld")
    return [
        Line("epsilon after each of 200 epochs", *timed("rdp", lambda: rdp.curve(epochs, DELTA)[-1])),
        Line("epsilon after each of 200 epochs", *timed("pld", lambda: pld.curve(epochs, DELTA)[-1], 2)),
    ]


def new_questions(quick: bool) -> Iterator[Line]:
    """Groups, random allocation, mu, and very long trainings, of noise 1 and rate 0.01 if nothing else is said."""
    pld, rdp = accountants.get("pld"), accountants.get("rdp")
    for size in (10, 100):
        group, what = GroupSum(1.0, "add-remove", "poisson", RATE, size=size), f"a group of {size}, 1000 steps"
        yield Line(what, *timed("pld", partial(pld.epsilon, [Release(group, 1000)], DELTA), 2), bar=2.0)
    epoch = [Release(GaussianSum(1.0, "add-remove", "random-allocation", RATE), 10)]
    law_of_ratio.cache_clear()
    yield Line(ALLOCATED, *timed("pld", partial(pld.epsilon, epoch, DELTA), 1))
    sampled = [Release(GaussianSum(1.0, "add-remove", "poisson", RATE), 1000)]
    yield Line("mu, 1000 steps", *timed("pld", lambda: best_attacker(sampled).mu, 2), bar=0.2)
    long = [Release(GaussianSum(1000.0, "add-remove", "poisson", 1e-4), 10**12)]
    yield Line("10^12 steps, z 1000, rate 1e-4", *timed("pld", partial(pld.epsilon, long, DELTA), 2))
    yield Line("10^12 steps, z 1000, rate 1e-4", *timed("rdp", partial(rdp.epsilon, long, DELTA)))
    if not quick:
        yield Line(ALLOCATED, *timed("Opake", peer_allocation, 1))
        yield Line("a group of 10, 1000 steps", *timed("dp-accounting pld", partial(peer_group, 10), 1))


def whole_commands(quick: bool) -> Iterator[Line]:
    """`dpsgd account` by rdp; and of ledgers of many noise multipliers by pld, with their most memory in MiB."""
    simple = ["--noise-multiplier", "4", "--sampling-rate", str(RATE), "--steps", "10000", "--accountant", "rdp"]
    yield Line("the whole command, one query", "rdp", min(_process(simple)[0] for _ in range(5)), math.nan, bar=0.25)
    for count, bar in ((1000, 1.0), (20_000, 10.0), (100_000, 60.0))[: 1 if quick else 3]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "ledger.jsonl")
            noises = [4 + 2 * math.cos(i / count * 3) for i in range(count)]
            entries = [LedgerEntry(Release(GaussianSum(z, "add-remove", "poisson", RATE)), "train", 0) for z in noises]
            with open(path, "w", encoding="utf-8") as file:
                file.write("\n".join(to_lines(entries, 0, None)))
            seconds, memory = min(_process([path, "--accountant", "pld"]) for _ in range(3 if count == 1000 else 1))
        yield Line(f"the whole command, {count:,} noise levels", "pld (MiB)", seconds, memory, bar=bar)


def _process(arguments: list[str]) -> tuple[float, float]:
    """Return the processor seconds of `dpsgd account`, and its most memory in MiB."""
    made = subprocess.Popen([sys.executable, "-m", "dpsgd_cli", "account", *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(made.pid, 0)
    if status:
        raise SystemExit(f"account {' '.join(arguments)} failed")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def allocation_truth() -> None:
    """Print stated over true epsilons of one epoch, in the direction that removes the record.

    Two independent ways: `_by_draws`, and where noise is 1 or more `_by_convolution`, which does not see the least
    deltas. Where both know an answer, both are printed.
    """
    pld = accountants.get("pld")
    print(f"{'z':>5}{'steps':>7}{'delta':>9}{'stated':>10}{'by draws':>10}{'convolved':>10}{'stated/true':>13}")
    for noise in (0.2, 0.4, 1.0, 2.0, 4.0):
        for steps in (10, 100, 1000):
            drawn, convolved = _by_draws(noise, steps), _by_convolution(noise, steps) if noise >= 1 else {}
            for delta in _DELTAS:
                release = [Release(GaussianSum(noise, "add-remove", "random-allocation", 1 / steps))]
                stated, found = pld.epsilon(release, delta), (drawn.get(delta), convolved.get(delta))
                known = next((one for one in found if one is not None), None)
                shown = "".join(f"{'-' if one is None else f'{one:.4f}':>10}" for one in found)
                ratio = "-" if known is None else f"{stated / known:.4f}" if known > 1e-3 else f"{stated:.4f} / 0"
                print(f"{noise:>5}{steps:>7}{delta:>9.0e}{stated:>10.4f}{shown}{ratio:>13}", flush=True)


_DELTAS = (1e-3, 1e-5, 1e-9, 1e-13)


def _by_draws(noise: float, steps: int, draws: int = 20_000) -> dict[float, float]:
    """Return true epsilons of one epoch: E_Q (R - e^epsilon)_+ by draws in which one step, any of them, is pushed up.

    With x_i standard normal but for one that is moved by s, a draw counts 1 / mean_i exp(s x_i - s^2 / 2). Every step
    may be the large one: pushing the record's own step alone misses most of a small delta at many steps. Of several s
    the one counts that shows delta with the least relative error; above 3% nothing is known.
    """
    random, pushes = np.random.default_rng(5), np.concatenate([[0.0], 1 / noise + np.linspace(0, 7, 8)])
    ratio, weight = np.zeros((len(pushes), draws)), np.zeros((len(pushes), draws))
    for step in range(steps):
        normal = random.standard_normal(draws, dtype=np.float32).astype(np.float64)
        for row, push in enumerate(pushes):
            x = normal + push * (step == 0)
            ratio[row] += np.exp(x / noise - 0.5 / noise**2) / steps
            weight[row] += np.exp(push * x - push**2 / 2) / steps
    found = {}
    for delta in _DELTAS:
        best = 0.03
        for own, counts in zip(ratio, weight, strict=True):

            def seen(epsilon: float, own: Any = own, counts: Any = counts) -> tuple[float, float]:
                parts = np.maximum(0, own - math.exp(epsilon)) / counts
                return float(parts.mean()), float(parts.std()) / math.sqrt(draws)

            def over(epsilon: float, seen: Any = seen) -> float:
                return float(seen(epsilon)[0])

            epsilon = _where(over, delta, float(np.log(own.max())))
            mean, error = seen(epsilon)
            if mean > 0 and error / mean < best:
                best, found[delta] = error / mean, epsilon
    return found


def _by_convolution(noise: float, steps: int, points: int = 1 << 22) -> dict[float, float]:
    """Return true epsilons of one epoch by the law of the sum of T ratios on an even grid, with Fourier transforms.

    Masses are tilted by e^(t v) before they are transformed, so that rare sums are not lost in rounding. Of several t
    the one counts whose rounding is least beside delta; above 1% nothing is known.
    """
    width = (2 * steps + 3 * math.exp(9.5 / noise - 0.5 / noise**2)) / points
    edges = (np.arange(points + 1) - 0.5) * width
    edges[0] = 0.0
    with np.errstate(divide="ignore"):
        one = np.diff(ndtr((np.log(edges) + 0.5 / noise**2) * noise))
    sums, held, found = np.arange(points) * width, one > 0, {}
    best = dict.fromkeys(_DELTAS, 0.01)
    for score in (0.0, 2.0, 4.0, 6.0, 8.0):
        tilt = score / math.sqrt(steps * math.expm1(noise**-2))
        if tilt * sums[held].max() > 600:
            break
        tilted = np.zeros(points)
        tilted[held] = one[held] * np.exp(tilt * sums[held])
        whole = np.fft.irfft(np.fft.rfft(tilted / tilted.sum()) ** steps, points)
        back = np.exp(np.minimum(steps * math.log(tilted.sum()) - tilt * sums, 600.0))
        law = np.maximum(whole, 0) * back
        noisy = 1e-15 * float(whole.max()) * back
        for delta in _DELTAS:

            def over(at: float, masses: Any = law) -> float:
                return float(masses @ np.maximum(0, sums / steps - math.exp(at)))

            epsilon = _where(over, delta, math.log(sums[-1] / steps))
            lost = over(epsilon, noisy) / delta
            if lost < best[delta]:
                best[delta], found[delta] = lost, epsilon
    return found


def _where(falls_to: Callable[[float], float], delta: float, high: float) -> float:
    """Return the epsilon from 0 to `high` at which a falling function is `delta`."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if falls_to(middle) > delta else (low, middle)
    return low


def peer(kind: str, uses: list[tuple[float, int]]) -> float:
    """dp-accounting's Renyi accountant (`rdp`), or its loss distributions (`pld`)."""
    from dp_accounting import dp_event
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    accountant = {"rdp": RdpAccountant, "pld": PLDAccountant}[kind]()
    for noise, steps in uses:
        accountant.compose(dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(DELTA))


def peer_prv(noise: float, steps: int) -> float:
    """prv_accountant's upper bound, at its usual errors; nan where it is not installed."""
    try:
        from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant
    except ImportError:
        return math.nan
    own = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=RATE)
    accountant = PRVAccountant(prvs=[own], max_self_compositions=[steps], eps_error=0.01, delta_error=DELTA / 1000)
    return float(accountant.compute_epsilon(DELTA, [steps])[2])


def _opake() -> Any:
    """Opake's accounting; None where it is not installed.

    Opake 0.16.1 asks Python 3.11 and 3.12 for weak references in classes that have them: the request is left out.
    """
    usual = dataclasses.dataclass

    def without(*classes: Any, weakref_slot: bool = False, **options: Any) -> Any:
        return usual(*classes, **options)

    dataclasses.dataclass = without
    try:
        return importlib.import_module("opake.dpsgd.accounting")
    except ImportError:
        return None
    finally:
        dataclasses.dataclass = usual


def peer_opake(uses: list[tuple[float, int]]) -> float:
    """Opake's loss distributions (Rust)."""
    if (opake := _opake()) is None:
        return math.nan
    made = [opake.poisson(opake.gaussian(noise), sample_rate=RATE) * steps for noise, steps in uses]
    whole = made[0]
    for one in made[1:]:
        whole = whole | one
    return float(whole.epsilon_at(DELTA))


def peer_allocation() -> float:
    """Opake's random allocation: 10 epochs of 1 in 100."""
    if (opake := _opake()) is None:
        return math.nan
    one = opake.k_out_of_t(opake.gaussian(1.0), k=1, t=100, allocation="total")
    return float((one * 10).epsilon_at(DELTA))


def peer_group(size: int) -> float:
    """dp-accounting's mixture of Gaussians."""
    from dp_accounting.pld import privacy_loss_distribution
    from scipy.stats import binom

    weights = [float(binom.pmf(j, size, RATE)) for j in range(size + 1)]
    one = privacy_loss_distribution.from_mixture_gaussian_mechanism(1.0, list(range(size + 1)), weights)
    return float(one.self_compose(1000).get_epsilon_for_delta(DELTA))


def peer_opacus(mechanism: str, uses: list[tuple[float, int]]) -> float:
    """Opacus' accountants of the same names; nan where it is not installed."""
    try:
        from opacus.accountants import create_accountant
    except ImportError:
        return math.nan
    accountant = create_accountant(mechanism)
    accountant.history = [(noise, RATE, steps) for noise, steps in uses]
    return float(accountant.get_epsilon(DELTA))


def peer_calibrate() -> float:
    """dp-accounting's calibration, to the same precision."""
    from dp_accounting import dp_event, mechanism_calibration
    from dp_accounting.rdp import rdp_privacy_accountant

    def event(noise: float) -> dp_event.DpEvent:
        sampled = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(noise))
        return dp_event.SelfComposedDpEvent(sampled, 6000)

    bracket = mechanism_calibration.LowerEndpointAndGuess(0.0, 1.0)
    make = rdp_privacy_accountant.RdpAccountant
    return float(mechanism_calibration.calibrate_dp_mechanism(make, event, 3.0, DELTA, bracket, tol=1e-7))


def peer_opacus_calibrate() -> float:
    """Opacus' calibration, to its own precision of 0.01 in epsilon."""
    try:
        from opacus.accountants.utils import get_noise_multiplier
    except ImportError:
        return math.nan
    found = get_noise_multiplier(target_epsilon=3.0, target_delta=DELTA, sample_rate=RATE, steps=6000, accountant="rdp")
    return float(found)


def timed(who: str, work: Callable[[], float], repeats: int = 5) -> tuple[str, float, float]:
    """Who, the least processor seconds of some repeats (after one more, which imports), and the answer."""
    answer, least = math.nan, math.inf
    for repeat in range(repeats + (repeats > 1)):
        begun = _used()
        answer = work()
        if repeat or repeats == 1:
            least = min(least, _used() - begun)
    return who, least, answer


def _used() -> float:
    """Return the processor seconds of this process and of its children, which a busy machine changes little."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
