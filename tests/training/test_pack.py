"""Several recipes train as one pack: each trial ends where it ends alone, whoever is beside it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from dpsgd_cli.recipe.loading import LoadedRecipe, load_recipe
from dpsgd_cli.results import store
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member

COMMON = ["model.kind=linear", "repeats=2", "epochs=3"]
VARIANTS = (
    ["seed=5", "method.learning_rate=0.5"],
    ["privacy.clipping.norm=0.3", "epochs=5", "privacy.budget.epsilon=1"],
    ["method.weight_decay=0.01", "repeats=1", "privacy.schedule={kind: uniform, initial: 2.5}"],
)


def members(*variants: list[str]) -> list[Member]:
    loaded = [load_recipe("quickstart", [*COMMON, *variant]) for variant in variants]
    return [Member(one, loop.plan_recipe(one)[0]) for one in map(resolve_auto, loaded)]


def columns(directory: Path, table: str) -> list[dict[str, str]]:
    with (directory / table).open(newline="") as file:
        return list(csv.DictReader(file))


def number(cell: str) -> float:
    """An empty cell (no rho for sampled batches) equals an empty cell only."""
    return float(cell or -1)


def run_alone(loaded: LoadedRecipe, out: Path) -> Path:
    return loop.run(resolve_auto(loaded), loop.Options(out))


def test_a_trial_ends_the_same_alone_and_in_a_pack(tmp_path: Path) -> None:
    pack = members(*VARIANTS)
    together = loop.run_pack(pack, loop.Options(tmp_path / "pack"))
    for member, directory in zip(pack, together, strict=True):
        alone = run_alone(member.loaded, tmp_path / "alone")
        assert directory.name == alone.name
        assert store.read_document(directory)["privacy"] == store.read_document(alone)["privacy"]
        assert (directory / "ledger.jsonl").read_text() == (alone / "ledger.jsonl").read_text()
        for table in ("trials.csv", "history.csv"):
            ours, theirs = columns(directory, table), columns(alone, table)
            assert [row.keys() for row in ours] == [row.keys() for row in theirs]
            for one, other in zip(ours, theirs, strict=True):
                for key, value in one.items():
                    assert number(value) == pytest.approx(number(other[key]), rel=1e-4, abs=1e-6), (table, key)


def test_a_stopped_pack_goes_on_where_it_was(tmp_path: Path) -> None:
    pack = members(*[[*variant, "runtime.checkpoint_seconds=0"] for variant in VARIANTS])

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="2 of 5 epochs are kept"):
        loop.run_pack(pack, loop.Options(tmp_path / "a", progress=stop))
    told: list[str] = []
    resumed = loop.run_pack(pack, loop.Options(tmp_path / "a", resume=True, say=told.append))
    assert "Continuing after epoch 2 of 5." in told
    undisturbed = loop.run_pack(pack, loop.Options(tmp_path / "b"))
    for one, other in zip(resumed, undisturbed, strict=True):
        assert (one / "trials.csv").read_text() == (other / "trials.csv").read_text()
        assert (one / "ledger.jsonl").read_text() == (other / "ledger.jsonl").read_text()
    assert sorted((tmp_path / "a").iterdir()) == sorted(resumed)
