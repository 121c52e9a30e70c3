"""What holds of every way to train: the ledger prices the statement, which a check confirms; a stop changes nothing,
nor does a pack."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from dpsgd_cli.accounting import accountants
from dpsgd_cli.accounting.accountants.additive import rho_of
from dpsgd_cli.accounting.ledger import entries_from_lines, read_ledgers
from dpsgd_cli.accounting.mechanism import GaussianSum, Mechanism, Release, from_record
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.engine.processes import Team
from dpsgd_cli.errors import RunError
from dpsgd_cli.main import main
from dpsgd_cli.noise import run as noise
from dpsgd_cli.noise.run import Grid, add_noise
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import book as books
from dpsgd_cli.results import report, store
from dpsgd_cli.results.book import BookTerms
from dpsgd_cli.results.prices import unscaled
from dpsgd_cli.training import checkpoint, loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import WAYS as BATCHED
from tests.conftest import left_in, table
from tests.contracts.fresh import Fresh
from tests.contracts.ways import WAYS, write_way

FILES = ("trials.csv", "history.csv", "ledger.jsonl", "model.safetensors")

OTHERWISE = {
    "poisson-quantile": "sum and count share their charge: tests/clipping/test_bounds.py",
    "poisson-banded": "noise takes back noise: tests/noise/test_correlated_noise.py",
    "shuffle-banded": "noise takes back noise: tests/noise/test_correlated_noise.py",
    "shuffle-validation": "a trial that has ended goes on drawing, and none of it is kept",
}


class Way:
    """A recipe in a folder of its own, whose trainings are made once."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.said = name, folder, list[str]()
        self.recipe = write_way(name, folder)
        self.private = WAYS[name].get("privacy", {}) is not None

    def train(self, out: str, *overrides: str, stop: int | None = None, resume: bool = False) -> Path:
        """Train until `stop` epochs are done, then interrupt."""

        def progress(done: int, total: int) -> None:
            if done == stop:
                raise KeyboardInterrupt

        options = loop.Options(self.folder / out, resume, progress, self.said.append)
        return loop.run(resolve_auto(load_recipe(str(self.recipe), overrides)), options)

    @cached_property
    def whole(self) -> Path:
        """The folder of a run whose noise is kept, in `drawn`, and its standard deviations, in `scales`."""
        self.drawn: list[torch.Tensor] = []
        self.scales: list[float] = []

        def watched(sums: torch.Tensor, fresh: torch.Tensor, scale: torch.Tensor, grid: Grid | None) -> None:
            rows = sums.shape if sums.dim() == 2 and scale.dim() == 2 else (1, sums.numel())
            self.drawn.extend(fresh.reshape(rows).double())
            self.scales.extend(scale.expand(rows)[:, 0].tolist() if scale.dim() else [float(scale)])
            add_noise(sums, fresh, scale, grid)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise, "add_noise", watched)
            return self.train("whole")

    @cached_property
    def stopped(self) -> Path:
        """The folder of a run that was interrupted after its first epoch and, continued, after its second."""
        for epoch in (1, 2):
            with pytest.raises(RunError, match=rf"interrupted; {epoch} of \d+ epochs are kept: the same .* --resume"):
                self.train("stopped", stop=epoch, resume=epoch > 1)
        return self.folder / "stopped"

    def book(self) -> str | None:
        """Put a book of the table beside the recipe; None where no book covers what is trained."""
        if self.name not in BATCHED:
            return None
        terms: dict[str, Any] = {
            "adjacency": load_recipe(str(self.recipe)).recipe.adjacency,
            "unit": None,
            "epsilon": 1e4,
            "delta": 1e-3,
        }
        books.create(self.folder / "tiny.book", BookTerms(data={"tiny.npz": sha256(self.folder / "tiny.npz")}, **terms))
        return "tiny.book"

    def copy(self, name: str) -> Path:
        """Copy the checkpoint into another folder of results; return its file there."""
        shutil.copytree(self.stopped, self.folder / name, dirs_exist_ok=True)
        (saved,) = (self.folder / name).glob(".*.checkpoint")
        return saved


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Way:
    return Way(request.param, tmp_path_factory.mktemp("way"))


