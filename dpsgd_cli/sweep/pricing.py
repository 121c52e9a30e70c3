"""The privacy price of a sweep, in three statements: each trial, all trials together, and the private choice of one.

all together    The releases of all trials compose if their ledgers may be added (`accounting/joint_composition.py`).
random stopping The number of runs is random and each run is a cell drawn uniformly. Only the best run is published, or,
                if a Poisson number is 0, that there is none. The price depends on the law, not on the number drawn.
                `accounting/repeated_selection.py` has the theorem. It covers the output of ONE run: its settings, its
                weights, and its score, which costs nothing because it is measured on test records that no cell trains
                on. It does not cover the number of runs, the cells that were drawn, the results of the others, or which
                of the runs is the best: `private_tuning.py` keeps and shows none of these. If the number or any noise
                comes from a seed, the sweep is an experiment: anyone who knows the seed knows the number, or can remove
                the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.joint_composition import Run, why_apart
from dpsgd_cli.accounting.mechanism import Release, merge
from dpsgd_cli.accounting.repeated_selection import BestOfTrials
from dpsgd_cli.accounting.statement import BestAccountant
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.noise.settings import NoiseSource, describe_noise, noise_source
from dpsgd_cli.results import files, prices
from dpsgd_cli.sweep.settings import RandomStopping, Sweep

_FEW = 64
MEASURED = (
    "a private choice among runs whose held-out records are private has no proof here; state data.evaluation: public,"
    " which declares them public"
)


@dataclass(frozen=True)
class Spent:
    """Releases that bound ONE trial, the run whose trials they bound, and one trial's `epsilon`.

    `held_out`: releases on held-out records, which compose in parallel with the others.
    """

    releases: tuple[Release, ...]
    run: Run
    delta: float
    epsilon: float | None = None
    bound: str = "upper"
    held_out: tuple[Release, ...] = ()

    @property
    def trials(self) -> int:
        return len(self.run.seeds or ())

    @property
    def adjacency(self) -> str:
        return self.releases[0].mechanism.adjacency if self.releases else "any"


def statement(
    spent: Sequence[Spent | None], sweep: Sweep, cells: Sequence[Spent | None] | None = None
) -> dict[str, Any]:
    """Return the three statements, for the result file.

    `spent` has one entry for each different ledger of a cell; None is a trial without privacy. `cells`, which random
    stopping needs, bounds one run of EVERY cell, drawn or not.
    """
    private = [one for one in spent if one is not None]
    trials = sum(one.trials for one in private)
    told: dict[str, Any] = {"each_trial": _each(private), "all_trials": None, "choice": None, "warnings": []}
    told["noise_source"] = describe_noise(_noise_of(private))
    if sweep.select is not None:
        told["choice"] = _random_stopping(cells, sweep.select)
    if len(private) < len(spent):
        told["warnings"].append("some cells have no privacy at all; nothing protects the data once they are published")
        return told
    told["all_trials"] = _together(private, trials)
    if sweep.select is None and trials > 1:
        told["warnings"].append(
            "choosing among these trials is not covered by the statement on each: if you publish the best of them, you"
            " owe the epsilon of all trials together, unless the sweep declares `select:`; choosing by a nonprivate_"
            " column has no guarantee at all"
        )
    return told


def _each(spent: Sequence[Spent]) -> list[dict[str, Any]]:
    """Return the largest epsilon of a single trial, for each adjacency, delta and kind of bound."""
    found: dict[tuple[str, float, str], list[float | None]] = {}
    for one in spent:
        found.setdefault((one.adjacency, one.delta, one.bound), []).append(one.epsilon)
    return [
        {"adjacency": adjacency, "delta": delta, "bound": bound, "epsilon": prices.largest(epsilons)}
        for (adjacency, delta, bound), epsilons in found.items()
    ]


def _noise_of(spent: Sequence[Spent | None], seed: int | None = None) -> NoiseSource:
    """Return the source of the noise of all trials, and of a choice among them (by `seed`, if it has one)."""
    return noise_source(seed, *(seed for one in spent if one is not None for seed in one.run.seeds or ()))


def _together(spent: Sequence[Spent], trials: int) -> dict[str, Any]:
    nothing = {"epsilon": None, "trials": trials}
    if not spent:
        return {**nothing, "note": "no trial"}
    apart = why_apart([one.run for one in spent])
    if apart is not None:
        return {**nothing, "note": apart}
    delta = min(one.delta for one in spent)
    parts = [_added_up(spent, lambda one: one.releases), _added_up(spent, lambda one: one.held_out)]
    try:
        epsilon, accountant = max(_least(part).best(part, delta) for part in parts if part)
    except PrivacyError as error:
        return {**nothing, "note": str(error)}
    return {"epsilon": files.finite(epsilon), "delta": delta, "adjacency": spent[0].adjacency, "trials": trials,
            "accountant": accountant, "bound": "upper"}  # fmt: skip


def _added_up(spent: Sequence[Spent], of: Callable[[Spent], Sequence[Release]]) -> list[Release]:
    """Return the releases of all trials together, in units of their sensitivities."""
    return merge([Release(r.mechanism, r.count * one.trials) for one in spent for r in unscaled(of(one))])


def _random_stopping(cells: Sequence[Spent | None] | None, select: RandomStopping) -> dict[str, Any]:
    """Return the statement on the best run. It depends on the law, not on the draw, even if no run was drawn."""
    told: dict[str, Any] = {"kind": select.kind, "law": select.priced.law, "mean": select.mean, "epsilon": None}
    told["randomness"] = describe_noise(_noise_of(cells or (), select.seed))
    if cells is None:
        return {**told, "note": "what bounds the cells that did not run is not known"}
    private = [one for one in cells if one is not None]
    if len(private) < len(cells) or not private:
        return {**told, "note": "a cell without privacy may be drawn"}
    apart = why_apart([one.run for one in private])
    if apart is not None:
        return {**told, "note": apart}
    if any(one.held_out for one in private):
        return {**told, "note": MEASURED}
    delta = min(one.delta for one in private)
    try:
        epsilon = BestOfTrials(select.priced).of_any([unscaled(one.releases) for one in private])[0](delta)
    except PrivacyError as error:
        return {**told, "note": str(error)}
    note = (
        "holds if only the best run and its settings are published, or that no run was made; the score is measured on"
        " test records, which are declared public; how many runs there were must stay secret, and so must how long they"
        " took"
    )
    said = {"epsilon": files.finite(epsilon), "delta": delta, "adjacency": private[0].adjacency, "bound": "upper"}
    return {**told, **said, "note": note}


def _least(releases: Sequence[Release]) -> BestAccountant:
    """Return the least of the upper bounds; without `pld` for many unlike releases, which would take it minutes."""
    names = accountants.USUAL if len(releases) <= _FEW else [n for n in accountants.USUAL if n != "pld"]
    return BestAccountant(names)


def unscaled(releases: Sequence[Release]) -> list[Release]:
    """Return the releases in units of their sensitivity, so that more of them are equal."""
    return [prices.unscaled(release) for release in releases]
