"""Command `dpsgd predict`: predictions of a trained model for new records. The work is in `training/inference.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dpsgd_cli.cli import TRUST_CODE
from dpsgd_cli.common.text_format import count


@click.command("predict")
@TRUST_CODE
@click.argument("result", metavar="RESULT_DIR", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the CSV. Default: stdout.")
@click.option("--trial", type=click.IntRange(min=0), default=0, show_default=True, help="Trial whose model predicts.")
@click.option("--probabilities", is_flag=True, help="Add a column for each class.")
@click.option(
    "--coverage",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="P",
    help="Add sets of classes, or intervals, that hold the truth with probability at least P.",
)
def command(result: Path, new: Path, out: Path | None, trial: int, probabilities: bool, coverage: float | None) -> None:
    """Predict the class or target of the records in NEW with the model of a result.

    NEW is a table (or npz, npy) in the format of the training data; labels are ignored, and columns are found by their
    names. The output is CSV with one line per record, in the same order: the class as the recipe writes it, or the
    target in its own units. A class that a spreadsheet would run as a formula (it begins with =, +, -, @ or a tab, and
    is not a number) gets an apostrophe before it. Predictions cost no privacy: they use only the released model.

    \b
    Examples:
      dpsgd predict results/patients-1a2b3c4d new.csv
      dpsgd predict results/patients-1a2b3c4d new.csv --probabilities --out answers.csv
    """
    import pandas as pd

    from dpsgd_cli.results import files
    from dpsgd_cli.training.inference import Trained  # torch

    trained = Trained.load(result)
    rows = trained.rows(new)
    for remark in trained.remarks(rows):
        click.echo(f"{new}: {remark}", err=True)
    if trained.trials > 1:
        click.echo(f"by the model of trial {trial} of {trained.trials}; --trial chooses another", err=True)
    outputs = trained.outputs(rows, trial)
    columns: dict[str, Any] = {"prediction": [files.no_formula(one) for one in trained.decided(outputs)]}
    if probabilities:
        shares = trained.probabilities(outputs)
        columns |= {f"probability_{label}": shares[:, at] for at, label in enumerate(trained.classes or ())}
    if coverage is not None:
        found = trained.with_coverage(outputs, trial, coverage)
        columns |= {name: [files.no_formula(one) for one in values] for name, values in found.items()}
    answer = pd.DataFrame(columns).to_csv(index=False)
    if out is None:
        click.echo(answer, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(out, answer)
    click.echo(f"{count(len(rows), 'prediction')} in {out}", err=True)
