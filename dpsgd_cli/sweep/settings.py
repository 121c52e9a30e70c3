"""Sweep files: what one may say, and reading it with every problem reported at its line.

Cells are the product of all blocks: recipes x every key of `grid` x `zip` x `list` x `random`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from dpsgd_cli.accounting.repeated_selection import Choice
from dpsgd_cli.common.sections import Count, Interval, Positive, Section
from dpsgd_cli.common.yaml_tree import Node, Path, Problem, SourceLocation, read_tree, undotted
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.recipe.check import validate
from dpsgd_cli.recipe.loading import find_recipe, read_text, shipped_recipes
from dpsgd_cli.recipe.overrides import apply_overrides

# Keys below these blocks are recipe keys, which contain dots.
_BLOCKS = ("grid", "zip")
_OWN = ("recipes", "zip", "grid", "list", "random", "select", "seeds", "most_trials", "resources")
_IS_A_RECIPE = "this is a recipe, not a sweep; use `dpsgd train {}`"
Settings = dict[str, Any]


class Draw(Section):
    """The distribution of a random value: a mapping with exactly one of these keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    choice: list[Any] | None = Field(None, description="One of these values.")
    uniform: Interval | None = Field(None, description="A number of [low, high].")
    log_uniform: Interval | None = Field(None, alias="log-uniform", description="The same, uniform in its logarithm.")
    integers: tuple[int, int] | None = Field(None, description="A whole number of low..high, both included.")

    @model_validator(mode="after")
    def _exactly_one(self) -> Draw:
        names = [field.alias or name for name, field in type(self).model_fields.items()]
        if sum(getattr(self, name) is not None for name in type(self).model_fields) != 1:
            raise ValueError(f"give exactly one of {', '.join(names)}")
        if self.choice == []:
            raise ValueError("choice: is empty; give at least one value")
        if self.log_uniform is not None and self.log_uniform[0] <= 0:
            raise ValueError(f"log-uniform: {list(self.log_uniform)} must begin above 0")
        if self.integers is not None and self.integers[0] > self.integers[1]:
            raise ValueError(f"integers: {list(self.integers)} must be [low, high] with low <= high")
        return self


class Random(Section):
    samples: Count = Field(description="How many random settings.")
    seed: int = Field(0, ge=0, description="The same seed, the same settings.")
    keys: dict[str, Draw] = Field(min_length=1, description="Where each recipe key's values come from.")


class RandomStopping(Section):
    """The best of a random number of cells drawn uniformly, with repetition (Papernot and Steinke 2022).

    A cell that is drawn n times runs n trials, whatever `repeats` says. If no randomness comes from a seed, only the
    best run is kept and shown.
    """

    kind: Literal["random-stopping"] = "random-stopping"
    law: Literal["geometric", "logarithmic", "poisson"] = Field(
        "geometric",
        description="Law of the number of runs: truncated negative binomial with shape 1 or 0, or its limit.",
    )
    mean: Annotated[float, Field(ge=1)] = Field(description="Expected number of runs.")
    seed: int | None = Field(
        None, ge=0, description="Of the number of runs; for experiments. Left out, the operating system's entropy."
    )
    metric: Annotated[str, Field(pattern=r"^test_[a-z_]+$")] = Field(
        "test_accuracy", description="What the best is best in, on test records, which are declared public."
    )

    @property
    def priced(self) -> Choice:
        """Return the choice that `accounting/repeated_selection.py` prices."""
        return Choice(self.mean, self.law)


class Resources(Section):
    """Resources that one pack requests from a cluster. The local launcher ignores them."""

    cpus: Count = Field(1, description="Cores.")
    gpus: int = Field(0, ge=0, description="Accelerators.")
    memory_gb: Positive = Field(4.0, description="Memory in GiB.")
    minutes: Count = Field(60, description="Longest time of one run of a pack; it is then requeued and resumed.")
    partition: str | None = Field(None, description="Slurm partition; the cluster's default when left out.")
    slurm: dict[str, str | int] = Field(
        {}, description="More options of sbatch, by their long names: {account: NAME, qos: NAME, constraint: NAME}."
    )
    at_once: Count = Field(64, description="Most packs that run at the same time.")

    @field_validator("slurm")
    @classmethod
    def _not_ours(cls, options: dict[str, str | int]) -> dict[str, str | int]:
        """Refuse what the launcher decides: jobs that end elsewhere or are not requeued would be lost."""
        if odd := [name for name in options if not re.fullmatch("[a-z][a-z-]*", name)]:
            raise ValueError(f"{odd[0]}: is no long name of an option")
        if ours := sorted(
            {"array", "open-mode", "output", "error", "requeue", "no-requeue", "signal", "wrap"} & set(options)
        ):
            raise ValueError(f"the launcher sets {', '.join(ours)}")
        named = {"cpus-per-task": "cpus", "gpus-per-node": "gpus", "mem": "memory_gb", "time": "minutes"}
        if twice := sorted({*named, "partition"} & set(options)):
            raise ValueError(f"{twice[0]}: use resources.{named.get(twice[0], twice[0])}")
        return options


