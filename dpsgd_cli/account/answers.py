"""Answers of `dpsgd account`: one row per accountant, series over epochs or over a parameter, and the gate.

Text output is in `report.py`, accountants are in `accounting/accountants/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dpsgd_cli.account.cases import Case, Target
from dpsgd_cli.accounting.accountants import Accountant
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.groups import ForGroup
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.search import ExactSum
from dpsgd_cli.accounting.statement import Composition, warnings_of
from dpsgd_cli.accounting.tradeoff import Attacker, strongest
from dpsgd_cli.common.terminal import waiting
from dpsgd_cli.common.text_format import epsilon_text
from dpsgd_cli.errors import BudgetExceeded, InfeasibleBudget, UnsupportedMechanism

NOISE = "noise multiplier"
FALSE_POSITIVES = "false-positives"


@dataclass(frozen=True)
class Row:
    """Answer of one accountant for one case: what text, JSON, CSV and the gate print.

    `epsilon` is None if the accountant refuses; `note` then gives the reason. `priced` is the composition that all
    figures are of; None without a statement.
    """

    case: Case
    accountant: str
    epsilon: float | None
    delta: float
    bound: str
    note: str
    priced: Composition | None = None
    solved: dict[str, float] = field(default_factory=dict)
    attack: Attacker | None = None

    @property
    def adjacency(self) -> str | None:
        return None if self.priced is None else self.priced.adjacency

    @property
    def rho(self) -> float | None:
        return None if self.priced is None or self.epsilon is None or self.case.start else self.priced.rho()


@dataclass(frozen=True)
class Series:
    """Named columns over an axis, with None where an accountant has no value.

    `shown` are the columns of a picture, with the name of each in its legend.
    """

    axis: str
    points: list[float]
    columns: dict[str, list[float | None]]
    shown: dict[str, str]


def price(case: Case, accountant: Accountant, at_epsilon: float | None = None) -> Row:
    """Return epsilon at the case's delta, or delta at `at_epsilon`.

    Returns a row without epsilon if the accountant does not cover the case. A terminal shows what takes long.
    """
    priced, start = None, case.start
    if start is not None and at_epsilon is None and (case.together, case.group, case.choice) == (None, 1, None):
        row = price(replace(case, start=None), accountant)
        if row.epsilon is None:
            return replace(row, case=case)
        epsilon, delta = row.epsilon + start["epsilon"], row.delta + start["delta"]
        terms = f"{epsilon_text(row.epsilon)} + {epsilon_text(start['epsilon'])} of the earlier result"
        return replace(row, case=case, epsilon=epsilon, delta=delta, note=f"{row.note}; {terms}")
    with waiting(accountant.name):
        try:
            priced = case.composition
            epsilon = priced.epsilon(accountant, case.delta) if at_epsilon is None else at_epsilon
            delta = case.delta if at_epsilon is None else priced.delta(accountant, at_epsilon)
        except UnsupportedMechanism as refusal:
            return _refused(case, accountant, refusal, priced)
    note = "its budget, whatever it spends of that" if case.is_budget else ForGroup(accountant, case.group).note
    note = note if epsilon < math.inf else "no finite epsilon"
    return Row(case, accountant.name, epsilon, delta, accountant.bound, note, priced)


def warnings_of_case(case: Case, rows: Sequence[Row]) -> list[str]:
    """Return the warnings about the least bound of a case, as `dpsgd train` gives them."""
    own = [row for row in rows if row.case is case and row.epsilon is not None and row.bound == "upper"]
    if not own:
        return []
    least = min(own, key=lambda row: (row.epsilon or 0.0, row.delta))
    epsilon = least.epsilon if least.epsilon is not None and least.epsilon < math.inf else None
    return warnings_of(epsilon, least.delta, case.records, case.group)


def tradeoff_curve(cases: Sequence[Case], rates: Sequence[float]) -> Series:
    """Return the best attacker's true positive rate at each false positive rate, per case and for a blind guess."""
    columns: dict[str, list[float | None]] = {}
    for case in cases:
        found = strongest([curve.attacker(rates) for curve in case.composition.curves(min(rates))])
        said = "exact" if found.exact else "at most"
        columns[f"{_prefix(case, cases)}true positives ({said})"] = [found.true_positives[rate] for rate in rates]
    columns["blind guess"] = list(rates)
    return Series(FALSE_POSITIVES, list(rates), columns, {name: name for name in columns})


