"""`privacy.unit` through `dpsgd train`: all rows of one user replaced, folds, resume, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dpsgd_cli.errors import RunError, UsageError
from dpsgd_cli.main import main
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.dp_sgd.run import DpSgd
from dpsgd_cli.methods.least_squares import DpLeastSquares
from dpsgd_cli.methods.settings import METHODS
from dpsgd_cli.recipe.loading import load_recipe
from tests.conftest import Train, WriteRecipe
from tests.contracts.test_neighbours import FLAT, PATE, Rows, Run, differing, made_once

USERS, EACH, WHO = 10, 3, "u4"
BUDGET = {"budget": {"epsilon": 2.0, "delta": 1e-5}}
UNIT = {"unit": {"column": "user", "most_rows": 2}}
# by this seed u4 is one of 7 users that train, by name and by rank
SPLIT = {"data": {"test_path": "", "split": {"test": 0.3, "seed": 38}}}
PRIVATE = {"privacy": {**FLAT, **UNIT}, "epochs": 2, **SPLIT}
FULL = {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.5}
METHOD: dict[str, dict[str, Any]] = {
    "full": {**PRIVATE, "model": {"kind": "linear"}, "method": FULL},
    "network, by layer": {
        **PRIVATE,
        "model": {"kind": "mlp", "hidden": [3]},
        "method": FULL,
        "privacy": {**FLAT, **UNIT, "clipping": {"kind": "per-layer", "norm": 0.5}},
    },
    "raw": {**PRIVATE, "model": {"kind": "linear"}, "method": FULL, "data": {**SPLIT["data"], "preprocess": []}},
    "dp-gd": {**PRIVATE, "model": {"kind": "convex"}, "method": {"kind": "dp-gd", "learning_rate": 0.5}},
    "poisson": {**PRIVATE, "model": {"kind": "linear"}, "method": {**FULL, "batching": "poisson", "batch_size": 5}},
    "shuffle": {
        **PRIVATE,
        "model": {"kind": "linear"},
        "method": {**FULL, "batching": "shuffle", "batch_size": 3},
        "privacy": {**FLAT, **UNIT, "adjacency": "zero-out"},
    },
    "least squares": {
        **SPLIT,
        "model": {"kind": "linear"},
        "method": {"kind": "dp-least-squares"},
        "privacy": {**BUDGET, **UNIT},
    },
    "folds": {
        **PRIVATE,
        "data": {"test_path": ""},
        "model": {"kind": "linear"},
        "method": FULL,
        "folds": 2,
        "repeats": 1,
    },
}

PLAIN = {**METHOD["full"], "privacy": FLAT, "data": {**SPLIT["data"], "drop": ["user"]}, "seed": 9}


def base_rows() -> Rows:
    rng = np.random.default_rng(0)
    names = [f"u{n % USERS}" for n in range(USERS * EACH)]
    return [
        [*map(str, row), "no" if row.sum() < 1 else "yes", who]
        for row, who in zip(rng.random((30, 2)), names, strict=True)
    ]


def changed(rows: Rows, change: Callable[[list[str]], list[str]]) -> Rows:
    return [change(row) if row[-1] == WHO else row for row in rows]


CHANGES: dict[str, Callable[[Rows], Rows]] = {
    "flipped": lambda rows: changed(rows, lambda r: [*r[:2], "no" if r[2] == "yes" else "yes", WHO]),
    "huge": lambda rows: changed(rows, lambda r: ["1e300", "-1e300", "no", WHO]),
    "one row": lambda rows: [row for n, row in enumerate(rows) if row[-1] != WHO or n < USERS],
    "more rows": lambda rows: [*rows, *([["0.1", "0.9", "yes", WHO]] * 5)],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    return made_once(tmp_path_factory.mktemp("users"), CHANGES, base_rows, METHOD)


@pytest.mark.parametrize("method", [name for name in METHOD if name != "folds"])
@pytest.mark.parametrize("change", CHANGES)
def test_all_rows_of_a_user_changed_show_in_nothing_public(runs: Callable[..., Run], method: str, change: str) -> None:
    one, other = runs(method, "none"), runs(method, change)
    assert one.done.exit_code == 0, one.done.stderr
    assert differing(one.shown(False), other.shown(False)) == {}


def first_sums(patch: pytest.MonkeyPatch, run: Callable[[], Run]) -> tuple[torch.Tensor, float]:
    """The sums of the first step before noise, (R, P), and the sensitivity that the ledger says."""
    seen: list[torch.Tensor] = []
    own = DpSgd.privatise

    def watched(self: Any, epoch: int, step: int) -> None:
        seen.append(self.context.pack.sums.clone())
        own(self, epoch, step)

    with patch.context() as here:
        here.setattr(DpSgd, "privatise", watched)
        done = run()
    assert done.result is not None, done.done.stderr
    line = json.loads((done.result / "ledger.jsonl").read_text().splitlines()[0])
    assert line["unit"] == "user"
    return seen[0], line["sensitivity"]


@pytest.mark.parametrize("method", ["full", "network, by layer", "raw", "dp-gd"])
def test_replacing_all_rows_of_a_user_moves_a_sum_by_no_more_than_the_ledger_says(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under add-remove a sum moves by S where a user goes, so by 2 S at most where one is replaced."""
    base, most = None, 0.0
    for number, change in enumerate(["none", *CHANGES]):
        rows = CHANGES[change](base_rows()) if change in CHANGES else base_rows()
        sums, stated = first_sums(monkeypatch, lambda: Run(tmp_path / str(number), rows, METHOD[method]))  # noqa: B023
        base = sums if base is None else base
        most = max(most, float((sums - base).norm(dim=1).max()))
        assert most <= 2 * stated * (1 + 1e-5)
    # a change of clipped gradients is seen at all
    assert most > 0.1


