"""Calibration of predicted numbers: what one record moves, what is charged, and what the correction does."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import dpsgd_cli as dpsgd
from dpsgd_cli.accounting.ledger import read_entries
from dpsgd_cli.accounting.mechanism import GaussianSum
from dpsgd_cli.calibration import run
from dpsgd_cli.calibration.price import sensitivity
from dpsgd_cli.calibration.run import Units, corrected, exact_sums
from dpsgd_cli.methods.dp_gd import DpGd
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training.plans import plan_and_outline, resolve_auto
from dpsgd_cli.training.start import Member, Trials, start
from tests.conftest import Train, WriteRecipe

UNITS = Units(centre=-0.25, scale=0.5, bound=0.5)
VISITS: dict[str, Any] = {
    "data": {
        "path": "visits.csv", "target": "visits", "task": "regression", "target_bounds": [0, 40],
        "bounds": {"age": [0, 10]}, "preprocess": [{"bin": {}}], "split": {"test": 500}, "evaluation": "public",
    },
    "model": {"kind": "convex", "loss": "squared"}, "method": {"kind": "dp-gd"}, "epochs": None,
    "privacy": {"budget": {"epsilon": 4, "delta": 1e-5}, "noise_source": "seeded"}, "seed": 3,
}  # fmt: skip


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """Write 4,000 numbers of visits, exponential with mean 2 + age / 2, so that the mean is far above the median."""
    rng = np.random.default_rng(0)
    age = rng.uniform(0, 10, 4_000)
    table = pd.DataFrame({"age": age, "visits": np.minimum(rng.exponential(2 + age / 2), 40)})
    table.to_csv(tmp_path / "visits.csv", index=False)
    return tmp_path


def parts() -> np.ndarray:
    """Return what single records add to the release, (n, 4): extremes, and a grid between them."""
    numbers = [
        -math.inf,
        -1e30,
        -1.0,
        -0.75,
        -0.25,
        0.0,
        0.25,
        1.0,
        2.0,
        1e30,
        math.inf,
        math.nan,
        *np.linspace(-2, 2, 41),
    ]
    pairs = product(numbers, numbers)
    return np.array([exact_sums(np.array([p]), np.array([y]), UNITS) for p, y in pairs])


def test_a_record_adds_at_most_the_root_of_five_halves_and_extremes_reach_it() -> None:
    lengths = np.linalg.norm(parts(), axis=1)
    assert lengths.max() <= 1.5811389 and lengths.max() == pytest.approx(math.sqrt(2.5))
    assert sensitivity("add-remove") == sensitivity("zero-out") == pytest.approx(math.sqrt(2.5))
    assert (exact_sums(np.array([np.nan, 0.0, np.inf]), np.array([0.0, np.nan, 0.0]), UNITS) == 0).all()


def test_a_replaced_record_moves_the_release_by_at_most_twice_that() -> None:
    found = np.unique(parts().round(9), axis=0)
    apart = np.linalg.norm(found[:, None] - found[None], axis=2).max()
    assert math.sqrt(8) <= apart <= 3.1622777 and sensitivity("replace-one") == pytest.approx(2 * math.sqrt(2.5))


def test_the_sums_are_those_that_the_proof_names() -> None:
    """Prediction 0 is .5 scales above the centre; the residual .2 is .4 of its bound. The second is clamped in both."""
    first, second = [0.4, 0.4 * 0.5, 0.5 * 0.5, 0.5 * 0.25], [-1, -1, 0.5, 0.5]
    found = exact_sums(np.array([0.0, 5.0]), np.array([0.2, -0.9]), UNITS)
    assert found == pytest.approx(np.add(first, second))


def test_targets_beyond_their_bounds_count_as_the_bounds_as_in_training() -> None:
    """Prediction .9 is .1 below the bound 1, which is .2 of a residual's; 5 and 1e30 are no further away than 1."""
    for prediction, target in ((0.9, 5.0), (0.9, 1e30), (-0.9, -5.0)):
        (residual, *_) = exact_sums(np.array([prediction]), np.array([target]), UNITS)
        assert residual == pytest.approx(math.copysign(0.2, target))


def test_without_noise_the_correction_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    told = rng.uniform(-0.6, 0.2, 500)
    truth = 0.1 + 0.8 * told + rng.normal(0, 0.05, 500)
    slope, constant = np.polyfit(told, truth, 1)
    made = corrected(exact_sums(told, truth, UNITS), 1e-9, 500, UNITS)
    assert (made.scale, made.shift) == pytest.approx((slope, constant))


def test_noise_alone_corrects_nothing_and_no_noise_makes_a_prediction_absurd() -> None:
    assert corrected(np.array([1.0, -1.0, 0.2, 0.5]), 2.0, 500, UNITS) == run.Correction(1.0, 0.0)
    for released in product([-1e9, 0.0, 1e9], repeat=4):
        made = corrected(np.array(released), 2.0, 500, UNITS)
        assert 0.5 <= made.scale <= 1.5 and abs(made.shift) <= 1 + 0.5 * 2


def begun(write_recipe: WriteRecipe, **changes: Any) -> tuple[Trials, DpGd]:
    loaded = resolve_auto(load_recipe(str(write_recipe(**VISITS | {"repeats": 1} | changes))))
    at = start([Member(loaded, plan_and_outline(loaded)[0])])
    assert isinstance(at.method, DpGd) and at.method.calibrating is not None
    return at, at.method


