"""Random stopping without a seed: what may be seen afterwards is one run's output and the price."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from dpsgd_cli.accounting.ledger import Ledger, to_lines
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.errors import ModelError
from dpsgd_cli.main import main
from dpsgd_cli.results import store
from dpsgd_cli.sweep import private_tuning
from dpsgd_cli.sweep.running import PackJob
from dpsgd_cli.sweep.session import SweepSession
from dpsgd_cli.training import loop
from tests.conftest import toy_result, write_result
from tests.sweep import conftest
from tests.sweep.conftest import GRID, Sweep

STOPPING = GRID + "select: {kind: random-stopping, law: poisson, mean: 3}\n"
SECURE = (*conftest.SECURE, "save_model=true")


def everything(out: Path) -> dict[str, str]:
    """Every file, hidden ones too, with its text; weights by their size."""
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(out)): path.read_text() if path.suffix != ".safetensors" else str(path.stat().st_size)
        for path in files
    }


def without_output(text: str) -> str:
    """Without what the best run is: its settings and its metrics, which are released."""
    return re.sub(r"(learning_rate|norm|test_\w+)([\\\"=: ]+)[0-9.e-]+", r"\1", text)


def draws(monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
    monkeypatch.setattr(private_tuning, "draw", lambda select, cells: counts)


def test_what_is_seen_does_not_depend_on_how_many_runs_there_were(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run, or nine of all cells in several packs: the same files, lines and numbers, but for one run's output."""
    seen = []
    for counts, out in (([0, 0, 0, 1], "one"), ([2, 3, 1, 3], "nine")):
        draws(monkeypatch, counts)
        done = sweep(STOPPING, *SECURE, "most_trials=3", out=out)
        assert done.exit_code == 0, done.output
        told = done.stdout.replace(f"/{out}", "/out"), done.stderr
        seen.append(without_output(json.dumps([everything(tmp_path / out), told], sort_keys=True)))
        assert not [path for path in (tmp_path / out).iterdir() if path.name.startswith(".")]
        assert "trial" not in done.stdout and done.stderr == ""
    assert seen[0] == seen[1]


def test_the_best_is_released_and_the_others_are_removed(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, [2, 0, 3, 0])
    runs: dict[str, Any] = {}
    remove = private_tuning._publish

    def watched(public: Any, private: Any, sweep: Any, cells: Any, every: Any, book: Any) -> Any:
        assert stat.S_IMODE(private.path.stat().st_mode) == 0o700
        for cell in cells:
            directory = private.path / cell.directory
            weights = load_file(directory / "model.safetensors")
            for row in store.read_document(directory)["trials"]:
                runs[f"{cell.label}/{row['trial']}"] = row["test_accuracy"], cell.settings, row["trial"], weights
        return remove(public, private, sweep, cells, every, book)

    monkeypatch.setattr(private_tuning, "_publish", watched)
    assert sweep(STOPPING, *SECURE).exit_code == 0
    assert len(runs) == 5
    accuracy, settings, trial, weights = max(runs.values(), key=lambda one: one[0])
    stem = next(out.glob("*.result.json")).name.removesuffix(".result.json")
    assert {path.name for path in out.iterdir()} == {f"{stem}.chosen", f"{stem}.result.json", f"{stem}.sweep.json"}
    assert not re.search(r"timing|pack_trials", json.dumps(everything(out)))
    told = json.loads((out / f"{stem}.result.json").read_text())
    beside_it = Ledger()
    beside_it.spend(Release(GaussianSum(16.0, "add-remove")), epoch=0)
    other = toy_result(to_lines(beside_it.entries, 0, None), trials=1)
    write_result(out / "other", other, "data: {name: digits}\nmethod: {batching: poisson}\n")
    beside = CliRunner().invoke(main, ["account", str(out), "--trials", "all", "--max-epsilon", "1e9"])
    # lines are broken where the names of folders leave room
    said = " ".join(beside.stdout.split())
    assert (beside.exit_code, "a private choice among runs that left no ledger" in said) == (1, True)
    assert set(told) == {"sweep", "privacy", "chosen"}
    assert set(told["chosen"]) == {"settings", "metrics", "declarations", "uncovered_steps", "directory"}
    assert (told["chosen"]["settings"], told["chosen"]["metrics"]["test_accuracy"]) == (settings, accuracy)
    assert told["privacy"]["each_trial"] == [] and told["privacy"]["all_trials"] is None
    found = load_file(out / f"{stem}.chosen" / "model.safetensors")
    assert {name: values.tolist() for name, values in found.items()} == {
        name.removeprefix(f"trial-{trial}/"): values.tolist()
        for name, values in weights.items()
        if name.startswith(f"trial-{trial}/")
    }
    assert "\nrepeats: 1\n" in (out / f"{stem}.chosen" / "recipe.yaml").read_text()


