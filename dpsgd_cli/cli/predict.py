"""Command `dpsgd predict`: predictions of a trained model for new records. The work is in `training/inference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dpsgd_cli.cli import TRUST_CODE
from dpsgd_cli.common.text_format import count

if TYPE_CHECKING:
    import numpy as np

    from dpsgd_cli.training.inference import Trained


def _answers(trained: Trained, rows: np.ndarray, trial: int, probabilities: bool) -> dict[str, Sequence[Any]]:
    """Return the columns of the answer. Those of tokens are computed in parts, whose outputs are not kept."""
    from dpsgd_cli.errors import UsageError

    if trained.by_place:
        if probabilities:
            raise UsageError(f"--probabilities: are of one class a record, and data.task is {trained.data.task}")
        if trained.data.task != "next-token":
            return _columns(trained.predict(rows, trial))
        tokens, perplexities = trained.predict_tokens(rows, trial)
        # a record without a next token has none
        return _columns(tokens) | {"perplexity": [one if one == one else None for one in perplexities.tolist()]}
    outputs = trained.outputs(rows, trial)
    told = _columns(trained.decided(outputs))
    if probabilities:
        shares = trained.probabilities(outputs)
        told |= {f"probability_{label}": shares[:, at].tolist() for at, label in enumerate(trained.classes or ())}
    return told


def _columns(decided: np.ndarray) -> dict[str, Sequence[Any]]:
    """Return the column of predictions (N, ...). Several answers of a record are in one cell, as its text."""
    return {"prediction": [" ".join(map(str, own)) if isinstance(own, list) else own for own in decided.tolist()]}


@click.command("predict")
@TRUST_CODE
@click.argument("result", metavar="RESULT_DIR", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File for the CSV. Default: stdout.")
@click.option("--trial", type=click.IntRange(min=0), default=0, show_default=True, help="Trial whose model predicts.")
@click.option("--probabilities", is_flag=True, help="Add a column for each class.")
@click.option("--keep", multiple=True, metavar="COLUMN", help="Write this column of NEW first; may be given again.")
@click.option("--unknown", type=click.Choice(["error", "ignore"]), default="error", show_default=True,
              help="Categories that the model does not know: no prediction, or one as for none of them.")  # fmt: skip
def command(
    result: Path, new: Path, out: Path | None, trial: int, probabilities: bool, keep: tuple[str, ...], unknown: str
) -> None:
    """Predict the class or target of the records in NEW with the model of a result.

    NEW is a table (or npz, npy) in the format of the training data; labels are ignored, and columns are found by their
    names. The output is CSV with one line per record, in the same order: the class as the recipe writes it, or the
    target in its own units, within its public bounds. Several targets have a column each. A model of tokens gives the
    likeliest next token at each place, and the record's perplexity. A row of a table that cannot be used does not stop
    the others: it has no prediction, and the column `error` says why. A text that a spreadsheet would run as a formula
    (it begins with =, +, -, @ or a tab, and is not a number) gets an apostrophe before it. Predictions cost no privacy:
    they use only the released model.

    \b
    Examples:
      dpsgd predict results/patients-1a2b3c4d new.csv
      dpsgd predict results/patients-1a2b3c4d new.csv --keep patient --unknown ignore
      dpsgd predict results/patients-1a2b3c4d new.csv --probabilities --out answers.csv
    """
    from dpsgd_cli.errors import UsageError
    from dpsgd_cli.results import files
    from dpsgd_cli.training.inference import Trained  # torch

    trained = Trained.load(result)
    found = trained.source.one_by_one(new, keep, "ignore" if unknown == "ignore" else "error")
    rows, reasons = found.x, found.reasons
    columns: dict[str, Sequence[Any]] = dict(found.kept)
    for remark in trained.remarks(rows):
        click.echo(f"{new}: {remark}", err=True)
    if trained.trials > 1:
        click.echo(f"by the model of trial {trial} of {trained.trials}; --trial chooses another", err=True)
    told = _answers(trained, rows, trial, probabilities)
    twice = [name for name in (*told, "error") if name in columns]
    if twice:
        raise UsageError(f"--keep: the answer has a column {twice[0]!r} of its own; rename that of {new}")
    places = iter(range(len(rows)))
    at = [None if reason is not None else next(places) for reason in reasons]
    columns |= {name: [None if place is None else values[place] for place in at] for name, values in told.items()}
    bad = sum(reason is not None for reason in reasons)
    if bad:
        columns["error"] = reasons
        told_of = any(reason is not None and "categor" in reason for reason in reasons) and unknown != "ignore"
        advice = " (--unknown ignore predicts where a category is not known)" * told_of
        click.echo(f"{new}: {count(bad, 'row')} without a prediction; the column `error` says why{advice}", err=True)
    answer = files.to_csv([dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)])
    if out is None:
        click.echo(answer, nl=False)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(out, answer)
    click.echo(f"{count(len(rows), 'prediction')} in {out}", err=True)
