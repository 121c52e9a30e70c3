"""Tables with more places than rows: a public number stands for a private size, and empty places add nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.clipping.run import Diagnostics
from dpsgd_cli.data.on_disk import DiskRows, stored
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.errors import RunError
from dpsgd_cli.methods.base import create
from dpsgd_cli.methods.context import Context
from dpsgd_cli.noise.run import Grid
from dpsgd_cli.users.run import UnitTable
from tests.conftest import Train, WriteRecipe
from tests.methods.small_problem import Silent, context, points, recipe, run, signed

ROWS, PLACES = 50, 60
CLIP = {"clipping": {"kind": "flat", "norm": 0.4}, "budget": {"epsilon": 3.0, "delta": 1e-5}}


def made(method: dict[str, Any], **privacy: Any) -> Any:
    length = {} if method["kind"] == "dp-agd" else {"epochs": 1}
    return recipe(method, model={"kind": "convex", "l2": 0.0}, privacy={**CLIP, **privacy}, **length)


def in_places(one: Any, streams: list[Any]) -> Context:
    """A context of ROWS records in PLACES places."""
    return context(one, streams, points(ROWS), PLACES)


def expected() -> np.ndarray:
    """The clipped sum at weights 0 over all records, one by one."""
    z = signed(made({"kind": "dp-gd", "learning_rate": 1.0}), points(ROWS))
    return np.sum([g * min(1.0, 0.4 / np.linalg.norm(g)) for g in -z / 2], axis=0)


@pytest.mark.parametrize(
    "method",
    [
        {"kind": "dp-gd", "learning_rate": 1.0},
        {"kind": "dp-sgd", "batching": "full", "learning_rate": 1.0},
        {"kind": "dp-sgd", "batching": "poisson", "batch_size": PLACES, "learning_rate": 1.0},
        {"kind": "dp-sgd", "batching": "random-allocation", "batch_size": PLACES, "learning_rate": 1.0},
    ],
)  # fmt: skip
def test_a_batch_of_all_places_sums_each_record_once_and_is_divided_by_places(method: dict[str, Any]) -> None:
    own = in_places(made(method), [Silent(0)])
    assert len(own.table) == PLACES and own.table.rows == ROWS
    trained = create(own)
    own.pack.values.zero_()
    run(trained)
    assert np.allclose(trained.output[0].numpy(), -expected() / PLACES, atol=1e-12)


def test_each_record_is_in_a_batch_at_the_rate_that_was_priced() -> None:
    """1,500 batches of expected size 30 from 60 places: each record in half of them, to 5 deviations (3e-5 for all)."""
    method = {"kind": "dp-sgd", "batching": "poisson", "batch_size": 30, "learning_rate": 1.0}
    own = in_places(made(method), [SeededStreams(0)])
    trained: Any = create(own)
    seen = np.zeros(ROWS)
    for step in range(1500):
        for _, _, mask in own.table.chunks(trained.batches.sampler.batch(step), 1000):
            rows = torch.as_tensor(trained.batches.sampler.batch(step).rows)[0]
            assert mask is not None
            there = rows[mask[0]]
            assert (there < ROWS).all()
            seen[there.numpy()] += 1
    assert abs(seen / 1500 - 0.5).max() < 5 * np.sqrt(0.25 / 1500)


def test_a_single_record_from_an_empty_place_adds_nothing() -> None:
    method = {"kind": "dp-sgd", "batching": "fixed", "batch_size": 1, "learning_rate": 0.1}
    own = in_places(made(method), [SeededStreams(0)])
    trained: Any = create(own)
    drawn = np.array([int(trained.batches.sampler.batch(step).rows[0, 0]) for step in range(8 * PLACES)])
    assert ROWS <= drawn.max() < PLACES, "some are empty"
    for step in range(8 * PLACES):
        own.pack.sums.zero_()
        trained.add_sums(0, step, Diagnostics(1, torch.device("cpu")))
        assert own.pack.sums.any() == (drawn[step] < ROWS)


def test_rows_in_memory_and_on_disk_and_users_are_masked_alike(tmp_path: Path) -> None:
    x, y = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    disk = [DiskRows(stored(tmp_path / f"{name}.npy")) for name in "xy"]
    here = torch.device("cpu")
    memory = Table.load(x, y, False, here, torch.float32)
    users = UnitTable(memory.x, memory.y, False, members=torch.arange(5)[:, None])
    tables = [memory, StreamedTable.open(disk[0], disk[1], here, torch.float32), users]
    batch = Batch(rows=np.array([[0, 7, 4, 5]]), mask=np.array([[True, True, True, False]]))
    for table in tables:
        placed = table.with_places(8)
        assert len(placed) == 8 and placed.rows == 5
        for given, wanted in (
            (batch, [True, False, True, False]),
            (Batch(rows=batch.rows), [True, False, True, False]),
        ):
            [(found, _, mask)] = placed.chunks(given, 100)
            assert mask is not None and mask[0].tolist() == wanted
            assert torch.equal(found[0, [0, 2]], torch.from_numpy(x[[0, 4]]))
        [(_, _, whole)] = placed.chunks(Batch(rows=None), 100)
        assert whole is None, "all rows are no places"
        with pytest.raises(ValueError, match="4 places cannot hold 5 rows"):
            table.with_places(4)


def test_a_fold_with_more_rows_than_places_is_refused() -> None:
    table = Table(torch.zeros(5, 1), torch.zeros(5), False)
    held = torch.tensor([[False], [False], [False], [True], [True]])
    assert len(table.with_folds(held, 4)) == 4
    with pytest.raises(RunError, match="3 training rows, more than the 2 places"):
        table.with_folds(held, 2)


LINEAR: dict[str, Any] = {"model": {"kind": "linear"}}
CONVEX: dict[str, Any] = {"model": {"kind": "convex", "l2": 0.1}}
COLUMN: dict[str, Any] = {
    "path": "two.csv", "target": "y", "bounds": {"x": [0, 1]}, "split": {"test": 0.3}, "evaluation": "public",
}  # fmt: skip
NOISED: dict[str, dict[str, Any]] = {
    "poisson": {**LINEAR, "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 12, "learning_rate": 1}},
    "users": {
        **LINEAR,
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 12, "learning_rate": 1},
        "privacy": {"unit": {"column": "who", "most_rows": 2}},
    },
    "full": {**LINEAR, "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1}},
    "preconditioned": {
        **LINEAR,
        "method": {"kind": "dp-gd", "learning_rate": 1, "preconditioner": {"kind": "second-moment"}},
    },
    "dp-gd": {**CONVEX, "method": {"kind": "dp-gd", "learning_rate": 1}},
    "calibration": {
        "model": {"kind": "convex", "loss": "squared"}, "method": {"kind": "dp-gd", "calibration": {"share": 0.1}},
        "data": COLUMN | {"task": "regression", "target_bounds": [0, 1]}, "epochs": None,
    },
    "intervals": {
        "model": {"kind": "convex"}, "method": {"kind": "dp-gd", "inference": "intervals"},
        "data": COLUMN | {"classes": [0, 1]}, "epochs": None,
    },
    "dp-agd": {**CONVEX, "method": {"kind": "dp-agd", "splits": 10}, "epochs": None},
    "output-perturbation": {**CONVEX, "method": {"kind": "output-perturbation", "steps": 3}, "epochs": None},
    "dp-least-squares": {**LINEAR, "method": {"kind": "dp-least-squares"}, "epochs": None},
    "pca": {
        **LINEAR,
        "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 1},
        "data": {"preprocess": [{"pca": {"components": 2, "noise_multiplier": 5}}]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NOISED)
def test_what_noise_is_priced_and_released_for_is_the_number_of_places(
    name: str, write_recipe: WriteRecipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 42 of 60 records train, a private number: no grid of noise without a seed may be made for it.

    The places are all 60, because 42 and 6 deviations of 3.55 are more.
    """
    rng = np.random.default_rng(0)
    x, y = rng.random((60, 4)), np.arange(60) % 2
    np.savez(tmp_path / "two.npz", x=x, y=y, who=np.arange(60))
    made, rows = [], []
    own, rowed = Grid.of.__func__, Table.with_places  # type: ignore[attr-defined]

    def of(cls: type[Grid], numbers: int, records: int, *rest: Any) -> Any:
        made.append(records)
        return own(cls, numbers, records, *rest)

    def with_places(self: Table, places: int) -> Table:
        rows.append(self.rows)
        return rowed(self, places)

    monkeypatch.setattr(Grid, "of", classmethod(of))
    monkeypatch.setattr(Table, "with_places", with_places)
    sections = NOISED[name]
    pd.DataFrame({"x": x[:, 0], "y": y}).to_csv(tmp_path / "two.csv", index=False)
    data = sections.get("data", {})
    if "path" not in data:
        data = {"path": "two.npz", "bounds": [0, 1], "classes": [0, 1], "split": {"test": 0.3}} | data
    privacy = {"budget": {"epsilon": 4, "delta": 1e-3}} | sections.get("privacy", {})
    train(write_recipe(**{"epochs": 2, **sections, "data": data, "privacy": privacy, "seed": None, "repeats": 1}))
    assert made and set(made) == {60}
    assert 30 < rows[0] < 55
