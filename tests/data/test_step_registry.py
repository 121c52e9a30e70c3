"""The registries of preprocessing steps and extractors: what each states that it is fitted on, and bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsgd_cli.data.dataset import Column, FittedOn, Layout, Length, Step, length_of
from dpsgd_cli.data.features import EXTRACTORS
from dpsgd_cli.data.on_disk import Transform
from dpsgd_cli.data.preparation import pipeline_of
from dpsgd_cli.data.preprocess import STEPS, Pipeline, norm_bound
from dpsgd_cli.data.settings import Data
from dpsgd_cli.data.step_settings import PREPROCESS, Features, PreprocessStep
from dpsgd_cli.errors import DataError

COLUMNS = (
    Column("age", (-20.0, 90.0)),
    Column("share", (0.0, 0.5)),
    Column("colour", values=("red", "green", "blue")),
    Column("there", indicator=True, category="there"),
)
TABLE, NUMBERS = Layout((4,), COLUMNS), Layout((2,), COLUMNS[:2])
IMAGES = Layout((1, 8, 8), bounds=(0.0, 255.0))
SAMPLES: dict[str, list[tuple[Layout, dict[str, Any]]]] = {
    "one-hot": [(TABLE, {}), (TABLE, {"columns": ["colour"]})],
    "bin": [(Layout((3,), COLUMNS[:3]), given) for given in ({}, {"bins": 4}, {"pairs": 3})],
    "scale": [
        *((TABLE, {"by": by}) for by in ("bounds", "standard", "min-max")),
        (IMAGES, {"by": "bounds", "to": [-3, 2]}),
    ],
    "unit-norm": [(NUMBERS, {}), (NUMBERS, {"at_most": True}), (IMAGES, {})],
    "bias": [(TABLE, {"value": -7.0}), (IMAGES, {})],
    "pca": [
        *((NUMBERS, {"components": 2, "public": True, "whiten": whiten}) for whiten in (False, True)),
        (NUMBERS, {"components": 1, "noise_multiplier": 1.0}),
        (NUMBERS, {"components": 1, "of": "public"}),
    ],
}
"""Each kind of step on layouts that it takes."""
CASES = [(kind, layout, given) for kind, samples in SAMPLES.items() for layout, given in samples]


def step_of(kind: str, given: dict[str, Any]) -> Step:
    return STEPS[kind](PreprocessStep.model_validate({kind: given}).step, "add-remove")


def rows_of(layout: Layout, seed: int, count: int = 12) -> np.ndarray:
    """Rows within public bounds, half of the values at one end."""
    random = np.random.default_rng(seed)
    if layout.columns is None:
        low, high = layout.bounds or (0.0, 1.0)
        drawn = random.uniform(low, high, (count, *layout.shape))
        return np.where(random.random(drawn.shape) < 0.5, high, drawn).astype(np.float32)
    rows = np.zeros((count, len(layout.columns)), np.float32)
    for at, column in enumerate(layout.columns):
        if column.values is not None:
            rows[:, at] = random.integers(len(column.values), size=count)
        else:
            low, high = column.bounds or (0.0, 1.0)
            ends = random.choice([low, high], size=count)
            rows[:, at] = np.where(random.random(count) < 0.5, ends, random.uniform(low, high, count))
    if any(column.indicator for column in layout.columns):
        rows[:, -1] = random.integers(2, size=count)
    return rows


def transform_of(step: Step, layout: Layout, rows: np.ndarray) -> Transform:
    return step.transform(layout, step.kept(rows, layout))


def test_every_kind_of_step_is_here_and_in_the_schema() -> None:
    assert set(STEPS) == set(PREPROCESS) == set(SAMPLES)
    assert {*EXTRACTORS} == {one.model_fields["kind"].default for one in get_args(get_args(Features)[0])}


@pytest.mark.parametrize(("kind", "layout", "given"), CASES)
def test_a_step_reads_no_more_than_it_states(kind: str, layout: Layout, given: dict[str, Any]) -> None:
    """What is fitted on nothing keeps nothing, and makes of each record the same whoever is beside it; what one
    training record changes is covered."""
    step, rows = step_of(kind, given), rows_of(layout, 0)
    assert step.fitted_on in get_args(FittedOn)
    if step.fitted_on == "nothing":
        assert step.kept(rows, layout) is None
        transform = transform_of(step, layout, rows)
        together = transform(rows.copy())
        apart = np.concatenate([transform(rows[at : at + 1].copy()) for at in range(len(rows))])
        assert np.allclose(together, apart, atol=1e-5)
    elif step.release is None:
        other = rows.copy()
        other[0] = 2 * rows.max(axis=0) + 1
        one, two = step.kept(rows, layout), step.kept(other, layout)
        assert one is not None and two is not None
        assert not np.array_equal(one, two)
    assert step.covered


@pytest.mark.parametrize(("kind", "layout", "given"), CASES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_no_row_is_longer_than_the_stated_bound(kind: str, layout: Layout, given: dict[str, Any], seed: int) -> None:
    step, rows = step_of(kind, given), rows_of(layout, seed)
    if step.release is not None:
        return
    made = transform_of(step, layout, rows)(rows.copy())
    bound = norm_bound([step], [layout, step.plan(layout)])
    if bound is not None:
        assert float(np.linalg.norm(made.reshape(len(made), -1).astype(np.float64), axis=1).max()) <= bound * (1 + 1e-5)


@pytest.mark.parametrize(("kind", "bound"), [("unit-norm", 1.0), ("bin", 1.0), ("bias", None), ("scale", 1.0)])
def test_bounds_by_hand(kind: str, bound: float | None) -> None:
    """Two numeric columns: cosines and unit rows are of norm 1, [0, 1]^2 of root 2, and bounds of their ends' root."""
    step = step_of(kind, {})
    found = norm_bound([step], [NUMBERS, step.plan(NUMBERS)])
    ends = (90.0**2 + 0.5**2 + 1.0) ** 0.5
    assert found == pytest.approx({"scale": 2**0.5, "bias": ends}.get(kind, bound))


