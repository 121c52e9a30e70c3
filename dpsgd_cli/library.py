"""Python interface: train a recipe, open a result, and use its model. `dpsgd_cli.train`, `.load` and `.Result`.

Messages and refusals are those of the commands; errors are those of `dpsgd_cli.errors`. The work is done in
`training/loop.py` and `training/inference.py`. Prices from Python are in `account/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, from_numpy, nn

from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.recipe.overrides import assignments
from dpsgd_cli.results import store, summary
from dpsgd_cli.results.result import summarise_columns
from dpsgd_cli.training import loop
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def train(
    recipe: str | Path,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    out: str | Path = "results",
    resume: bool = False,
    finish: bool = False,
    book: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train the model of a recipe, as `dpsgd train` does, and open its result.

    `recipe` is a YAML file or the name of a shipped recipe. `overrides` replaces settings by dotted key, for example
    {"privacy.budget.epsilon": 1}. The result directory is written in `out`; a complete one is reused. `resume`
    continues an interrupted run, and `finish` makes a result of its last checkpoint. `book` is the budget book of the
    table, which is charged before anything is released (`dpsgd budget`). `say` receives the lines that the
    command prints on stderr.
    """
    with trusting(really=not finish):
        charged = {} if book is None else {"privacy.book": str(Path(book).resolve())}
        loaded = resolve_auto(load_recipe(str(recipe), (*assignments(overrides), *assignments(charged))))
    options = loop.Options(Path(out), resume, save_models=True)
    if say is not None:
        options = loop.Options(Path(out), resume, say=say, save_models=True)
    return load(loop.finish(loaded, options) if finish else loop.run(loaded, options))


def load(path: str | Path, *, trust_code: bool = False) -> Result:
    """Open a result directory after checking that every file in it is unchanged.

    Its models may need a Python file. If this user has not trained with that file, it runs only with `trust_code`;
    otherwise using the models raises UsageError.
    """
    return Result(Path(path), store.read_whole(Path(path)), trust_code)


@dataclass(frozen=True)
class Result:
    """A finished run. `document` is its `result.json`; `print(result)` prints the summary of `dpsgd train`.

    Fields whose names begin with `nonprivate_` are computed from training records without noise. Do not publish them.
    """

    directory: Path
    document: dict[str, Any]
    trust_code: bool = False

    @property
    def privacy(self) -> dict[str, Any]:
        """Return the statement: `epsilon`, `delta`, `adjacency`, `accountant`, `bound`, `declarations` and more."""
        return dict(self.document["privacy"])

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return `mean`, `std`, `ci95` and `n` over trials, by metric, such as `test_accuracy`."""
        return dict(self.document["metrics"])

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Return the outcome of each trial."""
        return list(self.document["trials"])

    @property
    def warnings(self) -> list[str]:
        """Return the warnings for a reader of the statement."""
        return list(self.document["warnings"])

    @cached_property
    def trained(self) -> Trained:
        """Return the trained models. Raise DataError if the result holds none."""
        with trusting(really=self.trust_code):
            return Trained.load(self.directory)

    def predict(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> pd.Series:
        """Return the class or target of each record, predicted by the model of one trial.

        `records` is a table with the columns of the training records (others are ignored), an array if the training
        records are one, or a file of either. The index is that of the table. Raises DataError for records that the
        recipe does not allow.
        """
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.predict(self.trained.rows(records), trial)
        return pd.Series(found, index=_index(records), name="prediction").infer_objects()

    def probabilities(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> pd.DataFrame:
        """Return the probability of each class for each record, one column per class."""
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.probabilities(self.trained.outputs(self.trained.rows(records), trial))
        return pd.DataFrame(found, index=_index(records), columns=list(self.trained.classes or ()))

    def evaluate(self, labelled: pd.DataFrame | str | Path | None = None) -> dict[str, dict[str, Any]]:
        """Return metrics on labelled records; by default, on the test records of the result.

        The metrics have no noise. They cost the training records no further privacy, but the labelled records are not
        protected.
        """
        with trusting(really=self.trust_code):
            if labelled is None:
                return summarise_columns(self.trained.own_metrics())
            return summarise_columns(self.trained.evaluate(self.trained.labelled(labelled)))

    def inputs(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> Tensor:
        """Return the inputs of `module` for these records, preprocessed as for training."""
        with trusting(really=self.trust_code):
            return from_numpy(self.trained.inputs(self.trained.rows(records), trial))

    def module(self, trial: int = 0) -> nn.Module:
        """Return the model of one trial: an ordinary module with its weights, on the CPU, that takes `inputs`."""
        with trusting(really=self.trust_code):
            return self.trained.module(trial)

    def __str__(self) -> str:
        return summary.result_text(self.document, self.directory)


def _index(records: Any) -> Any:
    return getattr(records, "index", None)