def afford(case: Case, named: Sequence[Accountant], parameter: str, target: Target) -> list[Row]:
    """Return a row per accountant with the value of `parameter` that the budget affords.

    A budget in epsilon is solved for each accountant separately, one in rho once for all of them.
    """
    if target.epsilon is None:
        value, solved = case.solved(parameter, target, named[0])
        return [replace(price(solved, one), case=case, solved={parameter: value}) for one in named]
    rows = []
    for accountant in named:
        try:
            value, solved = case.solved(parameter, target, accountant)
            rows.append(replace(price(solved, accountant), case=case, solved={parameter: value}))
        except (UnsupportedMechanism, InfeasibleBudget) as refusal:
            rows.append(_refused(case, accountant, refusal))
    return rows


def ranked(rows: Sequence[Row], more_is_better: bool = False) -> list[Row]:
    """Return the rows by epsilon, or by the solved value, best first; estimates follow bounds, refusals come last.

    `more_is_better`: the larger of two solved values is the better one (epochs, not noise).
    """
    sign = -1.0 if more_is_better else 1.0

    def key(row: Row) -> tuple[bool, bool, float, float, str]:
        solved = sign * next(iter(row.solved.values()), 0.0)
        return row.epsilon is None, row.bound != "upper", solved, row.epsilon or 0.0, row.accountant

    return sorted(rows, key=key)


Question = tuple[Case, Sequence[Accountant]]


def epoch_curve(questions: Sequence[Question], with_rho: bool) -> Series:
    """Return epsilon after every epoch, for each case and each of its accountants that covers it.

    Raises UnsupportedMechanism, with all reasons, if no accountant covers any case.
    """
    # a case without a statement is refused here, not left out
    epochs = {id(case): case.by_epoch() for case, _ in questions}
    extra: list[dict[str, list[float | None]]] = []
    for case, _ in questions:
        # the noise multiplier of each epoch is that of its last Gaussian
        sums = [[r.mechanism for r in own if isinstance(r.mechanism, GaussianSum)] for own in epochs[id(case)]]
        noise: list[float | None] = [own[-1].noise_multiplier if own else None for own in sums]
        extra.append({NOISE: noise} if len(questions) == 1 else {})
        # no rho is proved for the best of several trials
        if with_rho and case.choice is None and (rhos := _rho_curve(epochs[id(case)])) is not None:
            extra[-1]["rho"] = list(rhos)

    def curve(case: Case, accountant: Accountant) -> list[float | None]:
        with waiting(f"{accountant.name}, {len(epochs[id(case)])} epochs"):
            return [*accountant.curve(epochs[id(case)], case.delta)]

    return _series("epochs", questions, curve, extra)


def parameter_curve(questions: Sequence[Question], axis: str, points: Sequence[float]) -> Series:
    """Return epsilon over the values `points` of parameter `axis`; None where an accountant refuses a value.

    Raises UnsupportedMechanism, with all reasons, if no accountant covers any case.
    """

    def curve(case: Case, accountant: Accountant) -> list[float | None]:
        rows = [price(case.with_value(axis, point), accountant) for point in points]
        if all(row.epsilon is None for row in rows):
            raise UnsupportedMechanism(f"{accountant.name}: {rows[0].note}")
        return [row.epsilon for row in rows]

    return _series(axis, questions, curve, points=list(points))


def divergence_curve(sampling_rate: float, noise_multiplier: float, orders: Sequence[float]) -> Series:
    """Return Renyi divergences of a Poisson-sampled and an unsampled Gaussian, and Yu et al.'s conjectured bound.

    Source: Yu et al. 2019, Figures 1 and 16.
    """
    from dpsgd_cli.accounting import renyi  # NumPy, which most questions do without

    columns: dict[str, list[float | None]] = {
        "sampled": [*renyi.poisson_gaussian_divergences(sampling_rate, noise_multiplier, orders).tolist()],
        "unsampled": [renyi.gaussian_divergence(noise_multiplier, order) for order in orders],
        "conjectured bound": [order * (sampling_rate / noise_multiplier) ** 2 for order in orders],
    }
    return Series("order", list(orders), columns, {name: name for name in columns})