def test_least_squares_moves_by_no_more_than_the_ledger_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[np.ndarray, ...]] = []
    own = DpLeastSquares._exact

    def watched(self: Any, trial: int) -> Any:
        found.append(own(self, trial))
        return found[-1]

    monkeypatch.setattr(DpLeastSquares, "_exact", watched)
    moved = []
    for number, change in enumerate(["none", *CHANGES]):
        rows = CHANGES[change](base_rows()) if change in CHANGES else base_rows()
        done = Run(tmp_path / str(number), rows, METHOD["least squares"])
        assert done.result is not None, done.done.stderr
        stated = json.loads((done.result / "ledger.jsonl").read_text().splitlines()[0])["sensitivity"]
        (ours, z, _), (base, other, _) = found[-1], found[0]
        # share 1/2 weighs both alike, and S^2 is 2
        moved.append(float(np.hypot(np.linalg.norm(ours - base), np.linalg.norm(z - other))))
        assert stated == pytest.approx(np.sqrt(2)) and moved[-1] <= 2 * stated
        # of 7 users, each of weight 1 whatever the number of rows: the bias's constant counts users
        assert np.trace(ours) <= 7 + 1e-9
    assert max(moved) > 0.5


def test_all_rows_of_a_user_are_in_one_fold(runs: Callable[..., Run]) -> None:
    one = runs("folds", "none")
    assert one.done.exit_code == 0 and one.result is not None, one.done.stderr
    document = json.loads((one.result / "result.json").read_text())
    told = document["privacy"]["declarations"]
    assert any("The number of users is public: 10; each trial trains on at most 10" in said for said in told)
    assert document["privacy"]["unit"] == {"column": "user", "most_rows": 2}


def refused(folder: Path, sections: dict[str, Any]) -> str:
    done = Run(folder, base_rows(), sections)
    assert done.done.exit_code == 2 and done.result is None, done.done.output
    assert "Traceback" not in done.done.output
    return done.done.stderr


UNPROVED = sorted(
    kind for kind, one in METHODS.items() if not one.descriptor.by_unit and one.descriptor.privacy != "refused"
)


