"""Command `dpsgd recipe`: list, show, copy, validate and draft recipes; print their schema.

Reading and checking recipes is in `recipe/loading.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from dpsgd_cli.cli import TRUST_CODE, complete
from dpsgd_cli.errors import RecipeError, UsageError
from dpsgd_cli.recipe.check import json_schema
from dpsgd_cli.recipe.loading import dump_recipe, load_recipe, named_files, question, shipped_recipes
from dpsgd_cli.recipe.schema import Recipe


@click.group()
def command() -> None:
    """List, show, copy, validate and draft recipes; print their schema for editors.

    A recipe is a YAML file, or the name of one that ships with dpsgd.

    \b
    Examples:
      dpsgd recipe list
      dpsgd recipe show quickstart privacy.budget.epsilon=1
      dpsgd recipe copy quickstart -o mine.yaml
    """


SHELVES = {"": "to begin with", "tabular": "tables", "finetune": "texts", "frontier": "images"}
"""Headings of recipes to begin with, by folder; the others reproduce papers."""


@command.command("list")
@click.option("--all", "every", is_flag=True, help="Also list the recipes that reproduce papers.")
def list_(every: bool) -> None:
    """List the shipped recipes and their questions.

    \b
    Examples:
      dpsgd recipe list
      dpsgd recipe list --all
    """
    recipes = shipped_recipes()
    shelves: dict[str, list[str]] = {heading: [] for heading in SHELVES.values()}
    for name in recipes:
        shelves.setdefault(SHELVES.get(name.rpartition("/")[0], "papers"), []).append(name)
    papers = shelves.get("papers", [])
    if not every:
        shelves.pop("papers", None)
    width = max((len(name) for shelf in shelves.values() for name in shelf), default=0)
    for heading, names in shelves.items():
        click.echo(f"{heading}:")
        for name in names:
            click.echo(f"  {name:<{width}}  {question(recipes[name])}")
    if papers and not every:
        folders = ", ".join(dict.fromkeys(name.partition("/")[0] for name in papers))
        click.echo(f"papers: {len(papers)} more, of {folders}; `dpsgd recipe list --all` lists them")


@command.command()
@click.argument("recipe", shell_complete=complete)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print RECIPE with its defaults filled in.

    The output is an equivalent recipe.

    \b
    Examples:
      dpsgd recipe show quickstart
      dpsgd recipe show yu2019/mnist-step repeats=3 > mine.yaml
    """
    loaded = load_recipe(recipe, overrides)
    click.echo(dump_recipe(loaded.recipe), nl=False)


@command.command("copy")
@TRUST_CODE
@click.argument("recipe", shell_complete=complete)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: stdout.")
def copy(recipe: str, overrides: tuple[str, ...], out: Path | None) -> None:
    """Write a copy of RECIPE to own: every setting, with its meaning.

    Automatic settings are resolved from public facts, and each says why it has its value. The copy trains to the same
    result, to the last bit if the recipe has a seed.

    \b
    Examples:
      dpsgd recipe copy quickstart -o mine.yaml
      dpsgd recipe copy tabular/adult privacy.budget.epsilon=1 -o mine.yaml
    """
    from dpsgd_cli.recipe.copying import explained
    from dpsgd_cli.training.plans import resolve_auto

    loaded = load_recipe(recipe, overrides)
    names = named_files(loaded.recipe)
    if names and (Path() if out is None else out.parent).resolve() != loaded.base.resolve():
        raise UsageError(
            f"{recipe} names files relative to itself ({', '.join(names)}); write the copy beside it: --out"
        )
    text = explained(resolve_auto(loaded))
    if out is None:
        click.echo(text, nl=False)
    else:
        _write_new(out, text)
        click.echo(f"{out}: now `dpsgd train {out}`")


@command.command()
@click.argument("recipes", nargs=-1, required=True, metavar="RECIPE...")
def validate(recipes: tuple[str, ...]) -> None:
    """Check recipes and report every problem.

    The exit code is 2 if there is any.

    \b
    Example:
      dpsgd recipe validate mine.yaml yu2019/mnist-time
    """
    problems: list[str] = []
    for source in recipes:
        try:
            load_recipe(source)
        except RecipeError as error:
            problems += error.problems
        else:
            click.echo(f"{source}: valid")
    if problems:
        raise RecipeError(problems)


