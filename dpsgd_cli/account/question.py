"""What `dpsgd account` is asked, from its flags to cases, accountants, rows and curves.

Not here: options and printing (`commands/account.py`), prices (`answers.py`), tables (`report.py`).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from dpsgd_cli.account import answers
from dpsgd_cli.account.cases import Case, FlagCase
from dpsgd_cli.account.solving import Target
from dpsgd_cli.errors import UnsupportedMechanism, UsageError
from dpsgd_cli.privacy import accountants
from dpsgd_cli.privacy.groups import ForGroup
from dpsgd_cli.privacy.selection import BestOfTrials, Choice
from dpsgd_cli.recipe.batching import BATCHINGS
from dpsgd_cli.wording import quoted

MOST_USES = 1_000_000_000_000
"""Of steps, epochs and trials."""
MOST_IN_A_GROUP = 1_000_000


class Asked:
    """The command line, one attribute per option. No dataclass: making one takes a millisecond of every answer."""

    arguments: tuple[str, ...]
    noise_multiplier: float | None
    sampling_rate: float | None
    batch_size: int | None
    records: int | None
    largest_batch: int | None
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
    law: str
    attacker: bool
    curve: bool
    over: str | None
    plot: str | None
    format: str | None

    def __init__(self, **given: Any) -> None:
        """Raises UsageError for flags that do not go together."""
        self.__dict__.update(given)
        if self.delta is not None and not 0 < self.delta < 1:
            raise UsageError(f"--delta is {self.delta:g}, but must be above 0 and below 1")
        apart = [name for name in ("excess_risk", "over", "at_epsilon") if getattr(self, name) is not None]
        apart += ["curve"] if self.curve else []
        if self.max_epsilon is not None and apart:
            raise UsageError(
                f"--max-epsilon judges prices, which --{apart[0].replace('_', '-')} does not show: ask for one"
            )
        if not 1 <= self.group <= MOST_IN_A_GROUP:
            raise UsageError(f"--group is {self.group}, but must be at least 1 and at most {MOST_IN_A_GROUP}")
        others = ("solve", "target_epsilon", "target_rho", "best_of", "excess_risk", "over")
        besides = [name for name in others if getattr(self, name) is not None]
        besides += [name for name in ("attacker", "curve") if getattr(self, name)]
        if self.group > 1 and besides:
            raise UsageError(f"--group states prices; leave --{besides[0].replace('_', '-')} out, or --group")
        self.overrides = [text for text in self.arguments if "=" in text and not os.path.exists(text)]
        self.sources = [text for text in self.arguments if text not in self.overrides]


def demands_of(asked: Asked, error: float) -> list[dict[str, Any]]:
    """Steps and records of Lecture 9, section 7, for each recipe."""
    from dpsgd_cli.account.recipes import demand_of
    from dpsgd_cli.recipe.loading import load_recipe

    if not asked.sources:
        raise UsageError("--excess-risk is about a convex recipe: name one")
    return [demand_of(load_recipe(source, asked.overrides), error) for source in asked.sources]


def cases_of(asked: Asked) -> list[Case]:
    """What is asked about, in the order given."""
    cases = [_source_case(asked, source) for source in asked.sources] if asked.sources else _flag_cases(asked)
    if asked.trials == "1":
        return cases
    return [case.repeated(_trial_count(asked.trials, case)) for case in cases]


def _flag_cases(asked: Asked) -> list[Case]:
    if asked.overrides:
        raise UsageError(f"{asked.overrides[0]}: KEY=VALUE changes a recipe; name one")
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    _check_flags(asked)
    sampling_rate = _sampling_rate(asked)
    sampled = sampling_rate is not None or asked.records is not None
    batchings = asked.batching or (("poisson",) if sampled else ())
    if not batchings:
        raise UsageError(
            "nothing to account for: give --noise-multiplier, --sampling-rate and --steps (or --epochs), or --batching"
            " full or shuffle; or a recipe, a result directory or a ledger"
        )
    return [
        FlagCase(
            batching=batching,  # type: ignore[arg-type]
            adjacency=asked.adjacency or BATCHINGS[batching].adjacency,  # type: ignore[arg-type,index]
            delta=asked.delta if asked.delta is not None else 1e-5,
            noise_multiplier=asked.noise_multiplier,
            sampling_rate=sampling_rate,
            records=asked.records,
            largest_batch=asked.largest_batch,
            steps=asked.steps,
            epochs=asked.epochs,
        )
        for batching in batchings
    ]


def _check_flags(asked: Asked) -> None:
    """Numbers that no mechanism could have; the rest is checked where mechanisms are made."""
    counts = {
        "--steps": asked.steps,
        "--epochs": asked.epochs,
        "--batch-size": asked.batch_size,
        "--records": asked.records,
        "--largest-batch": asked.largest_batch,
    }
    for name, value in counts.items():
        if value is not None and not 1 <= value <= MOST_USES:
            raise UsageError(f"{name} is {quoted(value)}, but must be at least 1 and at most {MOST_USES}")
    if asked.sampling_rate is not None and not 0 < asked.sampling_rate <= 1:
        raise UsageError(f"--sampling-rate is {asked.sampling_rate:g}, but must be above 0 and at most 1")
    if asked.noise_multiplier is not None and not 0 < asked.noise_multiplier < float("inf"):
        raise UsageError(f"--noise-multiplier is {asked.noise_multiplier:g}, but must be positive and finite")


def _sampling_rate(asked: Asked) -> float | None:
    """As it was given, or of a batch size and a number of records."""
    if asked.batch_size is None:
        return asked.sampling_rate
    if asked.sampling_rate is not None:
        raise UsageError("give --sampling-rate, or --batch-size and --records, not both")
    if asked.records is None:
        raise UsageError(f"--batch-size {asked.batch_size} is a share of --records: give that, too")
    if asked.batch_size > asked.records:
        raise UsageError(f"--batch-size is {asked.batch_size}, but must be at most --records ({asked.records})")
    return asked.batch_size / asked.records


def _source_case(asked: Asked, source: str) -> Case:
    from dpsgd_cli.account.checkpoints import read_checkpoint
    from dpsgd_cli.account.ledgers import read_ledgers  # NumPy and pydantic, which flags do without
    from dpsgd_cli.account.recipes import read_recipe
    from dpsgd_cli.results.checkpoint import ENDING

    flags = {
        "--noise-multiplier": asked.noise_multiplier,
        "--sampling-rate": asked.sampling_rate,
        "--batch-size": asked.batch_size,
        "--records": asked.records,
        "--largest-batch": asked.largest_batch,
        "--steps": asked.steps,
        "--batching": asked.batching or None,
        "--adjacency": asked.adjacency,
    }
    extra = [name for name, value in flags.items() if value is not None]
    if extra:
        raise UsageError(f"{', '.join(extra)}: {source} says that already; change a recipe with KEY=VALUE")
    is_checkpoint = source.endswith(ENDING)
    ledgers = read_checkpoint(Path(source), asked.delta) if is_checkpoint else read_ledgers(source, asked.delta)
    if ledgers is None:
        return read_recipe(source, asked.overrides, asked.delta, asked.epochs)
    if asked.overrides or asked.epochs is not None:
        raise UsageError(f"{source} is a record of what happened; KEY=VALUE and --epochs cannot change it")
    return ledgers


def _trial_count(text: str, case: Case) -> int:
    recorded = getattr(case, "entries", None)
    if recorded is not None:
        if text != "all":
            raise UsageError(
                f"--trials {text}: {case.label} records its trials; give all, or leave it out for the most expensive"
            )
        return len(recorded)
    if text == "all":
        recipe = getattr(case, "recipe", None)
        if recipe is None:
            raise UsageError("--trials all: numbers have no trials of their own; give how many")
        return int(recipe.trials)
    # no longer than the bound, since very long numbers take long to read
    if not text.isdecimal() or len(text) > len(str(MOST_USES)) or not 1 <= int(text) <= MOST_USES:
        raise UsageError(
            f"--trials is {quoted(text)}, but must be a whole number of at least 1 and at most {MOST_USES}, or all"
        )
    return int(text)


def _accountants(asked: Asked, case: Case) -> list[accountants.Accountant]:
    """Those to ask about one case."""
    if asked.best_of is not None:
        if set(asked.accountant) - {"rdp"}:
            raise UsageError("--best-of is priced by Renyi divergences only: leave --accountant out, or say rdp")
        reason = case.why_apart(2)
        if reason is not None:
            raise UnsupportedMechanism(f"--best-of: {reason}")
        return [BestOfTrials(Choice(asked.best_of, asked.law))]
    names: list[str] = []
    for text in asked.accountant or accountants.USUAL:
        name, _, batching = text.partition("@")
        if batching not in ("", *BATCHINGS):
            raise UsageError(f"--accountant {text}: unknown batching {batching!r}; known: {', '.join(BATCHINGS)}")
        if not batching or batching == case.batching:
            names += accountants.NAMES if name == "all" else [name]
    found = [accountants.get(name) for name in dict.fromkeys(names)]
    return found if asked.group == 1 else [ForGroup(accountant, asked.group) for accountant in found]


def rows_of(asked: Asked, cases: list[Case]) -> list[answers.Row]:
    """Prices, or what a budget affords. A refusal by the only accountant asked is an error."""
    rows: list[answers.Row] = []
    more_is_better = False
    for index, case in enumerate(cases):
        named = _accountants(asked, case)
        parameter = _free_parameter(asked, case)
        more_is_better = parameter is not None and case.parameters().get(parameter, False)
        if parameter is None:
            if not asked.accountant and asked.best_of is None and case.spends_a_budget():
                # a budget in epsilon may be one by this accountant, which then states just that
                tight = accountants.get("zcdp-tight")
                named = [*named, tight if asked.group == 1 else ForGroup(tight, asked.group)]
            found = [answers.price(case, accountant, asked.at_epsilon) for accountant in named]
            # that of one record is no group's: k^2 times as much (Bun and Steinke 2016, Proposition 1.9)
            found = [dataclasses.replace(row, rho=row.rho and row.rho * asked.group**2) for row in found]
            if asked.attacker:
                told = answers.attacker_of(case)
                found = [dataclasses.replace(row, attacker=told) for row in found]
        else:
            found = answers.afford(case, named, parameter, _target(asked, case))
        rows += [dataclasses.replace(row, case=index) for row in found]
    if all(row.epsilon is None for row in rows) and not any(case.no_statement() for case in cases):
        raise UnsupportedMechanism(_reasons(rows))
    return answers.ranked(rows, more_is_better)


def _reasons(rows: list[answers.Row]) -> str:
    """Why nobody answers, each reason once."""
    named: dict[str, list[str]] = {}
    for row in rows:
        named.setdefault(row.note.removeprefix("refused: "), []).append(row.accountant)
    return "\n".join(f"{', '.join(names)}: {reason}" for reason, names in named.items())


def _free_parameter(asked: Asked, case: Case) -> str | None:
    """What to solve for; None when everything is given and only the price is asked."""
    wanted = asked.target_epsilon is not None or asked.target_rho is not None
    if asked.target_epsilon is not None and asked.target_rho is not None:
        raise UsageError("give --target-epsilon or --target-rho, not both")
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


def _target(asked: Asked, case: Case) -> Target:
    if asked.target_epsilon is not None or asked.target_rho is not None:
        return Target(asked.target_epsilon, asked.target_rho)
    return case.budget()


def series_of(asked: Asked, cases: list[Case]) -> answers.Series:
    """The curve that --curve or --over asks for."""
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
            raise UsageError(f"--over {asked.over}: rates of false alarms are above 0 and below 1")
        return answers.tradeoff_curve(cases, points)
    return answers.parameter_curve(questions, axis, points, named_by_user=bool(asked.accountant))


def _axis(text: str) -> tuple[str, list[float]]:
    """NAME=FROM:TO:STEP."""
    name, _, span = text.partition("=")
    try:
        start, stop, step = (float(part) for part in span.split(":"))
    except ValueError:
        raise UsageError(
            f"--over {text}: write it as NAME=FROM:TO:STEP, for example sampling-rate=0.01:0.1:0.01"
        ) from None
    if not (step > 0 and stop >= start) or (stop - start) / step > 100_000:
        raise UsageError(f"--over {text}: FROM must not be above TO, STEP must be positive, at most 100000 points")
    return name, list(answers.steps_between(start, stop, step))
