"""Python interface: train a recipe, open a result, and use its model. `dpsgd_cli.train`, `.load` and `.Result`.

Messages and refusals are those of the commands; errors are those of `dpsgd_cli.errors`. The work is done in
`training/loop.py` and `training/inference.py`. Prices from Python are in `account/`.
"""

from __future__ import annotations

import contextlib
import copy
import html
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, from_numpy, nn

from dpsgd_cli.common.plugins import IN_MEMORY, InMemory, content_of, standing_for, trusting
from dpsgd_cli.data import memory
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.engine import huggingface
from dpsgd_cli.engine.packing import refuse_unfinished
from dpsgd_cli.engine.settings import HuggingFaceModel
from dpsgd_cli.engine.weights import digest, held, redrawn
from dpsgd_cli.errors import DpsgdError, ModelError, RunError, UsageError
from dpsgd_cli.recipe.loading import LoadedRecipe, load_mapping, load_recipe
from dpsgd_cli.recipe.of_records import LABELS, StatedFacts, recipe_of_arrays, recipe_of_table
from dpsgd_cli.recipe.overrides import assignments
from dpsgd_cli.results import store, summary
from dpsgd_cli.results.result import summarise_columns
from dpsgd_cli.training import loop
from dpsgd_cli.training.inference import Trained
from dpsgd_cli.training.plans import resolve_auto

if TYPE_CHECKING:
    import pandas as pd


