"""Trainings that start from a private result: what is stated of both, and what is refused because no sum is proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from dpsgd_cli.accounting.accountants import get
from dpsgd_cli.accounting.ledger import read_ledgers
from dpsgd_cli.data.fingerprint import sha256
from dpsgd_cli.engine import bundle
from dpsgd_cli.errors import DpsgdError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.results import book as books
from dpsgd_cli.results import reading, report, store
from dpsgd_cli.results.book import BookTerms
from dpsgd_cli.results.comparison import equal_budgets
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import GRADIENT, OWN, StopAt, Train, WriteRecipe, recipe_writer

PRIVATE = {**OWN, "split": {"test": 0.25}, "evaluation": "private"}
METHOD = {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.5, "preconditioner": None}
FIRST: dict[str, Any] = {"seed": None, "repeats": 1, "data": PRIVATE, "epochs": 2, "method": METHOD}


def write(folder: Path, **sections: Any) -> Path:
    path = recipe_writer(folder)(**(FIRST | sections))
    if not (folder / "half.npz").exists():
        both = np.load(folder / "tiny.npz")
        x, y = (np.concatenate([both[name], both[f"{name}_test"]]) for name in ("x", "y"))
        np.savez(folder / "half.npz", x=x[::2], y=y[::2])
    np.savez(folder / "tiny.npz", x=x, y=y) if "x_test" in np.load(folder / "tiny.npz") else None
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A folder with the recipe `tiny.yaml`, a first result, and a second that started from it and hardly moved."""
    path = write(tmp_path_factory.mktemp("earlier"))

    def run(*overrides: str) -> Path:
        options = loop.Options(path.parent / "out", save_models=True)
        return loop.run(resolve_auto(load_recipe(str(path), overrides)), options)

    first = run()
    still = ("method.learning_rate=1e-12", "privacy.budget.epsilon=1", "privacy.budget.delta=1e-4")
    return path, first, run("name=second", f"privacy.start={first}", *still)


def account(*args: object) -> tuple[int, str]:
    found = CliRunner().invoke(main, ["account", *map(str, args)])
    return found.exit_code, found.output


def test_both_budgets_are_added(made: tuple[Path, Path, Path]) -> None:
    _, first, second = made
    earlier, privacy = (store.read_document(one)["privacy"] for one in (first, second))
    (releases,) = read_ledgers(second / "ledger.jsonl").values()
    training = [one for one in releases if one.mechanism.label != "held-out"]
    own = get(privacy["accountant"]).epsilon(training, 1e-4)
    assert own > 0.5 and privacy["start"]["own"]["epsilon"] >= own
    assert privacy["epsilon"] >= earlier["epsilon"] + own and privacy["delta"] == 1e-3 + 1e-4
    assert (privacy["rho"], privacy["attacker"], privacy["parts"]) == (None, None, {})
    document = store.read_document(second)
    assert document["trials"][0]["epsilon"] == privacy["epsilon"]
    assert bundle.read(second / bundle.NAME).about["privacy"]["epsilon"] == privacy["epsilon"]
    assert bundle.read(second / bundle.NAME).about["privacy"]["delta"] == privacy["delta"]
    assert privacy["start"]["ledger_sha256"] == sha256(first / "ledger.jsonl")


def test_a_sum_is_no_equal_budget_of_one_of_its_terms(made: tuple[Path, Path, Path], train: Train) -> None:
    path, _, second = made
    alone = train(path, "name=alone", "privacy.budget.epsilon=1", "privacy.budget.delta=1e-4")
    one, both = (store.read_document(folder)["privacy"] for folder in (alone, second))
    assert one["budget"] == both["budget"] and not equal_budgets(one, both) and equal_budgets(both, both)


def test_the_training_starts_from_the_weights_of_the_earlier_result(made: tuple[Path, Path, Path]) -> None:
    first, second = (bundle.read(one / bundle.NAME).weights[0] for one in made[1:])
    assert max(float(value.abs().max()) for value in first.values()) > 0.01
    for name, value in first.items():
        np.testing.assert_allclose(second[name], value, atol=1e-8)


def test_every_page_states_the_sum(made: tuple[Path, Path, Path]) -> None:
    page = report.pages(made[2])["report.md"]
    assert "epsilon 5.0000 at delta 0.0011" in page and "4.0000 at delta 0.001 of the earlier result" in page
    assert "mu-Gaussian-DP" not in page and "TPR" not in page
    assert CliRunner().invoke(main, ["check", str(made[2])]).exit_code == 0


