"""scikit-learn's estimators: its own checks, pipelines, folds, and what cannot be private is refused or named."""

from __future__ import annotations

import pickle
import traceback
import warnings
from datetime import date
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.feature_selection import SelectKBest
from sklearn.model_selection import GridSearchCV, RandomizedSearchCV, cross_val_score, validation_curve
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, Normalizer, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import dpsgd_cli as dpsgd
from dpsgd_cli.accounting.ledger import read_ledgers
from dpsgd_cli.sklearn import DPClassifier, DPRegressor, PrivacyCostWarning
from tests.test_records import MARK, people

FAST = {"epochs": 3, "runtime.device": "cpu"}
BUDGET: dict[str, Any] = {"epsilon": 20, "delta": 1e-3, "overrides": FAST}
CLASSIFIER = DPClassifier(bounds=(-300, 300), classes="public", **BUDGET)
REGRESSOR = DPRegressor(bounds=(-300, 300), target_bounds=(-300, 300), **BUDGET)
TABLE = DPClassifier(bounds={"age": (0, 100)}, categories={"job": ["nurse", "smith"]}, classes=["no", "yes"], **BUDGET)


def blobs(rows: int = 80) -> tuple[np.ndarray, np.ndarray]:
    y = np.arange(rows) % 2
    return np.random.default_rng(0).normal(size=(rows, 3)) + 3.0 * y[:, None], y


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_the_checks_of_scikit_learn_pass(estimator: Any, seed: int | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = clone(estimator).set_params(random_state=seed)
        told = check_estimator(own, on_skip=None)
    passed = [one["check_name"] for one in told if one["status"] == "passed"]
    assert len(passed) > 45 and {one["status"] for one in told} <= {"passed", "skipped"}
    skipped = {one["check_name"] for one in told if one["status"] == "skipped"}
    assert skipped <= {"check_array_api_input", "check_pipeline_consistency"}


def test_a_fit_is_the_training_of_the_same_table(tmp_path: Any) -> None:
    frame = people()
    x, y = frame.drop(columns="churn"), frame["churn"]
    model = clone(TABLE).set_params(random_state=5, out=tmp_path / "kept").fit(x, y)
    directory = next((tmp_path / "kept").iterdir())
    result = dpsgd.load(directory)
    assert model.privacy_ == result.privacy and model.privacy_["epsilon"] <= 20
    assert result.document["provenance"]["seed"] is not None
    assert model.classes_.tolist() == ["no", "yes"] and model.feature_names_in_.tolist() == ["age", "job", "member"]
    assert model.predict(x).tolist() == result.predict(x).tolist()
    assert np.allclose(model.predict_proba(x), result.probabilities(x), atol=1e-6)
    assert model.score(x, y) == (model.predict(x) == y).mean()
    assert len(model.ledger_) == sum(map(len, read_ledgers(directory / "ledger.jsonl").values()))
    assert model.report_.startswith("# DPClassifier") and "add-remove" in model.report_
    again = pickle.loads(pickle.dumps(model))
    assert again.predict_proba(x).tolist() == model.predict_proba(x).tolist()
    assert again.report_ == model.report_


def test_no_record_is_cut_and_nothing_is_left_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    model = clone(CLASSIFIER).fit(*blobs())
    assert "The number of training records is public: 80." in model.privacy_["declarations"]
    assert model.privacy_["noise_source"] == "secure"
    assert list(tmp_path.iterdir()) == []


def test_classes_are_those_that_were_given() -> None:
    x, y = blobs()
    for given, labels in (([3, -1], [-1, 3]), ([True, False], [False, True]), (["b", "A", "a"], ["A", "a", "b"])):
        own = np.array(labels)[y]
        model = clone(CLASSIFIER).set_params(classes=given).fit(x, own)
        assert model.classes_.tolist() == labels and set(model.predict(x)) <= set(labels)
        assert model.predict_proba(x).shape == (len(x), len(labels))
    with pytest.raises(ValueError, match=r"y holds a label in row 1, which is not among the classes \[0, 2\]"):
        clone(CLASSIFIER).set_params(classes=[0, 2]).fit(x, y)
    for wrong, said in ((None, 'say classes="public"'), ("all", "must be a list"), ([0], "more than one class")):
        with pytest.raises(ValueError, match=said):
            clone(CLASSIFIER).set_params(classes=wrong).fit(x, np.zeros(80, int) if wrong == [0] else y)


def test_columns_are_dated_hashed_and_left_out_as_in_train(tmp_path: Any) -> None:
    """Refusals name arguments, and no file: there is none."""
    frame = people().assign(born=[date(2000, 1, 1 + row % 28) for row in range(120)], code="x", note="y")
    x, y = frame.drop(columns="churn"), frame["churn"]
    dated: dict[str, Any] = {"age": (0, 100), "born": (date(1999, 1, 1), date(2001, 12, 31))}
    how: dict[str, Any] = {"bounds": dated, "columns": {"code": {"hash": 8}}, "drop": ["note"]}
    model = clone(TABLE).set_params(**how, random_state=5, out=tmp_path).fit(x, y)
    result = dpsgd.load(next(tmp_path.iterdir()))
    assert {one.name for one in result.trained.layout.columns or ()} >= {"age", "job", "member"}
    assert {one.source for one in result.trained.layout.columns or ()} == {"age", "job", "member", "born", "code"}
    assert model.predict(x).tolist() == result.predict(x).tolist()
    x.loc[3, "age"] = np.nan
    for changed, said in (({}, "missing"), ({"drop": None}, "categories: needed for 'note'")):
        with pytest.raises(ValueError, match=said) as caught:
            clone(TABLE).set_params(**how | changed).fit(x, y)
        assert "parquet" not in str(caught.value) and "data." not in str(caught.value)


def test_predictions_lie_within_the_bounds_of_the_target() -> None:
    x, y = blobs()
    model = clone(REGRESSOR).set_params(target_bounds=(0, 1), overrides=FAST | {"epochs": 50}).fit(x, y)
    told = model.predict(x * 100)
    assert told.min() >= 0 and told.max() <= 1


def test_what_privacy_needs_has_no_default() -> None:
    x, y = blobs()
    for left_out in ("epsilon", "delta", "bounds"):
        with pytest.raises(ValueError, match=r"has no default|bounds: needed for 'x0', 'x1'"):
            clone(CLASSIFIER).set_params(**{left_out: None}).fit(x, y)
    with pytest.raises(ValueError, match="target_bounds="):
        clone(REGRESSOR).set_params(target_bounds=None).fit(x, y)
    with pytest.raises(NotFittedError):
        _ = CLASSIFIER.report_


def test_steps_of_a_pipeline_that_look_at_records_are_named() -> None:
    x, y = blobs()
    steps = [StandardScaler(), FunctionTransformer(), Normalizer(), SelectKBest(k=2), clone(CLASSIFIER)]
    model = make_pipeline(*steps).fit(x, y)
    assert model[-1].privacy_["uncovered_steps"] == [
        f"{name} (step {name.lower()!r} of a pipeline) was fitted to the records, without noise, before they were given"
        for name in ("StandardScaler", "SelectKBest")
    ]
    assert "NOT covered: StandardScaler" in model[-1].report_
    assert set(model.predict(x)) <= {0, 1}
    assert make_pipeline(FunctionTransformer(), clone(CLASSIFIER)).fit(x, y)[-1].privacy_["uncovered_steps"] == []
    outer = make_pipeline(StandardScaler(), make_pipeline(Normalizer(), clone(CLASSIFIER))).fit(x, y)
    assert len(outer[-1][-1].privacy_["uncovered_steps"]) == 1


def test_the_price_of_each_fold_is_said() -> None:
    x, y = blobs()
    with pytest.warns(
        PrivacyCostWarning, match=r"this fold costs epsilon .* at delta 0\.001 by itself.*Nothing is stated of all"
    ) as told:
        scores = cross_val_score(make_pipeline(Normalizer(), clone(CLASSIFIER)), x, y, cv=3)
    assert len(scores) == len([one for one in told if one.category is PrivacyCostWarning]) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error", PrivacyCostWarning)
        clone(CLASSIFIER).fit(x, y)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_over_parameters_is_refused(jobs: int) -> None:
    """Guarantee: no fit of a search trains, in this process or in another."""
    x, y = blobs()
    plain, within = clone(CLASSIFIER), make_pipeline(StandardScaler(), clone(CLASSIFIER))
    searches = [
        GridSearchCV(plain, {"epsilon": [1, 2]}, cv=2, n_jobs=jobs),
        RandomizedSearchCV(within, {"dpclassifier__epsilon": [1, 2]}, n_iter=2, cv=2, n_jobs=jobs),
        GridSearchCV(within, {"standardscaler__with_mean": [True, False]}, cv=2, n_jobs=jobs),
    ]
    for search in searches:
        with pytest.raises(ValueError, match="would choose by scores") as caught:
            search.fit(x, y)
        assert not hasattr(search, "best_estimator_") and caught.value is not None
    if jobs == 1:
        with pytest.raises(ValueError, match="would choose by scores"):
            validation_curve(plain, x, y, param_name="epsilon", param_range=[1, 2], cv=2, error_score="raise")


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (np.array([[MARK, "1"]] * 80), None),
        (np.array([[MARK, 1.0]] * 80, dtype=object), None),
        ([[MARK]] * 80, None),
        ([MARK] * 80, None),
        (None, [MARK] + ["1"] * 79),
        (None, np.array([MARK, *range(79)], dtype=object)),
        (pd.DataFrame({"x0": [MARK] * 80}), None),
        (pd.DataFrame({"x0": [[MARK]] * 80}), None),
    ],
)
@pytest.mark.parametrize("estimator", [CLASSIFIER, REGRESSOR], ids=["classifier", "regressor"])
def test_no_traceback_holds_a_cell(estimator: Any, x: Any, y: Any) -> None:
    features, labels = blobs()
    own = clone(estimator).set_params(classes=[0, 1]) if estimator is CLASSIFIER else clone(estimator)
    with pytest.raises((ValueError, TypeError)) as caught:
        own.fit(features if x is None else x, labels if y is None else y)
    assert MARK not in "".join(traceback.format_exception(caught.value))
    fitted = own.fit(features, labels)
    if x is not None:
        with pytest.raises((ValueError, TypeError)) as caught:
            fitted.predict(x)
        assert MARK not in "".join(traceback.format_exception(caught.value))
