"""Python interface: train a recipe, open a result, and use its model. `dpsgd_cli.train`, `.load` and `.Result`.

Messages and refusals are those of the commands; errors are those of `dpsgd_cli.errors`. The work is done in
`training/loop.py` and `training/inference.py`. Prices from Python are in `account/`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, from_numpy, nn

from dpsgd_cli.common.plugins import trusting
from dpsgd_cli.data import memory
from dpsgd_cli.errors import DpsgdError, RunError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe, load_mapping, load_recipe
from dpsgd_cli.recipe.of_records import LABELS, StatedFacts, recipe_of_arrays, recipe_of_table
from dpsgd_cli.recipe.overrides import assignments
from dpsgd_cli.results import headline, store, summary
from dpsgd_cli.results.result import summarise_columns
from dpsgd_cli.training import loop
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


def train(
    recipe: Any,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    target: Any = None,
    epsilon: float | None = None,
    delta: float | None = None,
    bounds: Mapping[str, Any] | Sequence[float] | None = None,
    categories: Mapping[str, Sequence[Any]] | None = None,
    classes: Sequence[Any] | Literal["public"] | None = None,
    target_bounds: Sequence[float] | None = None,
    missing: Mapping[str, Any] | None = None,
    drop: Sequence[str] = (),
    fitted_before: Sequence[str] = (),
    columns: Mapping[str, Any] | None = None,
    name: str = "records",
    out: str | Path = "results",
    resume: bool = False,
    finish: bool = False,
    book: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train a model, as `dpsgd train` does, and open its result.

    Args:
        recipe: A YAML file, the name of a shipped recipe, or a recipe as a dictionary. Or the private records: a table
            (pandas; with pyarrow, also polars and whatever else has an Arrow stream), or an array (N, ...) of features.
        overrides: Settings that replace those of the recipe by dotted key, such as {"privacy.budget.epsilon": 1}.
        target: With records: the column that is learnt, or for an array the labels (N,).
        epsilon, delta: With records: the budget. Neither has a default.
        bounds, categories, classes, target_bounds, missing, drop, fitted_before, columns: With records: what is
            public (`StatedFacts`). State it from public knowledge; what is left out is refused, with the columns that
            need it.
        name: With records: names the result, and stands for the file of the records in its recipe.
        out: The folder in which the result directory is written; a complete one is reused.
        resume, finish: Continue an interrupted run, or make a result of its last checkpoint.
        book: The budget book of the table, which is charged before anything is released (`dpsgd budget`).
        say: Receives the lines that the command prints on stderr.

    Raises the errors of `dpsgd_cli.errors`. A fifth of the records are held out and measured in private, at no further
    price, unless `overrides` says {"data.split": {"test": 0}}, another share, or {"data.evaluation": "public"}. No
    message holds a cell of the records.
    """
    options = loop.Options(Path(out), resume, save_models=True)
    if say is not None:
        options = loop.Options(Path(out), resume, say=say, save_models=True)
    lists = (missing or {}, drop, fitted_before, columns or {})
    stated = StatedFacts(bounds, categories or {}, classes, target_bounds, *lists)
    charged = () if book is None else assignments({"privacy.book": str(Path(book).resolve())})
    if isinstance(recipe, str | Path | Mapping):
        if stated != StatedFacts() or (target, epsilon, delta) != (None, None, None):
            raise UsageError("train: a recipe has its own data and budget; give records, or set keys with overrides")
        changes = (*assignments(overrides), *charged)
        loaded = load_mapping(recipe, changes) if isinstance(recipe, Mapping) else load_recipe(str(recipe), changes)
        return _trained(loaded, options, finish)
    with _hiding_cells():
        held, content = _of_records(recipe, target, stated, name)
        content["privacy"] = {"budget": _budget(epsilon, delta)}
        loaded = load_mapping(content, (*assignments(overrides), *charged))
        with memory.holding(Path(content["data"]["path"]), held):
            return _trained(loaded, options, finish)


@contextlib.contextmanager
def _hiding_cells() -> Iterator[None]:
    """Raise errors without the errors that caused them, and other libraries' without their text: it may show a cell."""
    try:
        yield
    except DpsgdError as error:
        raise error from None
    except Exception as error:  # noqa: BLE001, whatever it is
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"
        told = f"training on records in memory failed ({where}); the message may show a cell, so it is not repeated"
        raise RunError(told) from None


def _trained(loaded: LoadedRecipe, options: loop.Options, finish: bool) -> Result:
    with trusting(really=not finish):
        settled = resolve_auto(loaded)
    return load(loop.finish(settled, options) if finish else loop.run(settled, options))


