"""Command `dpsgd evaluate`: metrics of trained models on labelled records. The work is in `training/inference.py`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dpsgd_cli.cli import TRUST_CODE
from dpsgd_cli.common.text_format import metric_text

_WITHOUT_NOISE = (
    "measured without noise: the guarantee does not cover these records; publish this only if they are public"
)
_OF_PUBLIC = "measured without noise, on records that the result declares public"


@click.command("evaluate")
@TRUST_CODE
@click.argument("result", metavar="RESULT_DIR", type=click.Path(path_type=Path))
@click.argument("labelled", type=click.Path(path_type=Path), required=False)
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", help="Format of the metrics.")
def command(result: Path, labelled: Path | None, form: str) -> None:
    """Measure the models of a result on the records in LABELLED.

    LABELLED has the format of the training data, with labels. Without it, the test records of the result are read
    again, which must give its own metrics. The metrics have no noise: they cost the training data no privacy, and do
    not protect the measured records. A baseline is what the best constant answer to these records reaches.

    \b
    Examples:
      dpsgd evaluate results/patients-1a2b3c4d newer.csv
      dpsgd evaluate results/patients-1a2b3c4d
    """
    from dpsgd_cli.engine.metrics import METRICS, in_words
    from dpsgd_cli.results.result import summarise_columns
    from dpsgd_cli.results.summary import metric_over_trials
    from dpsgd_cli.training.inference import Trained  # torch

    trained = Trained.load(result)
    found, constants = trained.measured(labelled)
    told = summarise_columns(found)
    baselines = {name: own["mean"] for name, own in summarise_columns(constants).items()}
    note = _OF_PUBLIC if labelled is None else _WITHOUT_NOISE
    if form == "json":
        click.echo(json.dumps({"metrics": told, "baselines": baselines, "trials": found, "note": note}, indent=2))
        return
    click.echo(f"{result.name} on {labelled or 'its own test records'}")
    # F1 scores of single labels come last
    for name in [*(known for known in METRICS if known in told), *(name for name in told if name not in METRICS)]:
        words = in_words(f"test_{name}").removeprefix("test ").removeprefix("test_")
        beside = f" (baseline {metric_text(baselines[name])})" if name in baselines else ""
        click.echo(f"  {words:<33} {metric_over_trials(told[name])}{beside}")
    click.echo(f"  {note}")