def test_whitened_rows_have_no_bound() -> None:
    for kind, layout, chosen in CASES:
        if chosen.get("whiten"):
            step = step_of(kind, chosen)
            assert length_of(step.bounded(Length(1.0, 0.0), layout), step.plan(layout)) is None


class Plain(Step, stated=False):
    """A step that keeps the mean of what it is fitted on."""

    def plan(self, layout: Layout) -> Layout:
        return layout

    def bounded(self, length: Length, before: Layout) -> Length:
        return length

    def kept(self, rows: np.ndarray, layout: Layout) -> np.ndarray:
        return rows.mean(axis=0)

    def transform(self, layout: Layout, kept: np.ndarray | None) -> Transform:
        return lambda x: x if kept is None else x - kept


def test_a_step_that_does_not_state_what_it_is_fitted_on_cannot_be_made_even_where_it_derives_from_one() -> None:
    with pytest.raises(TypeError, match="must state fitted_on"):
        type("New", (Plain,), {})
    with pytest.raises(TypeError, match="must state fitted_on"):
        type("New", (STEPS["unit-norm"],), {})  # type: ignore[arg-type]


def test_a_step_without_a_bound_on_rows_cannot_be_made() -> None:
    body = {name: vars(Plain)[name] for name in ("plan", "kept", "transform")}
    with pytest.raises(TypeError, match="bounded"):
        type("New", (Step,), {**body, "fitted_on": "nothing"})(None, "add-remove")


def through(fitted_on: FittedOn) -> np.ndarray:
    """Rows after a step of that statement, which keeps whatever it is given."""
    made = type("New", (Plain,), {"fitted_on": fitted_on})
    rows = rows_of(NUMBERS, 3)
    step: Step = made(None, "add-remove")
    (found,), _ = Pipeline([step], [NUMBERS, NUMBERS], {}, lambda *_: rows).run([rows.copy()], 1)
    return np.asarray(found) - rows


def test_a_step_that_states_nothing_is_given_no_record() -> None:
    assert not through("nothing").any()


def test_a_step_on_training_rows_that_nothing_covers_is_refused() -> None:
    with pytest.raises(TypeError, match="which nothing covers"):
        through("training")


@pytest.mark.parametrize(("kind", "layout", "given"), CASES)
def test_a_model_in_use_never_fits_on_new_records_what_was_fitted_in_training(
    kind: str, layout: Layout, given: dict[str, Any]
) -> None:
    """Only what is fitted on no record may be missing from what training kept."""
    data = Data.model_validate({"path": "t.csv", "target": "y", "preprocess": [{kind: given}]})
    if step_of(kind, given).fitted_on == "nothing":
        assert pipeline_of(data, Path(), NUMBERS if layout == TABLE and kind != "one-hot" else layout, {}).steps
        return
    with pytest.raises(DataError, match="lacks what step 0"):
        pipeline_of(data, Path(), layout, {})


@pytest.mark.parametrize("kind", EXTRACTORS)
def test_extractors_act_on_each_record_alone(kind: str) -> None:
    """What they are made of is public (`tests/data/test_features.py`); of records they are fitted on none."""
    assert EXTRACTORS[kind].fitted_on == "nothing"  # type: ignore[attr-defined]