@pytest.mark.parametrize("kind", UNPROVED)
def test_a_method_that_looks_at_single_rows_is_refused(kind: str, tmp_path: Path) -> None:
    candidates = [{"kind": "uniform"}, {"kind": "uniform", "initial": 2}]
    extra: dict[str, dict[str, Any]] = {
        "pate": {**PATE, "aggregation": {"kind": "gnmax", "noise": 2}},
        "private-selection": {"batch_size": 4, "candidates": candidates},
        "python": {"file": "own.py"},
    }
    model = {"kind": "linear" if kind in extra else "convex"}
    sections = {**PRIVATE, "model": model, "method": {"kind": kind, **extra.get(kind, {})}}
    told = refused(tmp_path / "run", {**sections, "privacy": {**BUDGET, **UNIT}})
    assert f"nothing is proved of method {kind} where all rows of a user are protected together; use dp-gd" in told


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"method": {**FULL, "batching": "fixed", "batch_size": 1}}, "method dp-sgd, batching fixed"),
        ({"method": {**FULL, "preconditioner": {"kind": "second-moment"}}}, "not for all rows of a user; give null"),
        ({"data": {"validation": {"records": 2, "noise_multiplier": 3}}}, "charged for one record, and a user"),
        ({"data": {"preprocess": [{"pca": {"components": 1, "noise_multiplier": 5}}]}}, "the noise of pca is charged"),
        ({"runtime": {"dtype": "bfloat16"}}, "bfloat16 is proved for single records"),
        ({"privacy": {**FLAT, "unit": {"column": "y", "most_rows": 2}}}, "is the target; name the column"),
        ({"privacy": {**FLAT, "unit": {"column": "user", "most_rows": 0}}}, "most_rows"),
    ],
)  # fmt: skip
def test_what_is_proved_of_single_records_only_is_refused(sections: dict[str, Any], told: str, tmp_path: Path) -> None:
    data = {**SPLIT["data"], **sections.get("data", {})}
    assert told in refused(tmp_path / "run", {**METHOD["full"], **sections, "data": data})


@pytest.fixture
def users(write_recipe: WriteRecipe, tmp_path: Path) -> Path:
    """The small recipe, on rows of 16 users of 1 to 5 rows."""
    path = write_recipe(
        data={"path": "who.npz", "bounds": [0, 1], "classes": [0, 1, 2]},
        method={"kind": "dp-sgd", "batch_size": 6, "learning_rate": 0.5},
        privacy={"unit": {"column": "who", "most_rows": 3}, "budget": {"epsilon": 4, "delta": 1e-3}},
    )
    with np.load(tmp_path / "tiny.npz") as held:
        who = np.sort(np.arange(48) ** 2 % 61 % 16)
        np.savez(tmp_path / "who.npz", **held, who=who, who_test=np.arange(12) + 100)
    return path


def test_several_processes_are_refused() -> None:
    recipe = load_recipe("beyond/adult-users").recipe
    with pytest.raises(UsageError, match="one process, not in 2"):
        create(SimpleNamespace(recipes=(recipe,), team=SimpleNamespace(size=2)))  # type: ignore[arg-type]


def test_rows_of_users_and_of_records_are_not_stated_together(runs: Callable[..., Run], tmp_path: Path) -> None:
    """A ledger about users and one about records have no common neighbours."""
    users, records = runs("full", "none"), Run(tmp_path / "plain", base_rows(), PLAIN)
    assert users.result is not None and records.result is not None, records.done.stderr
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((users.result / "ledger.jsonl").read_text() + (records.result / "ledger.jsonl").read_text())
    told = CliRunner().invoke(main, ["account", str(mixed)])
    assert told.exit_code == 2 and "some lines are about single records, others about users" in told.output
    both = CliRunner().invoke(main, ["compare", str(users.result), str(records.result), "--out", str(tmp_path / "c")])
    assert both.exit_code == 0 and "epsilon (add-remove of users)" in both.output, both.output


def test_a_file_of_users_is_hashed_where_nobody_publishes_it(write_recipe: WriteRecipe, train: Train) -> None:
    """Its hash is a function of whose every row is: who knows all others could try out the last one."""
    unit = {"column": "who.npy", "most_rows": 3}
    path = write_recipe(privacy={"unit": unit, "budget": {"epsilon": 4, "delta": 1e-3}, "accountant": "rdp"})
    np.save(path.parent / "who.npy", np.concatenate([np.arange(48) % 16, np.arange(100, 112)]))
    provenance = json.loads((train(path) / "result.json").read_text())["provenance"]
    assert provenance["data_sha256"] == {}
    assert sorted(provenance["nonprivate_data_sha256"]) == ["tiny.npz", "who.npy"]
    np.save(path.parent / "who.npy", np.concatenate([np.arange(48) % 12, np.arange(100, 112)]))
    with pytest.raises(RunError, match=r"made from another content of who\.npy"):
        train(path)