def test_the_statement_is_that_of_the_ledger_after_each_epoch(way: Way) -> None:
    if not way.private:
        assert store.read_document(way.whole)["privacy"]["epsilon"] is None
        return
    privacy = store.read_document(way.whole)["privacy"]
    accountant = accountants.get(privacy["accountant"])
    entries = entries_from_lines((way.whole / "ledger.jsonl").read_text().splitlines(), "ledger")
    rows = table(way.whole, "trials.csv")
    history = table(way.whole, "history.csv")
    assert set(entries) == set(range(len(rows))) and len(history) == sum(int(row["epochs"]) for row in rows)
    # a method that chooses what it releases states its budget, and beside it what was spent
    chooses = privacy["spent"] is not None
    stated, prefix = (privacy["spent"], "spent_") if chooses else (privacy, "")
    for trial, row in enumerate(rows):
        spent = [entry.release for entry in entries[trial]]
        assert float(row[f"{prefix}epsilon"]) == pytest.approx(accountant.epsilon(spent, privacy["delta"]), rel=1e-12)
        rho = rho_of(spent)
        assert rho is None or rho == pytest.approx(float(row[f"{prefix}rho"]), rel=1e-14)
    for name in ("epsilon", "rho"):
        assert stated[name] is None or stated[name] == max(float(row[f"{prefix}{name}"]) for row in rows)
    budget = privacy["budget"] or {}
    assert all(privacy[name] <= budget[name] for name in budget.keys() & {"rho", "epsilon"})
    for row in history:
        until = [e for e in entries[int(row["trial"])] if e.epoch is None or e.epoch <= int(row["epoch"])]
        spent = [entry.release for entry in until]
        # a privacy-loss distribution is rounded upwards on a grid, which the curve shares among all epochs
        near = 1e-4 if privacy["accountant"] == "pld" else 1e-9
        assert float(row["epsilon"]) == pytest.approx(accountant.epsilon(spent, privacy["delta"]), rel=near)
        gradients = [one.mechanism for one in spent if isinstance(one.mechanism, GaussianSum)]
        # DP-AGD measures a gradient more than once in an epoch, with less and less noise
        if row.get("noise_multiplier") and gradients[-1].label == "gradient" and not way.name.startswith("dp-agd"):
            assert float(row["noise_multiplier"]) == gradients[-1].noise_multiplier


def test_noise_is_fresh_and_as_large_as_charged(way: Way) -> None:
    """Of every Gaussian release: no two share their numbers, and their scales are those that the ledger charges."""
    if way.name in OTHERWISE:
        pytest.skip(OTHERWISE[way.name])
    entries = entries_from_lines((way.whole / "ledger.jsonl").read_text().splitlines(), "ledger")
    spent = [entry.release for own in entries.values() for entry in own]
    gaussians = {one.mechanism: one.count for one in spent if isinstance(one.mechanism, GaussianSum)}
    charged = {f"{own.noise_multiplier * own.sensitivity:.6g}" for own in gaussians}
    assert charged == {f"{one:.6g}" for one in way.scales}
    assert len({tuple(one[:3].tolist()) for one in way.drawn}) == len(way.drawn) >= sum(gaussians.values())


def test_a_run_that_was_stopped_and_continued_is_the_run_that_was_not(way: Way) -> None:
    way.copy("resumed")
    continued = way.train("resumed", resume=True)
    assert any(text.startswith("Continuing after epoch 2 of") for text in way.said)
    for name in FILES:
        assert not (way.whole / name).exists() or (continued / name).read_bytes() == (way.whole / name).read_bytes()
    assert store.read_document(continued)["privacy"] == store.read_document(way.whole)["privacy"]
    assert left_in(way.folder / "resumed") == {"tiny"}


def counted(releases: list[Release]) -> Counter[Mechanism]:
    """How often each mechanism was used, by its noise multiplier."""
    found = Counter[Mechanism]()
    for one in map(unscaled, releases):
        found[one.mechanism] += one.count
    return found


