"""Questions of `dpsgd account`: from its flags to cases, accountants, rows and curves.

Options and printing are in `cli/account.py`, prices in `answers.py`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpsgd_cli.account import answers
from dpsgd_cli.account.cases import Case, FlagCase, Target
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.accounting.groups import ForGroup
from dpsgd_cli.accounting.repeated_selection import BestOfTrials, Choice
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import UnsupportedMechanism, UsageError

MOST_USES = 1_000_000_000_000
"""Largest number of steps, epochs or trials."""
MOST_IN_A_GROUP = 1_000_000

_COUNT = (1, MOST_USES, f"a whole number of at least 1 and at most {MOST_USES}")
_POSITIVE = (math.ulp(0.0), sys.float_info.max, "positive and finite")
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "noise_multiplier": _POSITIVE,
    "sampling_rate": (math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "batch_size": _COUNT,
    "records": _COUNT,
    "largest_batch": _COUNT,
    "participations": _COUNT,
    "steps": _COUNT,
    "epochs": _COUNT,
    "delta": (math.ulp(0.0), math.nextafter(1.0, 0.0), "above 0 and below 1"),
    "target_epsilon": _POSITIVE,
    "target_rho": _POSITIVE,
    "at_epsilon": (0.0, sys.float_info.max, "at least 0 and finite"),
    "max_epsilon": (0.0, sys.float_info.max, "at least 0 and finite"),
    "excess_risk": _POSITIVE,
    "group": (1, MOST_IN_A_GROUP, f"a whole number of at least 1 and at most {MOST_IN_A_GROUP}"),
    "best_of": (1.0, sys.float_info.max, "at least 1 and finite"),
}
"""Range of each numeric option: smallest value, largest value, and the range in words."""

_FORM = ("format",)
_RECORDS = ("events", "opacus_history")
_PRICED = ("delta", "accountant", "trials", "best_of", "law", *_RECORDS, *_FORM)
_OF_NUMBERS = (
    "noise_multiplier", "sampling_rate", "batch_size", "records", "largest_batch", "participations", "steps", "epochs",
    "batching", "adjacency",
)  # fmt: skip
_TARGETS = ("target_epsilon", "target_rho")
_USES: dict[str, tuple[str, ...]] = {
    "a price": (*_PRICED, *_OF_NUMBERS, "max_epsilon", "attacker", "group"),
    "--at-epsilon": ("at_epsilon", *_PRICED[1:], *_OF_NUMBERS, "attacker", "group"),
    "a budget": (*_PRICED, *_OF_NUMBERS, *_TARGETS, "solve", "max_epsilon"),
    "--curve": ("curve", *_PRICED, *_OF_NUMBERS, "plot"),
    "--over": ("over", *_PRICED, *_OF_NUMBERS, "plot"),
    "--over order": ("over", "noise_multiplier", "sampling_rate", "batch_size", "records", "plot", *_FORM),
    "--over false-positives": ("over", "trials", *_RECORDS, *_OF_NUMBERS, "plot", *_FORM),
    "--excess-risk": ("excess_risk", *_FORM),
    "--export": ("export", "trials", *_RECORDS, *_OF_NUMBERS),
}
"""Options that each question uses; any other option is an error."""
_HINTS = {
    "--max-epsilon": "--max-epsilon judges prices, ask for one",
    "--plot": "a picture is of a curve, give --curve or --over",
    "--group": "--group states prices, leave it out or ask for one",
}


class AccountOptions:
    """Command line of `dpsgd account`, one attribute per option. Not a dataclass: creating the class takes 1 ms."""

    arguments: tuple[str, ...]
    noise_multiplier: float | None
    sampling_rate: float | None
    batch_size: int | None
    records: int | None
    largest_batch: int | None
    participations: int | None
    steps: int | None
    epochs: int | None
    batching: tuple[str, ...]
    adjacency: str | None
    delta: float | None
    accountant: tuple[str, ...]
    target_epsilon: float | None
    target_rho: float | None
    solve: str | None
    at_epsilon: float | None
    max_epsilon: float | None
    excess_risk: float | None
    group: int
    trials: str
    best_of: float | None
    law: str | None
    attacker: bool
    curve: bool
    over: str | None
    plot: str | None
    events: str | None
    opacus_history: str | None
    export: str | None
    format: str | None

    def __init__(self, **given: Any) -> None:
        """Check the options. Raises UsageError for numbers out of range and for options that exclude each other."""
        self.__dict__.update(given)
        for name in _NUMBERS:
            check_number(name, getattr(self, name))
        self._check_use()
        if self.best_of is not None and self.trials != "1":
            raise UsageError(
                f"--trials {quoted(self.trials)} with --best-of {self.best_of:g} has two readings: several published"
                " bests, or one best of candidates of several trainings. Leave --trials out for one published best;"
                " for candidates of N trainings each, give --steps or --epochs N times as large"
            )
        self.overrides = [text for text in self.arguments if "=" in text and not os.path.exists(text)]
        self.sources = [text for text in self.arguments if text not in self.overrides]

    @property
    def question(self) -> str:
        """Key of the question in `_USES`."""
        if self.excess_risk is not None:
            return "--excess-risk"
        if self.export is not None:
            return "--export"
        if self.over is not None:
            name, is_axis, _ = self.over.partition("=")
            return f"--over {name}" if is_axis and f"--over {name}" in _USES else "--over"
        if self.curve:
            return "--curve"
        if self.at_epsilon is not None:
            return "--at-epsilon"
        return "a price" if self.solve is None and self.target is None else "a budget"

    @property
    def target(self) -> Target | None:
        """The budget of the options; None without one. Raises UsageError for two, or for one that limits nothing."""
        given = [name for name in _TARGETS if getattr(self, name) is not None]
        if not given:
            return None
        options = [f"--{name.replace('_', '-')}" for name in given]
        if len(given) > 1:
            raise UsageError(f"{' and '.join(options)}: give one budget")
        return Target(**{given[0].removeprefix("target_"): getattr(self, given[0])})

    def _check_use(self) -> None:
        unused = [
            f"--{name.replace('_', '-')}"
            for name in AccountOptions.__annotations__
            if name not in ("arguments", *_USES[self.question]) and getattr(self, name) != USUAL[name]
        ]
        if unused:
            hint = next((_HINTS[name] for name in unused if name in _HINTS), "leave it out, or ask another question")
            raise UsageError(f"{self.question} does not use {', '.join(unused)}: {hint}")
        if self.law is not None and self.best_of is None:
            raise UsageError("--law is that of the number of trials of --best-of: give that, too, or leave --law out")


USUAL: dict[str, Any] = dict.fromkeys(AccountOptions.__annotations__) | {"group": 1, "trials": "1"}
"""Value of each option that is not given."""
USUAL |= dict.fromkeys(("arguments", "batching", "accountant"), ()) | dict.fromkeys(("attacker", "curve"), False)


def check_number(name: str, value: float | None) -> None:
    """Raise UsageError for a `value` of option `name` that is no number or outside its range; None passes."""
    if value is None:
        return
    least, most, words = _NUMBERS[name]
    whole = isinstance(least, float) or (not isinstance(value, bool) and value == value // 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (least <= value <= most and whole):
        shown = f"{value:g}" if isinstance(value, float) else quoted(value)
        raise UsageError(f"--{name.replace('_', '-')} is {shown}, but must be {words}")


def cases_of(asked: AccountOptions) -> list[Case]:
    """Return the cases of the command line, in the order given."""
    if asked.events is not None or asked.opacus_history is not None:
        cases: list[Case] = [_record_case(asked)]
    else:
        cases = [_source_case(asked, source) for source in asked.sources] if asked.sources else _flag_cases(asked)
    if asked.trials == "1":
        return cases
    if len(asked.sources) > 1:
        cases = [cases[0].joined(cases[1:])]
    return [case.repeated(_trial_count(asked.trials, case)) for case in cases]


def _flag_cases(asked: AccountOptions) -> list[Case]:
    if asked.overrides:
        raise UsageError(f"{asked.overrides[0]}: KEY=VALUE changes a recipe; name one")
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    sampling_rate = _sampling_rate(asked)
    sampled = sampling_rate is not None or asked.records is not None
    batchings = asked.batching or (("poisson",) if sampled else ())
    if not batchings:
        raise UsageError(
            "nothing to account for: give --noise-multiplier, --sampling-rate and --steps (or --epochs), or --batching"
            " full or shuffle; or a recipe, a result directory or a ledger"
        )
    _check_flags(asked, batchings, sampling_rate)
    return [
        FlagCase(
            batching=batching,  # type: ignore[arg-type]
            adjacency=asked.adjacency or BATCHINGS[batching].adjacency,  # type: ignore[arg-type,index]
            delta=asked.delta if asked.delta is not None else 1e-5,
            noise_multiplier=asked.noise_multiplier,
            sampling_rate=sampling_rate,
            records=asked.records,
            largest_batch=asked.largest_batch,
            participations=asked.participations,
            steps=asked.steps,
            epochs=asked.epochs,
        )
        for batching in batchings
    ]


def _check_flags(asked: AccountOptions, batchings: Sequence[str], rate: float | None) -> None:
    """Raise UsageError for numbers that contradict each other or that no batching of the question uses."""
    kinds = [kind for name, kind in BATCHINGS.items() if name in batchings]
    truncated = any(kind.recorded == "truncated" for kind in kinds)
    if asked.largest_batch is not None and not truncated:
        raise UsageError(
            f"--largest-batch is for truncated batches, not for {', '.join(batchings)}: add --batching"
            " truncated-poisson, or leave it out"
        )
    if asked.participations is not None and not all(kind.sampled and kind.by_epoch for kind in kinds):
        raise UsageError("--participations is for --batching random-allocation alone: leave it out")
    if rate is not None and not any(kind.sampled or kind.by_epoch for kind in kinds):
        raise UsageError(f"{', '.join(batchings)} batches have no sampling rate: leave it out")
    if asked.records is None:
        return
    if asked.sampling_rate is not None and not truncated:
        raise UsageError("--records with --sampling-rate is for truncated batches: give one of both")
    if asked.sampling_rate is not None and asked.sampling_rate * asked.records < 1 - 1e-9:
        raise UsageError(
            f"--sampling-rate {asked.sampling_rate:g} of --records {asked.records} is less than one record a batch:"
            f" the rate must be at least {1 / asked.records:g}"
        )
    if asked.largest_batch is not None and asked.largest_batch > asked.records:
        raise UsageError(f"--largest-batch is {asked.largest_batch}, but must be at most --records ({asked.records})")


def _sampling_rate(asked: AccountOptions) -> float | None:
    """Return the given sampling rate, or batch size over number of records; None without either."""
    if asked.batch_size is None:
        return asked.sampling_rate
    if asked.sampling_rate is not None:
        raise UsageError("give --sampling-rate, or --batch-size and --records, not both")
    if asked.records is None:
        raise UsageError(f"--batch-size {asked.batch_size} is a share of --records: give that, too")
    if asked.batch_size > asked.records:
        raise UsageError(f"--batch-size is {asked.batch_size}, but must be at most --records ({asked.records})")
    return asked.batch_size / asked.records


def _record_case(asked: AccountOptions) -> Case:
    """Return the case of `--events` or `--opacus-history`. What the file does not say has no default."""
    from dpsgd_cli.account.histories import HistoryCase
    from dpsgd_cli.accounting.events import read_events, read_opacus_history

    option, needed = ("--events", "adjacency") if asked.events is not None else ("--opacus-history", "batching")
    extra = [name for name in _OF_NUMBERS if name != needed and getattr(asked, name) != USUAL[name]]
    if asked.arguments or extra or (asked.events is not None and asked.opacus_history is not None):
        raise UsageError(f"{option} says all that was released: leave out other sources and numbers")
    delta = asked.delta if asked.delta is not None else 1e-5
    if asked.events is not None:
        if asked.adjacency is None:
            raise UsageError("--events: events do not say which data sets are neighbours: give --adjacency")
        releases = read_events(Path(asked.events), asked.adjacency)  # type: ignore[arg-type]
        remark = "nothing vouches for these events but their author"
        return HistoryCase(Path(asked.events).name, tuple(releases), delta, remark)
    assert asked.opacus_history is not None
    if len(asked.batching) != 1 or asked.batching[0] not in ("poisson", "shuffle"):
        raise UsageError(
            "--opacus-history: a history does not say how batches were drawn: give --batching poisson, or --batching"
            " shuffle for poisson_sampling=False"
        )
    releases = read_opacus_history(Path(asked.opacus_history), asked.batching[0])
    remark = f"true if all batches were {asked.batching[0]} batches, the loss was a sum or mean by a public size, and"
    return HistoryCase(Path(asked.opacus_history).name, tuple(releases), delta, f"{remark} no step is missing")


def exported(cases: Sequence[Case]) -> str:
    """Return the releases of one case as JSON events of dp_accounting; UsageError for releases that differ by trial."""
    import json

    from dpsgd_cli.accounting.events import to_event

    different = [releases for case in cases for releases in answers.distinct(case.trials())]
    if len(different) != 1:
        raise UsageError(
            f"--export: {len(different)} different ledgers: trials or parts of the data that differ are events of their"
            " own; give one ledger, or --trials all for what they cost together"
        )
    return json.dumps(to_event(different[0]), indent=1)


def _source_case(asked: AccountOptions, source: str) -> Case:
    from dpsgd_cli.account.ledgers import read_checkpoint, read_ledgers  # NumPy and pydantic, which flags do without
    from dpsgd_cli.training.checkpoint import ENDING

    extra = [name for name in _OF_NUMBERS if name != "epochs" and getattr(asked, name) != USUAL[name]]
    if extra:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in extra)
        raise UsageError(f"{flags}: {source} says that already; change a recipe with KEY=VALUE")
    is_checkpoint = source.endswith(ENDING)
    ledgers = read_checkpoint(Path(source), asked.delta) if is_checkpoint else read_ledgers(source, asked.delta)
    if ledgers is None:
        from dpsgd_cli.account.recipes import read_recipe  # all settings of recipes, which ledgers do without

        return read_recipe(source, asked.overrides, asked.delta, asked.epochs)
    if asked.overrides or asked.epochs is not None:
        raise UsageError(f"{source} is a record of what happened; KEY=VALUE and --epochs cannot change it")
    return ledgers


def _trial_count(text: str, case: Case) -> int:
    if case.recorded and text != "all":
        raise UsageError(
            f"--trials {text}: {case.label} records its trials; give all, or leave it out for the most expensive"
        )
    if text == "all":
        return case.own_trials()
    # no more digits than the bound has, since very long numbers are slow to parse
    if not text.isdecimal() or len(text) > len(str(MOST_USES)) or not 1 <= int(text) <= MOST_USES:
        raise UsageError(
            f"--trials is {quoted(text)}, but must be a whole number of at least 1 and at most {MOST_USES}, or all"
        )
    return int(text)


def _accountants(asked: AccountOptions, case: Case) -> list[accountants.Accountant]:
    """Return the accountants for one case."""
    if asked.best_of is not None:
        if set(asked.accountant) - {"rdp"}:
            raise UsageError("--best-of is priced by rdp: leave --accountant out")
        reason = case.why_apart(2)
        if reason is not None:
            raise UnsupportedMechanism(f"--best-of: {reason}")
        return [BestOfTrials(Choice(asked.best_of, asked.law or "geometric"))]
    names: list[str] = []
    for text in asked.accountant or accountants.USUAL:
        name, _, batching = text.partition("@")
        if batching not in ("", *BATCHINGS):
            raise UsageError(f"--accountant {text}: unknown batching {batching!r}; known: {', '.join(BATCHINGS)}")
        if not batching or batching == case.batching:
            names += accountants.NAMES if name == "all" else [name]
    found = [accountants.get(name) for name in dict.fromkeys(names)]
    return found if asked.group == 1 else [ForGroup(accountant, asked.group) for accountant in found]


def rows_of(asked: AccountOptions, cases: list[Case]) -> list[answers.Row]:
    """Return ranked rows of prices, or of the values that a budget affords.

    Raises UnsupportedMechanism if every accountant refuses, unless a case has no statement at all.
    """
    rows: list[answers.Row] = []
    more_is_better = False
    for index, case in enumerate(cases):
        if (asked.group > 1 or asked.best_of is not None) and case.has_held_out():
            option = "--group" if asked.group > 1 else "--best-of"
            raise UsageError(
                f"{option}: no price is proved where held-out records are private: a group may lie in both parts, and a"
                " choice may use both"
            )
        named = _accountants(asked, case)
        parameter = _free_parameter(asked, case)
        more_is_better = parameter is not None and case.parameters().get(parameter, False)
        if parameter is None:
            if not asked.accountant and asked.best_of is None and case.spends_a_budget():
                # if the budget in epsilon was set by this accountant, it states exactly that epsilon
                tight = accountants.get("zcdp-tight")
                named = [*named, tight if asked.group == 1 else ForGroup(tight, asked.group)]
            found = [answers.price(case, accountant, asked.at_epsilon) for accountant in named]
            # a group of k records has k^2 times the rho of one record (Bun and Steinke 2016, Proposition 1.9)
            found = [dataclasses.replace(row, rho=row.rho and row.rho * asked.group**2) for row in found]
            if asked.attacker:
                told = answers.attacker_of(case)
                found = [dataclasses.replace(row, attacker=told) for row in found]
        else:
            target = asked.target or case.budget()
            found = answers.afford(case, named, parameter, target)
        rows += [dataclasses.replace(row, case=index) for row in found]
    if all(row.epsilon is None for row in rows) and not any(case.no_statement() for case in cases):
        raise UnsupportedMechanism(_reasons(rows))
    return answers.ranked(rows, more_is_better)


def _reasons(rows: list[answers.Row]) -> str:
    """Return the accountants' reasons for refusing, each reason once."""
    named: dict[str, list[str]] = {}
    for row in rows:
        named.setdefault(row.note.removeprefix("refused: "), []).append(row.accountant)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())


