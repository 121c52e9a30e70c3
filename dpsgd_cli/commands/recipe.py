"""`dpsgd recipe`: list, show and validate recipes; print their schema.

Not here: how a recipe is read or checked (`recipe/loading.py`), or what it costs (`dpsgd train --dry-run`).
"""

from __future__ import annotations

import json

import click

from dpsgd_cli.commands import batching
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe.expected import recipe_schema
from dpsgd_cli.recipe.loading import dump_recipe, load_recipe, question, shipped_recipes


@click.group()
def command() -> None:
    """List, show and validate recipes; print their schema for editors.

    A recipe is a YAML file, or the name of one that ships with dpsgd.

    \b
    Examples:
      dpsgd recipe list
      dpsgd recipe show quickstart privacy.budget.epsilon=1
    """


@command.command("list")
def list_() -> None:
    """List the shipped recipes and their questions.

    \b
    Example:
      dpsgd recipe list
    """
    recipes = shipped_recipes()
    width = max(map(len, recipes), default=0)
    for name, file in recipes.items():
        click.echo(f"{name:<{width}}  {question(file)}")


@command.command()
@click.argument("recipe")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def show(recipe: str, overrides: tuple[str, ...]) -> None:
    """Print RECIPE with its defaults filled in.

    What is printed is the same recipe again. Comments at its end say what it leaves to the data card or to the
    operating system.

    \b
    Examples:
      dpsgd recipe show quickstart
      dpsgd recipe show yu2019/mnist-step repeats=3 > mine.yaml
    """
    from dpsgd_cli.data import unsaid

    found = load_recipe(recipe, overrides).recipe
    click.echo("\n".join([dump_recipe(found).rstrip("\n"), *unsaid.comments(found)]))


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
def schema() -> None:
    """Print the JSON Schema of a recipe.

    Editors complete and check YAML with it.

    \b
    Example:
      dpsgd recipe schema > recipe.schema.json
    """
    click.echo(json.dumps(recipe_schema(), indent=2))


command.add_command(batching.command)
