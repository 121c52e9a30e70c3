"""Noise and step lengths by epoch: the papers' formulas, and no noise too small to protect."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from scipy.optimize import minimize

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.errors import PrivacyError, RecipeError
from dpsgd_cli.methods.dp_sgd.optimizers import make_average, make_update
from dpsgd_cli.methods.dp_sgd.settings import SgdSettings, TailIterates
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.schedules.settings import LEAST, Schedule

ADAPTER: TypeAdapter[Any] = TypeAdapter(Schedule)


def schedule(**settings: Any) -> Any:
    return ADAPTER.validate_python(settings)


# Yu et al. 2019, section IV-A2, written out by hand for epochs 0, 1, 9, 10, 100 and 150.
EPOCHS = (0, 1, 9, 10, 100, 150)
CASES: list[tuple[dict[str, Any], list[float]]] = [
    ({"kind": "uniform", "initial": 8}, [8] * 6),
    ({"kind": "auto", "initial": 8}, [8] * 6),
    ({"kind": "time", "initial": 10, "decay": 0.05}, [10, 10 / 1.05, 10 / 1.45, 10 / 1.5, 10 / 6, 10 / 8.5]),
    (
        {"kind": "exponential", "initial": 10, "decay": 0.01},
        [10, 9.900498337491681, 9.139311852712282, 9.048374180359595, 3.6787944117144233, 2.231301601484298],
    ),
    ({"kind": "step", "initial": 10, "decay": 0.6, "period": 10}, [10, 10, 10, 6, 10 * 0.6**10, 10 * 0.6**15]),
    (
        {"kind": "polynomial", "initial": 10, "final": 2, "decay": 3, "period": 100},
        [10, 2 + 8 * 0.99**3, 2 + 8 * 0.91**3, 2 + 8 * 0.9**3, 2, 2],
    ),
    ({"kind": "time", "initial": 10, "decay": 0.05, "period": 10}, [10, 10, 10, 10 / 1.05, 10 / 1.5, 10 / 1.75]),
    (
        {"kind": "exponential", "initial": 10, "decay": 0.1, "period": 10},
        [10, 10, 10, 9.048374180359595, 3.6787944117144233, 2.231301601484298],
    ),
    (
        {"kind": "polynomial", "initial": 10, "final": 2, "decay": 1, "period": 100, "every": 4},
        [10, 10, 10 - 8 * 0.08, 10 - 8 * 0.08, 2, 2],
    ),
    (
        {
            "kind": "piecewise",
            "parts": [
                {"epochs": 9, "schedule": {"kind": "uniform", "initial": 12}},
                {"epochs": 1, "schedule": {"kind": "time", "initial": 5, "decay": 1}},
                {"schedule": {"kind": "step", "initial": 8, "decay": 0.5, "period": 90}},
            ],
        },
        [12, 12, 5, 8, 4, 4],
    ),
    ({"kind": "validation", "initial": 9, "decay": 0.5}, [9] * 6),
    (
        {"kind": "list", "multipliers": [*range(1, 152)], "factor": 0.5},
        [0.5, 1, 5, 5.5, 50.5, 75.5],
    ),
    (
        {"kind": "influence", "initial": 10, "weights": {"contraction": math.exp(-0.04)}},
        [10, 9.900498337491681, 9.139311852712282, 9.048374180359595, 3.6787944117144233, 2.231301601484298],
    ),
    ({"kind": "influence", "initial": 6, "weights": [1, 16, *[81] * 8, *[1] * 141]}, [6, 3, 2, 6, 6, 6]),
]


@pytest.mark.parametrize(("settings", "expected"), CASES, ids=lambda case: str(case)[:30])
def test_published_values(settings: dict[str, Any], expected: list[float]) -> None:
    found = [schedule(**settings).noise_multiplier(epoch) for epoch in EPOCHS]
    assert found == pytest.approx(expected, rel=1e-14)


def test_noise_too_small_to_protect_is_refused_with_its_epoch() -> None:
    decaying = schedule(kind="exponential", initial=1, decay=1)
    last = math.floor(-math.log(LEAST))
    assert decaying.noise_multiplier(last) >= LEAST > decaying.noise(last + 1)
    with pytest.raises(PrivacyError, match=rf"exponential has noise multiplier \S+ at epoch {last + 1}"):
        decaying.noise_multiplier(last + 1)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([{"epochs": 3, "schedule": {"kind": "uniform", "initial": 1}}], "leave it out of the last part"),
        ([{"schedule": {"kind": "uniform", "initial": 1}}] * 2, "only the last part lasts to the end"),
    ],
)
def test_only_the_last_part_is_open(parts: list[Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        schedule(kind="piecewise", parts=parts)


def test_free_numbers_are_named_and_set() -> None:
    free = schedule(
        kind="piecewise",
        parts=[
            {"epochs": 3, "schedule": {"kind": "uniform", "initial": 1}},
            {"schedule": {"kind": "time", "initial": "auto", "decay": 1}},
        ],
    )
    assert free.free_numbers() == ["parts.1.initial"]
    assert free.with_number("parts.1.initial", 4.0).noise_multiplier(3) == 4
    assert schedule(kind="step", initial=1, decay="auto", period="auto").free_numbers() == ["decay", "period"]


@pytest.mark.parametrize("settings", [settings for settings, _ in CASES], ids=lambda case: str(case)[:30])
def test_every_epoch_of_a_scaled_schedule_has_scaled_noise(settings: dict[str, Any]) -> None:
    kind = schedule(**settings)
    scaled = kind.scaled(2.5)
    found = [scaled.noise_multiplier(epoch) for epoch in range(12)]
    assert found == pytest.approx([2.5 * kind.noise_multiplier(epoch) for epoch in range(12)], rel=1e-14)


def loaded(folder: Path, kind: str, *overrides: str) -> LoadedRecipe:
    """A recipe of five epochs of shuffled batches, whose schedule is `kind`."""
    file = folder / "recipe.yaml"
    file.write_text(f"""\