def priced(*args: object) -> dict[str, Any]:
    """Return the row of the recipe's accountant, after the gate of every bound was tried on either side of it."""
    rows = json.loads(account(*args, "--attacker", "--format", "json")[1])
    found: dict[str, Any] = next(row for row in rows if row["accountant"] == "rdp")
    for off, code in ((-1e-6, 1), (1e-6, 0)):
        assert account(*args, "--accountant", "rdp", "--max-epsilon", found["epsilon"] + off)[0] == code
    assert found["rho"] is None and "mu" not in found
    return found


def test_account_adds_the_earlier_result_and_proves_nothing_else(made: tuple[Path, Path, Path]) -> None:
    path, first, second = made
    row = priced(second)
    assert row["epsilon"] == pytest.approx(store.read_document(second)["privacy"]["epsilon"], rel=1e-9)
    assert row["delta"] == 1e-3 + 1e-4
    planned = priced(path, f"privacy.start={first}")
    assert planned["epsilon"] == pytest.approx(8, abs=0.01) and planned["delta"] == 2e-3


@pytest.mark.parametrize(
    "question",
    [["--trials", "all"], ["--group", "2"], ["--at-epsilon", "6"], ["--curve"], ["--over", "false-positives=.1:.3:.1"]],
    ids=" ".join,
)
def test_other_questions_have_no_statement(made: tuple[Path, Path, Path], question: list[str]) -> None:
    assert "only epsilon at a delta is stated" in " ".join(account(made[2], *question)[1].split())


def test_no_ledgers_are_added_to_that_of_a_result_with_a_start(made: tuple[Path, Path, Path]) -> None:
    for folders in (made[1:], [made[0].parent / "out"]):
        assert "only the sum of their epsilons is proved" in " ".join(account(*folders, "--trials", "all")[1].split())
    assert account(made[0].parent / "out", "--max-epsilon", 100)[0] == 1


def test_a_chain_adds_all(made: tuple[Path, Path, Path], train: Train) -> None:
    path, _, second = made
    third = train(path, "name=third", f"privacy.start={second}", "data.path=half.npz")
    privacy = store.read_document(third)["privacy"]
    assert privacy["epsilon"] == pytest.approx(9, abs=0.02) and privacy["delta"] == pytest.approx(2.1e-3)
    assert privacy["start"]["epsilon"] == store.read_document(second)["privacy"]["epsilon"]


def test_a_public_copy_can_be_started_from(made: tuple[Path, Path, Path], train: Train, tmp_path: Path) -> None:
    copy = store.public_copy(made[1], tmp_path / "copy")
    assert store.read_document(train(made[0], "name=of-copy", f"privacy.start={copy}"))["privacy"]["epsilon"] > 7.9
    published = store.public_copy(made[2], tmp_path / "second")
    assert store.read_document(published)["privacy"]["epsilon"] > 4.9


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no start": lambda privacy: privacy.update(epsilon=1.0, delta=1e-4) or privacy.pop("start"),
    "less epsilon": lambda privacy: privacy.update(epsilon=1.0),
    "less delta": lambda privacy: privacy.update(delta=1e-4),
    "an estimate": lambda privacy: privacy.update(bound="estimate"),
    "a rho": lambda privacy: privacy.update(rho=0.1),
    "another earlier one": lambda privacy: privacy["start"].update(epsilon=0.1) or privacy.update(epsilon=1.2),
}


@pytest.mark.parametrize("forged", FORGERIES)
def test_a_forged_claim_is_found(made: tuple[Path, Path, Path], train: Train, forged: str) -> None:
    copy = made[2].parent / f"forged-{len(forged)}"
    shutil.copytree(made[2], copy)
    try:
        document = store.read_document(copy)
        FORGERIES[forged](document["privacy"])
        document["trials"][0]["epsilon"] = document["privacy"]["epsilon"]
        (copy / "result.json").write_text(json.dumps(reading.sealed(document)))
        assert CliRunner().invoke(main, ["check", str(copy)]).exit_code == 1
        assert forged != "no start" or account(copy)[0] != 0
        if forged == "another earlier one":  # found where that one is at hand, as for `check`
            return
        with pytest.raises(DpsgdError, match=r"check|not a result"):
            train(made[0], f"privacy.start={copy}", "name=of-a-forgery")
    finally:
        shutil.rmtree(copy)


