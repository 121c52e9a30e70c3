"""Estimators of scikit-learn's kind that train privately: `DPClassifier` and `DPRegressor`.

    from dpsgd_cli.sklearn import DPClassifier

    model = DPClassifier(epsilon=1, delta=1e-5, bounds={"age": (18, 90)}, classes=["no", "yes"]).fit(X, y)
    model.predict(X_new), model.privacy_["epsilon"], model.report_

`fit` trains the recipe that `dpsgd.train` makes of a data frame, on all records: none is cut for tests.

Guarantee: one `fit` is as private as `privacy_` says. These things are outside of what one fit can state:

- Every further `fit` on the same records has a price of its own. A fit that is a fold of a cross-validation warns about
  that. Nothing is stated of all folds: scikit-learn deals them out by place or label, so that removing one record moves
  others. A search over parameters (`GridSearchCV` and what else calls scikit-learn's `_fit_and_score` with parameters)
  is refused, because it chooses by scores that nothing protects; `dpsgd sweep` tunes privately. A search of another
  library, or a loop of your own, cannot be distinguished from single fits, so it is neither refused nor priced.
- Steps before the estimator in a `Pipeline` that have to be fitted see the records without noise. They are named in the
  statement (`uncovered_steps`) as outside of it. Steps that you apply by yourself cannot be known: `fitted_before` of
  `dpsgd.train` names them.
- `score` and metrics have no noise: they protect nobody in the records that they measure.

Columns of an array are called x0, x1, ... No message shows a cell of the records.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.pipeline import Pipeline
from sklearn.utils import check_random_state, column_or_1d, get_tags
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from dpsgd_cli import library
from dpsgd_cli.common.text_format import listed
from dpsgd_cli.data import memory
from dpsgd_cli.data.cells import TableRows
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.results import report
from dpsgd_cli.results.result import Row

_SAFE = re.compile(
    r"Complex data not supported|contains (NaN|infinity)|[Ss]parse|\d+ (sample|feature)\(s\)|y cannot be None|"
    r"Unknown label type|inconsistent numbers of samples|feature names|Feature names|is expecting \d+ features|"
    r"requires y to be passed|should be a 1d array|must be of .*string|argument must be"
)
"""Messages of scikit-learn that show no cell."""


class PrivacyCostWarning(UserWarning):
    """A fit on records that other fits use too: each has a price."""


class _Private(BaseEstimator):
    """Base of both estimators. Attributes of a fitted one:

    `privacy_`: the statement. `ledger_`: the releases. `report_`: the report as Markdown.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return an argument of the constructor, as `_keep` holds it."""

    def _keep(self, given: dict[str, Any]) -> None:
        """Hold the arguments of a constructor as they are, under their names."""
        self.__dict__.update((name, given[name]) for name in self._get_param_names())

    def _fit(self, X: Any, y: Any, **target: Any) -> Self:
        """Train on features and the column y, and keep the result's content; what it needs of files stays in memory."""
        before = _fitted_steps()
        name = "target"
        while name in X.names:
            name += "_"
        table = X.beside(name, y)
        changes: dict[str, Any] = {"data.split": {"test": 0}}
        if self.random_state is not None:
            changes["seed"] = int(check_random_state(self.random_state).randint(2**31 - 1))
        with tempfile.TemporaryDirectory() as temporary, _hiding_cells():
            result = library.train(
                table,
                changes | dict(self.overrides or {}),
                target=name,
                epsilon=self.epsilon,
                delta=self.delta,
                bounds=self.bounds,
                categories=self.categories,
                missing=self.missing,
                columns=self.columns,
                drop=tuple(self.drop or ()),
                fitted_before=before,
                name=type(self).__name__,
                out=temporary if self.out is None else self.out,
                **target,
            )
            self._trained = result.trained
            self._files = {file.name: file.read_bytes() for file in result.directory.iterdir() if file.is_file()}
            self._named = result.directory.name
            self.privacy_: Row = result.privacy
        self.ledger_: list[Row] = [json.loads(line) for line in self._files["ledger.jsonl"].splitlines()]
        _say_prices(self.privacy_)
        return self

    @property
    def report_(self) -> str:
        """The report of the fit, as Markdown."""
        check_is_fitted(self)
        with tempfile.TemporaryDirectory() as temporary:
            directory = Path(temporary) / self._named
            directory.mkdir()
            for name, content in self._files.items():
                (directory / name).write_bytes(content)
            written = report.write(directory)
            return next(page for page in written if page.suffix == ".md").read_text(encoding="utf-8")

    def _table(self, X: Any, y: Any = None, reset: bool = False) -> Any:
        """Return features as a table, and with `reset` its labels (N,), as scikit-learn checks them."""
        with _hiding_cells():
            table = memory.table_of(X)
            if table is not None:
                checked = (X, y) if reset else (X,)
                validate_data(self, *checked, reset=reset, skip_check_array=True)
                return table, None if y is None else self._labels(y, len(table))
            rows: Any = validate_data(self, X, reset=reset, dtype="numeric")
            if not reset:
                return _numbered(rows), None
            if y is None:
                raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
            labels = self._labels(y, len(rows))
            return _numbered(rows), labels

    def _labels(self, y: Any, rows: int) -> np.ndarray:
        labels: np.ndarray = column_or_1d(y, warn=True)
        if len(labels) != rows:
            raise ValueError(f"X and y have inconsistent numbers of samples: {rows} and {len(labels)}")
        return labels

    def _outputs(self, X: Any) -> np.ndarray:
        """Return the outputs (N, K) of the model."""
        check_is_fitted(self)
        table, _ = self._table(X)
        with _hiding_cells():
            return self._trained.outputs(self._trained.source.rows(table), 0, exactly=True)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "privacy_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags


