"""`dpsgd account`: what a training costs, and what a budget affords. Needs no torch and no data.

Not here: any price (`privacy/accountants/`), solving (`account/solving.py`), tables (`account/report.py`).
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import click

from dpsgd_cli.errors import UnsupportedMechanism, UsageError
from dpsgd_cli.recipe.batching import BATCHINGS
from dpsgd_cli.wording import quoted

if TYPE_CHECKING:
    from dpsgd_cli.account.answers import Row, Series
    from dpsgd_cli.account.cases import Case
    from dpsgd_cli.account.solving import Target
    from dpsgd_cli.privacy.accountants import Accountant


MOST_USES = 1_000_000_000_000
"""Of steps, epochs and trials."""


class Rate(click.ParamType):
    """A number, or a batch size over a number of records: 0.01 or 600/60000."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        size, over, records = str(value).partition("/")
        try:
            return float(size) / (float(records) if over else 1.0)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} is neither a number nor a batch size over records, such as 600/60000", param, ctx)


class Asked:
    """The command line, one attribute per option. No dataclass: making one takes a millisecond of every answer."""

    arguments: tuple[str, ...]
    noise_multiplier: float | None
    sampling_rate: float | None
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
    trials: str
    best_of: float | None
    law: str
    curve: bool
    over: str | None
    plot: str | None
    format: str | None

    def __init__(self, **given: Any) -> None:
        self.__dict__.update(given)


@click.command("account", short_help="State what flags, a recipe, a result or a ledger cost in privacy.")
@click.argument("arguments", nargs=-1, metavar="[RECIPE | RESULT_DIR | LEDGER]... [KEY=VALUE]...")
@click.option("--noise-multiplier", type=float, metavar="Z", help="Noise over sensitivity, the same in every step.")
@click.option("--sampling-rate", type=Rate(), metavar="Q", help="Expected batch size over records: 0.01, 600/60000.")
@click.option("--steps", type=int, metavar="T", help="Number of steps.")
@click.option("--epochs", type=int, metavar="E", help="Number of epochs of 1/Q steps (instead of --steps).")
@click.option(
    "--batching",
    type=click.Choice(list(BATCHINGS)),
    multiple=True,
    help="How records reach a step; poisson when --sampling-rate is given. Repeat it to compare.",
)
@click.option(
    "--adjacency",
    type=click.Choice(["add-remove", "replace-one", "zero-out"]),
    help="Which data sets are neighbours; left out, the batching's own.",
)
@click.option(
    "--delta", type=float, metavar="D", help="Where epsilon is stated; 1e-5, or the recipe's or result's own."
)
@click.option(
    "--accountant",
    multiple=True,
    metavar="NAME[@BATCHING]",
    help="Repeatable; `all` adds variants to the usual ones; @BATCHING asks it about that batching only.",
)
@click.option("--target-epsilon", type=float, metavar="E", help="Solve for what this epsilon affords.")
@click.option("--target-rho", type=float, metavar="R", help="The same for a budget in zCDP.")
@click.option(
    "--solve",
    metavar="NAME",
    help="The free parameter: noise-multiplier, epochs, steps; of a recipe: initial, decay, final, epochs.",
)
@click.option("--at-epsilon", type=float, metavar="E", help="State delta at this epsilon instead.")
@click.option("--max-epsilon", type=float, metavar="E", help="Exit with 1 unless some bound proves at most this.")
@click.option(
    "--excess-risk", type=float, metavar="A", help="Of a convex recipe: the T and n that Lecture 9 asks for at error A."
)
@click.option("--trials", default="1", metavar="N|all", help="Price N trials (all: the source's) as one.")
@click.option("--best-of", type=float, metavar="K", help="Publish only the best of K trials, K random.")
@click.option("--law", type=click.Choice(["geometric", "logarithmic", "poisson"]), default="geometric", help="Of K.")
@click.option("--curve", is_flag=True, help="Epsilon epoch by epoch, as CSV.")
@click.option("--over", metavar="NAME=FROM:TO:STEP", help="Epsilon over a parameter; `order` shows Renyi divergences.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Also draw the curve to this file.")
@click.option("--format", type=click.Choice(["table", "json", "csv"]), help="Of the result on stdout.")
def command(**given: Any) -> None:
    """State what a training costs in privacy, or what a budget affords, before anyone trains.

    Give numbers, recipes (with KEY=VALUE overrides), result directories (of a run or a whole sweep) or ledgers. Every
    accountant answers or says why it cannot; `upper` is a proof, `estimate` is not.

    \b
    What does it cost?
      dpsgd account --noise-multiplier 4 --sampling-rate 0.01 --steps 10000
      dpsgd account --batching shuffle --noise-multiplier 6 --epochs 400 --accountant zcdp
      dpsgd account yu2019/mnist-time
      dpsgd account results/ --trials all
    What can I afford?
      dpsgd account --target-epsilon 3 --sampling-rate 0.01 --epochs 60
      dpsgd account --target-epsilon 3 --sampling-rate 0.01 --noise-multiplier 1
      dpsgd account yu2019/mnist-exponential --solve decay --epochs 60
      dpsgd account lectures/adult-dp-gd --excess-risk 0.1
    Curves and gates
      dpsgd account yu2019/mnist-uniform yu2019/mnist-time --accountant zcdp --curve --plot curve.png
      dpsgd account --sampling-rate 0.01 --noise-multiplier 4 --over order=2:256:1
      dpsgd account recipe.yaml --max-epsilon 3
    """
    asked = Asked(**given)
    if asked.delta is not None and not 0 < asked.delta < 1:
        raise UsageError(f"--delta is {asked.delta:g}, but must be above 0 and below 1")
    apart = [name for name in ("excess_risk", "over", "at_epsilon") if getattr(asked, name) is not None]
    apart += ["curve"] if asked.curve else []
    if asked.max_epsilon is not None and apart:
        raise UsageError(
            f"--max-epsilon judges prices, which --{apart[0].replace('_', '-')} does not show: ask for one"
        )
    if asked.excess_risk is not None:
        _show_demand(asked)
        return
    cases = _cases(asked)
    if asked.curve or asked.over is not None:
        _show_series(asked, _series(asked, cases))
        return
    if asked.plot is not None:
        raise UsageError("--plot draws a curve: give --curve or --over")
    rows = _rows(asked, cases)
    _show_rows(asked, cases, rows)
    if asked.max_epsilon is not None:
        from dpsgd_cli.account.answers import check_gate

        check_gate(cases, rows, asked.max_epsilon)


