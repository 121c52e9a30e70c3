"""`dpsgd sweep` from end to end: what is finished stays, what fails is told and tried again, nothing is corrupted."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dpsgd_cli.errors import ModelError
from dpsgd_cli.main import main
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from tests.sweep.conftest import GRID, Sweep, result, table

DRAWN = 2  # runs that a Poisson number of mean 6 gives at seed 1


def test_a_sweep_writes_every_cell_a_table_and_what_it_cost(sweep: Sweep, out: Path) -> None:
    done = sweep(GRID)
    assert done.exit_code == 0, done.output
    assert "pack 1/1: 4 cells, 4 trials" in done.stderr
    rows = table(out)
    assert [(row["method.learning_rate"], row["privacy.clipping.norm"]) for row in rows] == [
        ("1", "0.5"), ("1", "1"), ("2", "0.5"), ("2", "1"),
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"done"}
    assert all(store.is_complete(out / row["directory"]) for row in rows)
    privacy = result(out)["privacy"]
    assert privacy["all_trials"]["epsilon"] > privacy["each_trial"][0]["epsilon"]
    assert "choosing among these trials is not covered" in done.stdout
    (page,) = out.glob("*.report.html")
    html = page.read_text()
    assert "4 of 4 cells are done, 0 failed" in html and "all trials together epsilon" in html
    accuracy = [cells[1] for cells in re.findall(r"<tr><td>(.*?)</td>.*?<td>(0\.\d+|1)</td>", html)]
    assert len(accuracy) == 4 and html.count("<tr>") == 5
    assert "choosing among these trials is not covered" in html and "nonprivate" not in html.split("The cells")[1]


def test_a_finished_cell_is_never_run_again(sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep("grid: {method.learning_rate: [1]}\n")
    trained: list[int] = []
    run_pack = loop.run_pack

    def counted(members: Any, options: Any) -> Any:
        trained.append(len(members))
        return run_pack(members, options)

    monkeypatch.setattr(loop, "run_pack", counted)
    assert "1 of 2 cells have run before" in sweep("grid: {method.learning_rate: [1, 2]}\nseeds: shared\n").stderr
    assert trained == [1]
    sweep("grid: {method.learning_rate: [1, 2]}\nseeds: shared\n")
    assert trained == [1]


ALLOCATED = "method.batching=random-allocation"


def test_a_dry_run_tells_every_cell_that_cannot_run(sweep: Sweep) -> None:
    done = sweep(
        "grid: {method.batch_size: [100, 5000], privacy.adjacency: [add-remove, replace-one]}\n", "--dry-run", ALLOCATED
    )
    assert done.exit_code == 2
    assert done.stdout.count("ERROR, see below") == 3
    assert done.stderr.count("method.batch_size is 5000, more than the 1438 training records") == 2
    assert done.stderr.count("random allocation under replace-one adjacency") == 1


def break_cells(monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Packs that hold a cell of this learning rate fail."""
    run_pack = loop.run_pack

    def run(members: Any, options: Any) -> Any:
        if any(member.loaded.recipe.method.learning_rate == rate for member in members):
            raise ModelError("broken for this test")
        return run_pack(members, options)

    monkeypatch.setattr(loop, "run_pack", run)


