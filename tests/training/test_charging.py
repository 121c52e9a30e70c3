"""What a training charges its book for: the whole plan, once, before any record is used; and what no book covers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from dpsgd_cli import library
from dpsgd_cli.accounting.mechanism import GaussianSum, Release
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.errors import BudgetExceeded, PrivacyError, RecipeError, RunError, UsageError
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import book as books
from dpsgd_cli.results import store
from dpsgd_cli.results.book import BookTerms
from dpsgd_cli.training import charging, loop
from dpsgd_cli.training.plans import resolve_auto
from tests.accounting.test_book_filter import delta_of, epsilon_of
from tests.conftest import GRADIENT, OWN, StopAt, Train, WriteRecipe

FULL: dict[str, Any] = {
    "method": GRADIENT | {"batching": "full"},
    "privacy": {"budget": {"epsilon": 1, "delta": 1e-3}, "book": "tiny.book"},
    "seed": None,
    "repeats": 1,
}
FULL["method"].pop("batch_size")


@pytest.fixture
def recipe(write_recipe: WriteRecipe) -> Callable[..., Path]:
    """Writes a recipe with a book beside it, of epsilon 3 at delta 1e-3."""

    def write(terms: dict[str, Any] | None = None, **sections: Any) -> Path:
        path = write_recipe(**(FULL | sections))
        given: dict[str, Any] = {
            "data": {"tiny.npz": sha256(path.parent / "tiny.npz")},
            "unit": None,
            "adjacency": "add-remove",
        }
        given |= {"epsilon": 3.0, "delta": 1e-3} | (terms or {})
        (path.parent / "tiny.book").unlink(missing_ok=True)
        books.create(path.parent / "tiny.book", BookTerms(**given))
        return path

    return write


def charges(path: Path) -> list[dict[str, Any]]:
    return books.read(path.parent / "tiny.book").charges


def published(path: Path) -> int:
    book = books.read(path.parent / "tiny.book")
    return sum(book.released(line["id"]) for line in book.charges)


def test_a_result_names_its_book_and_its_charge(recipe: Callable[..., Path], train: Train) -> None:
    path = recipe()
    directory = train(path)
    book = books.read(path.parent / "tiny.book")
    told = store.read_document(directory)["privacy"]["book"]
    assert told == {"book": book.identity, "charge": book.charges[0]["id"]}
    assert published(path) == 1


def test_a_run_is_charged_before_a_record_is_used(
    recipe: Callable[..., Path], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe()

    def start(*given: Any, **named: Any) -> Any:
        assert len(charges(path)) == 1
        raise RunError("the disk is gone")

    monkeypatch.setattr(loop, "start", start)
    with pytest.raises(RunError, match="the disk is gone"):
        train(path)
    assert len(charges(path)) == 1 and published(path) == 0


def test_what_does_not_fit_uses_no_record(
    recipe: Callable[..., Path], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe({"epsilon": 0.9})
    monkeypatch.setattr(loop, "start", lambda *given, **named: pytest.fail("records were used"))
    with pytest.raises(BudgetExceeded, match="nothing was started"):
        train(path)
    assert charges(path) == [] and not list((path.parent / "out").glob("tiny-*"))


def test_several_runs_are_composed_tightly(recipe: Callable[..., Path], train: Train) -> None:
    """Six runs of epsilon 1 at delta 1e-3 are 2.98 together by the analytic Gaussian of SciPy: a book of 3.1 holds
    them, and no seventh of epsilon 1 (3.27)."""
    path = recipe({"epsilon": 3.1})
    for number in range(6):
        train(path, out=path.parent / f"out{number}")
    with pytest.raises(BudgetExceeded):
        train(path, out=path.parent / "out6")
    mu = brentq(lambda mu: delta_of(mu, 1.0) - 1e-3, 0.01, 10, xtol=1e-14)
    assert sum(line["mu_squared"] for line in charges(path)) == pytest.approx(6 * mu**2, rel=1e-4)
    assert epsilon_of(6**0.5 * mu, 0.9e-3) < 3.1 < epsilon_of(7**0.5 * mu, 0.9e-3)


def test_a_killed_training_has_spent_its_budget_and_one_that_goes_on_spends_it_once(
    recipe: Callable[..., Path], train: Train, stop_at: StopAt
) -> None:
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, progress=stop_at(1, KeyboardInterrupt()))
    assert (len(charges(path)), published(path)) == (1, 0)
    train(path, resume=True)
    assert (len(charges(path)), published(path)) == (1, 1)
    with pytest.raises(RunError):
        train(path, out=path.parent / "b", progress=stop_at(1, KeyboardInterrupt()))
    train(path, out=path.parent / "b")
    assert (len(charges(path)), published(path)) == (3, 2)


def test_a_training_that_is_killed_outright_stays_charged(recipe: Callable[..., Path], train: Train) -> None:
    """SIGKILL, once its first checkpoint is there; the resumed training publishes what was charged."""
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0}, epochs=2_000)
    out = path.parent / "out"
    command = [sys.executable, "-m", "dpsgd_cli", "train", str(path), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not list(out.glob(".*.checkpoint")):
            assert process.poll() is None
            time.sleep(0.05)
        process.kill()
    assert (len(charges(path)), published(path)) == (1, 0)
    loop.finish(resolve_auto(load_recipe(str(path))), loop.Options(out))
    assert (len(charges(path)), published(path)) == (1, 1)


def test_a_resume_from_a_copied_checkpoint_is_a_second_run(
    recipe: Callable[..., Path], train: Train, stop_at: StopAt
) -> None:
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, progress=stop_at(1, KeyboardInterrupt()))
    (checkpoint,) = (path.parent / "out").glob(".*.checkpoint")
    shutil.copy(checkpoint, path.parent / "copy")
    directory = train(path, resume=True)
    shutil.rmtree(directory)
    shutil.copy(path.parent / "copy", checkpoint)
    train(path, resume=True)
    assert (len(charges(path)), published(path)) == (2, 2)


def test_a_resume_by_another_plan_is_charged(
    recipe: Callable[..., Path], train: Train, stop_at: StopAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another version of dpsgd may plan it: with less noise it is not what was charged."""
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, progress=stop_at(1, KeyboardInterrupt()))
    plan = loop.plan_recipe

    def cheaper(loaded: Any) -> Any:
        found, outline = plan(loaded)
        assert found is not None
        epochs = tuple(
            tuple(Release(GaussianSum(4.0, own.mechanism.adjacency), own.count) for own in epoch)
            for epoch in found.epochs
        )
        return replace(found, epochs=epochs), outline

    monkeypatch.setattr(loop, "plan_recipe", cheaper)
    with pytest.raises(RunError, match="were not charged as they are"):
        train(path, resume=True)
    first, second = charges(path)
    assert first["mu_squared"] < second["mu_squared"]


