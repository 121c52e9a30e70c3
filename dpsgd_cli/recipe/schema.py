"""Recipes: experiments whose method is one of a list, and whose sections agree with each other.

`methods/experiment.py` has the sections. `recipe/loading.py` reads the YAML, the method's planner computes the price,
`training/loop.py` runs the recipe.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from dpsgd_cli.accounting.adjacency import NEIGHBOURS
from dpsgd_cli.data.settings import Data
from dpsgd_cli.engine.settings import HuggingFaceModel
from dpsgd_cli.methods.experiment import Experiment
from dpsgd_cli.methods.settings import Method
from dpsgd_cli.recipe.agreement import method_problems


class Recipe(Experiment):
    """One experiment, with the method that it names."""

    method: Method = Field(description="How it is trained, and how records reach a step.")

    @model_validator(mode="after")
    def _resolved(self) -> Recipe:
        """Tell the data section, once, what the other sections decide; refuse sections that do not agree."""
        privacy, problems = self.privacy, list[str]()
        self.__dict__["data"] = self._data()
        problems += method_problems(self)
        if privacy is not None and privacy.noise_source == "secure" and self.seed is not None:
            problems.append("privacy.noise_source: secure cannot be seeded; leave seed out")
        if privacy is not None and privacy.noise_source == "seeded" and self.seed is None:
            problems.append("privacy.noise_source: seeded needs a seed")
        if privacy is not None and (privacy.book or privacy.start) and self.seed is not None:
            problems.append(
                "seed: noise from a seed can be computed again, so it is no private release, which a book counts and"
                " privacy.start adds; leave seed out (seed=null), or leave both out of an experiment"
            )
        if privacy is not None and self.data.coins is not None:
            problems.append("data.coins: is for recipes without privacy; with it, the adjacency decides: leave it out")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _data(self) -> Data:
        """Return the data section with the tokenizer of the model, private held-out records, and what protects them."""
        data, text, private = self.data, self.data.text, self.privacy is not None
        if text is not None and text.folder is None and text.words is None:
            if not isinstance(self.model, HuggingFaceModel):
                raise ValueError(
                    "data.text.folder: missing; give the folder of a tokenizer, or words: 4096 for hashed words"
                )
            data = data.changed(text=text.changed(folder=self.model.folder, public=True))
        coins = data.coins or ("content" if NEIGHBOURS[self.adjacency].counted else "place")
        unit = None if self.privacy is None else self.privacy.unit
        data = data.measured(self.folds) if private else data
        return data.protecting(unit, self.folds, by_place=coins == "place", private=private)
