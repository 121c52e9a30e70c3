"""When ledgers of several trials add up, and what they would give away where they were added all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from dpsgd_cli.accounting.joint_composition import Records, Run, why_apart
from dpsgd_cli.main import main
from dpsgd_cli.results import store
from dpsgd_cli.results.evaluated import records_of
from dpsgd_cli.results.guarantee import scope
from tests.conftest import Train, WriteRecipe

HELD = Records("mine", "tested on 20% of its records (split seed 0)")
GD: dict[str, Any] = {"kind": "dp-gd", "learning_rate": 1}
ONE_STEP: dict[str, Any] = {"method": GD, "epochs": 1, "repeats": 1, "save_model": True}


def run(*seeds: int | None, name: str = "a", adjacency: str | None = "add-remove", held: Records | None = HELD) -> Run:
    return Run(name, seeds, adjacency, held)


def account(*args: object) -> Result:
    return CliRunner().invoke(main, ["account", *map(str, args)])


def refused(*args: object) -> str:
    """The reason that stands in every row, of whatever accountant, and that no gate passes."""
    told = account(*args, "--trials", "all", "--format", "json")
    assert told.exit_code == 0, told.output
    (reason,) = {row["note"] for row in json.loads(told.stdout) if row["epsilon"] is None and row["rho"] is None}
    assert len(json.loads(told.stdout)) > 5
    assert all(row["epsilon"] is None for row in json.loads(told.stdout))
    assert account(*args, "--trials", "all", "--max-epsilon", "1e9").exit_code == 1
    return str(reason)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([run(0, 1, 2), run(2, name="b")], "share seed 2, and thus noise (a and b)"),
        ([run(4, 4)], "share seed 4, and thus noise (a)"),
        ([Run("a", (0, 1), "add-remove", Records("mine", "tested on 5 folds", 5))], "with folds: 5"),
        ([run(None), run(None, held=Records("mine", "tested on 30%"))], "leave out different records"),
        ([run(None), run(None, held=Records("other", HELD.left_out))], "different data"),
        ([run(0), run(1, adjacency="zero-out")], "different adjacencies (add-remove, zero-out)"),
        ([run(0), run(1, adjacency=None, name="plain")], "plain has no privacy"),
        ([run(0, 1, held=None)], "does not say which records"),
        ([run(0), Run("b", None, "add-remove", HELD)], "does not say the seeds"),
    ],
)
def test_trials_that_do_not_add_up_are_told_why(runs: list[Run], words: str) -> None:
    assert words in (why_apart(runs) or "")
    assert words in (why_apart(runs[::-1]) or "") or "and thus noise" in words


@pytest.mark.parametrize(
    "runs", [[run(0, 1, 2), run(3, name="b")], [run(None, None), run(None)], [run(None, None), run(0, 1)], [run(5)]]
)
def test_trials_with_noise_of_their_own_and_the_same_records_left_out_add_up(runs: list[Run]) -> None:
    assert why_apart(runs) is None


def test_of_one_trial_nothing_else_needs_to_be_known() -> None:
    assert why_apart([Run("a", None, "add-remove", None)], 1) is None
    assert why_apart([Run("a", None, "add-remove", None)], 2) is not None
    assert why_apart([Run("a", None, "add-remove", HELD)]) is not None


def test_one_seed_at_two_clip_norms_gives_the_gradient_and_gets_no_statement(tmp_path: Path, train: Train) -> None:
    """One full-batch step from 0: w = -(g + z C xi) / 320, so 320 (w2 - 2 w1) = g, where C2 = 2 C1 and nobody clips.

    The sum of the gradients is written out here in NumPy; the noise has standard deviations 80 and 160.
    """
    rng = np.random.default_rng(0)
    y = np.arange(320) % 3
    x = (rng.random((320, 4)) + np.eye(3, 4)[y]) / 2
    np.savez(tmp_path / "rows.npz", x=x, y=y, x_test=x[:9], y_test=y[:9])
    recipe = tmp_path / "gd.yaml"
    recipe.write_text(
        "name: gd\ndata: {path: rows.npz, bounds: [0, 1], classes: [0, 1, 2], preprocess: [{scale: {}}]}\n"
        "model: {kind: linear}\nmethod: {kind: dp-gd, learning_rate: 1}\nepochs: 1\nseed: 0\nsave_model: true\n"
        "privacy: {delta: 1e-5, schedule: {kind: uniform, initial: 20}, clipping: {kind: flat, norm: 4}}\n"
        "runtime: {device: cpu, threads: 1, dtype: float64}\n"
    )
    first, second = (train(recipe, f"privacy.clipping.norm={norm}") for norm in (4, 8))
    w1, w2 = (load_file(found / "model.safetensors") for found in (first, second))
    (weight,) = [name for name, values in w1.items() if values.ndim == 2]
    found = 320 * (w2[weight].astype(float) - 2 * w1[weight].astype(float))
    exact = (np.full((320, 3), 1 / 3) - np.eye(3)[y]).T @ x.astype(np.float32)
    assert np.abs(320 * w1[weight]).max() > 10 * np.abs(exact).max() / 3
    assert found == pytest.approx(exact, abs=1e-3)
    assert "share seed 0, and thus noise" in refused(tmp_path / "out")
    assert account(first, "--trials", "all", "--max-epsilon", "1").exit_code == 0


def test_overlapping_ranges_of_seeds_share_noise(write_recipe: WriteRecipe, train: Train) -> None:
    path = write_recipe(**ONE_STEP)
    train(path, "repeats=3")
    directory = train(path, "seed=2")
    assert "share seed 2" in refused(directory.parent)


def test_cuts_that_differ_in_the_last_digit_are_different_cuts(write_recipe: WriteRecipe, train: Train) -> None:
    """Of 40,000 rows, .2 and .20004 leave out others, though both are 20.00%."""
    path = write_recipe(**ONE_STEP)
    train(path, "data.split={test: 0.2}")
    directory = train(path, "data.split={test: 0.20004}", "seed=1")
    said = refused(directory.parent)
    assert "leave out different records (tested on 20" in said
    assert "on 20% of its records (split seed 0)" in said and "on 20.004% of its records (split seed 0)" in said


def test_folds_are_stated_trial_by_trial_only(write_recipe: WriteRecipe, train: Train) -> None:
    path = write_recipe(**ONE_STEP, folds=4)
    directory = train(path)
    assert "in one fold and trained on in the others" in refused(directory)
    assert "in one fold and trained on in the others" in refused(path)
    stated = store.read_document(directory)["privacy"]["scope"]
    assert "no statement about several of them, published together or as a mean: with folds: 4" in stated
    assert account(directory, "--max-epsilon", "4").exit_code == 0
    best = account(path, "--best-of", "3")
    assert "no statement:" in best.stdout and "with folds: 4" in best.stdout and "upper" not in best.stdout
    told = account(path, "--trials", "4", "--curve")
    assert (told.exit_code, "with folds: 4" in told.stderr) == (2, True)


@pytest.mark.parametrize("change", ["data.split={test: 12, seed: 1}", "data.validation={records: 6, public: true}"])
def test_a_record_left_out_here_and_trained_on_there_has_no_statement(
    write_recipe: WriteRecipe, train: Train, change: str
) -> None:
    path = write_recipe(**ONE_STEP)
    train(path)
    directory = train(path, "seed=1", change)
    assert "leave out different records" in refused(directory.parent)


def test_validation_records_are_left_out_where_they_are_public_and_not_where_each_look_is_charged() -> None:
    charged, public = (
        records_of({"name": "digits", "validation": {"records": 6, **way}}, None, {})
        for way in ({"noise_multiplier": 9.0}, {"public": True})
    )
    assert charged == records_of({"name": "digits"}, None, {}) != public


def test_another_content_of_the_file_has_no_statement(write_recipe: WriteRecipe, train: Train, tmp_path: Path) -> None:
    path = write_recipe(**ONE_STEP)
    train(path)
    held = dict(np.load(tmp_path / "tiny.npz"))
    np.savez(tmp_path / "tiny.npz", **{**held, "x": held["x"][::-1]})
    directory = train(path, "seed=1")
    assert "different data" in refused(directory.parent)


def test_a_bare_ledger_of_several_trials_has_no_statement(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe(**{**ONE_STEP, "repeats": 2}))
    assert account(directory, "--trials", "all", "--max-epsilon", "9").exit_code == 0
    bare = shutil.copy(directory / "ledger.jsonl", directory.parent / "bare.jsonl")
    assert "does not say which records its trials left out" in refused(bare)


def test_a_ledger_that_does_not_say_its_seeds_has_no_statement(write_recipe: WriteRecipe, train: Train) -> None:
    directory = train(write_recipe(**{**ONE_STEP, "repeats": 2}))
    file = directory.parent / "bare.jsonl"
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    for line in lines:
        del line["seed"]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "does not say the seeds of its trials" in refused(file)
    file.write_text("".join(f"{json.dumps({**line, 'seed': i})}\n" for i, line in enumerate([*lines, lines[0]])))
    told = account(file, "--trials", "all")
    assert (told.exit_code, "trial 0 has several seeds" in told.stderr) == (2, True)


def test_flags_say_what_they_take_for_granted() -> None:
    told = account("--batching", "full", "--noise-multiplier", "9", "--steps", "1", "--trials", "3")
    assert "3 trials together: added up as if each had noise of its own" in " ".join(told.stdout.split())


def test_the_scope_of_a_result_is_that_of_its_trials() -> None:
    assert "cost the sum of their ledgers" in scope(run(0, 1))
    assert scope(run(0)).startswith("this one trial")


def test_a_comparison_states_nothing_of_trials_that_share_noise(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path
) -> None:
    path = write_recipe(**ONE_STEP)
    ours = train(path)
    shared, apart = train(path, "privacy.clipping.norm=2"), train(path, "seed=1")
    told = [
        CliRunner().invoke(main, ["compare", str(ours), str(other), "--out", str(tmp_path / "tables")]).stdout
        for other in (shared, apart)
    ]
    assert "No joint guarantee is given for all of them: trials share seed 0" in told[0]
    assert "dpsgd account --trials all` on the folder" in told[1]
