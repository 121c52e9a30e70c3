"""Last weights alone: exact laws in one dimension, an attack through training, refusals, one charge."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from dpsgd_cli.accounting.ledger import read_ledgers
from dpsgd_cli.accounting.mechanism import LastIterate, last_iterate_mu
from dpsgd_cli.errors import PrivacyError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training.plans import plan_and_outline
from tests.cli.accounting import rows, run
from tests.conftest import Train, WriteRecipe

METHOD: dict[str, Any] = {
    "kind": "dp-gd",
    "released": "last-weights",
    "learning_rate": 1.0,
    "optimizer": {"kind": "sgd", "momentum": 0},
    "averaging": None,
    "preconditioner": None,
}
PRIVACY: dict[str, Any] = {
    "adjacency": "add-remove",
    "clipping": {"kind": "flat", "norm": 0.5},
    "schedule": {"kind": "uniform", "initial": "auto"},
    "budget": {"epsilon": 4, "delta": 1e-3},
}
MODEL: dict[str, Any] = {"kind": "convex", "loss": "logistic", "l2": 0.1}
DATA: dict[str, Any] = {"path": "two.npz", "bounds": [0, 1], "classes": [0, 1]}
RUNTIME: dict[str, Any] = {"dtype": "float64", "evaluate_every": 30}


def law_of_quadratic(contraction: float, steps: int) -> float:
    """mu of w <- c w + shift + N(0, 1) against the same without shift 1: two normals, summed step by step."""
    powers = contraction ** np.arange(steps)
    return float(powers.sum() / math.sqrt((powers**2).sum()))


@pytest.mark.parametrize("contraction", [0.0, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_the_price_is_the_exact_law_of_a_quadratic(contraction: float, steps: int) -> None:
    assert last_iterate_mu(2.0, contraction, steps) == pytest.approx(law_of_quadratic(contraction, steps) / 2, rel=1e-9)


def test_a_hundred_steps_that_contract_by_a_tenth_need_44_percent_of_the_noise() -> None:
    """Issue: .44; every step released costs sqrt(100)."""
    assert last_iterate_mu(1.0, 0.9, 100) / 10 == pytest.approx(0.4358, abs=5e-4)


GIVEN = {"data": DATA, "method": METHOD, "privacy": PRIVACY, "model": MODEL, "runtime": RUNTIME, "epochs": 30}


class Descent:
    """Clipped least squares of one weight on few records, with all laws on a grid."""

    def __init__(self, seed: int, eta: float, steps: int, l2: float = 0.3) -> None:
        random = np.random.default_rng(seed)
        self.x, self.y = random.uniform(-1, 1, 4), random.uniform(-3, 3, 4)
        self.x[-1], self.y[-1] = 1.0, 5.0
        self.eta, self.steps, self.l2, self.clip, self.noise = eta, steps, l2, 0.7, 1.0
        self.points = np.linspace(-8, 8, 1601)

    def step(self, w: np.ndarray, present: bool) -> np.ndarray:
        count = 4 if present else 3
        gradients = np.clip(self.x[:, None] * (self.x[:, None] * w - self.y[:, None]), -self.clip, self.clip)
        return w - self.eta * (gradients[:count].sum(axis=0) / 4 + self.l2 * w)

    def law(self, present: bool) -> np.ndarray:
        """Masses of the last weight on the grid, from 0."""
        scale = self.eta * self.noise * self.clip / 4
        masses = np.zeros_like(self.points)
        masses[len(masses) // 2] = 1.0
        moves = stats.norm.pdf(self.points[:, None], self.step(self.points, present)[None, :], scale)
        moves /= moves.sum(axis=0)
        for _ in range(self.steps):
            masses = moves @ masses
        return masses

    def needed(self) -> float:
        """The least mu for the powers of the best tests at some false-positive rates, in both directions."""
        found = []
        both = self.law(True), self.law(False)
        for null, other in (both, both[::-1]):
            order = np.argsort(-other / np.maximum(null, 1e-300))
            alpha, power = np.cumsum(null[order]), np.cumsum(other[order])
            for rate in (0.01, 0.05, 0.2, 0.5, 0.8):
                at = int(np.searchsorted(alpha, rate))
                found.append(stats.norm.ppf(power[at]) - stats.norm.ppf(alpha[at]))
        return float(max(found))

    def stated(self) -> float:
        most = self.l2 + 5 / 4  # curvature 1, rows of at most 1, one record more
        contraction = max(abs(1 - self.eta * self.l2), abs(1 - self.eta * most))
        return last_iterate_mu(self.noise, contraction, self.steps)


@pytest.mark.parametrize("seed", range(6))
def test_no_law_of_clipped_descent_is_easier_to_tell_than_is_stated(seed: int) -> None:
    descent = Descent(seed, eta=(0.3, 0.8, 1.2)[seed % 3], steps=(3, 12)[seed % 2])
    needed = descent.needed()
    assert 0.3 * descent.stated() < needed <= descent.stated() * (1 + 1e-3)
    assert needed <= math.sqrt(descent.steps) / descent.noise


def test_a_ledger_states_no_less_noise_than_its_steps_prove() -> None:
    made = {"step_noise": 2.0, "length": 12}
    with pytest.raises(PrivacyError, match="contraction"):
        LastIterate(1.0, "add-remove", contraction=1.0, **made)  # type: ignore[arg-type]
    LastIterate(2 / law_of_quadratic(0.5, 12), "add-remove", contraction=0.5, **made)  # type: ignore[arg-type]
    with pytest.raises(PrivacyError, match="which its steps prove"):
        LastIterate(2.01 / law_of_quadratic(0.5, 12), "add-remove", contraction=0.5, **made)  # type: ignore[arg-type]


def recipe(write_recipe: WriteRecipe, **changes: Any) -> Path:
    """48 rows of two classes, four features in [0, 1]."""
    path = write_recipe(**GIVEN | changes)
    random = np.random.default_rng(0)
    y = np.arange(60) % 2
    x = (random.random((60, 4)) + np.eye(2, 4)[y]) / 2
    np.savez(path.parent / "two.npz", x=x[:48], y=y[:48], x_test=x[48:], y_test=y[48:])
    return path


def test_one_charge_comes_before_the_first_step_and_prices_all(train: Train, write_recipe: WriteRecipe) -> None:
    directory = train(recipe(write_recipe))
    (trial,) = {tuple(releases) for releases in read_ledgers(directory / "ledger.jsonl").values()}
    (release,) = trial
    mechanism = release.mechanism
    assert isinstance(mechanism, LastIterate) and (release.count, mechanism.length) == (1, 30)
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    assert {line["epoch"] for line in lines} == {0}
    privacy = store.read_document(directory)["privacy"]
    assert privacy["epsilon"] == pytest.approx(rows(str(directory), "--accountant", "gaussian")["gaussian"]["epsilon"])
    # step noise below that of released steps at the same budget, by the ratio of the two formulas
    every = rows(str(recipe(write_recipe, method=METHOD | {"released": "every-step"})), "--accountant", "gaussian")
    assert every["gaussian"]["epsilon"] == pytest.approx(privacy["epsilon"], rel=1e-6)
    mu = privacy["attacker"]["mu"]
    ratio = mechanism.step_noise / (math.sqrt(30) / mu)
    assert ratio == pytest.approx(last_iterate_mu(1.0, mechanism.contraction, 30) / math.sqrt(30), rel=1e-6)
    refused = run(str(directory), "--group", "2")
    assert refused.exit_code == 2 and "not for groups" in refused.stderr


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"kind": "linear"}}, "model.kind must be convex"),
    ({"model": MODEL | {"loss": "hinge"}}, "needs a smooth loss"),
    ({"model": MODEL | {"l2": 0.0}}, "model.l2 above 0"),
    ({"method": METHOD | {"learning_rate": 50.0}}, "must be below"),
    ({"method": METHOD | {"optimizer": {"kind": "sgd", "momentum": 0.5}}}, "momentum: 0"),
    ({"method": METHOD | {"optimizer": {"kind": "adam"}}}, "momentum: 0"),
    ({"method": METHOD | {"averaging": {"kind": "tail"}}}, "averaging must be null"),
    ({"method": METHOD | {"groups": [{"names": "*", "decay": 0}]}}, "groups must be left out"),
    ({"method": METHOD | {"learning_rate": {"kind": "cosine", "initial": 1.0}}}, "must be one number"),
    ({"privacy": PRIVACY | {"clipping": {"kind": "per-layer", "norm": 1.0}}}, "must be flat"),
    ({"privacy": PRIVACY | {"clipping": {"kind": "automatic"}}}, "must be flat"),
    ({"privacy": PRIVACY | {"schedule": {"kind": "time", "initial": 9, "decay": 0.1}}}, "must be uniform"),
    ({"runtime": RUNTIME | {"evaluate_every": 10}}, "evaluate_every must be at least epochs"),
    ({"runtime": RUNTIME | {"dtype": "float32"}}, "must be float64"),
    (
        {"epochs": "until-budget", "privacy": PRIVACY | {"schedule": {"kind": "uniform", "initial": 9}}},
        "epochs must be",
    ),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_what_the_theorem_does_not_cover_is_refused(
    changes: dict[str, Any], said: str, write_recipe: WriteRecipe
) -> None:
    result = run(str(recipe(write_recipe, **changes)))
    assert result.exit_code == 2 and said in result.stderr, result.stderr


@pytest.mark.parametrize("planted", [False, True])
def test_an_audit_of_last_weights_comes_near_the_claim_and_refutes_a_smaller_one(
    planted: bool, write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted bug prices the last step alone."""
    if planted:
        module = "dpsgd_cli.methods.dp_gd.price.last_iterate_mu"
        monkeypatch.setattr(module, lambda noise, contraction, steps: 1 / (3 * noise))
        monkeypatch.setattr("dpsgd_cli.accounting.mechanism.last_iterate_mu", lambda *_: 1e-9)
    path = recipe(write_recipe, epochs=12)
    arguments = ["audit", str(path), "--trials", "300", "--tier", "A,B", "--out", str(tmp_path / "audit")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == (1 if planted else 0), result.output
    (document,) = (tmp_path / "audit").rglob("audit.json")
    found = json.loads(document.read_text())
    assert found["refuted"] == planted
    assert planted or found["lower_bounds"]["B"] > 1


def planned(path: Path) -> LastIterate:
    """The one release that a recipe plans."""
    plan, _ = plan_and_outline(load_recipe(str(path)))
    assert plan is not None
    (release,) = plan.releases
    assert isinstance(release.mechanism, LastIterate)
    return release.mechanism


@pytest.mark.parametrize("rate", [0.2, 1.0, 1.4])
def test_the_contraction_is_that_of_the_steepest_and_the_flattest_direction(
    rate: float, write_recipe: WriteRecipe
) -> None:
    """Rows of at most |(1, 1, 1, 1, 1)|, a logistic loss (1/4), 48 records and one more, an L2 term of .1."""
    curvature = 0.1 + 5 / 4 * 49 / 48
    expected = max(abs(1 - 0.1 * rate), abs(1 - curvature * rate))
    found = planned(recipe(write_recipe, method=METHOD | {"learning_rate": rate}))
    assert found.contraction == pytest.approx(expected, rel=1e-12)


def test_rounding_is_charged(write_recipe: WriteRecipe) -> None:
    found = planned(recipe(write_recipe))
    assert 0 < 1 / found.noise_multiplier - last_iterate_mu(found.step_noise, found.contraction, 30) < 1e-9