def test_squared_losses_predict_means_by_default(visits: Path, write_recipe: WriteRecipe, train: Train) -> None:
    """Without the correction the mean prediction is far below the mean; the release has its share of the budget."""
    path = write_recipe(**VISITS | {"epochs": 100}, repeats=1)
    results = [train(path, *given, save_models=True) for given in ([], ["method.calibration=null", "name=plain"])]
    table = pd.read_csv(visits / "visits.csv")
    ours, plain = (table["visits"].mean() - np.mean(dpsgd.load(one).predict(table)) for one in results)
    assert abs(ours) < 0.5 < 1 < plain  # of a mean of 4.3; what is left is in residuals beyond their bound of 10
    made = [entry.release for entry in read_entries(results[0] / "ledger.jsonl")[0]]
    spent = dict.fromkeys(("marginals", "calibration", "gradient"), 0.0)
    for one in made:
        assert isinstance(one.mechanism, GaussianSum)
        spent[one.mechanism.label] += one.count / one.mechanism.noise_multiplier**2
        if one.mechanism.label == "calibration":
            assert one.count == 1 and one.mechanism.sensitivity == pytest.approx(math.sqrt(2.5))
    mu = math.sqrt(sum(spent.values()))
    assert spent["calibration"] == pytest.approx(0.05 * 0.95 * mu**2, rel=1e-3)
    delta = stats.norm.cdf(mu / 2 - 4 / mu) - math.exp(4) * stats.norm.cdf(-mu / 2 - 4 / mu)
    assert delta == pytest.approx(1e-5, rel=1e-3)


def test_logarithms_are_not_calibrated_by_default(visits: Path, write_recipe: WriteRecipe) -> None:
    bounds = {"target_bounds": [0.01, 40], "target_transform": "log"}
    for data, chosen in ((VISITS["data"], True), (VISITS["data"] | bounds, False)):
        found = resolve_auto(load_recipe(str(write_recipe(**VISITS | {"repeats": 1, "data": data}))))
        assert (found.recipe.method.calibrated is not None) == chosen


def test_noise_is_added_and_only_training_records_are_summed(
    visits: Path, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two folds sums its own rows. The correction follows what noise made of the sums, and not the sums."""
    released, rows, noised = np.array([600.0, 40.0, 9.0, 20.0]), [], []
    data = {key: value for key, value in VISITS["data"].items() if key != "split"}
    at, method = begun(write_recipe, data=data, folds=2, epochs=3)

    def drawn(*given: Any) -> np.ndarray:
        noised.append(given)
        return released

    def sums(p: np.ndarray, y: np.ndarray, units: Units) -> np.ndarray:
        rows.append(len(p))
        return exact_sums(p, y, units)

    monkeypatch.setattr(run, "gaussian", drawn)
    monkeypatch.setattr(run, "exact_sums", sums)
    for epoch in range(3):
        assert not noised, "only the last step's weights are corrected"
        method.run_epoch(epoch)
    held, calibrating = at.context.table.held_out, method.calibrating
    assert held is not None and calibrating is not None
    for trial, given in enumerate(noised):
        assert sum(rows[trial::2]) == int((~held[:, trial]).sum()) < 2_200
        assert given[0] is at.context.streams[trial] and given[1:3] == ("calibration", 0)
        assert given[4] == calibrating.mechanisms[trial] and given[5] == at.context.table.summed
    assert len(noised) == 2 and len(at.context.ledgers[0].entries) == len(at.context.ledgers[1].entries)
    bounds = [min(1.0, 8 * at.context.recipes[0].required_privacy.clipping.norm_bound(None) / math.sqrt(2))] * 2
    noise = calibrating.mechanisms[0].noise_multiplier * math.sqrt(2.5)
    expected = [600 / calibrating.records[trial] * (1 - 2 * (noise / 600) ** 2) * bounds[trial] for trial in range(2)]
    assert calibrating.corrections[:, 0].tolist() == [1.0, 1.0]  # 40 is too little spread for a slope
    assert calibrating.corrections[:, 1].tolist() == pytest.approx(expected)


def test_the_correction_survives_a_stop(visits: Path, write_recipe: WriteRecipe) -> None:
    (_, first), (_, again) = (begun(write_recipe, epochs=4) for _ in range(2))
    for epoch in range(4):
        first.run_epoch(epoch)
    kept, output = first.state(), first.output.clone()
    again.run_epoch(0)
    again.load_state(kept)
    assert torch.equal(again.output, output) and again.calibrating is not None and first.calibrating is not None
    assert again.calibrating.corrections.tolist() != [[1.0, 0.0]]
    first.calibrating.corrections.zero_()
    assert (kept["calibration"] != 0).any()  # a snapshot of its own


def test_a_recipe_that_asks_for_it_gets_a_bias(visits: Path, write_recipe: WriteRecipe) -> None:
    """Adam has no automatic rate, and there a model of bins has no bias unless something needs it."""
    method = {"kind": "dp-gd", "optimizer": {"kind": "adam"}, "calibration": {"share": 0.1}}
    _, trained = begun(write_recipe, method=method, epochs=2)
    assert trained.calibrating is not None and trained.context.pack.size == trained.calibrating.bias + 1


def test_a_training_that_is_stopped_for_good_is_calibrated_once(
    visits: Path, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was charged for one release, and whoever asks again gets no second one with other noise."""
    _, method = begun(write_recipe, epochs=4, seed=None, privacy={"budget": {"epsilon": 4, "delta": 1e-5}})
    released: list[str] = []

    def drawn(*given: Any) -> np.ndarray:
        released.append(given[1])
        return np.array([600.0, 0, 0, 0])

    monkeypatch.setattr(run, "gaussian", drawn)
    for epoch in range(2):
        method.run_epoch(epoch)
    plain = method.output.clone()
    assert released == []
    method.after_training()
    method.after_training()
    assert released == ["calibration"] and not torch.equal(method.output, plain)