PCA = "data.preprocess=[{scale: {}}, {pca: {components: 2, noise_multiplier: 9}}]"
CLEAR = "data.evaluation=public"
AGD = ["method={kind: dp-agd}", "model={kind: convex}", "epochs=auto"]
REFUSED: dict[str, tuple[list[str], list[str], str]] = {
    "without privacy": (
        ["method={kind: sgd, batching: full, learning_rate: 0.5}", "privacy=null", CLEAR],
        [],
        "without privacy",
    ),
    "a seed": (["seed=1"], [], "who knows the seed"),
    "an own seed": ([], ["seed=1"], "seed: noise from a seed"),
    "several trials": (["repeats=2"], [], "statement is of one trial"),
    "another adjacency": (["privacy.adjacency=replace-one"], [], "there is no sum"),
    "test records in the clear": ([CLEAR], [], "no sum is proved"),
    "own test records in the clear": ([], [CLEAR], "no sum is proved"),
    "other data, in the clear": ([CLEAR], [CLEAR, "data.path=half.npz"], "of different data"),
    "public validation": ([], ["data.validation={records: 5, public: true}"], "no sum is proved"),
    "public records": ([], ["data.public={records: 5, from: train}"], "no sum is proved"),
    "other public records": ([CLEAR], [CLEAR, "data.public={records: 5, from: train}"], "no sum is proved"),
    "another model": (["model={kind: mlp, hidden: [3]}"], [], "another architecture"),
    "other bounds": (["data.bounds=[0, 2]"], [], "another layout"),
    "released preprocessing": ([PCA], [PCA], "released preprocessing"),
    "mapped rows": ([], ["method.preconditioner={kind: second-moment}"], "maps the rows"),
    "a method with its own start": ([], AGD, "does not start from given weights"),
    "folds": ([], ["folds=3", CLEAR], "folds: each record"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_proved_sum_is_refused(tmp_path: Path, train: Train, case: str) -> None:
    earlier, further, said = REFUSED[case]
    path = write(tmp_path)
    start = train(path, "name=start", *earlier, save_models=True)
    with pytest.raises(DpsgdError, match=said):
        train(path, f"privacy.start={start}", *further)
    assert not list((tmp_path / "out").glob("tiny-*"))


def test_test_records_in_the_clear_are_the_same_ones(tmp_path: Path, train: Train) -> None:
    path = write(tmp_path, data={**PRIVATE, "evaluation": "public"})
    start = train(path, "name=start", save_models=True)
    privacy = store.read_document(train(path, f"privacy.start={start}"))["privacy"]
    assert privacy["epsilon"] > 7.9


@pytest.mark.parametrize("edit", [{"epsilon": None}, {"accountant": "zcdp-rs", "bound": "estimate", "epsilon": 1e9}])
def test_what_is_no_bound_is_no_term_of_a_sum(tmp_path: Path, train: Train, edit: dict[str, Any]) -> None:
    noise = {"schedule": {"kind": "uniform", "initial": 2}, "delta": 1e-3}
    path = write(
        tmp_path,
        data={**PRIVATE, "evaluation": "public"},
        method=GRADIENT | {"batching": "poisson", "batch_size": 1},
        privacy=noise,
    )
    start = train(path, "name=start", save_models=True)
    document = store.read_document(start)
    document["privacy"].update(edit, rho=None, attacker=None)
    document["trials"][0]["epsilon"] = edit["epsilon"]
    (start / "result.json").write_text(json.dumps(reading.sealed(document)))
    with pytest.raises(DpsgdError, match="no epsilon that is a bound"):
        train(path, f"privacy.start={start}")


def test_another_unit_is_refused(tmp_path: Path, train: Train, write_recipe: WriteRecipe) -> None:
    path = write(tmp_path)
    np.save(tmp_path / "users.npy", np.arange(60) // 2)
    np.save(tmp_path / "others.npy", np.arange(60) // 3)
    unit = "privacy.unit={column: %s, most_rows: 3}"
    start = train(path, "name=start", unit % "users.npy", save_models=True)
    for further in ((), (unit % "others.npy",)):
        with pytest.raises(DpsgdError, match="there is no sum"):
            train(path, f"privacy.start={start}", *further)
    assert store.read_document(train(path, f"privacy.start={start}", unit % "users.npy"))["privacy"]["epsilon"] > 7.9


def test_a_changed_result_is_refused_and_a_changed_start_is_noticed(tmp_path: Path, train: Train) -> None:
    path = write(tmp_path)
    start = train(path, "name=start", save_models=True)
    further = train(path, f"privacy.start={start}")
    (start / "model.safetensors").write_bytes(b"x" + (start / "model.safetensors").read_bytes()[1:])
    for name in ("tiny", "again"):
        with pytest.raises(DpsgdError, match=r"was changed after|another content of"):
            train(path, f"name={name}", f"privacy.start={start}")
    told = CliRunner().invoke(main, ["check", str(further)]).output
    assert "start    unknown" in told and "code     FAILED" in told


def test_a_book_has_both_or_refuses(tmp_path: Path, train: Train) -> None:
    path = write(tmp_path, method=GRADIENT | {"batching": "poisson"})
    terms = BookTerms({"tiny.npz": sha256(tmp_path / "tiny.npz")}, None, "add-remove", 50.0, 1e-2)
    books.create(tmp_path / "a.book", terms)
    booked = train(path, "name=booked", "privacy.book=a.book", save_models=True)
    other = train(path, "name=other", save_models=True)
    train(path, f"privacy.start={booked}", "privacy.book=a.book")
    assert [line["runs"][0].partition("-")[0] for line in books.read(tmp_path / "a.book").charges] == ["booked", "tiny"]
    with pytest.raises(DpsgdError, match="this result was not charged to"):
        train(path, "name=again", f"privacy.start={other}", "privacy.book=a.book")
    assert len(books.read(tmp_path / "a.book").charges) == 2
    lines = (tmp_path / "a.book").read_text().splitlines(keepends=True)
    (tmp_path / "a.book").write_text("".join(lines[:1]))
    with pytest.raises(DpsgdError, match="an old copy of the book"):
        train(path, "name=again", f"privacy.start={booked}", "privacy.book=a.book")


def test_a_training_that_was_stopped_goes_on_from_the_same_start(tmp_path: Path, train: Train, stop_at: StopAt) -> None:
    path = write(tmp_path, epochs=4)
    start = train(path, "name=start", save_models=True)
    with pytest.raises(DpsgdError, match="kept"):
        train(path, f"privacy.start={start}", progress=stop_at(2, KeyboardInterrupt()))
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    stopped = resolve_auto(load_recipe(str(path), [f"privacy.start={start}"]))
    ended = loop.finish(stopped, loop.Options(tmp_path / "other"))
    steps = {}
    for folder in (ended, train(path, f"privacy.start={start}", resume=True)):
        (releases,) = read_ledgers(folder / "ledger.jsonl").values()
        steps[folder] = sum(one.count for one in releases if one.mechanism.label != "held-out")
        assert store.read_document(folder)["privacy"]["epsilon"] > 7.9  # of the held-out part, as large as the whole
    assert [*steps.values()] == [2, 4]


def test_an_own_network_goes_on_from_its_result_however_it_is_given(tmp_path: Path) -> None:
    """As the module itself, or as a function that builds one with these names; never as public weights."""
    import dpsgd_cli as dpsgd

    def network(width: int = 4) -> nn.Module:
        return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 3)).astype(np.float32), rng.integers(0, 2, 80)
    settings: dict[str, Any] = {"epsilon": 1, "delta": 1e-3, "classes": [0, 1], "bounds": [-4, 4], "out": tmp_path}
    small = {"epochs": 1, "method.learning_rate": 1e-12}
    first = dpsgd.train((x, y), small, model=network(), weights="drawn", name="first", **settings)
    further = settings | {"start": first}
    second = dpsgd.train((x, y), small, model=lambda: network(), name="second", **further)
    torch.testing.assert_close(second.module()(torch.ones(1, 3)), first.module()(torch.ones(1, 3)))
    assert second.privacy["epsilon"] > first.privacy["epsilon"] + 0.5
    with pytest.raises(DpsgdError, match=r"privacy\.start: 0\.bias is \(4,\)"):
        dpsgd.train((x, y), small, model=lambda: network(5), name="third", **further)
    with pytest.raises(DpsgdError, match="so they are not public"):
        dpsgd.train((x, y), small, model=nn.Sequential(second.module()), weights="public", name="fourth", **settings)


def test_a_sweep_and_an_audit_refuse_a_start(made: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path, first, _ = made
    (tmp_path / "sweep.yaml").write_text(f"name: s\nrecipes: [{path}]\ngrid: {{method.learning_rate: [0.1, 0.2]}}\n")
    for command in (["sweep", str(tmp_path / "sweep.yaml"), "--out", str(tmp_path)], ["audit", str(path)]):
        found = CliRunner().invoke(main, [*command, f"privacy.start={first}"])
        assert found.exit_code != 0 and "privacy.start" in found.output + "".join(
            one.read_text() for one in tmp_path.rglob("*.failed.json")
        )
