"""The schema of a sweep file: axes, private choice of the best cell, and resources on a cluster.

Cells are the product of all blocks: recipes x every key of `grid` x `zip` x `list` x `random`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from dpsgd_cli.common.sections import Count, Interval, Positive, Section

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


class ExponentialChoice(Section):
    """The exponential mechanism on the number of training records that each trial classifies correctly."""

    kind: Literal["exponential"] = "exponential"
    epsilon: Positive = Field(description="Of the choice, on top of everything that was trained.")
    seed: int | None = Field(None, ge=0, description="For experiments; left out, the operating system's entropy.")


Select = Annotated[RandomStopping | ExponentialChoice, Field(discriminator="kind")]


class Resources(Section):
    """Resources that one pack requests from a cluster. The local launcher ignores them."""

    cpus: Count = Field(1, description="Cores.")
    gpus: int = Field(0, ge=0, description="Accelerators.")
    memory_gb: Positive = Field(4.0, description="Memory in GiB.")
    minutes: Count = Field(60, description="Longest time of one run of a pack; it is then requeued and resumed.")
    partition: str | None = Field(None, description="Slurm partition; the cluster's default when left out.")
    at_once: Count = Field(64, description="Most packs that run at the same time.")


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
    select: Select | None = Field(None, description="How the best cell is chosen privately.")
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
        if isinstance(self.select, RandomStopping) and self.seeds == "shared":
            problems.append("seeds: shared, but select needs runs with independent noise; use seeds: distinct")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def keys(self) -> list[str]:
        """The recipe keys that the axes set, each once, in the file's order."""
        found = [*self.grid, *self.zip, *(key for one in self.listed for key in one)]
        found += self.random.keys if self.random is not None else []
        return list(dict.fromkeys(found))
