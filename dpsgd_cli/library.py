"""dpsgd from Python: train a recipe, open a result, and use its model. `dpsgd_cli.train`, `.load` and `.Result`.

What is said and refused is what the commands say and refuse; errors are those of `dpsgd_cli.errors`.

Not here: prices (`account/calling.py`), which need none of this, and the work itself (`training/loop.py`,
`training/inference.py`).
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
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train the model of a recipe, as `dpsgd train` does, and open its result.

    `recipe` is a YAML file or the name of a shipped recipe; `overrides` replaces settings by dotted key, as
    {"privacy.budget.epsilon": 1}. The result directory is made in `out`; one that is there already is not made again.
    `resume` goes on with an interrupted run, and `finish` makes a result of its last checkpoint. `say` is told what the
    command would print on stderr.
    """
    loaded = load_recipe(str(recipe), assignments(overrides))
    options = loop.Options(Path(out), resume, save_models=True)
    if say is not None:
        options = loop.Options(Path(out), resume, say=say, save_models=True)
    return load(loop.finish(loaded, options) if finish else loop.run(loaded, options))


def load(path: str | Path, *, trust_code: bool = False) -> Result:
    """Open a result directory, once every file in it was seen to be as it was written.

    Its models may need a Python file. One that this user has not trained with runs only with `trust_code`; UsageError
    otherwise, when the models are used.
    """
    return Result(Path(path), store.read_whole(Path(path)), trust_code)


@dataclass(frozen=True)
class Result:
    """A finished run. `document` is its `result.json`; `print(result)` says what `dpsgd train` prints.

    Fields whose names begin with `nonprivate_` are of training records, without noise: not to be published.
    """

    directory: Path
    document: dict[str, Any]
    trust_code: bool = False

    @property
    def privacy(self) -> dict[str, Any]:
        """The statement: `epsilon`, `delta`, `adjacency`, `accountant`, `bound`, `declarations`, and what else."""
        return dict(self.document["privacy"])

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """`mean`, `std`, `ci95` and `n` over trials of each metric, as `test_accuracy`."""
        return dict(self.document["metrics"])

    @property
    def trials(self) -> list[dict[str, Any]]:
        """What each trial came to."""
        return list(self.document["trials"])

    @property
    def warnings(self) -> list[str]:
        """What a reader of the statement should know."""
        return list(self.document["warnings"])

    @cached_property
    def trained(self) -> Trained:
        """Its models. Raises DataError where it holds none."""
        with trusting(really=self.trust_code):
            return Trained.load(self.directory)

    def predict(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> pd.Series:
        """The class of each record, or its predicted target, by the model of one trial.

        `records` are a table with the columns of the training records (more are left alone), an array where they are
        one, or a file of either. The index is that of the table. Raises DataError for what the recipe does not allow.
        """
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.predict(self.trained.rows(records), trial)
        return pd.Series(found, index=_index(records), name="prediction").infer_objects()

    def probabilities(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> pd.DataFrame:
        """The probability of each class, a column each."""
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.probabilities(self.trained.outputs(self.trained.rows(records), trial))
        return pd.DataFrame(found, index=_index(records), columns=list(self.trained.classes or ()))

    def evaluate(self, labelled: pd.DataFrame | str | Path | None = None) -> dict[str, dict[str, Any]]:
        """Metrics on other records with labels; left out, on those that the result itself was tested on.

        A measurement without noise: the released models cost their training records nothing more, but whoever is in
        these records is not protected.
        """
        with trusting(really=self.trust_code):
            if labelled is None:
                return summarise_columns(self.trained.own_metrics())
            return summarise_columns(self.trained.evaluate(self.trained.labelled(labelled)))

    def inputs(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> Tensor:
        """What `module` takes for these records: preprocessed as for training."""
        with trusting(really=self.trust_code):
            return from_numpy(self.trained.inputs(self.trained.rows(records), trial))

    def module(self, trial: int = 0) -> nn.Module:
        """The model of one trial: an ordinary module with its weights, on the CPU, for what `inputs` gives."""
        with trusting(really=self.trust_code):
            return self.trained.module(trial)

    def __str__(self) -> str:
        return summary.result_text(self.document, self.directory)


def _index(records: Any) -> Any:
    return getattr(records, "index", None)