def _free_parameter(asked: AccountOptions, case: Case) -> str | None:
    """Return the parameter to solve for; None if the question is a price.

    Raises UsageError for two targets, or if a target leaves nothing to solve for.
    """
    wanted = asked.target is not None
    if asked.solve is not None:
        return asked.solve
    if not wanted:
        return None
    free = case.free()
    if free is None:
        raise UsageError(
            "everything is given, so the target leaves nothing to solve for: leave out --noise-multiplier or --steps,"
            f" or name what is free with --solve ({', '.join(case.parameters()) or 'nothing here'})"
        )
    return free


def series_of(asked: AccountOptions, cases: list[Case]) -> answers.Series:
    """Return the curve of `--curve` or `--over`; UsageError for a bad axis."""
    questions = [(case, _accountants(asked, case)) for case in cases]
    if asked.over is None:
        with_rho = not asked.accountant or asked.accountant == ("zcdp",)
        return answers.epoch_curve(questions, with_rho, named_by_user=bool(asked.accountant))
    axis, points = _axis(asked.over)
    if axis == "order":
        sampling_rate = _sampling_rate(asked)
        if sampling_rate is None or asked.noise_multiplier is None:
            raise UsageError("--over order needs --sampling-rate and --noise-multiplier")
        if points[0] <= 1:
            raise UsageError(f"--over {asked.over}: Renyi orders are above 1")
        return answers.divergence_curve(sampling_rate, asked.noise_multiplier, points)
    if axis == answers.FALSE_POSITIVES:
        if not (points[0] > 0 and points[-1] < 1):
            raise UsageError(f"--over {asked.over}: false positive rates are above 0 and below 1")
        return answers.tradeoff_curve(cases, points)
    if axis.replace("-", "_") in _NUMBERS:
        for point in points:
            check_number(axis.replace("-", "_"), point)
    return answers.parameter_curve(questions, axis, points, named_by_user=bool(asked.accountant))


def _axis(text: str) -> tuple[str, list[float]]:
    """Parse NAME=FROM:TO:STEP into the name and its points; UsageError for anything else."""
    name, _, span = text.partition("=")
    try:
        start, stop, step = (float(part) for part in span.split(":"))
    except ValueError:
        raise UsageError(
            f"--over {text}: write it as NAME=FROM:TO:STEP, for example sampling-rate=0.01:0.1:0.01"
        ) from None
    if not all(map(math.isfinite, (start, stop, step))):
        raise UsageError(f"--over {text}: FROM, TO and STEP must be finite")
    if not (step > 0 and stop >= start) or (stop - start) / step > 100_000:
        raise UsageError(f"--over {text}: FROM must not be above TO, STEP must be positive, at most 100000 points")
    return name, list(answers.steps_between(start, stop, step))
