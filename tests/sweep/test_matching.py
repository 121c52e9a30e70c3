"""Recipes at matched budgets: what is solved for, what stays, and what the label says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dpsgd_cli.accounting.budget import EpsilonBudget
from dpsgd_cli.errors import InfeasibleBudget
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.results.comparison import Entry, read_entries
from dpsgd_cli.schedules.settings import ExponentialDecay, Uniform
from dpsgd_cli.sweep.matching import SharedTerms, matched
from dpsgd_cli.training.loop import plan_recipe
from dpsgd_cli.training.plans import resolve_auto

TEXT = """\
name: {name}
data: {{name: digits}}
model: {{kind: linear}}
method: {{kind: dp-sgd, batching: shuffle, batch_size: 200, learning_rate: 1}}
privacy: {{adjacency: zero-out, budget: {{epsilon: 2.5, delta: 1e-3}}, schedule: {schedule}}}
epochs: {epochs}
seed: 0
"""


def write(folder: Path, schedule: str, epochs: str = "until-budget", name: str = "a") -> str:
    file = folder / f"{name}.yaml"
    file.write_text(TEXT.format(name=name, schedule=schedule, epochs=epochs))
    return str(file)


def compared(folder: Path, *arguments: str) -> list[Entry]:
    done = CliRunner().invoke(main, ["compare", *arguments, "--delta", "1e-3", "--out", str(folder / "out")])
    assert done.exit_code == 0, done.output
    return sorted(read_entries(folder / "out"), key=lambda entry: entry.epsilon or 0)


def noise_of(entry: Entry) -> list[float]:
    header, *rows = [line.split(",") for line in (entry.directory / "history.csv").read_text().splitlines()]
    return [float(row[header.index("noise_multiplier")]) for row in rows]


def test_fixed_noise_becomes_what_the_budget_allows(tmp_path: Path) -> None:
    file = write(tmp_path, "{kind: exponential, initial: 3, decay: 0.1}", "2")
    ((label, _, loaded),) = matched([file], SharedTerms(epsilons=(1.0,)))
    assert (label, loaded.recipe.epochs) == ("a (first noise solved)", 2)
    assert loaded.recipe.privacy is not None
    assert loaded.recipe.privacy.schedule == ExponentialDecay(initial="auto", decay=0.1)
    assert loaded.recipe.privacy.budget == EpsilonBudget(epsilon=1.0, delta=1e-5)


@pytest.mark.parametrize("schedule", ["{kind: uniform}", "{kind: exponential, initial: 3, decay: auto}"])
def test_a_free_number_stays_the_one_that_is_solved_for(tmp_path: Path, schedule: str) -> None:
    file = write(tmp_path, schedule, "2")
    ((label, _, loaded),) = matched([file], SharedTerms(epsilons=(1.0,)))
    assert label == "a"
    assert loaded.recipe.privacy is not None
    assert loaded.recipe.privacy.schedule == load_recipe(file).recipe.privacy.schedule  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("schedule", "solved"),
    [
        ("{kind: uniform, initial: 6}", "noise solved"),
        ("{kind: exponential, initial: 8, decay: 0.05}", "first noise solved"),
        (
            "{kind: piecewise, parts: [{epochs: 3, schedule: {kind: uniform, initial: 7}}, {schedule: {kind: time,"
            " initial: 9, decay: 0.1}}]}",
            "all noise scaled",
        ),
        ("{kind: polynomial, initial: 9, final: 6, decay: 2, period: 10}", "all noise scaled"),
    ],
)
def test_what_trains_until_its_budget_is_spent_keeps_its_length(tmp_path: Path, schedule: str, solved: str) -> None:
    """As many epochs as its own budget buys, at every budget the least noise that they allow, and the label says so."""
    file = write(tmp_path, schedule)
    own, _ = plan_recipe(resolve_auto(load_recipe(file)))
    assert own is not None and len(own.epochs) > 4
    entries = compared(tmp_path, file, "--epsilon", "2.2,4")
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert text.count(f"| a ({len(own.epochs)} epochs, {solved}) |") == 2
    for entry, budget in zip(entries, (2.2, 4), strict=True):
        assert len(noise_of(entry)) == len(own.epochs)
        assert 0.999 * budget < (entry.epsilon or 0) <= budget
        factor = noise_of(entry)[0] / own.noise_multipliers[0]
        assert noise_of(entry) == pytest.approx([factor * z for z in own.noise_multipliers])
    assert noise_of(entries[0])[0] > own.noise_multipliers[0] > noise_of(entries[1])[0]


def test_where_only_the_run_tells_the_length_the_budget_decides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_fits(loaded: LoadedRecipe) -> None:
        raise InfeasibleBudget(f"not one epoch of {loaded.source}")

    monkeypatch.setattr("dpsgd_cli.sweep.matching.plan_and_outline", nothing_fits)
    ((label, _, loaded),) = matched([write(tmp_path, "{kind: uniform, initial: 4}")], SharedTerms(epsilons=(1.0,)))
    assert (label, loaded.recipe.epochs) == ("a (length solved)", "until-budget")
    assert loaded.recipe.privacy is not None
    assert loaded.recipe.privacy.schedule == Uniform(initial=4)