class DPClassifier(ClassifierMixin, _Private):
    """A private classifier: by default the linear model of cosines and categories, with automatic settings.

    Args:
        epsilon, delta: The budget of one fit. `fit` refuses to run without.
        bounds: Public [low, high] by column, first and last day of a column of dates, or one pair for all numbers.
        categories: Public values by column of text.
        classes: Public classes; "public" declares that the labels in y are.
        missing: By column, what a missing value means (`data.missing` of a recipe).
        columns: What codes of many values and free text become: {"code": {"hash": 64}, "note": {"text": 512}}.
        drop: Columns to leave out.
        overrides: Further settings of the recipe by dotted key.
        random_state: None for secure noise. A seed makes the noise reproducible, for experiments alone.
        out: Folder that gets the result directory; None keeps no files.

    After `fit`: `classes_`, `privacy_`, `ledger_`, `report_`, `n_features_in_`, `feature_names_in_` (data frames).
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        bounds: Mapping[str, Any] | Sequence[float] | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        classes: Sequence[Any] | Literal["public"] | None = None,
        missing: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
        drop: Sequence[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        random_state: Any = None,
        out: str | Path | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Train on records X (N, D), a data frame or an array of numbers, and their labels y (N,)."""
        _refuse_search()
        table, labels = self._table(X, y, reset=True)
        with _hiding_cells():
            check_classification_targets(labels)
        if self.classes is None:
            raise ValueError('classes: list the classes, or say classes="public": the labels that y holds are public')
        known = np.unique(labels if isinstance(self.classes, str) else np.asarray(self.classes))
        if isinstance(self.classes, str) and self.classes != "public":
            raise ValueError(f'classes: is {self.classes!r}, but must be a list, or "public"')
        if len(known) < 2:
            raise ValueError("training needs more than one class")
        if not np.isin(labels, known).all():
            row = int((~np.isin(labels, known)).argmax())
            raise ValueError(f"y holds a label in row {row}, which is not among the classes {listed(known.tolist())}")
        names = [str(one) for one in known.tolist()]
        if len({name.casefold() for name in names}) < len(names):
            names = [f"class {index}" for index in range(len(names))]
        self._fit(table, np.array(names)[np.searchsorted(known, labels)], classes=names)
        self.classes_ = known
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted class of each record, (N,)."""
        outputs = self._outputs(X)
        chosen = self._trained.chosen(outputs)
        found: np.ndarray = self.classes_[chosen]
        return found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # noise, on the few records of a check
        return tags

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class for each record, (N, K), in the order of `classes_`.

        Where two are equal after rounding, that of the predicted class is the next larger number. With costs or class
        weights another class than the most probable one may be predicted.
        """
        outputs = self._outputs(X)
        with _hiding_cells():
            shares = self._trained.probabilities(outputs)
        chosen = self._trained.chosen(outputs)
        equal = shares[np.arange(len(shares)), chosen] >= shares.max(axis=1) - 1e-12
        tied = np.flatnonzero((shares.argmax(axis=1) != chosen) & equal)
        shares[tied, chosen[tied]] = np.nextafter(shares[tied].max(axis=1), 1.0)
        return shares


