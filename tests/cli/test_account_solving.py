"""What `dpsgd account --solve` finds is what a recipe's `auto` finds, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from dp_accounting.pld import privacy_loss_distribution as oracle

from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.methods.experiment import plan_for
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.schedules.settings import NoiseSchedule
from tests.cli.accounting import SCHEDULES, recipe, rows, run

POISSON = ["method.batching=poisson", "privacy.adjacency=add-remove", "method.batch_size=600"]
RHO = {"rho": 0.78125}
AGREE: dict[str, tuple[str, str, dict[str, float], int]] = {
    "uniform initial": ("{kind: uniform, initial: 9}", "initial", RHO, 40),
    "time initial": (SCHEDULES["time"], "initial", RHO, 40),
    "time decay": (SCHEDULES["time"], "decay", RHO, 30),
    "exponential initial": (SCHEDULES["exponential"], "initial", RHO, 40),
    "exponential decay": (SCHEDULES["exponential"], "decay", RHO, 30),
    "step initial": (SCHEDULES["step"], "initial", RHO, 40),
    "step decay": (SCHEDULES["step"], "decay", RHO, 40),
    "step period": (SCHEDULES["step"], "period", RHO, 40),
    "polynomial initial": (SCHEDULES["polynomial"], "initial", RHO, 40),
    "polynomial final": (SCHEDULES["polynomial"], "final", RHO, 50),
    "polynomial decay": (SCHEDULES["polynomial"], "decay", RHO, 40),
    "polynomial period": (SCHEDULES["polynomial"], "period", RHO, 40),
    "climbing decay": ("{kind: polynomial, initial: 10, final: 40, decay: 3, period: 100}", "decay", {"rho": 0.06}, 30),
    "piecewise decay": (
        "{kind: piecewise, parts: [{epochs: 9, schedule: {kind: uniform, initial: 12}},"
        " {schedule: {kind: exponential, initial: 12, decay: 0.1}}]}",
        "parts.1.decay",
        RHO,
        40,
    ),
    "exponential decay, epsilon": (SCHEDULES["exponential"], "decay", {"epsilon": 3.0}, 20),
    "uniform initial, epsilon": ("{kind: uniform, initial: 9}", "initial", {"epsilon": 3.0}, 20),
}


@pytest.mark.parametrize("case", AGREE)
def test_solve_gives_the_number_that_auto_gives(tmp_path: Path, case: str) -> None:
    """`--solve decay` of a polynomial that climbs found nothing, since it had a direction of its own."""
    schedule, name, target, epochs = AGREE[case]
    path = recipe(tmp_path, schedule)
    kind, limit = next(iter(target.items()))
    accountant = "gaussian" if kind == "epsilon" else "zcdp"
    given = [f"epochs={epochs}", "--solve", name, f"--target-{kind}", repr(limit), "--accountant", accountant]
    solved = rows(path, *given)[accountant]
    budget = {kind: limit} | ({"delta": 1e-5} if kind == "epsilon" else {})
    free = with_auto(tmp_path, path, name)
    found = load_recipe(free, [f"epochs={epochs}", f"privacy.budget={json.dumps(budget)}"]).recipe
    planned = plan_for(found, Facts(60_000)).schedule
    assert isinstance(planned, NoiseSchedule)
    assert solved[name] == planned.number_at(name)


def with_auto(tmp_path: Path, source: str, name: str) -> str:
    content = yaml.safe_load(Path(source).read_text())
    *sections, last = name.split(".")
    here = content["privacy"]["schedule"]
    for key in sections:
        here = here[int(key) if isinstance(here, list) else key]
    here = here.get("schedule", here)
    here[last] = "auto"
    path = tmp_path / "auto.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_trials_together_are_solved_for_within_one_budget(tmp_path: Path) -> None:
    path = recipe(tmp_path, SCHEDULES["exponential"])
    asked = [path, "epochs=30", "--solve", "initial", "--trials", "4", "--accountant", "gaussian"]
    for target, key in (("--target-epsilon", "epsilon"), ("--target-rho", "rho")):
        solved = rows(*asked, target, "2")["gaussian"]
        assert 2 * (1 - 1e-6) < solved[key] <= 2


def test_the_best_of_trials_is_what_is_solved_for(tmp_path: Path) -> None:
    path = recipe(tmp_path, "{kind: uniform, initial: 9}")
    asked = [path, "epochs=30", "--solve", "initial", "--best-of", "5", "--target-epsilon", "3"]
    assert 3 * (1 - 1e-3) < rows(*asked)["rdp"]["epsilon"] <= 3


def test_a_decay_on_poisson_batches_is_solved_for_or_refused(tmp_path: Path) -> None:
    """It began at decay 1, where the noise of later epochs is next to nothing: a traceback of pld."""
    path = recipe(tmp_path, SCHEDULES["exponential"])
    asked = [path, *POISSON, "epochs=10", "--solve", "decay", "--target-epsilon", "3", "--accountant", "pld"]
    result = run(*asked)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code == 0, result.stderr
    found = rows(*asked)["pld"]
    assert 3 * (1 - 1e-4) < found["epsilon"] <= 3


@pytest.mark.parametrize("solve", [[], ["--solve", "initial"], ["--solve", "epochs"]])
def test_what_an_accountant_refuses_is_refused_where_a_budget_asks_for_it(tmp_path: Path, solve: list[str]) -> None:
    """Nikolov's lecture speaks of epsilon below 1; epsilon 2 got the noise of epsilon 1, 2.4 times what it affords."""
    path = recipe(tmp_path, "{kind: uniform, initial: auto}" if not solve else "{kind: uniform, initial: 9}")
    text = Path(path).read_text().replace("batching: shuffle, batch_size: 600", "batching: full")
    Path(path).write_text(text.replace("{rho: 0.78125}", "{epsilon: 2, delta: 1e-5}") + "epochs: 40\n")
    named = ["privacy.accountant=nikolov", *solve, *(["--accountant", "nikolov"] if solve else [])]
    result = run(path, *named)
    assert result.exit_code == 2
    assert "nikolov: it is stated for epsilon below 1" in result.stderr
    assert "the budget is not spent there" in result.stderr


