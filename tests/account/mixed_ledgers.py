"""Random ledgers of all kinds, priced by every accountant and compared with a bound from below.

    python -m tests.account.mixed_ledgers --count 2000     # a quarter of an hour

No accountant may state less than `ledger_oracle.py` proves. Each ledger is written, and read back by `dpsgd account`:
one part or two, one record or a group, one training or the best of several. The program ends with the distribution of
stated over proved epsilons, by kind, and with status 1 if a stated one is below.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpsgd_cli.account import account
from dpsgd_cli.accounting.adjacency import Adjacency, Batching
from dpsgd_cli.accounting.ledger import LedgerEntry, Phase, to_lines
from dpsgd_cli.accounting.mechanism import (
    ApproximateDP,
    CorrelatedSums,
    GaussianSum,
    PureDP,
    Release,
    Threshold,
    ZeroConcentrated,
)
from dpsgd_cli.errors import UnsupportedMechanism
from tests.account.ledger_oracle import LAWS, oracle

SLACK = 1e-5
"""Relative and absolute rounding that is no fault: results are shown to fewer digits."""
_LEAST = 1e-3


class Draw:
    """Random numbers of one ledger."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([41, seed])

    def between(self, low: float, high: float) -> float:
        return float(np.exp(self.random.uniform(np.log(low), np.log(high))))

    def whole(self, low: int, high: int) -> int:
        return round(self.between(low, high))

    def one(self, *options: Any) -> Any:
        return options[self.random.integers(len(options))]


Maker = Callable[[Draw, Adjacency], Iterator[Release]]


def _unsampled(draw: Draw, near: Adjacency) -> Iterator[Release]:
    batching: Batching = draw.one("full", "full", "shuffle") if near != "add-remove" else "full"
    yield Release(GaussianSum(draw.between(0.7, 60), near, batching), draw.whole(1, 50))