def _show_demand(asked: Asked) -> None:
    """Steps and records of Lecture 9, section 7, for each recipe."""
    import json

    from dpsgd_cli.account.recipes import demand_of
    from dpsgd_cli.recipe.loading import load_recipe

    overrides = [text for text in asked.arguments if "=" in text and not os.path.exists(text)]
    sources = [text for text in asked.arguments if text not in overrides]
    if not sources:
        raise UsageError("--excess-risk is about a convex recipe: name one")
    assert asked.excess_risk is not None
    rows = [demand_of(load_recipe(source, overrides), asked.excess_risk) for source in sources]
    if asked.format == "json":
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        click.echo(
            f"{row['recipe']}: at an expected excess risk of {row['excess_risk']:g}, Lecture 9 asks for"
            f" T = {row['steps']:,} steps and n = {row['records']:,} records (it has {row['records_available']:,})"
        )


def _cases(asked: Asked) -> list[Case]:
    """What is asked about, in the order given."""
    overrides = [text for text in asked.arguments if "=" in text and not os.path.exists(text)]
    sources = [text for text in asked.arguments if text not in overrides]
    cases = [_source_case(asked, source, overrides) for source in sources] if sources else _flag_cases(asked, overrides)
    if asked.trials == "1":
        return cases
    return [case.repeated(_trial_count(asked.trials, case)) for case in cases]


def _flag_cases(asked: Asked, overrides: list[str]) -> list[Case]:
    from dpsgd_cli.account.cases import FlagCase

    if overrides:
        raise UsageError(f"{overrides[0]}: KEY=VALUE changes a recipe; name one")
    if asked.steps is not None and asked.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    _check_flags(asked)
    batchings = asked.batching or (("poisson",) if asked.sampling_rate is not None else ())
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
            sampling_rate=asked.sampling_rate,
            steps=asked.steps,
            epochs=asked.epochs,
        )
        for batching in batchings
    ]


def _check_flags(asked: Asked) -> None:
    """Numbers that no mechanism could have; the rest is checked where mechanisms are made."""
    for name, value in (("--steps", asked.steps), ("--epochs", asked.epochs)):
        if value is not None and not 1 <= value <= MOST_USES:
            raise UsageError(f"{name} is {quoted(value)}, but must be at least 1 and at most {MOST_USES}")
    if asked.sampling_rate is not None and not 0 < asked.sampling_rate <= 1:
        raise UsageError(f"--sampling-rate is {asked.sampling_rate:g}, but must be above 0 and at most 1")
    if asked.noise_multiplier is not None and not 0 < asked.noise_multiplier < float("inf"):
        raise UsageError(f"--noise-multiplier is {asked.noise_multiplier:g}, but must be positive and finite")