def test_a_sweep_that_has_published_is_never_drawn_again(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sweep(STOPPING, *SECURE).exit_code == 0
    before = everything(out)

    def again(*_: object) -> list[int]:
        raise AssertionError("drawn again")

    monkeypatch.setattr(private_tuning, "draw", again)
    done = sweep(STOPPING, *SECURE)
    assert done.exit_code == 0, done.output
    assert everything(out) == before


def test_no_run_at_all_is_released_as_such(sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, [0, 0, 0, 0])
    done = sweep(STOPPING, *SECURE)
    assert done.exit_code == 0 and "no trial chosen" in done.stdout
    nothing = next(out.glob("*.result.json")).read_text()
    draws(monkeypatch, [1, 0, 0, 2])
    assert sweep(STOPPING, *SECURE, out="other").exit_code == 0
    some = next((out.parent / "other").glob("*.result.json")).read_text()
    assert json.loads(nothing)["privacy"] == json.loads(some)["privacy"]
    assert not list(out.glob("*.chosen"))


def test_a_run_that_fails_publishes_nothing_and_goes_on_with_the_same_draw(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws(monkeypatch, [1, 0, 1, 0])
    run_pack = loop.run_pack

    def broken(members: Any, options: Any) -> Any:
        if any(member.loaded.recipe.method.learning_rate == 2 for member in members):
            raise ModelError("broken for this test")
        return run_pack(members, options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "run_pack", broken)
        done = sweep(STOPPING, *SECURE)
        fast = sweep(STOPPING, *SECURE, "--fail-fast", "--retry-failed")
    assert (done.exit_code, "nothing is published" in " ".join(done.stderr.split())) == (1, True)
    assert (fast.exit_code, "a run failed; stopped because of --fail-fast" in fast.stderr) == (1, True)
    assert "learning_rate" not in done.output + fast.output and "1 of" not in done.output + fast.output
    assert not list(out.glob("*.result.json")) and not list(out.glob("*.chosen"))
    status = CliRunner().invoke(main, ["sweep", "status", str(out)]).stdout
    assert "begun; its progress stays secret" in status
    assert "holds no ledger" in CliRunner().invoke(main, ["account", str(out)]).stderr
    draws(monkeypatch, [9, 9, 9, 9])
    done = sweep(STOPPING, *SECURE, "--retry-failed")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "published" in CliRunner().invoke(main, ["sweep", "status", str(out)]).stdout


def test_shards_publish_together(sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws(monkeypatch, [1, 1, 1, 0])
    first = sweep(STOPPING, *SECURE, "--shard", "1/2")
    assert (first.exit_code, "nothing is published yet" in first.stderr) == (0, True), first.output
    assert not list(out.glob("*.result.json"))
    assert sweep(STOPPING, *SECURE, "--shard", "2/2").exit_code == 0
    assert list(out.glob("*.result.json")) and not list(out.glob(".*.private"))


def test_a_process_that_comes_second_reads_what_was_published(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has opened the sweep, and finds the runs gone when it would choose."""
    draws(monkeypatch, [1, 1, 0, 0])
    assert sweep(STOPPING, *SECURE, "--dry-run").exit_code == 0
    late = SweepSession.open(str(out.parent / "sweep.yaml"), SECURE, out)
    late.begin()
    assert len(late.running) == 2
    assert sweep(STOPPING, *SECURE).exit_code == 0
    told = json.loads(next(out.glob("*.result.json")).read_text())
    assert late.finish() == told
    seen = iter([None, told])  # it looks before it chooses, and again when the runs are gone
    monkeypatch.setattr(private_tuning, "published", lambda place: next(seen))
    assert late.finish() == told


def test_a_quiet_job_says_nothing_of_its_packs(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    PackJob((), out, quiet=True).say("warning: once a pack")
    assert capsys.readouterr().err == ""
    PackJob((), out).say("warning: once a pack")
    assert capsys.readouterr().err == "warning: once a pack\n"


def test_only_random_stopping_without_a_seed_is_secret(sweep: Sweep, out: Path) -> None:
    assert sweep("grid: {method.learning_rate: [1, 2]}\n", *SECURE).exit_code == 0
    assert list(out.glob("*.table.csv"))


def test_a_split_that_differs_between_cells_is_refused_before_anything_is_drawn(sweep: Sweep, out: Path) -> None:
    blocks = (
        "grid: {data.split: [{test: 0.2, seed: 0}, {test: 0.2, seed: 1}]}\nselect: {kind: random-stopping, mean: 3}\n"
    )
    done = sweep(blocks, *SECURE)
    assert done.exit_code == 2 and "leave out different records" in " ".join(done.stderr.split())
    assert not out.exists()
