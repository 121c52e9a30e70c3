"""Questions of `dpsgd account`: from its options to cases, accountants, rows and curves. Prices are in `answers.py`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

from dpsgd_cli.account import answers
from dpsgd_cli.account.cases import DEFAULT_DELTA, Case, Numbers, of_history
from dpsgd_cli.account.options import MOST_USES, OF_NUMBERS, Asked, check_number, flag
from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.adjacency import BATCHINGS, Batching, replace_factor
from dpsgd_cli.accounting.repeated_selection import BestOfTrials, Choice
from dpsgd_cli.common.text_format import quoted
from dpsgd_cli.errors import UnsupportedMechanism, UsageError


def cases_of(asked: Asked) -> list[Case]:
    """Return the cases of the command line, in the order given, each for whom and for how many trials was asked."""
    together = asked.trials != "1"
    if asked.opacus_history is not None:
        cases = [_history_case(asked)]
    elif asked.sources:
        whole = [asked.sources] if together else [[source] for source in asked.sources]
        cases = [_source_case(asked, sources) for sources in whole]
    else:
        cases = _number_cases(asked)
    choice = None if asked.best_of is None else Choice(asked.best_of, asked.law or "geometric")
    return [
        dataclasses.replace(
            case, together=_trial_count(asked.trials, case) if together else None, group=asked.group, choice=choice
        )
        for case in cases
    ]


def _number_cases(asked: Asked) -> list[Case]:
    if asked.overrides:
        raise UsageError(f"{asked.overrides[0]}: KEY=VALUE changes a recipe; name one")
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    sampled = asked.sampling_rate is not None or asked.batch_size is not None or asked.records is not None
    batchings: Sequence[Batching] = asked.batching or (("poisson",) if sampled else ())
    if not batchings:
        raise UsageError(
            "nothing to account for: give --noise-multiplier, --sampling-rate and --steps (or --epochs), or --batching"
            " full or shuffle; or a recipe, a result directory or a ledger"
        )
    _check_numbers(asked, batchings)
    found = []
    for batching in batchings:
        adjacency = asked.adjacency or BATCHINGS[batching].adjacency
        over_clip = None if asked.noise_over_clip is None else asked.noise_over_clip / replace_factor(adjacency)
        numbers = Numbers(
            batching=batching,
            adjacency=adjacency,
            delta=asked.delta if asked.delta is not None else DEFAULT_DELTA,
            noise_multiplier=asked.noise_multiplier if over_clip is None else over_clip,
            sampling_rate=_sampling_rate(asked, batching),
            records=asked.records,
            steps=asked.steps,
            epochs=asked.epochs,
        )
        found.append(numbers.case())
    return found


def _check_numbers(asked: Asked, batchings: Sequence[str]) -> None:
    """Raise UsageError for numbers that contradict each other or that no batching of the question uses."""
    kinds = [kind for name, kind in BATCHINGS.items() if name in batchings]
    rate = asked.sampling_rate
    if asked.batch_size is not None:
        if rate is not None:
            raise UsageError("give --sampling-rate, or --batch-size and --records, not both")
        if asked.records is None:
            raise UsageError(f"--batch-size {asked.batch_size} is a share of --records: give that, too")
        if asked.batch_size > asked.records:
            raise UsageError(f"--batch-size is {asked.batch_size}, but must be at most --records ({asked.records})")
    if (rate or asked.batch_size) and not any(kind.sampled or kind.by_epoch for kind in kinds):
        raise UsageError(f"{', '.join(batchings)} batches have no sampling rate: leave it out")
    if rate is not None and asked.records is not None and rate * asked.records < 1 - 1e-9:
        raise UsageError(
            f"--sampling-rate {rate:g} of --records {asked.records} is less than one record a batch:"
            f" the rate must be at least {1 / asked.records:g}"
        )


def _sampling_rate(asked: Asked, batching: Batching) -> float | None:
    """Return the given sampling rate, or that of the batch size and the number of records; None without either."""
    if asked.batch_size is None:
        return asked.sampling_rate
    kind = BATCHINGS[batching]
    return kind.rate(asked.batch_size, asked.records) if kind.sampled else asked.batch_size / asked.records


def _history_case(asked: Asked) -> Case:
    """Return the case of `--opacus-history`. What the file does not say has no default."""
    from dpsgd_cli.accounting.events import read_opacus_history

    if asked.sources or asked.overrides or any(asked.given(*(name for name in OF_NUMBERS if name != "batching"))):
        raise UsageError("--opacus-history says all that was released: leave out other sources and numbers")
    if len(asked.batching) != 1 or asked.batching[0] not in ("poisson", "shuffle"):
        raise UsageError(
            "--opacus-history: a history does not say how batches were drawn: give --batching poisson, or --batching"
            " shuffle for poisson_sampling=False"
        )
    path, batching = Path(asked.opacus_history), asked.batching[0]
    remark = f"true if all batches were {batching} batches, the loss was a sum or mean by a public size, and no step is"
    releases = read_opacus_history(path, batching)
    return of_history(path.name, releases, asked.delta or DEFAULT_DELTA, f"{remark} missing")


def exported(cases: Sequence[Case]) -> str:
    """Return the releases of one case as JSON: an event of dp_accounting, or a list where trials or parts differ.

    Guarantee: at every delta, the greatest price of the events is that of the case. Each trial is stated by itself, and
    a record is in one of the disjoint parts of the data, whose releases alone depend on it (parallel composition).
    Raises UsageError for several cases.
    """
    from dpsgd_cli.accounting.events import to_event

    if len(cases) != 1:
        raise UsageError(f"--export: {len(cases)} cases; give one, as an event holds what is priced together")
    different = dict.fromkeys(part for parts in cases[0].composition.trials for part in parts)
    events = [to_event(part) for part in different]
    return json.dumps(events[0] if len(events) == 1 else events, indent=1)


def _source_case(asked: Asked, sources: Sequence[str]) -> Case:
    """Return the case of a recipe, or of the ledgers of one or several sources together."""
    from dpsgd_cli.account.ledgers import read_ledgers  # NumPy and pydantic, which numbers do without

    extra = list(asked.given(*(name for name in OF_NUMBERS if name != "epochs")))
    if extra:
        said = f"{sources[0]} says that already; change a recipe with KEY=VALUE"
        raise UsageError(f"{', '.join(map(flag, extra))}: {said}")
    if (ledgers := read_ledgers(sources, asked.delta)) is not None:
        if asked.overrides or asked.epochs is not None:
            raise UsageError(f"{sources[0]} is a record of what happened; KEY=VALUE and --epochs cannot change it")
        return ledgers
    if len(sources) > 1:
        raise UsageError("--trials adds up results and ledgers, or the trials of one recipe: name one recipe at a time")
    from dpsgd_cli.account.recipes import read_recipe  # all settings of recipes, which ledgers do without

    return read_recipe(sources[0], asked.overrides, asked.delta, asked.epochs)


def _trial_count(text: str, case: Case) -> int:
    if case.recorded and text != "all":
        raise UsageError(
            f"--trials {text}: {case.label} records its trials; give all, or leave it out for the most expensive"
        )
    if text == "all":
        if case.own_trials is None:
            raise UsageError("--trials all: numbers have no trials of their own; give how many")
        return case.own_trials
    # no more digits than the bound has, since very long numbers are slow to parse
    if not text.isdecimal() or len(text) > len(str(MOST_USES)) or not 1 <= int(text) <= MOST_USES:
        raise UsageError(
            f"--trials is {quoted(text)}, but must be a whole number of at least 1 and at most {MOST_USES}, or all"
        )
    return int(text)


def _accountants(asked: Asked, case: Case) -> list[accountants.Accountant]:
    """Return the accountants for one case."""
    if case.choice is not None:
        if set(asked.accountant) - {"rdp"}:
            raise UsageError("--best-of is priced by rdp: leave --accountant out")
        return [BestOfTrials(case.choice)]
    names: list[str] = []
    for text in asked.accountant or accountants.USUAL:
        name, _, batching = text.partition("@")
        if batching not in ("", *BATCHINGS):
            raise UsageError(f"--accountant {text}: unknown batching {batching!r}; known: {', '.join(BATCHINGS)}")
        if not batching or batching == case.batching:
            names += accountants.NAMES if name == "all" else [name]
    # if a budget in epsilon was set by this accountant, it states exactly that epsilon
    names += ["zcdp-tight"] if case.is_budget and not asked.accountant else []
    return [accountants.get(name) for name in dict.fromkeys(names)]


def rows_of(asked: Asked, cases: Sequence[Case]) -> list[answers.Row]:
    """Return ranked rows of prices, or of the values that a budget affords.

    Raises UnsupportedMechanism if every accountant refuses, unless a case has no statement at all.
    """
    rows: list[answers.Row] = []
    more_is_better = False
    for case in cases:
        named = _accountants(asked, case)
        if asked.question == "B":
            parameter = asked.solve or _free_parameter(case)
            more_is_better = case.parameters.get(parameter, False)
            rows += answers.afford(case, named, parameter, asked.target or case.budget)
        else:
            found = [answers.price(case, accountant, asked.at_epsilon) for accountant in named]
            priced = next((row.priced for row in found if row.priced is not None), None)
            attack = priced.attack() if asked.attacker and priced is not None and case.start is None else None
            rows += [dataclasses.replace(row, attack=attack) for row in found]
    if all(row.epsilon is None for row in rows) and not any(case.no_statement() for case in cases):
        reasons = answers.reasons_of(rows).items()
        raise UnsupportedMechanism("\n".join(f"{', '.join(r.accountant for r in own)}: {why}" for why, own in reasons))
    return answers.ranked(rows, more_is_better)


def _free_parameter(case: Case) -> str:
    """Return the parameter that was left out; UsageError if the target leaves nothing to solve for."""
    if case.free is None:
        raise UsageError(
            "everything is given, so the target leaves nothing to solve for: leave out --noise-multiplier or --steps,"
            f" or name what is free with --solve ({', '.join(case.parameters) or 'nothing here'})"
        )
    return case.free


def series_of(asked: Asked, cases: Sequence[Case]) -> answers.Series:
    """Return the curve of `--curve` or `--over`; UsageError for a bad axis."""
    if asked.over is None:
        with_rho = not asked.accountant or asked.accountant == ("zcdp",)
        questions = [(case, _accountants(asked, case)) for case in cases]
        return answers.epoch_curve(questions, with_rho)
    axis, points = _axis(asked.over)
    if axis == "order":
        sampling_rate = _sampling_rate(asked, "poisson")
        if sampling_rate is None or asked.noise_multiplier is None:
            raise UsageError("--over order needs --sampling-rate and --noise-multiplier")
        if points[0] <= 1:
            raise UsageError(f"--over {asked.over}: Renyi orders are above 1")
        return answers.divergence_curve(sampling_rate, asked.noise_multiplier, points)
    if axis == answers.FALSE_POSITIVES:
        if not (points[0] > 0 and points[-1] < 1):
            raise UsageError(f"--over {asked.over}: false positive rates are above 0 and below 1")
        return answers.tradeoff_curve(cases, points)
    for point in points:
        check_number(axis.replace("-", "_"), point)
    questions = [(case, _accountants(asked, case)) for case in cases]
    return answers.parameter_curve(questions, axis, points)


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
    count = math.floor((stop - start) / step + 1e-9)
    return name, [round(start + i * step, 12) for i in range(count + 1)]
