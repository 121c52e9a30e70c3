"""PATE from recipe to result: one record moves one vote, and answers are drawn once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dpsgd_cli.accounting.mechanism import Release, Threshold
from dpsgd_cli.accounting.plan import Facts
from dpsgd_cli.errors import DpsgdError, PrivacyError
from dpsgd_cli.methods.pate import run as pate
from dpsgd_cli.methods.pate.price import pate as planned
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from dpsgd_cli.training.start import Member, start
from tests.methods.test_drawn_once import Closed

DESCENT = {"learning_rate": 1.0, "optimizer": {"kind": "sgd", "momentum": 0.9}}
CONFIDENT = {"kind": "confident-gnmax", "threshold": 4, "threshold_noise": 3, "noise": 2}


def rows(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.random((count, 4))
    return x, (x[:, 0] + x[:, 1] > 1).astype(int)


def recipe(
    folder: Path, data: tuple[np.ndarray, np.ndarray] | None = None, adjacency: str | None = None, **method: Any
) -> Path:
    """PATE with 6 teachers on 90 records of two classes; 40 public records, 20 judges."""
    folder.mkdir(exist_ok=True)
    x, y = data or rows()
    test_x, test_y = rows(150)
    np.savez(folder / "own.npz", x=x, y=y, x_test=test_x[90:], y_test=test_y[90:])
    sections = {
        "name": "small",
        "data": {"path": "own.npz", "classes": [0, 1], "bounds": [0, 1], "public": {"from": "test", "records": 40}},
        "model": {"kind": "linear"},
        "method": {
            "kind": "pate",
            "teachers": {"count": 6, "epochs": 5, **DESCENT},
            "aggregation": CONFIDENT,
            "queries": 30,
            "student": {"epochs": 4, **DESCENT},
            **method,
        },
        "privacy": {"delta": 1e-5, **({} if adjacency is None else {"adjacency": adjacency})},
        "seed": 0,
        "repeats": 2,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def trained(path: Path, out: str = "out") -> dict[str, Any]:
    directory = loop.run(resolve_auto(load_recipe(str(path))), loop.Options(path.parent / out))
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found


def of_start(path: Path, earlier: dict[str, Any] | None = None) -> Any:
    loaded = load_recipe(str(path))
    settled = resolve_auto(loaded)
    return start([Member(settled, loop.plan_recipe(settled)[0])], earlier)


def predictions(path: Path, trial: int = 0) -> np.ndarray:
    method = of_start(path).method
    assert isinstance(method, pate.Pate)
    return pate.Teaching(method.context, method.settings, trial).predictions()


def flipped(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x, np.where(np.arange(len(y)) == 17, 1 - y, y)


def huge(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(np.arange(len(x))[:, None] == 17, 1e30, x), y


def without(row: int) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    return lambda x, y: (np.delete(x, row, axis=0), np.delete(y, row))


TEACHING = [{}, {"batching": "shuffle", "batch_size": 4}]


@pytest.mark.parametrize("batching", TEACHING)
@pytest.mark.parametrize("change", [flipped, huge])
@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_one_record_changed_moves_the_votes_of_one_teacher(
    change: Callable[..., tuple[np.ndarray, np.ndarray]], batching: dict[str, Any], adjacency: str, tmp_path: Path
) -> None:
    teachers = {"count": 6, "epochs": 5, **DESCENT, **batching}
    ours = predictions(recipe(tmp_path / "one", teachers=teachers, adjacency=adjacency))
    theirs = predictions(recipe(tmp_path / "other", change(*rows()), teachers=teachers, adjacency=adjacency))
    assert (ours != theirs).any(axis=1).sum() <= 1


@pytest.mark.parametrize("batching", TEACHING)
@pytest.mark.parametrize("row", [0, 45, -1])
def test_one_record_removed_moves_the_votes_of_one_teacher(row: int, batching: dict[str, Any], tmp_path: Path) -> None:
    """With the same public number of places, which a statement takes to be known."""
    teachers = {"count": 6, "epochs": 5, **DESCENT, **batching}
    ours = predictions(recipe(tmp_path / "one", teachers=teachers))
    fewer = of_start(recipe(tmp_path / "other", without(row)(*rows()), teachers=teachers)).method
    whole = len(rows()[1])
    fewer.context = replace(fewer.context, table=fewer.context.table.with_places(whole))
    theirs = pate.Teaching(fewer.context, fewer.settings, 0).predictions()
    assert (ours != theirs).any(axis=1).sum() <= 1


def test_every_record_is_in_one_part_and_a_record_removed_moves_no_other(tmp_path: Path) -> None:
    ours = of_start(recipe(tmp_path / "one")).method
    teachers = [pate.Teaching(ours.context, ours.settings, trial) for trial in (0, 1)]
    parts = [one.part for one in teachers]
    assert [sorted(set(part)) for part in parts] == [list(range(6))] * 2
    assert (parts[0] != parts[1]).any(), "another seed deals other parts"
    assert len(rows()[1]) / 6 < max(np.bincount(parts[0])) <= teachers[0].records < len(rows()[1])
    for row in (0, 45, len(rows()[1]) - 1):
        fewer = of_start(recipe(tmp_path / f"without {row}", without(row)(*rows()))).method
        assert (pate.Teaching(fewer.context, fewer.settings, 0).part == np.delete(parts[0], row)).all()


def test_votes_do_not_depend_on_how_many_teachers_train_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe(tmp_path / "one")
    whole = predictions(path)
    monkeypatch.setattr(pate, "_NUMBERS_AT_ONCE", 2 * 10)
    assert (predictions(path) == whole).all()


def test_a_resumed_run_draws_no_second_noise_and_is_charged_the_same(tmp_path: Path) -> None:
    path, cut = recipe(tmp_path / "one"), 2
    whole = of_start(path)
    for epoch in range(whole.method.epochs):
        whole.method.run_epoch(epoch)
    halved = of_start(path)
    for epoch in range(cut):
        halved.method.run_epoch(epoch)
        halved.done = epoch + 1
    content = halved.checkpoint(halved.snapshot())
    again = of_start(path, content)
    again.restore(content, tmp_path / "saved")
    drawn: list[str] = []
    for stream in again.context.streams:
        stream.normal = lambda purpose, *more: drawn.append(purpose)
    for epoch in range(cut, again.method.epochs):
        again.method.run_epoch(epoch)
    assert not drawn
    assert (again.method.output == whole.method.output).all()
    assert [ledger.entries for ledger in again.context.ledgers] == [ledger.entries for ledger in whole.context.ledgers]


def test_nothing_is_drawn_while_the_method_is_made_that_a_resume_would_draw_anew(tmp_path: Path) -> None:
    context = of_start(recipe(tmp_path / "one")).context
    made = [pate.Pate(replace(context, streams=(Closed(), Closed()))) for _ in range(2)]
    assert [order.tolist() for order in made[0].order] == [order.tolist() for order in made[1].order]


def test_a_checkpoint_that_was_charged_less_than_it_answered_is_refused(tmp_path: Path) -> None:
    halved = of_start(recipe(tmp_path / "one"))
    halved.method.run_epoch(0)
    halved.done = 1
    content = halved.checkpoint(halved.snapshot())
    content["ledgers"][0] = content["ledgers"][0][:-1]
    again = of_start(recipe(tmp_path / "one"), content)
    with pytest.raises(DpsgdError, match="not charged as they are"):
        again.restore(content, tmp_path / "saved")


def test_every_query_is_charged_before_it_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = of_start(recipe(tmp_path / "one"))
    ledger, seen = trials.context.ledgers[0], []
    rule = trials.method.plans[0].aggregation

    def watched(kind: str, decide: Callable[..., Any]) -> Callable[..., Any]:
        def decided(*given: Any) -> Any:
            seen.append((kind, counted(ledger)))
            return decide(*given)

        return decided

    monkeypatch.setattr(type(rule), "accepts", staticmethod(watched("threshold", rule.accepts)))
    monkeypatch.setattr(type(rule), "label", staticmethod(watched("vote", rule.label)))
    trials.method._release(0)
    done = {"threshold": 0, "vote": 0}
    for kind, charged in seen:
        done[kind] += 1
        assert charged == done
    answers = trials.method.answers[0]
    assert done == {"threshold": 30, "vote": int((answers >= 0).sum())}
    assert 0 < done["vote"] < 30


def counted(ledger: Any) -> dict[str, int]:
    found = {"threshold": 0, "vote": 0}
    for entry in ledger.entries:
        found[entry.release.mechanism.label] += entry.release.count
    return found


def test_answers_end_where_the_plan_says(tmp_path: Path) -> None:
    found = trained(recipe(tmp_path / "one", aggregation={**CONFIDENT, "answers": 3}))
    assert [row["answered"] for row in found["trials"]] == [3, 3]


def test_every_query_has_noise_of_its_own(tmp_path: Path) -> None:
    trials = of_start(recipe(tmp_path / "one", aggregation={"kind": "gnmax", "noise": 1e6}))
    trials.method.run_epoch(0)
    same = np.mean(trials.method.answers[0])
    assert 0.1 < same < 0.9, "noise far above all votes decides, and does not decide the same every time"
    assert (trials.method.answers[0] != trials.method.answers[1]).any()


def test_a_spent_budget_ends_the_answers(tmp_path: Path) -> None:
    path = recipe(tmp_path / "one")
    sections = yaml.safe_load(path.read_text())
    sections["privacy"]["budget"] = {"epsilon": 5.0, "delta": 1e-5}
    path.write_text(yaml.safe_dump(sections))
    found = trained(path)
    assert found["privacy"]["epsilon"] == pytest.approx(5.0)
    assert found["metrics"]["queries"]["mean"] < 30
    assert found["privacy"]["spent"]["epsilon"] <= 5.0


def test_a_run_without_an_answer_says_so_and_publishes_what_it_started_from(tmp_path: Path) -> None:
    never = {**CONFIDENT, "threshold": 1e6}
    found = trained(recipe(tmp_path / "one", aggregation=never))
    assert found["metrics"]["answered"]["mean"] == 0
    assert any("no query was answered" in warning for warning in found["warnings"])


def test_what_the_votes_say_is_marked(tmp_path: Path) -> None:
    plain = trained(recipe(tmp_path / "one"))
    row = plain["trials"][0]
    assert {"nonprivate_epsilon_data_dependent", "nonprivate_ensemble_right", "nonprivate_teachers_right"} <= set(row)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ({"queries": 41}, "40 records are public"),
        ({"teachers": {"count": 91, "epochs": 1}}, "more than the 90 training records"),
        ({"teachers": {"count": 1, "epochs": 1}}, "teachers.count"),
    ],
)
def test_impossible_sizes_are_refused(method: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DpsgdError, match=message):
        trained(recipe(tmp_path / "one", **method))


def of_a_file(folder: Path, **public: Any) -> Path:
    """The same recipe, whose public records are those of an unlabelled file of 40, or of 20."""
    path = recipe(folder)
    held = np.load(folder / "own.npz")
    for name, count in (("unlabelled", 40), ("few", 20)):
        np.savez(folder / f"{name}.npz", x=held["x_test"][:count])
    sections = yaml.safe_load(path.read_text())
    sections["data"]["public"] = {"path": "unlabelled.npz"} | public
    path.write_text(yaml.safe_dump(sections))
    return path


def test_an_unlabelled_file_is_asked_about_and_its_labels_are_not_known(tmp_path: Path) -> None:
    found = trained(of_a_file(tmp_path / "own"))
    row = found["trials"][0]
    assert row["answered"] > 0
    assert not [name for name in row if name.endswith("_right")]
    assert any("40 public records, of unlabelled.npz" in said for said in found["privacy"]["declarations"])
    assert "unlabelled.npz" in found["provenance"]["data_sha256"]
    assert any("60 test records are public" in said for said in found["privacy"]["declarations"]), "all of them judge"


@pytest.mark.parametrize(
    ("public", "message"),
    [
        ({"path": "nowhere.npz"}, "no such file: .*nowhere.npz"),
        ({"records": 5}, "either records .* or path"),
        ({"from": "test"}, "from: .* leave it out"),
        ({"path": "few.npz"}, "method.queries is 30, but 20 records"),
    ],
)
def test_what_is_no_unlabelled_file_is_refused(public: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DpsgdError, match=message):
        trained(of_a_file(tmp_path / "own", **public))


@pytest.mark.parametrize("budget", ["{epsilon: 8, delta: 1e-5}", "null"])
def test_a_filter_of_mu_does_not_count_names_of_categories(budget: str) -> None:
    """They cost a delta. Outside of the budget, which `training` alone then is, they are priced beside it."""
    facts = Facts(32561, [Release(Threshold(0.0, 1e-6, "add-remove"))], public_records=8000)
    changes = [f"privacy.budget={budget}", "method.queries=50"]
    with pytest.raises(PrivacyError, match="names of private categories cost a delta"):
        planned(load_recipe("pate/adult-confident", changes).recipe, facts)
    if budget != "null":
        beside = load_recipe("pate/adult-confident", [*changes, "privacy.budget_covers=training"]).recipe
        assert any(isinstance(own.mechanism, Threshold) for own in planned(beside, facts).priced_releases)