def test_errors_name_keys_that_exist() -> None:
    result = run("lectures/adult-dp-gd", "--excess-risk", "0.1", "privacy.budget.epsilon=2")
    assert result.exit_code == 2
    assert "method.noise" not in result.stderr
    assert "privacy.accountant: gaussian" in result.stderr


def oracle_epsilon(batch: int, records: int, noise: float, steps: int) -> float:
    """dp-accounting's, from above."""
    loss = oracle.from_gaussian_mechanism(noise, sampling_prob=batch / records, value_discretization_interval=1e-3)
    return float(loss.self_compose(steps).get_epsilon_for_delta(1e-5))


def test_the_largest_batch_of_a_budget_is_what_dp_accounting_would_take() -> None:
    sizes = ["--records", "60000", "--noise-multiplier", "1", "--steps", "1000"]
    found = rows(*sizes, "--target-epsilon", "3", "--accountant", "pld")["pld"]
    batch = int(found["batch-size"])
    assert oracle_epsilon(batch - 2, 60_000, 1.0, 1000) < 3 < oracle_epsilon(batch + 2, 60_000, 1.0, 1000)
    priced = [
        rows(*sizes, "--batch-size", str(size), "--accountant", "pld")["pld"]["epsilon"] for size in (batch, batch + 1)
    ]
    assert priced[0] == found["epsilon"] <= 3 < priced[1]
    same = rows("--sampling-rate", f"{batch}/60000", *sizes[2:], "--accountant", "pld")["pld"]
    assert same["epsilon"] == priced[0]


def test_the_batch_of_a_recipe_is_solved_for_where_its_noise_is_known(tmp_path: Path) -> None:
    path = recipe(tmp_path, "{kind: uniform, initial: 2}")
    budget = ["privacy.budget={epsilon: 2, delta: 1.0e-5}", "privacy.delta=null", "epochs=5", "--accountant", "rdp"]
    found = rows(path, *POISSON, *budget, "--solve", "batch-size")["rdp"]
    batch = int(found["batch-size"])
    again = [rows(path, *POISSON, *budget[:3], "privacy.budget=null", "privacy.delta=1e-5", *budget[3:],
                  f"method.batch_size={size}")["rdp"]["epsilon"] for size in (batch, batch + 1)]  # fmt: skip
    assert again[0] == pytest.approx(found["epsilon"], rel=1e-12) and again[0] <= 2 < again[1]