def _poisson(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(GaussianSum(draw.between(0.5, 8), near, "poisson", draw.between(1e-3, 0.3)), draw.whole(1, 3000))


def _levels(draw: Draw, near: Adjacency) -> Iterator[Release]:
    """A schedule: many noise multipliers, each for some steps."""
    first, last, rate = draw.between(0.8, 8), draw.between(0.8, 8), draw.between(1e-3, 0.05)
    for noise in np.geomspace(first, last, draw.whole(3, 60)):
        yield Release(GaussianSum(float(noise), near, "poisson", rate), draw.whole(1, 50))


def _fixed(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(GaussianSum(draw.between(0.5, 6), near, "fixed", draw.between(1e-3, 0.3)), draw.whole(1, 1000))


def _allocated(draw: Draw, near: Adjacency) -> Iterator[Release]:
    steps = draw.one(1, 2, 3, 5, 8, 12, 40)
    noise = draw.between(0.3, 5)
    yield Release(GaussianSum(noise, near, "random-allocation", 1 / steps), draw.whole(1, 20))


def _correlated(draw: Draw, near: Adjacency) -> Iterator[Release]:
    bands = draw.whole(2, 16)
    if near == "replace-one" or (near == "zero-out" and draw.random.random() < 0.5):
        yield Release(CorrelatedSums(draw.between(1, 20), near, "shuffle", bands=bands), draw.whole(1, 20))
    else:
        made = CorrelatedSums(draw.between(0.7, 6), near, "poisson", draw.between(0.01, 0.3), bands=bands)
        yield Release(made, draw.whole(1, 200))


def _pure(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(PureDP(draw.between(0.005, 1), near, draw.one("laplace", "exponential", "pure")), draw.whole(1, 30))


def _approximate(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(ApproximateDP(draw.between(0.01, 0.7), draw.between(1e-12, 1e-6), near), draw.whole(1, 4))


def _threshold(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(Threshold(0.0, draw.between(1e-12, 1e-7), near))


def _budget(draw: Draw, near: Adjacency) -> Iterator[Release]:
    yield Release(ZeroConcentrated(draw.between(1e-3, 1), near))


_ALWAYS: dict[str, Maker] = {
    "unsampled": _unsampled, "poisson": _poisson, "levels": _levels, "correlated": _correlated,
    "pure": _pure, "approximate": _approximate, "threshold": _threshold, "budget": _budget,
}  # fmt: skip
_COMES: dict[str, Maker] = {"allocated": _allocated}
_REPLACED: dict[str, Maker] = {"fixed": _fixed}


@dataclass(frozen=True)
class Drawn:
    """A ledger: its parts' releases, their kinds, and the question about it."""

    kinds: tuple[str, ...]
    parts: tuple[tuple[Release, ...], ...]
    delta: float
    asked: dict[str, Any]

    @property
    def name(self) -> str:
        extra = ", ".join(f"{key} {value}" for key, value in self.asked.items())
        return f"{' + '.join(self.kinds)}{' | held out' if len(self.parts) > 1 else ''} {extra}".strip()


def drawn(seed: int) -> Drawn:
    """Return the ledger of a seed."""
    draw = Draw(seed)
    near: Adjacency = draw.one("add-remove", "add-remove", "zero-out", "replace-one")
    makers = _ALWAYS | (_REPLACED if near == "replace-one" else _COMES)
    names = list(makers)
    # each kind is alone, too, and first in turn
    kinds = (names[seed % len(names)],)
    kinds += tuple(draw.random.choice(names, draw.one(0, 1, 1, 2, 3)))
    parts = [tuple(release for kind in kinds for release in makers[kind](draw, near))]
    if draw.random.random() < 0.15:
        parts.append((Release(GaussianSum(draw.between(0.7, 20), near)),))
    asked: dict[str, Any] = {}
    way = draw.random.random()
    if len(parts) > 1:
        pass  # refused for groups and choices, which may use both parts
    elif way < 0.25:
        asked = {"group": draw.whole(2, 12)}
    elif way < 0.45:
        asked = {"best_of": float(draw.whole(2, 100)), "law": draw.one("poisson", "geometric")}
    return Drawn(kinds, tuple(parts), draw.between(1e-8, 1e-3), asked)


def stated(ledger: Drawn) -> list[dict[str, Any]]:
    """Return what `dpsgd account` states: the rows that are upper bounds."""
    phases: tuple[Phase, ...] = ("train", "held-out")
    entries = [LedgerEntry(r, phase) for phase, part in zip(phases, ledger.parts, strict=False) for r in part]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        path.write_text("\n".join(to_lines(entries, 0, None)))
        try:
            everyone: dict[str, Any] = {} if "best_of" in ledger.asked else {"accountant": "all"}
            rows = account(path, delta=ledger.delta, **everyone, **ledger.asked)
        except UnsupportedMechanism:  # nobody states anything
            return []
    return [row for row in rows if row["epsilon"] is not None and row["bound"] == "upper"]


def proved(ledger: Drawn) -> float:
    """Return the greatest epsilon that the ledger's own mechanisms need."""
    found = 0.0
    group, best_of = ledger.asked.get("group", 1), ledger.asked.get("best_of")
    for part in ledger.parts:
        exponential = any(isinstance(r.mechanism, PureDP) and r.mechanism.source == "exponential" for r in part)
        for top in (0.35, 0.5, 0.65) if exponential and group == 1 else (0.5,):
            own = oracle(part, group, top)
            if best_of is None:
                found = max(found, own.epsilon(ledger.delta))
            else:
                found = max(found, own.best_of(LAWS[ledger.asked["law"]](best_of), ledger.delta))
    return found


@dataclass(frozen=True)
class Compared:
    """The stated epsilon of each accountant over the proved one, `proved`."""

    seed: int
    ledger: Drawn
    proved: float
    stated: dict[str, float]

    @property
    def below(self) -> list[str]:
        return [name for name, found in self.stated.items() if found < self.proved * (1 - SLACK) - SLACK]


def compared(seed: int) -> Compared:
    ledger = drawn(seed)
    rows = {row["accountant"]: float(row["epsilon"]) for row in stated(ledger)}
    return Compared(seed, ledger, proved(ledger) if rows else 0.0, rows)


def main() -> int:
    """Compare ledgers; print those below, and the ratios by kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log", type=Path, help="one JSON line for each ledger")
    asked = parser.parse_args()
    ratios: dict[str, list[float]] = defaultdict(list)
    refused = below = 0
    log = asked.log.open("a") if asked.log else None
    for seed in range(asked.first, asked.first + asked.count):
        one = compared(seed)
        if log:
            print(json.dumps({"seed": seed, "name": one.ledger.name, "delta": one.ledger.delta,
                              "proved": one.proved, "stated": one.stated}), file=log, flush=True)  # fmt: skip
        refused += not one.stated
        for name in one.below:
            below += 1
            print(
                f"BELOW seed {seed}: {name} states {one.stated[name]:.6g}, proved {one.proved:.6g}: {one.ledger.name}"
            )
        if one.stated and one.proved > _LEAST:
            least = min(one.stated.values()) / one.proved
            way = next((key for key in ("group", "best_of") if key in one.ledger.asked), "one training")
            kinds = {*one.ledger.kinds}
            ratios[way].append(least)
            if way == "one training" and len(kinds) == 1:
                ratios[f"{kinds.pop()} alone"].append(least)
    print(f"{asked.count} ledgers, {refused} refused by all accountants, {below} statements below the oracle")
    print(f"{'least stated / proved':<24}{'ledgers':>8}{'median':>9}{'95%':>9}{'largest':>9}")
    for kind, found in sorted(ratios.items()):
        print(f"{kind:<24}{len(found):>8}" + "".join(f"{np.quantile(found, q):>9.4f}" for q in (0.5, 0.95, 1.0)))
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
