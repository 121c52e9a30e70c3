"""What sweeps and comparisons charge their book for: every trial of every cell before the first runs, and no cell
twice; for a choice by random stopping its price alone, so that the book does not tell what ran."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.accounting.book_filter import Price
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.accounting.repeated_selection import BestOfTrials, Choice
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.main import main
from dpsgd_cli.results import book as books
from dpsgd_cli.results.book import BookTerms
from dpsgd_cli.training import loop
from tests.accounting.test_book_filter import delta_of

RECIPE = """\
name: mine
data: {path: t.csv, target: y, classes: [0, 1], bounds: [0, 1]}
model: {kind: linear}
method: {kind: dp-sgd, batching: full, learning_rate: 1}
privacy: {schedule: {kind: uniform, initial: 10}, delta: 1.0e-5}
epochs: 2
repeats: 2
"""
GRID = "name: s\nrecipes: [mine.yaml]\ngrid: {method.learning_rate: [1, 2], privacy.clipping.norm: [0.5, 1]}\n"
ONE_TRIAL = 2 / 10**2  # mu^2 of two epochs at noise multiplier 10
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `dpsgd` in a folder with a table, its book of epsilon 5, a recipe and a sweep."""
    random = np.random.default_rng(0)
    rows = "".join(f"{a:.4f},{int(a > 0.5)}\n" for a in random.random(40))
    (tmp_path / "t.csv").write_text(f"a,y\n{rows}")
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "sweep.yaml").write_text(GRID)
    books.create(tmp_path / "t.book", BookTerms({"t.csv": sha256(tmp_path / "t.csv")}, None, "add-remove", 5.0, 1e-5))
    monkeypatch.chdir(tmp_path)

    def invoke(*words: str) -> Result:
        return CliRunner().invoke(main, [*words, "--book", "t.book"])

    return invoke


def charges() -> list[dict[str, Any]]:
    return books.read(Path("t.book")).charges


def spent() -> float:
    return math.fsum(line["mu_squared"] for line in charges())


def test_all_trials_of_all_cells_are_charged_at_once_before_the_first_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs: list[float] = []
    train = loop.run_pack

    def watched(*given: Any, **named: Any) -> Any:
        packs.append(spent())
        return train(*given, **named)

    monkeypatch.setattr(loop, "run_pack", watched)
    assert run("sweep", "sweep.yaml", "most_trials=2", "--out", "o").exit_code == 0
    (charge,) = charges()
    assert (len(charge["runs"]), charge["trials"]) == (4, 8)
    assert packs == [pytest.approx(8 * ONE_TRIAL)] * 4
    assert books.read(Path("t.book")).released(charge["id"]) == 4


def test_a_dry_run_charges_nothing(run: Run) -> None:
    assert run("sweep", "sweep.yaml", "--dry-run").exit_code == 0
    assert charges() == []


def test_a_sweep_that_does_not_fit_as_a_whole_runs_no_cell(run: Run) -> None:
    found = run("sweep", "sweep.yaml", "repeats=20", "--out", "o")
    assert found.exit_code == 1 and "would pass the book's budget" in found.output
    assert charges() == [] and not list(Path("o").glob("mine-*"))


def test_shards_charge_their_own_cells_and_all_trials_count(run: Run) -> None:
    for shard in ("1/2", "2/2", "2/2"):
        assert run("sweep", "sweep.yaml", "--out", "o", "--shard", shard).exit_code == 0
    assert [line["trials"] for line in charges()] == [4, 4]
    assert sum(len(set(line["runs"])) for line in charges()) == 4


def test_the_same_sweep_again_is_charged_for_removed_cells_only(run: Run) -> None:
    assert run("sweep", "sweep.yaml", "--out", "o").exit_code == 0
    assert run("sweep", "sweep.yaml", "--out", "o").exit_code == 0
    assert len(charges()) == 1
    shutil.rmtree(next(Path("o").glob("mine-*")))
    assert run("sweep", "sweep.yaml", "--out", "o").exit_code == 0
    assert [line["trials"] for line in charges()] == [8, 2]
    assert run("sweep", "sweep.yaml", "--out", "elsewhere").exit_code == 0
    assert [line["trials"] for line in charges()] == [8, 2, 8]


def test_a_sweep_that_goes_on_after_a_kill_is_not_charged_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    train, calls = loop.run_pack, list[int]()

    def killed(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(*given, **named)

    monkeypatch.setattr(loop, "run_pack", killed)
    assert run("sweep", "sweep.yaml", "most_trials=2", "--out", "o").exit_code != 0
    assert run("sweep", "sweep.yaml", "most_trials=2", "--out", "o").exit_code == 0
    assert [line["trials"] for line in charges()] == [8]


def test_cells_that_were_not_charged_stop_a_sweep(run: Run) -> None:
    assert CliRunner().invoke(main, ["sweep", "sweep.yaml", "--out", "o"]).exit_code == 0
    found = run("sweep", "sweep.yaml", "--out", "o")
    assert found.exit_code == 1 and "was not charged to" in found.output


def test_a_choice_from_a_seed_is_refused(run: Run) -> None:
    found = run("sweep", "sweep.yaml", "select={kind: random-stopping, mean: 2, seed: 1}", "--out", "o")
    assert found.exit_code == 2 and "select.seed" in found.output
    assert charges() == []


def test_random_stopping_is_charged_by_its_law_and_tells_nothing_else(run: Run) -> None:
    """The book has one line whatever ran: no name of a cell, no number of runs; and it pays for the best run."""
    words = ("sweep", "sweep.yaml", "select={kind: random-stopping, mean: 2}", "--out", "o")
    assert run(*words).exit_code == 0
    (charge,) = charges()
    (result,) = Path("o").glob("*.result.json")
    assert charge["runs"] == [result.name.removesuffix(".result.json")] and charge["trials"] == 1
    told = json.loads(result.read_text())["privacy"]
    book = books.read(Path("t.book"))
    assert told["book"] == {"book": book.identity, "charge": book.charges[0]["id"]}
    assert charge["epsilon"] == pytest.approx(told["choice"]["epsilon"], rel=1e-6)
    assert book.released(book.charges[0]["id"]) == 1
    assert run(*words).exit_code == 0
    assert len(charges()) == 1
    # dominated by its Renyi curve: the delta at any epsilon that the sweep itself states
    releases = [[Release(GaussianSum(10.0, "add-remove"), 2)]] * 4
    own = Price(charge["mu_squared"], charge["leak"])
    for delta in (1e-5, 1e-6, 1e-7):
        epsilon = BestOfTrials(Choice(2.0)).of_any(releases)[0](delta)
        mu = math.sqrt(own.mu_squared)
        assert own.leak + (1 - own.leak) * delta_of(mu, epsilon) >= delta * (1 - 1e-6)


def test_a_comparison_charges_all_its_recipes_without_their_common_seed(run: Run) -> None:
    Path("other.yaml").write_text(RECIPE.replace("learning_rate: 1", "learning_rate: 0.5").replace("mine", "other"))
    found = run("compare", "mine.yaml", "other.yaml", "--epsilon", "0.5", "--out", "o")
    assert found.exit_code == 0, found.output
    (charge,) = charges()
    assert (len(charge["runs"]), charge["trials"]) == (2, 4)
    documents = [json.loads(path.read_text()) for path in Path("o").glob("*/result.json")]
    assert [one["provenance"]["noise_source"] for one in documents] == ["secure", "secure"]
    assert [one["provenance"]["seed"] for one in documents] == [None, None]