@command.command()
@click.argument("data", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--target", required=True, help="Column (or array of an npz file) to predict.")
@click.option("--task", type=click.Choice(["classification", "regression"]), help="Default: guessed from the target.")
@click.option(
    "--text", multiple=True, metavar="COLUMN", help="A column of codes or categories, whatever its cells are."
)
@click.option(
    "--private-bounds", is_flag=True, help="Have bounds and categories released with noise; look at names only."
)
@click.option("--categorical", multiple=True, metavar="COLUMN", help="With --private-bounds: a column of categories.")
@click.option("--unit", metavar="COLUMN", help="The column that tells persons apart: all rows of one are protected.")
@click.option("--one-row-a-person", is_flag=True, help="No person has several rows.")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: stdout.")
def new(
    data: Path,
    target: str,
    task: Any,
    text: tuple[str, ...],
    private_bounds: bool,
    categorical: tuple[str, ...],
    unit: str | None,
    one_row_a_person: bool,
    out: Path | None,
) -> None:
    """Write a recipe for DATA: csv, tsv, json lines, parquet, xlsx or npz.

    The command detects how the file is written. It prints each column with its kind, its use and what you have to
    confirm. Values that were read from the file are marked in the recipe. Fill in the bounds yourself. The whole file
    is read, on this machine; no guarantee covers that.

    A column whose values repeat may tell persons apart. The command then shows its rows per value, and asks: --unit or
    --one-row-a-person. Training refuses a recipe in which that is open.

    With --private-bounds you need to know none of that: name the columns that hold categories, all others are numbers.
    Only column names, the number of records and the target are used. Training then releases bounds and categories with
    noise, which costs a share of the budget.

    \b
    Examples:
      dpsgd recipe new patients.csv --target malignant -o patients.yaml
      dpsgd recipe new visits.xlsx --target cost --text ward -o visits.yaml
      dpsgd recipe new patients.csv --target malignant --private-bounds --categorical ward -o patients.yaml
    """
    from dpsgd_cli.data.draft import ONE_ROW, draft  # pandas

    base = (out.parent if out is not None else Path()).resolve()
    if categorical and not private_bounds:
        raise UsageError("--categorical goes with --private-bounds; without it, kinds are read from the file")
    if unit is not None and one_row_a_person:
        raise UsageError("--unit: says that persons have several rows, and --one-row-a-person that none has; give one")
    private, shown = categorical if private_bounds else None, Path(os.path.relpath(data.resolve(), base)).as_posix()
    made = draft(data, target, task, shown, text, private, ONE_ROW if one_row_a_person else unit)
    if made.told:
        click.echo("\n".join(made.told), err=out is None)
    if out is None:
        click.echo(made.recipe, nl=False)
        return
    _write_new(out, made.recipe)
    used = "written from the names of columns, the number of records and the target alone; " * private_bounds
    click.echo(f"{out}: {used}fill in the marked lines, then run `dpsgd train {out}`")


def _write_new(out: Path, text: str) -> None:
    """Write a file that is not there yet; UsageError otherwise."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{out} exists; it is not overwritten: choose another name with -o, or remove it") from None
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from None


@command.command()
def schema() -> None:
    """Print the JSON Schema of a recipe.

    Editors complete and check YAML with it.

    \b
    Example:
      dpsgd recipe schema > recipe.schema.json
    """
    click.echo(json.dumps(json_schema(Recipe), indent=2))


@command.command("check-model")
@TRUST_CODE
@click.argument("recipe", shell_complete=complete)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def check_model(recipe: str, overrides: tuple[str, ...]) -> None:
    """Show for each layer of the model of RECIPE how it is clipped, its cost, and whether it is refused.

    Only the shape of a record is used, and no data. The exit code is 2 if a layer is refused.

    \b
    Examples:
      dpsgd recipe check-model quickstart
      dpsgd recipe check-model mine.yaml model.file=net.py
    """
    loaded = load_recipe(recipe, overrides)

    from dpsgd_cli.training.build_models import model_report  # torch

    for line in model_report(loaded):
        click.echo(line)