class DPRegressor(RegressorMixin, _Private):
    """A private regressor; arguments and attributes are those of `DPClassifier`.

    `target_bounds`: public [low, high] of the target, instead of classes. Predictions lie within them.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        delta: float | None = None,
        *,
        bounds: Mapping[str, Any] | Sequence[float] | None = None,
        categories: Mapping[str, Sequence[Any]] | None = None,
        target_bounds: Sequence[float] | None = None,
        missing: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
        drop: Sequence[str] | None = None,
        overrides: Mapping[str, Any] | None = None,
        random_state: Any = None,
        out: str | Path | None = None,
    ) -> None:
        self._keep(locals())

    def fit(self, X: Any, y: Any) -> Self:
        """Train on records X (N, D), a data frame or an array of numbers, and their targets y (N,)."""
        _refuse_search()
        table, labels = self._table(X, y, reset=True)
        try:
            targets = labels.astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError("Unknown label type: y holds something that is not a number") from None
        if not np.isfinite(targets).all():
            raise ValueError("y contains NaN or infinity; leave those records out")
        return self._fit(table, targets, target_bounds=self.target_bounds)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # noise, on the few records of a check
        return tags

    def predict(self, X: Any) -> np.ndarray:
        """Return the predicted target of each record, (N,)."""
        outputs = self._outputs(X)
        return self._trained.decided(outputs)


def _numbered(rows: np.ndarray) -> TableRows:
    return TableRows.of({f"x{number}": column for number, column in enumerate(rows.T)})


@contextlib.contextmanager
def _hiding_cells() -> Iterator[None]:
    """Turn errors of dpsgd into ValueError, which users of scikit-learn expect; hide messages that may show a cell."""
    try:
        yield
    except DpsgdError as error:
        raise ValueError(str(error)) from None
    except (ValueError, TypeError) as error:
        text = str(error)
        if "Reshape your data" in text:
            raise ValueError("Expected 2D array, got another shape. Reshape your data to (records, columns)") from None
        if _SAFE.search(text) and "could not convert" not in text:
            raise type(error)(text) from None
        raise type(error)(
            "X or y cannot be read as numbers (argument must be a string or a number); give a data frame with"
            " categories for columns of text"
        ) from None


def _callers() -> Iterator[FrameType]:
    """Yield the frames of the functions that called a `fit`, from the inner to the outer."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]


def _is_in(frame: FrameType, module: str) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(module)


def _is_fold(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_fit_and_score" and _is_in(frame, "sklearn.")


def _refuse_search() -> None:
    """Raise ValueError if the fit is one of a search over parameters by scikit-learn, or the refit of its best."""
    for frame in _callers():
        searched = _is_fold(frame) and frame.f_locals.get("parameters") is not None
        if searched or _is_in(frame, "sklearn.model_selection._search"):
            raise ValueError(
                "a search over parameters would choose by scores of the records that nothing protects, and each of its"
                " fits has a price; `dpsgd sweep` tunes at one price (`tuning` in a sweep). Or choose parameters on"
                " public data, and fit once"
            )


def _fitted_steps() -> list[str]:
    """Return the steps before the estimator in the pipelines that fit it, without those that are data-independent."""
    found: list[str] = []
    for frame in _callers():
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name != "fit" or not isinstance(owner, Pipeline):
            continue
        for name, step in owner.steps[:-1]:
            if step is not None and step != "passthrough" and get_tags(step).requires_fit:
                found.append(f"{type(step).__name__} (step {name!r} of a pipeline)")
    return list(dict.fromkeys(found))


def _say_prices(privacy: Row) -> None:
    """Warn about the price of a fit that is one of several on the same records."""
    price = f"costs epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:g} by itself"
    told = None
    for frame in _callers():
        owner = frame.f_locals.get("self")
        if _is_fold(frame):
            told = (
                f"this fold {price}, for the records that it was given. Nothing is stated of all folds together:"
                " removing one record moves others between scikit-learn's folds, and scores have no noise."
                " `dpsgd train` with `folds` trains and prices them all"
            )
        elif told is None and isinstance(owner, BaseEstimator) and not isinstance(owner, Pipeline | _Private):
            told = (
                f"this fit {price}, and {type(owner).__name__}, which asked for it, may fit to the same records several"
                " times: add up all prices, and those of what it computes itself"
            )
    if told is not None:
        warnings.warn(told, PrivacyCostWarning, stacklevel=4)