def _of_records(records: Any, target: Any, facts: StatedFacts, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the records as they are held in memory, and their recipe without a budget."""
    import numpy as np

    table = memory.table_of(records)
    if table is not None:
        if not isinstance(target, str):
            raise UsageError("train: target: give the name of the column that is learnt, as text")
        return table, recipe_of_table(table, target, facts, name)
    if not isinstance(records, np.ndarray):
        raise UsageError(
            f"train: a {type(records).__name__} is neither a recipe (a file, a name, a dictionary) nor records (a data"
            " frame, a table with an Arrow stream, a numpy array)"
        )
    labels = memory.labels_of(target)
    if labels is None or labels.shape != records.shape[:1]:
        raise UsageError("train: target: give an array of labels, one for each row of the features")
    return {"x": records, LABELS: labels}, recipe_of_arrays(facts, name)


def _budget(epsilon: float | None, delta: float | None) -> dict[str, float]:
    if epsilon is None or delta is None:
        raise UsageError(
            "train: give epsilon and delta, the budget: a guarantee has no default (delta: at most 1e-5, and at most a"
            " tenth of 1 / records)"
        )
    return {"epsilon": epsilon, "delta": delta}


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

    def intervals(self, trial: int = 0) -> dict[str, tuple[float | None, float, float]]:
        """Return (point, low, high) by metric, on private held-out records: 95% intervals, noise included.

        The point is None if noise hides it. Empty if no held-out record is private.
        """
        released = self.document.get("evaluation")
        return {name: (one[0], one[1], one[2]) for name, one in released[trial]["metrics"].items()} if released else {}

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
        """Return the class or target of each record (or an array of them), predicted by the model of one trial.

        `records` is a table with the columns of the training records (others are ignored), an array if the training
        records are one, or a file of either. The index is that of the table. Raises DataError for records that the
        recipe does not allow. Classes are spelled as in the file, but for true and false, which are truth values.
        """
        import numpy as np
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.predict(self.trained.source.rows(records), trial)
        if found.ndim > 1:
            return pd.Series(list(found), index=_index(records), name="prediction")
        if {str(one).casefold() for one in self.trained.classes or ()} == {"true", "false"}:
            # pandas reads such labels as truth values, however they are spelled
            found = np.array([str(one).casefold() == "true" for one in found])
        return pd.Series(found, index=_index(records), name="prediction").infer_objects()

    def probabilities(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> pd.DataFrame:
        """Return the probability of each class for each record, one column per class."""
        import pandas as pd

        with trusting(really=self.trust_code):
            found = self.trained.probabilities(self.trained.outputs(self.trained.source.rows(records), trial))
        return pd.DataFrame(found, index=_index(records), columns=list(self.trained.classes or ()))

    def evaluate(self, labelled: pd.DataFrame | str | Path | None = None) -> dict[str, dict[str, Any]]:
        """Return metrics on labelled records; by default, on the test records of the result.

        The metrics have no noise. They cost the training records no further privacy, but the labelled records are not
        protected.
        """
        with trusting(really=self.trust_code):
            return summarise_columns(self.trained.metrics(labelled))

    def inputs(self, records: pd.DataFrame | np.ndarray | str | Path, trial: int = 0) -> Tensor:
        """Return the inputs of `module` for these records, preprocessed as for training."""
        with trusting(really=self.trust_code):
            return from_numpy(self.trained.inputs(self.trained.source.rows(records), trial))

    def module(self, trial: int = 0) -> nn.Module:
        """Return the model of one trial: an ordinary module with its weights, on the CPU, that takes `inputs`."""
        with trusting(really=self.trust_code):
            return self.trained.module(trial)

    def shapes(self, trial: int = 0) -> pd.DataFrame:
        """Return the effect of each value of each column on the model's output, as `dpsgd explain` writes it."""
        import pandas as pd

        from dpsgd_cli.results import shapes
        from dpsgd_cli.training.explain import explain

        with trusting(really=self.trust_code):
            return pd.DataFrame(shapes.rows(explain(self.trained, trial, with_curves=False)))

    def coefficients(self, trial: int = 0) -> pd.DataFrame:
        """Return the weights of a linear model, with estimates and 95% intervals if the recipe asked for them.

        Columns: feature, output, weight, estimate, low, high, note. Raises UsageError for other models.
        """
        import pandas as pd

        from dpsgd_cli.results import shapes
        from dpsgd_cli.training.explain import coefficients

        with trusting(really=self.trust_code):
            return pd.DataFrame(shapes.coefficient_rows(coefficients(self.trained, trial)))

    def __str__(self) -> str:
        return summary.result_text(self.document, self.directory)

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it: quality and epsilon first, then metrics and the statement."""
        return headline.in_notebook(self.document)


def _index(records: Any) -> Any:
    return records.index if hasattr(records, "columns") else None
