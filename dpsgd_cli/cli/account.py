"""Command `dpsgd account`: the privacy cost of a training, or what a budget affords, without torch and without data.

Options are listed in `account/options.py` and interpreted in `account/question.py`; tables are in `account/report.py`.
"""

from __future__ import annotations

import contextlib
from typing import Any

import click

from dpsgd_cli.account import report
from dpsgd_cli.account.answers import check_gate
from dpsgd_cli.account.options import HEADINGS, OPTIONS, RANGES, Asked, Option, flag
from dpsgd_cli.account.question import cases_of, exported, rows_of, series_of
from dpsgd_cli.cli import TRUST_CODE, complete

_HINTS = {
    "--sigma": "--noise-multiplier (noise over sensitivity) or --noise-over-clip (noise over clip norm)",
    "--noise": "--noise-multiplier (noise over sensitivity) or --noise-over-clip (noise over clip norm)",
    "--sample-rate": "--sampling-rate",
    "--epsilon": "--target-epsilon (a budget), --at-epsilon (delta there) or --max-epsilon (a gate)",
}
"""Names that other libraries use, and what they are here."""


class Command(click.Command):
    """A command that knows what other libraries call its options, and lists its own by question."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        heading = ""
        for option in self.get_params(ctx):
            heading = HEADINGS.get(option.name or "", heading)
            if isinstance(option, click.Option) and (record := option.get_help_record(ctx)) is not None:
                groups.setdefault(heading, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _HINTS:
                raise
            raise click.UsageError(f"No such option: {error.option_name}; write {_HINTS[error.option_name]}") from None


class NumberType(click.ParamType):
    """Option type for a number. A sampling rate may be a batch size over records, such as 600/60000."""

    name = "number"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        over, _, under = text.partition("/")
        try:
            if self.kind in ("count", "group"):
                return int(text)
            return float(over) / float(under) if under and self.kind == "rate" else float(text)
        except (ValueError, ZeroDivisionError):
            hint = "" if self.kind != "rate" else ", nor a batch size over records, such as 600/60000"
            with contextlib.suppress(ValueError, ZeroDivisionError):
                meant = float(text[:-1]) / 100 if text.endswith("%") else float(over) / float(under)
                hint = f"; write {meant:.6g}"
            wanted = "whole number" if self.kind in ("count", "group") else "number"
            self.fail(f"{text!r} is no {wanted}{hint}", param, ctx)


def _declared(name: str, option: Option) -> click.Option:
    """Return an option of the list as Click knows it."""
    kind: Any = option.kind
    if kind == "flag":
        return click.Option([flag(name)], is_flag=True, help=option.help)
    if isinstance(kind, tuple):
        kind = click.Choice(list(kind))
    elif kind in RANGES:
        kind = NumberType(kind)
    else:
        kind = click.Path(dir_okay=False) if kind == "file" else str
    repeated = {"multiple": True} if option.value == () else {"default": option.value}
    return click.Option([flag(name)], type=kind, metavar=option.metavar, help=option.help, **repeated)


@click.command(
    "account",
    cls=Command,
    params=[_declared(name, option) for name, option in OPTIONS.items()],
    short_help="State the privacy cost of flags, a recipe, a result or a ledger.",
)
@click.argument(
    "arguments", nargs=-1, metavar="[RECIPE | RESULT_DIR | LEDGER]... [KEY=VALUE]...", shell_complete=complete
)
@TRUST_CODE
def command(**given: Any) -> None:
    """State the privacy cost of a training, or what a budget affords, without training.

    Give numbers, recipes (with KEY=VALUE overrides), result directories (of a run or a whole sweep) or
    ledgers. Every accountant answers or says why it cannot. `upper` is a proven bound, `estimate` is not.

    \b
    What it cost
      dpsgd account --noise-multiplier 4 --sampling-rate 0.01 --steps 10000
      dpsgd account yu2019/mnist-time
      dpsgd account results/ --trials all
    What a budget affords
      dpsgd account --target-epsilon 3 --sampling-rate 0.01 --epochs 60
      dpsgd account yu2019/mnist-exponential --solve decay --epochs 60
    Checking a claim
      dpsgd account recipe.yaml --max-epsilon 3
      dpsgd account --opacus-history history.json --batching poisson
    Curves
      dpsgd account yu2019/mnist-uniform yu2019/mnist-time --accountant zcdp --curve --plot curve.png
      dpsgd account --sampling-rate 0.01 --noise-multiplier 1 --steps 1000 --over false-positives=0.01:0.99:0.01
    """
    asked = Asked(**given)
    if asked.excess_risk is not None:
        from dpsgd_cli.account.recipes import demands_of  # pydantic

        click.echo(report.demands(demands_of(asked.sources, asked.overrides, asked.excess_risk), asked.format))
        return
    cases = cases_of(asked)
    if asked.export is not None:
        click.echo(exported(cases))
        return
    if asked.curve or asked.over is not None:
        found = series_of(asked, cases)
        if asked.plot is not None:
            report.draw(found, asked.plot)
            click.echo(f"drawn to {asked.plot}", err=True)
        click.echo(report.series(found, asked.format))
        return
    rows = rows_of(asked, cases)
    click.echo(report.prices(cases, rows, asked.format))
    if asked.max_epsilon is not None:
        check_gate(cases, rows, asked.max_epsilon)