def train(
    recipe: Any,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    target: Any = None,
    model: nn.Module | Callable[..., nn.Module] | None = None,
    weights: Literal["drawn", "public"] | None = None,
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
    start: Result | str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Result:
    """Train a model, as `dpsgd train` does, and open its result. `dpsgd report FOLDER` writes its page.

    Args:
        recipe: A YAML file, the name of a shipped recipe, or a recipe as a dictionary. Or the private records: a table
            (pandas; with pyarrow, also polars and whatever else has an Arrow stream), an array or a tensor (N, ...) of
            features, features and labels as a pair (X, y) or a TensorDataset, a dict of columns or of arrays, or a
            Hugging Face dataset.
        overrides: Settings that replace those of the recipe by dotted key, such as {"privacy.budget.epsilon": 1}.
        target: With records: the column that is learnt, or for an array the labels (N, ...).
        model: With records: a module, or a function that builds one: it gets `input_shape` and `outputs`, unless it
            needs no arguments. Left out, a linear model.
        weights: With a module: "drawn" draws its parameters anew by the `reset_parameters()` of its parts; "public"
            keeps them, and declares that no private record shaped them. No default.
        epsilon, delta: With records: the budget. Neither has a default.
        bounds, categories, classes, target_bounds, missing, drop, fitted_before, columns: With records: what is
            public (`StatedFacts`). State it from public knowledge; what is left out is refused, with the columns that
            need it.
        name: With records: names the result, and stands for the file of the records in its recipe.
        out: The folder in which the result directory is written; a complete one is reused.
        resume, finish: Continue an interrupted run, or make a result of its last checkpoint.
        book: The budget book of the table, which is charged before anything is released (`dpsgd budget`).
        start: An own private result, or its folder, whose weights the training starts from: the statement is then of
            both, and their epsilons and deltas add up (`results/earlier.py` has the proof).
        say: Receives the lines that the command prints on stderr.

    Raises the errors of `dpsgd_cli.errors`. A fifth of the records are held out and measured in private, at no further
    price, unless `overrides` says {"data.split": {"test": 0}}, another share, or {"data.evaluation": "public"}. No
    message holds a cell of the records.
    """
    options = loop.Options(Path(out), resume, say=say or loop.silence, save_models=True)
    lists = (missing or {}, drop, fitted_before, columns or {})
    stated = StatedFacts(bounds, categories or {}, classes, target_bounds, *lists)
    folder = start.directory if isinstance(start, Result) else start
    beside = {"privacy.book": book, "privacy.start": folder}
    charged = assignments({key: str(Path(one).resolve()) for key, one in beside.items() if one is not None})
    if isinstance(recipe, str | Path) or (isinstance(recipe, Mapping) and not memory.are_columns(recipe)):
        if stated != StatedFacts() or (target, model, epsilon, delta) != (None, None, None, None):
            raise UsageError("train: a recipe has its own data and budget; give records, or set keys with overrides")
        changes = (*assignments(overrides), *charged)
        loaded = load_mapping(recipe, changes) if isinstance(recipe, Mapping) else load_recipe(str(recipe), changes)
        return _trained(loaded, options, finish)
    with _hiding_cells(name):
        section, files = own_model(model, weights)
        held, content = _of_records(recipe, target, stated, name, section)
        content["privacy"] = {"budget": _budget(epsilon, delta)}
        loaded = load_mapping(content, (*assignments(overrides), *charged))
        with memory.holding(Path(content["data"]["path"]), held), standing_for(files):
            return replace(_trained(loaded, options, finish), files=files)


_KEYS = re.compile(r"\bdata\.(bounds|categorical|columns|missing|drop|classes|target_bounds)\b")


@contextlib.contextmanager
def _hiding_cells(name: str) -> Iterator[None]:
    """Raise errors without the errors that caused them, and other libraries' without their text: it may show a cell.

    Messages name the arguments of `train`, and no key or file of the recipe that it makes of them.
    """
    try:
        yield
    except DpsgdError as error:
        told = re.sub(rf"\b{re.escape(name)}(?:{memory.TABLE}|{memory.ARRAYS})(?!\w)", "the records", str(error))
        raise type(error)(_KEYS.sub(lambda key: {"categorical": "categories"}.get(key[1], key[1]), told)) from None
    except Exception as error:  # noqa: BLE001, whatever it is
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {Path(last.filename).name}, line {last.lineno}"
        told = f"training on records in memory failed ({where}); the message may show a cell, so it is not repeated"
        raise RunError(told) from None


def _trained(loaded: LoadedRecipe, options: loop.Options, finish: bool) -> Result:
    with trusting(really=not finish):
        settled = resolve_auto(loaded)
    return load(loop.finish(settled, options) if finish else loop.run(settled, options))


def own_model(model: Any, weights: str | None) -> tuple[dict[str, Any] | None, dict[str, InMemory]]:
    """Return the section `model` of a recipe of what `train` gets as `model`, and what stands for the files in it."""
    if model is None and weights is None:
        return None, {}
    is_module = isinstance(model, nn.Module)
    if weights not in (("drawn", "public") if is_module else (None,)) or not callable(model):
        raise UsageError(
            'train: model: give a function that builds a module, or a module with weights="drawn" (its parameters are'
            ' drawn anew, by the reset_parameters() of its parts) or weights="public" (they are kept, and you declare'
            " that no private record shaped them)"
        )
    results = (
        [one.of_private_result for one in model.modules() if hasattr(one, "of_private_result")] if is_module else []
    )
    if weights == "public" and results:
        raise UsageError(
            f"train: model: its weights are those of the private result {results[0]}, so they are not public; give"
            ' it as start=, and the model with weights="drawn": the statement is then of both'
        )
    name = f"{type(model).__name__ if is_module else getattr(model, '__name__', 'model')}{IN_MEMORY}"
    section: dict[str, Any] = {"kind": "python", "file": name, "factory": "model"}
    if not is_module:
        needs = any(one.default is one.empty and one.kind < 2 for one in inspect.signature(model).parameters.values())
        return section, {name: InMemory(model if needs else lambda *_: model(), content_of([model]))}
    refuse_unfinished(model)
    try:
        module, parts = copy.deepcopy(model), [*model.modules()]
    except RuntimeError:  # torch's, for a tensor of a graph
        raise ModelError("train: model: keeps a tensor that a pass computed; give a function that builds it") from None
    plain = [str({k: v for k, v in vars(one).items() if isinstance(v, int | float | str)}) for one in parts]
    sha256 = content_of([str(module), *plain, *(v for one in parts for v in (type(one), *vars(one).values()))])
    if weights == "drawn":
        return section, {name: InMemory(lambda *_: redrawn(module), sha256)}
    section["weights"] = {"file": f"weights of {name}", "public": True}
    kept = InMemory(held(module), digest(held(module)))
    return section, {name: InMemory(lambda *_: copy.deepcopy(module), sha256), f"weights of {name}": kept}


def _of_records(
    records: Any, target: Any, facts: StatedFacts, name: str, model: dict[str, Any] | None
) -> tuple[Any, dict[str, Any]]:
    """Return the records as they are held in memory, and their recipe without a budget."""
    import numpy as np

    found, beside = memory.records_of(records)
    if found is None:
        raise UsageError(
            f"train: a {type(records).__name__} is neither a recipe (a file, a name, a dictionary) nor records (a data"
            " frame, a table with an Arrow stream, an array or tensor, a pair (X, y), a TensorDataset, a Hugging Face"
            " dataset or a dict of columns)"
        )
    if beside is not None and target is not None:
        raise UsageError("train: target: the labels came with the features; leave it out")
    target = beside if target is None else target
    if isinstance(found, TableRows):
        if not isinstance(target, str):
            raise UsageError("train: target: give the name of the column that is learnt, as text")
        return found, recipe_of_table(found, target, facts, name, model)
    arrays = {"x": found} if isinstance(found, np.ndarray) else found
    if target is None and model is not None:
        return arrays, recipe_of_arrays(arrays, None, facts, name, model)
    if not (isinstance(target, str) and target in arrays):
        labels = memory.labels_of(target)
        if labels is None or {len(one) for one in arrays.values()} != {len(labels)}:
            raise UsageError("train: target: give an array of labels, one for each row of the features")
        arrays, target = {**arrays, LABELS: labels}, LABELS
    return arrays, recipe_of_arrays(arrays, target, facts, name, model)


def _budget(epsilon: float | None, delta: float | None) -> dict[str, float]:
    if epsilon is None or delta is None:
        raise UsageError(
            "train: give epsilon and delta, the budget: a guarantee has no default (delta: at most 1e-5, and at most a"
            " tenth of 1 / records)"
        )
    return {"epsilon": epsilon, "delta": delta}


def load(path: str | Path, *, trust_code: bool = False, model: Any = None, weights: str | None = None) -> Result:
    """Open a result directory after checking that every file in it is unchanged.

    Its models may need a Python file. If this user has not trained with that file, it runs only with `trust_code`;
    otherwise using the models raises UsageError. A model that was given to `train` in memory is given again here.
    """
    return Result(Path(path), store.read_whole(Path(path)), trust_code, own_model(model, weights)[1])


@dataclass(frozen=True)
class Result:
    """A finished run. `document` is its `result.json`; `print(result)` prints the summary of `dpsgd train`.

    Fields whose names begin with `nonprivate_` are computed from training records without noise. Do not publish them.
    """

    directory: Path
    document: dict[str, Any] = field(repr=False)
    trust_code: bool = False
    files: Mapping[str, InMemory] = field(default_factory=dict, compare=False, repr=False)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Allow the code of the model to run, and let what was given in memory stand for its files."""
        with trusting(really=self.trust_code), standing_for(self.files):
            yield

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
        with self._opened():
            return Trained.load(self.directory)

    def predict(self, records: Any, trial: int = 0) -> pd.Series:
        """Return the class or target of each record (or an array of them), predicted by the model of one trial.

        `records` is what `train` takes: a table with the columns of the training records (others are ignored), or
        arrays or tensors if the training records are some; or a file of either. The index is that of the table. Raises
        DataError for records that the recipe does not allow. Classes are spelled as in the file, but for true and
        false, which are truth values.
        """
        import numpy as np
        import pandas as pd

        with self._opened():
            found = self.trained.predict(self.trained.source.rows(records), trial)
        if found.ndim > 1:
            return pd.Series(list(found), index=_index(records), name="prediction")
        if {str(one).casefold() for one in self.trained.classes or ()} == {"true", "false"}:
            # pandas reads such labels as truth values, however they are spelled
            found = np.array([str(one).casefold() == "true" for one in found])
        return pd.Series(found, index=_index(records), name="prediction").infer_objects()

    def probabilities(self, records: Any, trial: int = 0) -> pd.DataFrame:
        """Return the probability of each class for each record, one column per class."""
        import pandas as pd

        with self._opened():
            found = self.trained.probabilities(self.trained.outputs(self.trained.source.rows(records), trial))
        return pd.DataFrame(found, index=_index(records), columns=list(self.trained.classes or ()))

    def evaluate(self, labelled: pd.DataFrame | str | Path | None = None) -> dict[str, dict[str, Any]]:
        """Return metrics on labelled records; by default, on the test records of the result.

        Each holds its `mean` over trials, and as `baseline` that of the best constant answers to these records, None
        where it has none. The metrics have no noise. They cost the training records no further privacy, but the
        labelled records are not protected.
        """
        with self._opened():
            found, constants = map(summarise_columns, self.trained.measured(labelled))
        return {name: own | {"baseline": constants.get(name, {}).get("mean")} for name, own in found.items()}

    def inputs(self, records: Any, trial: int = 0) -> Tensor:
        """Return the inputs of `module` for these records, preprocessed as for training."""
        with self._opened():
            return from_numpy(self.trained.inputs(self.trained.source.rows(records), trial))

    def module(self, trial: int = 0) -> nn.Module:
        """Return the model of one trial: an ordinary module with its weights, on the CPU, that takes `inputs`.

        A regression's outputs are those that it was trained on: `predict` turns them into the target's own unit. The
        module draws the noise of its own code, as that of a VAE, in eval mode, too; `predict` takes that noise's mean.
        """
        with self._opened():
            made = self.trained.module(trial)
        if self.privacy["accountant"] is not None:
            made.of_private_result = str(self.directory)  # type: ignore[assignment]
        return made

    def save_pretrained(self, folder: str | Path, trial: int = 0) -> None:
        """Write a model of transformers for `from_pretrained`; with adapters, for `peft.PeftModel.from_pretrained`.

        The classes are its labels. Raises UsageError for another model, or another kind of adapter.
        """
        with self._opened():
            loaded = self.trained.loaded
            own = loaded.recipe.model if isinstance(loaded.recipe.model, HuggingFaceModel) else None
            huggingface.save(self.trained.module(trial), own, loaded.base, self.trained.classes or (), Path(folder))

    def shapes(self, trial: int = 0) -> pd.DataFrame:
        """Return the effect of each value of each column on the model's output, as `dpsgd explain` writes it."""
        import pandas as pd

        from dpsgd_cli.results import shapes
        from dpsgd_cli.training.explain import explain

        with self._opened():
            return pd.DataFrame(shapes.rows(explain(self.trained, trial)))

    def coefficients(self, trial: int = 0) -> pd.DataFrame:
        """Return the weights of a linear model, with estimates and 95% intervals if the recipe asked for them.

        Columns: feature, output, weight, estimate, low, high, note. Raises UsageError for other models.
        """
        import pandas as pd

        from dpsgd_cli.results import shapes
        from dpsgd_cli.training.explain import coefficients

        with self._opened():
            return pd.DataFrame(shapes.coefficient_rows(coefficients(self.trained, trial)))

    def __str__(self) -> str:
        return summary.result_text(self.document, self.directory)

    def _repr_html_(self) -> str:
        """Return the result as a notebook shows it: the summary of `dpsgd train`."""
        return f"<pre>{html.escape(str(self))}</pre>"


def _index(records: Any) -> Any:
    return getattr(records, "index", None) if hasattr(records, "columns") else None
