"""Command `dpsgd account`: the privacy cost of a training, or what a budget affords, without torch and without data.

Flags are interpreted in `account/question.py`; tables are in `account/report.py`.
"""

from __future__ import annotations

from typing import Any

import click

from dpsgd_cli.account import report
from dpsgd_cli.account.answers import check_gate
from dpsgd_cli.account.question import AccountOptions, cases_of, exported, rows_of, series_of
from dpsgd_cli.accounting.adjacency import BATCHINGS
from dpsgd_cli.cli import TRUST_CODE


class Rate(click.ParamType):
    """Option type for a sampling rate: a number, or batch size over number of records, as in 0.01 or 600/60000."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        size, over, records = str(value).partition("/")
        try:
            return float(size) / (float(records) if over else 1.0)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} is neither a number nor a batch size over records, such as 600/60000", param, ctx)


@click.command("account", short_help="State the privacy cost of flags, a recipe, a result or a ledger.")
@click.argument("arguments", nargs=-1, metavar="[RECIPE | RESULT_DIR | LEDGER]... [KEY=VALUE]...")
@TRUST_CODE
@click.option("--noise-multiplier", type=float, metavar="Z", help="Noise divided by sensitivity, equal in all steps.")
@click.option("--sampling-rate", type=Rate(), metavar="Q", help="Expected batch size over records: 0.01, 600/60000.")
@click.option("--batch-size", type=int, metavar="B", help="Expected batch size; with --records, instead of Q.")
@click.option("--records", type=int, metavar="N", help="Number of training records.")
@click.option("--largest-batch", type=int, metavar="M", help="Largest size of a truncated batch.")
@click.option("--participations", type=int, metavar="K", help="Random allocation: steps of an epoch with each record.")
@click.option("--steps", type=int, metavar="T", help="Number of steps.")
@click.option("--epochs", type=int, metavar="E", help="Number of epochs of 1/Q steps (instead of --steps).")
@click.option(
    "--batching",
    type=click.Choice(list(BATCHINGS)),
    multiple=True,
    help="How batches are drawn; poisson if --sampling-rate is given. Repeat it to compare.",
)
@click.option(
    "--adjacency",
    type=click.Choice(["add-remove", "replace-one", "zero-out"]),
    help="Which data sets are neighbours. Default: that of the batching.",
)
@click.option(
    "--delta", type=float, metavar="D", help="Delta of the statement. Default: that of the recipe or result, else 1e-5."
)
@click.option(
    "--accountant",
    multiple=True,
    metavar="NAME[@BATCHING]",
    help="Accountant; repeatable. `all`: every one. @BATCHING: for that batching only.",
)
@click.option("--target-epsilon", type=float, metavar="E", help="Budget: solve for what this epsilon affords.")
@click.option("--target-rho", type=float, metavar="R", help="Budget in zCDP: solve for what this rho affords.")
@click.option(
    "--solve",
    metavar="NAME",
    help="Parameter to solve for: noise-multiplier, epochs, steps, batch-size; in a recipe: initial, decay, final,"
    " epochs, batch-size.",
)
@click.option("--at-epsilon", type=float, metavar="E", help="State delta at this epsilon.")
@click.option("--max-epsilon", type=float, metavar="E", help="Exit with code 1 unless an upper bound is at most this.")
@click.option(
    "--excess-risk",
    type=float,
    metavar="A",
    help="Steps and records that Lecture 9 needs for excess risk A (convex recipe).",
)
@click.option("--attacker", is_flag=True, help="Also state the TPR of the strongest attack at FPR 1% and 0.1%.")
@click.option(
    "--group",
    type=int,
    default=1,
    metavar="K",
    help="Protection of K records (or users) together.",
)
@click.option("--trials", default="1", metavar="N|all", help="Price N trials together (all: those of the source).")
@click.option(
    "--best-of",
    type=float,
    metavar="K",
    help="Publish only the best of a random number of trials, mean K.",
)
@click.option(
    "--law",
    type=click.Choice(["geometric", "logarithmic", "poisson"]),
    help="Law of the number of trials. Default: geometric.",
)
@click.option("--curve", is_flag=True, help="Print epsilon by epoch, as CSV.")
@click.option(
    "--over",
    metavar="NAME=FROM:TO:STEP",
    help="Print epsilon over a parameter, as CSV. `order`: Renyi divergences; `false-positives`: the trade-off curve.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    help="Also draw the curve (of the least bound unless accountants are named).",
)
@click.option(
    "--events",
    metavar="FILE",
    help="Price an event of dp_accounting, as JSON; with --adjacency, which it does not say.",
)
@click.option(
    "--opacus-history", metavar="FILE", help="Price an Opacus accountant's history, as JSON; with its --batching."
)
@click.option("--export", type=click.Choice(["dp-accounting"]), help="Print the releases as an event of dp_accounting.")
@click.option("--format", type=click.Choice(["table", "json", "csv"]), help="Format of the output.")
def command(**given: Any) -> None:
    """State the privacy cost of a training, or what a budget affords, without training.

    Give numbers, recipes (with KEY=VALUE overrides), result directories (of a run or a whole sweep), ledgers or
    checkpoints. Every accountant answers or says why it cannot. `upper` is a proven bound, `estimate` is not.

    \b
    What does it cost?
      dpsgd account --noise-multiplier 4 --sampling-rate 0.01 --steps 10000
      dpsgd account --batching shuffle --noise-multiplier 6 --epochs 400 --accountant zcdp
      dpsgd account yu2019/mnist-time
      dpsgd account results/ --trials all
      dpsgd account --noise-multiplier 4 --sampling-rate 0.01 --steps 1000 --group 3
    What can I afford?
      dpsgd account --target-epsilon 3 --sampling-rate 0.01 --epochs 60
      dpsgd account --target-epsilon 3 --sampling-rate 0.01 --noise-multiplier 1
      dpsgd account --target-epsilon 3 --records 60000 --epochs 60 --noise-multiplier 1
      dpsgd account yu2019/mnist-exponential --solve decay --epochs 60
      dpsgd account lectures/adult-dp-gd --excess-risk 0.1
    Checked by others
      dpsgd account results/quickstart-0a1b2c3d --export dp-accounting > event.json
      dpsgd account --events event.json --adjacency add-remove
      dpsgd account --opacus-history history.json --batching poisson
    Curves and gates
      dpsgd account yu2019/mnist-uniform yu2019/mnist-time --accountant zcdp --curve --plot curve.png
      dpsgd account --sampling-rate 0.01 --noise-multiplier 4 --over order=2:256:1
      dpsgd account --sampling-rate 0.01 --noise-multiplier 1 --steps 1000 --over false-positives=0.01:0.99:0.01
      dpsgd account recipe.yaml --max-epsilon 3
    """
    asked = AccountOptions(**given)
    if asked.excess_risk is not None:
        from dpsgd_cli.account.recipes import demands_of  # pydantic

        click.echo(report.demands(demands_of(asked.sources, asked.overrides, asked.excess_risk), asked.format))
        return
    cases = cases_of(asked)
    if asked.export is not None:
        click.echo(exported(cases))
        return
    if asked.curve or asked.over is not None:
        series = series_of(asked, cases)
        if asked.plot is not None:
            report.draw(series, asked.plot)
            click.echo(f"drawn to {asked.plot}", err=True)
        click.echo(report.series_json(series) if asked.format == "json" else report.series_csv(series))
        return
    rows = rows_of(asked, cases)
    click.echo(report.prices(cases, rows, asked.format))
    if asked.max_epsilon is not None:
        check_gate(cases, rows, asked.max_epsilon)