class Sweep(Section):
    """A set of experiments, read from one file."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)] = Field(
        description="Names the files of the sweep."
    )
    description: str = Field("", description="The question that the sweep answers.")
    recipes: list[str] = Field(min_length=1, description="Recipe files (relative to this one) or shipped recipes.")
    grid: dict[str, list[Any]] = Field({}, description="Recipe key -> values; every combination.")
    zip: dict[str, list[Any]] = Field({}, description="Recipe key -> values; the first of each, the second, ...")
    listed: list[Settings] = Field([], alias="list", description="Whole settings, one after the other.")
    random: Random | None = Field(None, description="Random settings.")
    seeds: Literal["distinct", "shared"] = Field(
        "distinct",
        description="distinct: every cell has noise of its own, so that cells compose. shared: the recipe's seed in"
        " every cell, for paired comparisons; then no statement about several cells together holds.",
    )
    select: RandomStopping | None = Field(None, description="How the best cell is chosen privately.")
    most_trials: Count | Literal["auto"] = Field(
        "auto", description="Most trials that train together in one pack; auto: what memory holds, 64 at most on a CPU."
    )
    resources: Resources = Field(Resources(), description="What a pack needs on a cluster.")

    @model_validator(mode="after")
    def _blocks_make_sense(self) -> Sweep:
        problems = [f"grid.{key}: is empty; give at least one value" for key, values in self.grid.items() if not values]
        lengths = {key: len(values) for key, values in self.zip.items()}
        if len(set(lengths.values())) > 1 or 0 in lengths.values():
            told = ", ".join(f"{key} has {length}" for key, length in lengths.items())
            problems.append(f"zip: every key needs equally many values, at least one; {told}")
        problems += [f"list.{i}: is empty; give at least one key" for i, one in enumerate(self.listed) if not one]
        if self.seeds == "distinct" and "seed" in {*self.grid, *self.zip, *(key for one in self.listed for key in one)}:
            problems.append(
                "seed: each cell gets a seed of its own; ask for several trials by repeats, or set seeds: shared"
            )
        if self.select is not None and self.seeds == "shared":
            problems.append("seeds: shared, but select needs runs with independent noise; use seeds: distinct")
        if problems:
            raise ValueError("\n".join(problems))
        return self


@dataclass(frozen=True)
class LoadedSweep:
    """A valid sweep, its tree (which has each value's line), its folder, and the overrides for every recipe."""

    sweep: Sweep
    tree: Node
    base: FilePath
    source: str
    overrides: tuple[str, ...]


def load_sweep(source: str, overrides: Sequence[str] = ()) -> LoadedSweep:
    """Read the sweep file, or the shipped sweep, `source`.

    `KEY=VALUE` whose key begins with a block of the sweep (`grid.method.batch_size=[1, 2]`, `random.samples=3`)
    changes the sweep; any other changes every recipe. Raises RecipeError with every problem.
    """
    if source in shipped_recipes() and not FilePath(source).is_file():
        raise RecipeError(f"{source}: {_IS_A_RECIPE.format(source)}")
    path = find_recipe(source, shipped_recipes(sweeps=True))
    tree, problems = read_tree(read_text(path, source), SourceLocation(source, 1))
    if tree is None:
        raise RecipeError([str(problem) for problem in problems])
    if not isinstance(tree.value, dict):
        raise RecipeError(
            f"{source}: not a sweep: it names no recipes; `dpsgd sweep sweeps/ci --dry-run` shows one that is shipped"
        )
    if tree.child("recipes") is None and tree.child("model") is not None:
        raise RecipeError(f"{source}: {_IS_A_RECIPE.format(source)}")
    mine = [text for text in overrides if text.split("=")[0].split(".")[0] in _OWN]
    problems += _override(tree, mine)
    problems += [problem for block in _BLOCKS for problem in _bad_keys(tree.child(block), (block,))]
    sweep, wrong = validate(tree, Sweep)
    problems += wrong
    if sweep is None or problems:
        raise RecipeError(in_order(problems))
    return LoadedSweep(sweep, tree, path.parent, source, tuple(text for text in overrides if text not in mine))


def is_sweep(source: str) -> bool:
    """Return True if `source` names a shipped sweep, or a YAML file that lists `recipes` and has no model."""
    path = FilePath(source)
    if not path.is_file():
        return source in shipped_recipes(sweeps=True) and source not in shipped_recipes()
    tree, _ = read_tree(read_text(path, source), SourceLocation(source, 1))
    if tree is None or not isinstance(tree.value, dict):
        return False
    return tree.child("recipes") is not None and tree.child("model") is None


def in_order(problems: Sequence[Problem]) -> list[str]:
    """Return the problems as text, ordered by line, each once, with the number of cells that have it."""
    ordered = sorted(problems, key=lambda problem: (problem.place.line is None, problem.place.line or 0))
    counts: dict[str, int] = {}
    for problem in ordered:
        counts[str(problem)] = counts.get(str(problem), 0) + 1
    return [text if count == 1 else f"{text} (in {count} cells)" for text, count in counts.items()]


def _override(tree: Node, texts: Sequence[str]) -> list[Problem]:
    """Apply overrides to the sweep itself, in place; `grid.a.b=[1]` sets the key `a.b` of the grid."""
    problems = []
    for text in texts:
        block, dot, rest = text.partition(".")
        if block in _BLOCKS and dot:
            key = rest.removesuffix(undotted(rest)[1]) or rest.partition("=")[0]
            new, wrong = read_tree(rest.removeprefix(key).removeprefix("="), SourceLocation(f"override {text}"))
            problems += wrong
            if new is not None:
                section = tree.value.setdefault(block, Node({}, new.place))
                section.value[key] = new
        else:
            problems += apply_overrides(tree, [text])
    return problems


def _bad_keys(block: Node | None, path: Path) -> list[Problem]:
    keys = block.value if block is not None and isinstance(block.value, dict) else {}
    return [
        Problem(node.place, (*path, key), "not a recipe key; write for example method.batch_size")
        for key, node in keys.items()
        if undotted(key)[1] or not key
    ]
