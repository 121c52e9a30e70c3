"""How long accounting takes, beside dp-accounting and Opacus, in one run on one machine.

    pip install -e '.[bench]'
    python benchmarks/accounting.py            # 1 to 2 minutes
    python benchmarks/accounting.py --quick    # without the slow peers

Every line is the least of several repeats, measured inside one process after imports, but for `command`, which is a
whole process less a bare interpreter's. Peers answer the same question; the epsilons beside the times show that they
do. Never imported by the package.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from dpsgd_cli.account.cases import Target, afforded
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.mechanism import GaussianSum, Release

RATE, STEPS, DELTA = 0.01, 100, 1e-5
NOISES = [10 * math.exp(-0.005 * epoch) for epoch in range(200)]
FAST = [name for name in accountants.USUAL if name != "pld"]


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
    quick = parser.parse_args().quick
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    lines = [*one_query(), *many_multipliers(quick), *calibration(quick), *history(), command()]
    print(f"{'question':<44}{'by':<22}{'ms':>10}{'bar':>8}  {'epsilon or z':>13}")
    for line in lines:
        bar = "" if line.bar is None else f"{1e3 * line.bar:.0f}"
        beaten = "" if line.bar is None else "  ok" if line.seconds < line.bar else "  MISSED"
        print(f"{line.what:<44}{line.who:<22}{1e3 * line.seconds:>10.2f}{bar:>8}  {line.answer:>13.6g}{beaten}")


def one_query() -> list[Line]:
    """q = 0.01, z = 4, 10^4 steps, delta 1e-5."""
    releases = [Release(GaussianSum(4.0, "add-remove", "poisson", RATE), 10**4)]
    rdp, pld = accountants.get("rdp"), accountants.get("pld")
    measured = [
        timed("rdp", lambda: rdp.epsilon(releases, DELTA)),
        timed("pld", lambda: pld.epsilon(releases, DELTA)),
        timed("dp-accounting rdp", lambda: peer_rdp([(4.0, 10**4)]), 3),
        timed("dp-accounting pld", lambda: peer_pld([(4.0, 10**4)]), 3),
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
    if not quick:
        lines.append(Line(what, *timed("dp-accounting rdp", lambda: peer_rdp(counts), 1)))
        lines.append(Line(what, *timed("dp-accounting pld", lambda: peer_pld(counts), 1)))
        lines.append(Line(what, *timed("opacus rdp", lambda: peer_opacus("rdp", counts), 1)))
        lines.append(Line(what, *timed("opacus prv", lambda: peer_opacus("prv", counts), 1)))
    return lines


def calibration(quick: bool) -> list[Line]:
    """The least initial noise of that schedule for epsilon 1, and of constant noise for epsilon 3."""

    def schedule(initial: float) -> list[Release]:
        return [Release(GaussianSum(initial * z / 10, "add-remove", "poisson", RATE), STEPS) for z in NOISES]

    def constant(noise: float) -> list[Release]:
        return [Release(GaussianSum(noise, "add-remove", "poisson", RATE), 6000)]

    def calibrate(build: Callable[[float], list[Release]], accountant: Accountant, epsilon: float) -> float:
        return afforded(build, "noise-multiplier", Target(epsilon), accountant, DELTA)

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


def history() -> list[Line]:
    """Epsilon after each of the 200 epochs, as `history.csv` needs it."""
    epochs = [[Release(GaussianSum(noise, "add-remove", "poisson", RATE), STEPS)] for noise in NOISES]
    rdp, pld = accountants.get("rdp"), accountants.get("pld")
    return [
        Line("epsilon after each of 200 epochs", *timed("rdp", lambda: rdp.curve(epochs, DELTA)[-1])),
        Line("epsilon after each of 200 epochs", *timed("pld", lambda: pld.curve(epochs, DELTA)[-1], 2)),
    ]


def command() -> Line:
    """The whole process of one query by all accountants but pld, less a bare interpreter."""
    args = ["-m", "dpsgd_cli", "account", "--noise-multiplier", "4", "--sampling-rate", str(RATE), "--steps", "10000"]
    args += [part for name in FAST for part in ("--accountant", name)]
    with tempfile.TemporaryDirectory() as cache:  # bytecode is compiled once, as in any installation
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": cache}

        def run(arguments: list[str]) -> float:
            subprocess.run([sys.executable, *arguments], env=environment, check=True, capture_output=True)
            return 0.0

        run(args)
        whole = timed("all but pld", lambda: run(args), 9)[1]
        bare = timed("", lambda: run(["-c", "pass"]), 9)[1]
    return Line("command, beyond the interpreter's start", "all but pld", whole - bare, math.nan, bar=0.05)


def peer_rdp(uses: list[tuple[float, int]]) -> float:
    """dp-accounting's Renyi accountant."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import rdp_privacy_accountant

    accountant = rdp_privacy_accountant.RdpAccountant()
    for noise, steps in uses:
        accountant.compose(dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(DELTA))


def peer_pld(uses: list[tuple[float, int]]) -> float:
    """dp-accounting's loss distributions."""
    from dp_accounting import dp_event
    from dp_accounting.pld import pld_privacy_accountant

    accountant = pld_privacy_accountant.PLDAccountant()
    for noise, steps in uses:
        accountant.compose(dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(noise)), steps)
    return float(accountant.get_epsilon(DELTA))


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
    """Who, the least seconds of some repeats (after one more, which imports), and the answer."""
    answer, least = math.nan, math.inf
    for repeat in range(repeats + (repeats > 1)):
        begun = time.perf_counter()
        answer = work()
        if repeat or repeats == 1:
            least = min(least, time.perf_counter() - begun)
    return who, least, answer


if __name__ == "__main__":
    main()