def test_a_failed_cell_is_recorded_and_the_others_go_on(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = "grid: {method.learning_rate: [1, 2, 3, 4, 5]}\n"
    with monkeypatch.context() as patch:
        break_cells(patch, 2.0)
        failed = sweep(blocks)
    assert (failed.exit_code, "1 of 5 cells failed; --retry-failed" in failed.stderr) == (1, True)
    assert [row["status"] for row in table(out)] == ["done", "failed", "done", "done", "done"]
    (record,) = out.glob("*.failed.json")
    assert json.loads(record.read_text())["error"] == "broken for this test"
    again = sweep(blocks)
    assert again.exit_code == 1 and "pack" not in again.stderr
    retried = sweep(blocks, "--retry-failed")
    assert retried.exit_code == 0, retried.output
    assert {row["status"] for row in table(out)} == {"done"}
    assert list(out.glob("*.failed.json")) == []


def test_shards_write_one_union(sweep: Sweep, tmp_path: Path) -> None:
    for shard in ("1/3", "3/3", "2/3"):
        assert sweep(GRID, "--shard", shard, out="shards").exit_code == 0
    assert sweep(GRID, "most_trials=1", out="whole").exit_code == 0
    keep = ("method.learning_rate", "privacy.clipping.norm", "status", "test_accuracy", "epsilon", "directory")
    ours, theirs = ([{key: row[key] for key in keep} for row in table(tmp_path / name)] for name in ("shards", "whole"))
    assert ours == theirs


def test_status_says_what_is_done_failed_and_missing(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_cells(monkeypatch, 2.0)
    sweep(GRID, "--shard", "1/2")
    done = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "out")])
    assert "1 of 4 cells done (1 of 4 trials), 1 failed, 2 missing" in done.stdout
    assert "broken for this test" in done.stdout
    (tmp_path / "empty").mkdir()
    nothing = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "empty")])
    assert (nothing.exit_code, "no sweep was begun here" in nothing.stderr) == (2, True)


def test_an_interrupt_stops_and_the_same_command_goes_on(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pack, calls = loop.run_pack, []

    def interrupted(members: Any, options: Any) -> Any:
        calls.append(len(members))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run_pack(members, options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_pack", interrupted)
        stopped = sweep(GRID, "most_trials=2")
    assert stopped.exit_code == 130 and "interrupted" in stopped.stderr
    assert len([path for path in out.iterdir() if path.is_dir()]) == 2
    assert list(out.glob("*.failed.json")) == []
    assert sweep(GRID, "most_trials=2").exit_code == 0
    assert {row["status"] for row in table(out)} == {"done"}


def test_random_stopping_publishes_the_best_run(sweep: Sweep, out: Path) -> None:
    done = sweep(GRID + "select: {kind: random-stopping, law: poisson, mean: 6, seed: 1}\n")
    assert done.exit_code == 0, done.output
    rows, told = table(out), result(out)
    assert told["privacy"]["choice"]["kind"] == "random-stopping"
    assert told["privacy"]["choice"]["epsilon"] > told["privacy"]["each_trial"][0]["epsilon"]
    best = max(
        (trial["test_accuracy"], row["directory"]) for row in rows
        for trial in store.read_document(out / row["directory"])["trials"]
    )  # fmt: skip
    assert told["chosen"]["directory"] == best[1]
    assert sum(int(row["trials"]) for row in rows) == DRAWN


def test_a_gate_does_not_pass_a_folder_from_which_a_cell_was_taken(sweep: Sweep, tmp_path: Path) -> None:
    """Its releases were made; a cell that failed made none that anybody has seen."""
    assert sweep("grid: {method.learning_rate: [1, 2]}\n").exit_code == 0
    out = tmp_path / "out"
    gate = ["account", str(out), "--max-epsilon", "1e6"]
    assert CliRunner().invoke(main, gate).exit_code == 0
    cell = min(path for path in out.iterdir() if path.is_dir())
    shutil.rmtree(cell)
    done = CliRunner().invoke(main, gate)
    assert done.exit_code == 1
    assert f"{cell}: the sweep lists this cell, which has neither a result nor a record that it failed" in done.stderr
    told = CliRunner().invoke(main, ["account", str(out)])
    assert told.exit_code == 0 and str(cell) in told.stdout
    assert CliRunner().invoke(main, [*gate, "--trials", "all"]).exit_code == 1
    cell.with_name(f"{cell.name}.failed.json").write_text('{"error": "no memory"}')
    assert CliRunner().invoke(main, gate).exit_code == 0