def _source_case(asked: Asked, source: str, overrides: list[str]) -> Case:
    from dpsgd_cli.account.ledgers import read_ledgers

    flags = {
        "--noise-multiplier": asked.noise_multiplier,
        "--sampling-rate": asked.sampling_rate,
        "--steps": asked.steps,
        "--batching": asked.batching or None,
        "--adjacency": asked.adjacency,
    }
    extra = [name for name, value in flags.items() if value is not None]
    if extra:
        raise UsageError(f"{', '.join(extra)}: {source} says that already; change a recipe with KEY=VALUE")
    ledgers = read_ledgers(source, asked.delta)
    if ledgers is None:
        from dpsgd_cli.account.recipes import read_recipe

        return read_recipe(source, overrides, asked.delta, asked.epochs)
    if overrides or asked.epochs is not None:
        raise UsageError(f"{source} is a record of what happened; KEY=VALUE and --epochs cannot change it")
    return ledgers


def _trial_count(text: str, case: Case) -> int:
    from dpsgd_cli.account.ledgers import LedgerCase

    if isinstance(case, LedgerCase):
        if text != "all":
            raise UsageError(
                f"--trials {text}: {case.label} records its trials; give all, or leave it out for the most expensive"
            )
        return len(case.entries)
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


def _accountants(asked: Asked, case: Case) -> list[Accountant]:
    """Those to ask about one case."""
    from dpsgd_cli.privacy import accountants

    if asked.best_of is not None:
        from dpsgd_cli.privacy.selection import BestOfTrials, Choice

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
    return [accountants.get(name) for name in dict.fromkeys(names)]


def _rows(asked: Asked, cases: list[Case]) -> list[Row]:
    """Prices, or what a budget affords. A refusal by the only accountant asked is an error."""
    from dpsgd_cli.account.answers import afford, price, ranked
    from dpsgd_cli.privacy.accountants import get

    rows: list[Row] = []
    more_is_better = False
    for index, case in enumerate(cases):
        named = _accountants(asked, case)
        parameter = _free_parameter(asked, case)
        more_is_better = parameter is not None and case.parameters().get(parameter, False)
        if parameter is None:
            if not asked.accountant and asked.best_of is None and case.spends_a_budget():
                # a budget in epsilon may be one by this accountant, which then states just that
                named = [*named, get("zcdp-tight")]
            found = [price(case, accountant, asked.at_epsilon) for accountant in named]
        else:
            found = afford(case, named, parameter, _target(asked, case))
        rows += [dataclasses.replace(row, case=index) for row in found]
    if all(row.epsilon is None for row in rows) and not any(case.no_statement() for case in cases):
        raise UnsupportedMechanism(_reasons(rows))
    return ranked(rows, more_is_better)


def _reasons(rows: list[Row]) -> str:
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
    from dpsgd_cli.account.solving import Target

    if asked.target_epsilon is not None or asked.target_rho is not None:
        return Target(asked.target_epsilon, asked.target_rho)
    return case.budget()


def _show_rows(asked: Asked, cases: list[Case], rows: list[Row]) -> None:
    from dpsgd_cli.account import report

    if asked.format == "json":
        click.echo(report.as_json(rows))
    elif asked.format == "csv":
        click.echo(report.as_csv(rows))
    else:
        for case in cases:
            click.echo(case.subject)
        click.echo(report.table(rows))
        told = [remark for case in cases for remark in (*case.remarks(), *case.uncovered())]
        for remark in dict.fromkeys(told):
            click.echo(remark)


def _series(asked: Asked, cases: list[Case]) -> Series:
    """The curve that --curve or --over asks for."""
    from dpsgd_cli.account import answers

    questions = [(case, _accountants(asked, case)) for case in cases]
    if asked.over is None:
        return answers.epoch_curve(questions, with_rho=not asked.accountant or asked.accountant == ("zcdp",))
    axis, points = _axis(asked.over)
    if axis == "order":
        if asked.sampling_rate is None or asked.noise_multiplier is None:
            raise UsageError("--over order needs --sampling-rate and --noise-multiplier")
        if points[0] <= 1:
            raise UsageError(f"--over {asked.over}: Renyi orders are above 1")
        return answers.divergence_curve(asked.sampling_rate, asked.noise_multiplier, points)
    return answers.parameter_curve(questions, axis, points)


def _axis(text: str) -> tuple[str, list[float]]:
    """NAME=FROM:TO:STEP."""
    from dpsgd_cli.account.answers import steps_between

    name, _, span = text.partition("=")
    try:
        start, stop, step = (float(part) for part in span.split(":"))
    except ValueError:
        raise UsageError(
            f"--over {text}: write it as NAME=FROM:TO:STEP, for example sampling-rate=0.01:0.1:0.01"
        ) from None
    if not (step > 0 and stop >= start) or (stop - start) / step > 100_000:
        raise UsageError(f"--over {text}: FROM must not be above TO, STEP must be positive, at most 100000 points")
    return name, list(steps_between(start, stop, step))


def _show_series(asked: Asked, series: Series) -> None:
    from dpsgd_cli.account import report

    if asked.plot is not None:
        report.plot(series, asked.plot)
        click.echo(f"drawn to {asked.plot}", err=True)
    click.echo(report.series_json(series) if asked.format == "json" else report.series_csv(series))