def test_a_resume_without_a_charge_is_charged(recipe: Callable[..., Path], train: Train, stop_at: StopAt) -> None:
    """The training began without the book, and the option of it is no other recipe."""
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, "privacy.book=null", progress=stop_at(1, KeyboardInterrupt()))
    assert charges(path) == []
    train(path, resume=True)
    assert (len(charges(path)), published(path)) == (1, 1)


def test_a_finished_run_is_charged_for_its_whole_plan(
    recipe: Callable[..., Path], train: Train, stop_at: StopAt
) -> None:
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, "privacy.book=null", progress=stop_at(1, KeyboardInterrupt()))
    settled = resolve_auto(load_recipe(str(path)))
    loop.finish(settled, loop.Options(path.parent / "out"))
    whole = train(path, out=path.parent / "whole")
    first, second = charges(path)
    assert first["mu_squared"] == second["mu_squared"] and published(path) == 2
    assert store.read_document(whole)["privacy"]["book"]["charge"] is not None


def test_of_two_that_go_on_at_once_only_one_publishes(
    recipe: Callable[..., Path], train: Train, stop_at: StopAt
) -> None:
    path = recipe(runtime={"device": "cpu", "threads": 1, "checkpoint_seconds": 0})
    with pytest.raises(RunError):
        train(path, progress=stop_at(1, KeyboardInterrupt()))

    def other(done: int, total: int) -> None:
        if done == total:
            (line,) = charges(path)
            books.release(path.parent / "tiny.book", path.parent / "out", line["runs"])

    with pytest.raises(RunError, match="published already"):
        train(path, resume=True, progress=other)
    assert not list((path.parent / "out").glob("tiny-*"))


