"""Two shards of a sweep that write into one folder, whatever the order of their reading and writing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.results import store
from dpsgd_cli.sweep import folder, pricing
from dpsgd_cli.sweep.session import SweepSession
from tests.sweep.conftest import FAST, GRID, Sweep, result

SELECT = GRID + "select: {kind: random-stopping, mean: 3, seed: 1}\n"
SLOW = """\
import sys, time
from pathlib import Path
from dpsgd_cli.results import store
from dpsgd_cli.sweep import pricing
from dpsgd_cli.sweep.session import SweepSession

first, late = sys.argv[3] == "first", Path(sys.argv[2]) / "late"
price = pricing.statement

def wait(*given):
    told = price(*given)
    print("priced", flush=True)
    for _ in range(600):
        if late.exists():
            break
        time.sleep(0.05)
    return told

if first:  # a slow disk between the price and what follows it
    pricing.statement = wait
session = SweepSession.open(sys.argv[1], [], Path(sys.argv[2]))
session.begin()
session.finish()
"""


@pytest.mark.parametrize("blocks", [GRID, SELECT])
def test_a_statement_is_about_the_cells_that_were_priced(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch, blocks: str
) -> None:
    """A cell that finishes between two steps of a shard is in no statement beside one that was priced before it."""
    assert sweep(blocks).exit_code == 0
    session = SweepSession.open(str(out.parent / "sweep.yaml"), [], out)
    last = out / session.running[-1].directory
    last.rename(out / ".later")
    price, written = pricing.statement, []

    def finishing(*given: Any) -> dict[str, Any]:
        told = price(*given)
        if not last.exists():
            (out / ".later").rename(last)
        return told

    tables = folder.write_tables

    def seen(*given: Any) -> dict[str, Any]:
        written.append(tables(*given))
        return written[-1]

    monkeypatch.setattr(pricing, "statement", finishing)
    monkeypatch.setattr(folder, "write_tables", seen)
    session.finish()
    trials = [sum(cell.trials for cell in session.running[: one["finished"]]) for one in written]
    assert [one["privacy"]["all_trials"]["trials"] for one in written] == trials
    assert [one["finished"] for one in written] == [len(session.running) - 1, len(session.running)]
    assert [one["chosen"] is not None for one in written] == [False, "select" in blocks]
    assert result(out)["finished"] == len(session.running)


def test_a_shard_with_a_slow_disk_leaves_no_statement_of_fewer_cells(sweep: Sweep, out: Path) -> None:
    """One process prices three of four cells and waits; the fourth finishes and another process writes."""
    assert sweep(GRID).exit_code == 0
    session = SweepSession.open(str(out.parent / "sweep.yaml"), [], out)
    whole, last = result(out), out / session.running[-1].directory
    last.rename(out / ".later")
    words = [sys.executable, "-c", SLOW, session.source, str(out)]
    slow = subprocess.Popen([*words, "first"], stdout=subprocess.PIPE)
    assert slow.stdout is not None and slow.stdout.readline() == b"priced\n"
    (out / ".later").rename(last)
    subprocess.run([*words, "second"], check=True)
    (out / "late").touch()
    assert slow.wait(60) == 0
    assert result(out) == whole


def test_a_table_with_nonprivate_columns_is_its_owners(sweep: Sweep, out: Path) -> None:
    old = os.umask(0o022)
    try:
        assert sweep(f"list:\n{FAST}").exit_code == 0
    finally:
        os.umask(old)
    (file,) = out.glob("*.table.csv")
    assert "nonprivate_" in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_unpublished_draw_of_a_killed_run_is_gone_before_the_next_draw(
    sweep: Sweep, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(staged: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "publish", killed)
        assert sweep(f"list:\n{FAST}").exit_code != 0
    (left,) = [path for path in out.glob(".*.writing-*") if path.is_dir()]
    assert (left / "model.safetensors").exists() or (left / "result.json").exists()
    from dpsgd_cli.training import loop

    start, there = loop.start, list[bool]()  # type: ignore[attr-defined]

    def seen(*given: Any) -> Any:
        there.append(left.exists())
        return start(*given)

    monkeypatch.setattr("dpsgd_cli.training.loop.start", seen)
    monkeypatch.setattr("dpsgd_cli.results.files.sweep_up", lambda folder: None)
    assert sweep(f"list:\n{FAST}").exit_code == 0
    assert there == [False]