name: own
data: {{name: digits}}
model: {{kind: linear}}
method: {{kind: dp-sgd, batching: shuffle, batch_size: 200}}
privacy: {{schedule: {kind}, delta: 1e-5}}
epochs: 5
""")
    return load_recipe(str(file), overrides)


def planned(found: LoadedRecipe) -> list[float]:
    return [*plan_for(found.recipe, Facts(1438)).noise_multipliers]


def test_a_list_is_as_long_as_the_training_or_longer(tmp_path: Path) -> None:
    assert planned(loaded(tmp_path, "{kind: list, multipliers: [9, 8, 7, 6, 5, 4]}")) == [9, 8, 7, 6, 5]
    with pytest.raises(RecipeError, match=r"recipe.yaml:5: .*lists noise for 2 epochs, but epochs is 5"):
        loaded(tmp_path, "{kind: list, multipliers: [9, 8]}")


def test_the_factor_of_a_list_spends_a_budget(tmp_path: Path) -> None:
    """rho = sum 1 / (2 f^2 z^2), so f^2 = (1/2 + 1/8 + 1/8 + 1/8 + 1/8) / rho."""
    noise = planned(
        loaded(tmp_path, "{kind: list, multipliers: [1, 2, 2, 2, 2], factor: auto}", "privacy.budget={rho: 0.25}")
    )
    assert noise == pytest.approx([2, 4, 4, 4, 4], rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_noise_of_the_same_price_has_less_influence(tmp_path: Path, seed: int) -> None:
    """Least sum w sigma^2 at rho = sum 1 / (2 sigma^2), by a search that knows of neither Lagrange nor the formula."""
    weights = np.random.default_rng(seed).lognormal(sigma=1.5, size=5)
    said = f"{{kind: influence, initial: auto, weights: {weights.tolist()}}}"
    ours = np.array(planned(loaded(tmp_path, said, "privacy.budget={rho: 0.25}")))

    def influence(shares: np.ndarray) -> float:
        own = np.exp(shares - np.log(np.exp(shares).sum())) * 0.25
        return float(weights @ (1 / (2 * own)))

    found = minimize(
        influence, np.zeros(5), method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 9999}
    )
    assert weights @ ours**2 == pytest.approx(found.fun, rel=1e-7)


@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.5, 1])
@pytest.mark.parametrize(("epochs", "momentum"), [(1, 0.8), (2, 0.5), (7, 0), (50, 0.8)])
def test_the_weights_of_a_tail_are_what_training_makes_of_one_gradient(
    epochs: int, momentum: float, fraction: float
) -> None:
    """Trial t has a gradient of 1 in step t alone; how far that moves the average, of how far it ever moves weights."""
    values = torch.zeros(epochs, 1, dtype=torch.float64)
    update = make_update(SgdSettings(momentum=momentum), values)
    average = make_average(TailIterates(fraction=fraction), values, [epochs] * epochs)
    assert average is not None
    for step in range(epochs):
        gradient = torch.zeros_like(values)
        gradient[step] = 1
        update.apply(values, gradient, torch.ones_like(values), step)
        average.add(values, step)
    moved = (1 - momentum) * -average.average.flatten()
    noise = schedule(
        kind="influence", initial=3, weights={"epochs": epochs, "momentum": momentum, "fraction": fraction}
    )
    expected = 3 * (moved[0] / moved) ** 0.25
    assert [noise.noise_multiplier(t) for t in range(epochs)] == pytest.approx(expected.tolist(), rel=1e-12)
    assert noise.length == epochs and noise.noise(epochs) == 0


def test_a_list_of_weights_ends_and_a_contraction_shrinks(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="lists noise for 2 epochs, but epochs is 5"):
        loaded(tmp_path, "{kind: influence, initial: 9, weights: [1, 2]}")
    with pytest.raises(RecipeError, match="contraction"):
        loaded(tmp_path, "{kind: influence, initial: 9, weights: {contraction: 1.2}}")