def test_a_run_without_a_seed_goes_on_as_if_it_had_not_been_stopped(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way draws the same, stopped or not, from streams of which nothing but noise can be drawn twice.

    A book is charged for all trials, and for no mechanism less often than it was used.
    """
    asked: dict[tuple[object, ...], int] = {}
    monkeypatch.setattr(Team, "streams", lambda _, own: tuple(Fresh(i, asked) for i in range(len(own))))
    book = way.book()
    charged = way.train("drawn", "seed=null", *(["privacy.book=tiny.book"] if book else []))
    whole = load_file(charged / "model.safetensors")
    asked.clear()
    with pytest.raises(RunError, match="2 of"):
        way.train("drawn again", "seed=null", stop=2)
    continued = load_file(way.train("drawn again", "seed=null", resume=True) / "model.safetensors")
    assert all(torch.equal(value, continued[key]) for key, value in whole.items())
    if book:
        (charge,) = books.read(way.folder / book).charges
        ledgers = read_ledgers(charged / "ledger.jsonl")
        assert charge["trials"] == len(ledgers) == 2 and charge["mu_squared"] > 0
        used = counted([release for releases in ledgers.values() for release in releases])
        assert used and used <= counted([from_record(record) for record in charge["releases"]])


def test_a_result_passes_its_check_and_has_a_page_that_needs_nothing_else(way: Way) -> None:
    if not way.private:
        pytest.skip("it states nothing")
    checked = CliRunner().invoke(main, ["check", str(way.whole)])
    marks = {line.split()[1] for line in checked.stdout.splitlines() if line.startswith("  ")}
    assert checked.exit_code == 0 and marks == {"ok"}, checked.output
    plain, drawn = (page.read_text(encoding="utf-8") for page in report.write(way.whole))
    privacy = store.read_document(way.whole)["privacy"]
    assert all(f"- {said}" in plain for said in privacy["declarations"])
    assert not re.search(r"^## .*\n\n## ", plain, re.MULTILINE), "a section has nothing in it"
    stated = re.search(r"Epsilon at most (\S+) at delta 0.001", plain)
    assert stated is not None and 0 <= float(stated[1]) - privacy["epsilon"] <= 1e-4
    assert ("so the budget is the bound" in plain) == (privacy["spent"] is not None)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', drawn)) <= {"data:,", *re.findall(r'href="(#[^"]*)"', drawn)}
    assert "<script" not in drawn and "@import" not in drawn
    ElementTree.fromstring(drawn.replace("<!DOCTYPE html>", "").replace('<meta charset="utf-8">', "").replace(
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">', ""
    ))  # fmt: skip


def test_a_trial_is_the_same_alone_in_a_pack_and_in_pieces(way: Way) -> None:
    if "folds" in WAYS[way.name] or way.name.startswith("dp-agd"):
        pytest.skip("trials are its folds; tests/methods/test_dp_agd.py asks DP-AGD")
    packed = table(way.train("pack", "repeats=3"), "trials.csv")
    for seed, pieces in ((0, []), (2, ["runtime.micro_batch=5"])):
        (alone,) = table(way.train(f"alone {seed}", "repeats=1", f"seed={seed}", *pieces), "trials.csv")
        assert alone["seed"] == packed[seed]["seed"] == str(seed)
        for name in set(alone) - {"trial"}:
            assert alone[name] == packed[seed][name] or float(alone[name]) == pytest.approx(
                float(packed[seed][name]), abs=1e-5
            )
    assert len({row["test_loss"] for row in packed}) == 3


CHARGES: dict[str, Callable[[list[list[str]]], list[list[str]]]] = {
    "emptied": lambda ledgers: [[] for _ in ledgers],
    "one emptied": lambda ledgers: [*ledgers[:-1], []],
    "last line gone": lambda ledgers: [*ledgers[:-1], ledgers[-1][:-1]],
    "cheaper": lambda ledgers: [[line.replace('"count": 4', '"count": 1') for line in own[:-1]] for own in ledgers],
    "charged twice": lambda ledgers: [*ledgers[:-1], ledgers[-1] * 2],
}


def test_what_was_done_and_what_was_charged_must_agree(way: Way) -> None:
    """An emptied ledger once lowered a result's epsilon from 332.5 to 314.0. Charges of preprocessing stay here."""
    if not way.private:
        pytest.skip("it charges nothing")
    saved = way.copy("tampered")
    content = checkpoint.load(saved)
    assert content is not None
    before = [[line for line in own if '"phase": "before"' in line] for own in content["ledgers"]]
    trained = [[line for line in own if '"phase": "before"' not in line] for own in content["ledgers"]]
    for change in CHARGES.values():
        fewer = [first + rest for first, rest in zip(before, change(trained), strict=True)]
        checkpoint.save(saved, content | {"ledgers": fewer})
        with pytest.raises(RunError, match=r"2 finished epochs were not charged as they are.*train again"):
            way.train("tampered", resume=True)


def test_every_way_to_train_is_priced_and_finished(way: Way) -> None:
    """The ledger is what the first epochs of the whole run released, unless the method chooses."""
    saved = way.copy("finished")
    loaded, options = resolve_auto(load_recipe(str(way.recipe))), loop.Options(way.folder / "finished")
    if WAYS[way.name].get("method", {}).get("kind") == "private-selection":
        with pytest.raises(RunError, match="it chooses among its candidates in its last epoch; continue it with --res"):
            loop.finish(loaded, options)
        assert saved.is_file()
        return
    directory = loop.finish(loaded, options)
    assert left_in(way.folder / "finished") == {"tiny"}
    document = store.read_whole(directory)
    privacy = document["privacy"]
    assert document["metrics"]["test_loss"]["n"] == len(document["trials"])
    if not way.private:
        return
    lines, whole = (
        [json.loads(line) for line in (at / "ledger.jsonl").read_text().splitlines()] for at in (directory, way.whole)
    )
    if privacy["spent"] is None:
        assert lines == [line for line in whole if line["phase"] == "before" or line["epoch"] < 2]
        assert privacy["epsilon"] < store.read_document(way.whole)["privacy"]["epsilon"]
        return
    assert privacy["rho"] == pytest.approx(0.5, rel=1e-6), "the method chooses: its budget is stated"
    assert privacy["spent"]["rho"] < 0.45 and "the whole budget" in privacy["declarations"][-1]
