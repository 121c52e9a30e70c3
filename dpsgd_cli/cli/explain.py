"""Command `dpsgd explain`: what a trained model learnt of each column. The work is in `training/explain.py`."""

from __future__ import annotations

from pathlib import Path

import click

from dpsgd_cli.cli import TRUST_CODE


@click.command("explain")
@TRUST_CODE
@click.argument("result", metavar="RESULT_DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write tables and a page with pictures.")
@click.option("--trial", type=click.IntRange(min=0), default=0, show_default=True, help="Whose model is explained.")
def command(result: Path, out: Path | None, trial: int) -> None:
    """Show what the model of a result learnt of each column of its table.

    A column's size is the standard deviation of its effect over its values. Everything is computed from the released
    weights and public facts, so it costs no privacy. With --out, DIR gets shapes.csv (the effect of each value, and the
    deviation of training noise in it), coefficients.csv (linear models) and explained.html. If the recipe asked for
    intervals (method.inference), the tables hold the ends of 95% intervals: low, high.

    \b
    Examples:
      dpsgd explain results/patients-1a2b3c4d
      dpsgd explain results/patients-1a2b3c4d --out explained
    """
    from dpsgd_cli.engine.settings import OneLayer
    from dpsgd_cli.errors import UsageError
    from dpsgd_cli.results import document, files, shapes
    from dpsgd_cli.training import explain  # torch
    from dpsgd_cli.training.inference import Trained

    trained = Trained.load(result)
    found = explain.explain(trained, trial)
    if not found.shapes:
        raise UsageError(f"{result}: there is nothing to explain ({'; '.join(found.left_out)})")
    lines = [("column", "size", "least effect at", "greatest effect at"), *shapes.summary(found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(lines[0]))]
    click.echo(f"{result.name}: effect on the {found.unit}")
    for line in lines:
        click.echo("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    for text in (found.about_noise, found.about_intervals, *(f"left out: {text}" for text in found.left_out)):
        if text:
            click.echo(f"  {text}")
    privacy = (trained.document or {}).get("privacy", {})
    if not privacy.get("accountant") or privacy.get("uncovered_steps"):
        click.echo("  not covered by a statement: publish neither the model nor these tables", err=True)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    texts = {"shapes.csv": files.to_csv(shapes.rows(found))}
    if isinstance(trained.loaded.recipe.model, OneLayer):
        own = shapes.coefficient_rows(explain.coefficients(trained, trial))
        texts["coefficients.csv"] = files.to_csv(own)
    title = document.Heading(f"{trained.loaded.recipe.name}: what it learnt", 1)
    texts["explained.html"] = document.html([title, *shapes.blocks(found)])
    for name, text in texts.items():
        files.write_whole(out / name, text)
        click.echo(out / name)