def test_a_release_is_noted_before_it_is_published(
    recipe: Callable[..., Path], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe()

    def publish(staged: Any) -> None:
        assert published(path) == 1
        raise RunError("killed")

    monkeypatch.setattr(store, "publish", publish)
    with pytest.raises(RunError, match="killed"):
        train(path)
    assert not list((path.parent / "out").glob("tiny-*"))


def test_a_finished_result_is_charged_no_more_and_must_be_of_the_book(
    recipe: Callable[..., Path], train: Train
) -> None:
    path = recipe()
    train(path)
    train(path)
    assert len(charges(path)) == 1
    train(path, "privacy.book=null", out=path.parent / "b")
    with pytest.raises(RunError, match="was not charged to"):
        train(path, out=path.parent / "b")
    empty = (path.parent / "tiny.book").read_text().splitlines()[0]
    (path.parent / "tiny.book").write_text(f"{empty}\n")
    with pytest.raises(RunError, match="old copy of the book"):
        train(path)


def test_a_dry_run_charges_nothing(recipe: Callable[..., Path]) -> None:
    path = recipe()
    loop.rehearse(resolve_auto(load_recipe(str(path))))
    assert charges(path) == []


def test_python_charges_a_book_too(recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = recipe()
    monkeypatch.chdir(path.parent)
    result = library.train(path, {"privacy.book": None}, book="tiny.book", out=path.parent / "out")
    assert result.privacy["book"]["book"] == books.read(path.parent / "tiny.book").identity
    assert len(charges(path)) == 1


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another table": ({"data": {"tiny.npz": "ab" * 32}}, {}, "of another table"),
    "a file more": ({"data": {"tiny.npz": "ab" * 32, "b": "cd" * 32}}, {}, "of another table"),
    "another adjacency": ({"adjacency": "replace-one"}, {}, "replace-one, but the recipe has add-remove"),
    "another unit": ({"unit": "who"}, {}, "but the recipe has add-remove"),
    "folds": ({}, {"folds": 3}, "each record is tested, without noise"),
    "a step without noise": (
        {},
        {"data": OWN | {"preprocess": [{"scale": {"by": "standard"}}]}},
        "no book covers this recipe",
    ),
    "data that are no file": ({}, {"data": {"name": "digits"}}, "not in files"),
}


@pytest.mark.parametrize(("terms", "sections", "why"), REFUSED.values(), ids=REFUSED)
def test_what_the_book_does_not_cover_is_refused(
    recipe: Callable[..., Path], train: Train, terms: dict[str, Any], sections: dict[str, Any], why: str
) -> None:
    path = recipe(terms, **sections)
    with pytest.raises(PrivacyError, match=why):
        train(path)
    assert charges(path) == []


def test_a_changed_table_is_another_table(recipe: Callable[..., Path], train: Train) -> None:
    path = recipe()
    with np.load(path.parent / "tiny.npz") as file:
        arrays = dict(file)
    arrays["x"][0, 0] += 1e-9
    np.savez(path.parent / "tiny.npz", **arrays)
    with pytest.raises(PrivacyError, match="of another table"):
        train(path)


def test_a_table_that_changes_after_it_was_charged_is_not_trained_on(
    recipe: Callable[..., Path], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe()
    begin = charging.begin

    def slowly(*given: Any, **named: Any) -> None:
        begin(*given, **named)
        with np.load(path.parent / "tiny.npz") as file:
            arrays = dict(file)
        arrays["x"][0, 0] += 1e-3
        np.savez(path.parent / "tiny.npz", **arrays)

    monkeypatch.setattr(charging, "begin", slowly)
    with pytest.raises(RunError, match=r"tiny\.npz: was changed after"):
        train(path)
    assert published(path) == 0


def test_a_test_file_that_is_the_table_is_refused(recipe: Callable[..., Path], train: Train, tmp_path: Path) -> None:
    """Metrics on it would have no noise."""
    rows = "a,y\n" + "".join(f"{i / 60},{i % 2}\n" for i in range(60))
    (tmp_path / "t.csv").write_text(rows)
    (tmp_path / "u.csv").write_text(rows)
    for test in ("t.csv", "u.csv"):
        own = {"path": "t.csv", "test_path": test, "target": "y", "classes": [0, 1], "bounds": [0, 1]}
        path = recipe({"data": {"t.csv": sha256(tmp_path / "t.csv")}}, data=own)
        with pytest.raises(PrivacyError, match="of another table"):
            train(path)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"seed": 3}, "no private release")],
)
def test_a_recipe_that_no_book_can_cover_is_invalid(
    recipe: Callable[..., Path], changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        load_recipe(str(recipe(**changes)))


@pytest.mark.parametrize("listed", [{"classes": [0, 1]}, {}])
def test_runs_hold_out_the_same_records_however_they_are_read(
    recipe: Callable[..., Path], train: Train, tmp_path: Path, listed: dict[str, Any]
) -> None:
    """Under add-remove a coin of a record's content as read decides: with a column less, other records are tested.

    So they are with another positive class, whose number is another one.
    """
    (tmp_path / "t.csv").write_text("a,b,y\n" + "".join(f"{i / 60},{i % 7},{i % 2}\n" for i in range(60)))
    own = {"path": "t.csv", "target": "y", **listed, "bounds": {"a": [0, 1], "b": [0, 7]}}
    terms = {"data": {"t.csv": sha256(tmp_path / "t.csv")}, "epsilon": 30.0}
    path = recipe(terms, data=own)
    train(path)
    train(path, "data.bounds={a: [0, 2], b: [0, 7]}")
    for change in ("data.drop=[b]", "data.positive=0", "data.split={test: 0.3}"):
        fewer = ["data.bounds={a: [0, 1]}"] if "drop" in change else []
        with pytest.raises(UsageError, match="leave out the same records"):
            train(path, change, *fewer)
    assert len(charges(path)) == 2