def check_gate(cases: Sequence[Case], rows: Sequence[Row], most: float) -> None:
    """Raise BudgetExceeded unless some upper bound proves epsilon <= `most` for every case.

    Also raise it for a case with missing parts or with uses of the data that no price covers.
    """
    missing = [text for case in cases for text in case.missing]
    if missing:
        told = f"what is not there has no price, so --max-epsilon {most:g} is not met"
        raise BudgetExceeded("\n".join([told, *missing]))
    for case in cases:
        name = f"{case.label}: " if case.label else ""
        if case.uncovered:
            raise BudgetExceeded(f"{name}--max-epsilon {most:g} is not met: {'; '.join(case.uncovered)}")
        bounds = [row for row in rows if row.case is case and row.epsilon is not None and row.bound == "upper"]
        if not bounds:
            raise BudgetExceeded(f"{name}no accountant asked proves a bound, so --max-epsilon {most:g} is not met")
        best = min(bounds, key=lambda row: row.epsilon or 0.0)
        if best.epsilon is None or not best.epsilon <= most:
            raise BudgetExceeded(f"{name}epsilon {best.epsilon:.6g} ({best.accountant}) exceeds --max-epsilon {most:g}")


def reasons_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of accountants that refuse, by reason."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.epsilon is None:
            found.setdefault(row.note.removeprefix("refused: "), []).append(row)
    return found


def _refused(case: Case, accountant: Accountant, refusal: Exception, priced: Composition | None = None) -> Row:
    note = str(refusal).removeprefix(f"{accountant.name} does not cover this: ").removeprefix(f"{accountant.name}: ")
    return Row(case, accountant.name, None, case.delta, accountant.bound, f"refused: {note}", priced)


def _rho_curve(epochs: Sequence[Sequence[Release]]) -> list[float] | None:
    spent, totals = ExactSum(), []
    for releases in epochs:
        rho = rho_of(releases)
        if rho is None or rho == math.inf:
            return None
        spent.add(rho)
        totals.append(spent.total())
    return totals


def _prefix(case: Case, cases: Sequence[Case]) -> str:
    """Return the prefix that distinguishes a case's columns from those of other cases; empty for a single case."""
    if len(cases) == 1:
        return ""
    labels = {other.label for other in cases}
    name = case.label if len(labels) > 1 else case.batching
    alike = [other for other in cases if name == (other.label if len(labels) > 1 else other.batching)]
    number = next(index for index, other in enumerate(alike, start=1) if other is case)
    return f"{name} " if len(alike) == 1 else f"{name} #{number} "


def _series(
    axis: str,
    questions: Sequence[Question],
    curve: Callable[[Case, Accountant], list[float | None]],
    extra: Sequence[dict[str, list[float | None]]] = (),
    points: list[float] | None = None,
) -> Series:
    """Return `curve` of each case and accountant that covers it, after the `extra` columns of the case."""
    cases = [case for case, _ in questions]
    columns: dict[str, list[float | None]] = {}
    shown: dict[str, str] = {}
    reasons: list[str] = []
    for index, (case, named) in enumerate(questions):
        prefix = _prefix(case, cases)
        columns |= {f"{prefix}{name}": values for name, values in (extra[index] if extra else {}).items()}
        for accountant in named:
            try:
                name = f"{prefix}{accountant.name}"
                columns[name] = curve(case, accountant)
                shown[name] = name if accountant.bound == "upper" else f"{name} ({accountant.bound})"
            except UnsupportedMechanism as refusal:
                reasons.append(str(refusal))
    if not set(columns) - {NOISE}:
        raise UnsupportedMechanism("no accountant covers this:\n" + "\n".join(dict.fromkeys(reasons)))
    longest = max(len(values) for values in columns.values())
    padded = {name: values + [None] * (longest - len(values)) for name, values in columns.items()}
    return Series(axis, points if points is not None else [float(i) for i in range(1, longest + 1)], padded, shown)
