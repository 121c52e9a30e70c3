"""Tables on disk against the same tables in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpsgd_cli.batching.run import FullSampler, PoissonSampler, ShuffleSampler
from dpsgd_cli.batching.streamed import StreamedTable
from dpsgd_cli.data.on_disk import DiskRows, stored
from dpsgd_cli.engine.streams import SeededStreams
from dpsgd_cli.engine.tensors import Batch, Table
from dpsgd_cli.errors import RecipeError
from dpsgd_cli.results import store
from tests.conftest import GRADIENT, OWN, WAYS, Train, WriteRecipe

CPU = torch.device("cpu")


@pytest.fixture
def tables(tmp_path: Path) -> tuple[Table, StreamedTable]:
    """40 rows of 2 x 2 with labels, in memory and on disk."""
    x, y = np.random.default_rng(0).random((40, 2, 2)).astype(np.float32), np.arange(40) % 3
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    features, labels = (DiskRows(stored(tmp_path / name)) for name in ("x.npy", "y.npy"))
    memory = Table.load(x, y, False, CPU, torch.float64)
    return memory, StreamedTable.open(features, labels, CPU, torch.float64)


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Whether two pieces hold the same tensors of the same types."""
    pairs = list(zip(first, second, strict=True))
    return all(a is b if a is None or b is None else torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("kind", ["poisson", "shuffle", "full", "span"])
@pytest.mark.parametrize("most", [3, 100])
def test_batches_are_those_of_a_table_in_memory(tables: tuple[Table, StreamedTable], kind: str, most: int) -> None:
    """In pieces of any size."""
    memory, disk = tables
    streams = [SeededStreams(seed) for seed in range(2)]
    samplers = {"poisson": PoissonSampler(streams, 40, 7), "shuffle": ShuffleSampler(streams, 40, 7)}
    for step in (0, 1, 2, 7):
        batch = Batch(rows=None, span=(5, 31)) if kind == "span" else samplers.get(kind, FullSampler()).batch(step)
        found, expected = list(disk.chunks(batch, most)), list(memory.chunks(batch, most))
        assert len(found) == len(expected)
        assert all(same(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def on_disk(path: Path) -> dict[str, Any]:
    """The rows of `tiny.npz` as npy files beside it, and the section that names them."""
    with np.load(path / "tiny.npz") as arrays:
        for name in arrays.files:
            np.save(path / f"{name}.npy", arrays[name].astype(np.float32) if name[0] == "x" else arrays[name])
        np.savez(
            path / "tiny.npz", **{n: arrays[n].astype(np.float32) if n[0] == "x" else arrays[n] for n in arrays.files}
        )
    files = {"path": "x.npy", "target": "y.npy", "test_path": "x_test.npy", "test_target": "y_test.npy"}
    return OWN | files


CASES: dict[str, dict[str, Any]] = {
    "poisson": {},
    "shuffle": {"method": GRADIENT | {"batching": "shuffle"}, "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}}},
    "full": {
        "method": {"kind": "dp-sgd", "batching": "full", "learning_rate": 0.1},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}},
    },
    "without privacy": {"method": GRADIENT | {"kind": "sgd"}, "privacy": None},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_disk_is_the_run_in_memory(write_recipe: WriteRecipe, train: Train, tmp_path: Path, case: str) -> None:
    """To the last bit: weights, ledger, history; micro-batches too."""
    section = on_disk(tmp_path)
    runtime = {"device": "cpu", "threads": 1, "micro_batch": 5}
    shared = CASES[case] | {"save_model": True, "runtime": runtime}
    ours = train(write_recipe(name="disk", data=section, **shared))
    theirs = train(write_recipe(name="memory", data=OWN, **shared))
    for name in ("model.safetensors", "ledger.jsonl", "history.csv", "trials.csv"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    made_from = store.read_document(ours)["provenance"]["nonprivate_data_sha256"]
    assert set(made_from) == {"x.npy", "y.npy", "x_test.npy", "y_test.npy"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"folds": 3}, r"data\.path: folds hold all rows in memory"),
        (WAYS["private-selection"], r"data\.path: method private-selection holds all rows in memory"),
    ],
)
def test_what_holds_all_rows_is_refused(
    write_recipe: WriteRecipe, train: Train, tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    section = on_disk(tmp_path)
    if "folds" in sections:
        section = {key: value for key, value in section.items() if not key.startswith("test_")}
    with pytest.raises(RecipeError, match=said):
        train(write_recipe(data=section, **sections))
