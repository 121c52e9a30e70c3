"""Tables that are kept as codes: the same features, the same sums, and no record moves a sum by more than its bound."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from dpsgd_cli.clipping.run import Clipping, Diagnostics
from dpsgd_cli.data.bins import BinColumns
from dpsgd_cli.data.dataset import Column, Layout
from dpsgd_cli.data.step_settings import Bin
from dpsgd_cli.engine import coded_table
from dpsgd_cli.engine.coded_rows import CodedColumn, CodedRows
from dpsgd_cli.engine.coded_table import CodedTable
from dpsgd_cli.engine.losses import cross_entropy
from dpsgd_cli.engine.settings import LinearModel
from dpsgd_cli.methods.risks import affine as coded_sums
from dpsgd_cli.preconditioning.marginals import counted, counted_codes
from dpsgd_cli.recipe.loading import load_recipe
from dpsgd_cli.training import auto_rule, build_models
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import Train, WriteRecipe

COLUMNS = (
    Column("age", (17.0, 90.0)),
    Column("job", values=("a", "b", "c")),
    Column("share", (0.0, 1.0)),
    Column("pay is missing", (0.0, 1.0), indicator=True, category="pay is missing", marks="pay"),
    Column("few", (0.0, 3.0)),
)
LAYOUT = Layout((5,), COLUMNS)
STEP = BinColumns(Bin(waves=6, products=False, grid=50, integers=["age", "few"]), "add-remove")


@pytest.fixture
def rows() -> np.ndarray:
    random = np.random.default_rng(0)
    found = np.stack(
        [
            random.normal(50, 30, 400),
            random.integers(-1, 3, 400),
            random.uniform(-0.2, 1.2, 400),
            random.integers(0, 2, 400),
            random.integers(0, 4, 400),
        ],
        axis=1,
    )
    found[3, :3:2] = np.nan
    found[4, 2] = np.inf
    return found


def test_coded_rows_have_the_features_of_the_step_to_the_bit(rows: np.ndarray) -> None:
    coder = STEP.coded(LAYOUT)
    assert coder is not None
    coded, features = coder(rows), STEP.transform(LAYOUT, None)(rows)
    assert coded.shape == features.shape and coded.codes[:1].dtype == np.uint16
    np.testing.assert_array_equal(np.asarray(coded), features)
    np.testing.assert_array_equal(coded[np.array([[7, 3], [0, 7]])], features[[[7, 3], [0, 7]]])


def test_numbers_are_rounded_to_public_points_near_them(rows: np.ndarray) -> None:
    """Whole numbers within fewer steps stay as they are; fractions move by at most half a step."""
    exact = BinColumns(Bin(waves=6, products=False, grid=None, integers=["age", "few"]), "add-remove")
    after, before = (one.transform(LAYOUT, None)(rows) for one in (STEP, exact))
    places = [i for i, c in enumerate(STEP.plan(LAYOUT).columns or ()) if c.name.startswith("share wave 1")]
    moved = np.abs(after - before)[:, places].max() / np.abs(before[:, places]).max()
    assert 0 < moved <= np.pi / 50
    finer = BinColumns(Bin(waves=6, products=False, grid=200, integers=["age", "few"]), "add-remove")
    rows[:, 0] = np.rint(rows[:, 0].clip(17, 90))
    rows = rows[np.isfinite(rows).all(axis=1)]
    own = [i for i, c in enumerate(STEP.plan(LAYOUT).columns or ()) if "age wave" in c.name]
    np.testing.assert_array_equal(
        finer.transform(LAYOUT, None)(rows)[:, own], exact.transform(LAYOUT, None)(rows)[:, own]
    )


def test_cells_are_counted_by_codes_as_by_rows(rows: np.ndarray) -> None:
    coder, columns = STEP.coded(LAYOUT), STEP.columns(LAYOUT)
    assert coder is not None
    known = rows[rows[:, 1] >= 0]
    np.testing.assert_allclose(counted_codes(coder(known), columns.cells), counted([coder(known)[:]], columns.cells))


@pytest.fixture
def table(tmp_path: Path, write_recipe: WriteRecipe) -> dict[str, Any]:
    random, rows = np.random.default_rng(1), 300
    frame = pd.DataFrame(
        {
            "a": random.normal(size=rows).round(3),
            "b": random.integers(0, 40, rows),
            "c": random.choice(["u", "v"], rows),
        }
    )
    frame["y"] = np.where(frame.a + (frame.c == "u") > 0.3, "yes", np.where(frame.b > 30, "maybe", "no"))
    frame["z"] = frame.a * 2 + frame.b / 10
    frame.to_csv(tmp_path / "table.csv", index=False)
    data: dict[str, Any] = {
        "path": "table.csv",
        "categorical": {"c": ["u", "v"]},
        "bounds": {"a": [-3, 3], "b": [0, 40]},
        "split": {"test": 100},
    }
    data["preprocess"] = [{"bin": {"waves": 8, "products": False, "grid": 64}}]
    classes = {"data": data | {"target": "y", "classes": ["maybe", "no", "yes"], "drop": ["z"]}}
    numbers = {"data": data | {"target": "z", "target_bounds": [-6, 10], "task": "regression", "drop": ["y"]}}
    return {"classes": classes, "numbers": numbers}


CASES = {
    "classes": {},
    "numbers": {},
    "bias": {"model": {"kind": "linear", "bias": True}},
    "no map": {"method": {"kind": "dp-sgd", "batching": "full", "preconditioner": None}},
    "poisson": {"method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 50}},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_on_features(
    table: dict[str, Any],
    case: str,
    write_recipe: WriteRecipe,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain: dict[str, Any] = {
        "save_model": True,
        "method": {"kind": "dp-sgd", "batching": "full"},
        "epochs": 5,
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}},
    }
    recipe = write_recipe(**(plain | table["numbers" if case == "numbers" else "classes"] | CASES[case]))
    called, add = [], coded_sums.CodedSums.add

    def watched(self: coded_sums.CodedSums, first: int, last: int, clipping: Clipping, seen: Diagnostics) -> None:
        """Add up single records first: none is longer than the clip norm, and some are as long."""
        sums, before = self.context.pack.sums, self.context.pack.sums.clone()
        for record in range(0, last, 9):
            sums.zero_()
            add(self, record, record + 1, clipping, Diagnostics(2, sums.device))
            called.append((sums.norm(dim=1) / clipping.norms[0]).max().item())
        sums.copy_(before)
        add(self, first, last, clipping, seen)

    monkeypatch.setattr(coded_sums.CodedSums, "add", watched)
    monkeypatch.setattr(coded_sums, "PIECE", 64)
    monkeypatch.setattr(coded_table, "PIECE", 64)
    first = train(recipe, out=tmp_path / "coded")
    assert (max(called, default=1) == pytest.approx(1, abs=1e-5)) and bool(called) == (case != "poisson")
    monkeypatch.setattr(build_models, "_of_codes", lambda *_: False)
    second = train(recipe, out=tmp_path / "features")
    one, other = (load_file(next(Path(made).rglob("model.safetensors"))) for made in (first, second))
    assert one.keys() == other.keys()
    for name, own in one.items():
        torch.testing.assert_close(own, other[name], rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_not_finite_adds_nothing_and_leaves_the_others() -> None:
    sums = object.__new__(coded_sums.CodedSums)
    sums.context = SimpleNamespace(loss=cross_entropy)  # type: ignore[assignment]
    scores = torch.tensor([[[3.0, 0.0, 1.0], [1.0, 5.0, 0.5]]], dtype=torch.float64)
    labels, squares = torch.tensor([[1, 0, 1]]), torch.tensor([[4.0, 9.0, 0.25]], dtype=torch.float64)

    def weights(scores: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        seen = Diagnostics(1, torch.device("cpu"))
        return sums._weights(scores, labels, squares, Clipping(torch.tensor([[0.5]])), seen)

    sound = weights(scores, squares)
    lengths = sound.square().sum(dim=1).mul(squares).sqrt()
    assert torch.isfinite(sound).all() and (lengths <= 0.5 + 1e-12).all() and (lengths > 0.49).any()
    for odd in (float("inf"), float("nan")):
        for given in (
            (torch.cat([scores[..., :1], scores[..., 1:2] * odd, scores[..., 2:]], dim=2), squares),
            (scores, squares * torch.tensor([[1.0, odd, 1.0]], dtype=torch.float64)),
        ):
            found = weights(*given)
            assert (found[..., 1] == 0).all() and torch.equal(found[..., ::2], sound[..., ::2])


def test_sums_whose_rounding_is_not_covered_are_made_of_features() -> None:
    """8,192 additions in a piece, one a piece and one a code are at most 16,384 and one for each 16,384 rows."""
    layer, recipe = (
        LinearModel(),
        SimpleNamespace(runtime=SimpleNamespace(compile=False), data=SimpleNamespace(augment=None)),
    )
    pack = SimpleNamespace(session=SimpleNamespace(rounds=False), layers=[1])

    def covered(rows: int, codes: int) -> bool:
        column = CodedColumn(np.zeros(0, int), np.zeros((codes, 0)), len)  # type: ignore[arg-type]
        rows_of = CodedRows([column], np.ones(1), np.broadcast_to(np.uint16(0), (rows, 1)))
        table = CodedTable(torch.empty(0), torch.empty(0), False, coded=rows_of, labels=np.empty(0))
        settings = SimpleNamespace(**vars(recipe), model=layer)
        return coded_sums.fits(SimpleNamespace(table=table, recipes=[settings], pack=pack))  # type: ignore[arg-type]

    assert covered(10**6, 4097) and covered(60_000_000, 4097) and covered(10**6, 8192 - 61)
    assert not covered(70_000_000, 4097) and not covered(10**6, 8192 - 59)


def test_large_tables_get_a_grid(
    table: dict[str, Any], write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = table["classes"]
    own["data"]["preprocess"] = [{"bin": {}}]
    path = write_recipe(**own, method={"kind": "dp-sgd", "batching": "full"}, epochs=None)

    def grid() -> object:
        step = (resolve_auto(load_recipe(str(path))).recipe.data.preprocess or [])[0]
        assert step.bin is not None
        return step.bin.grid

    assert grid() is None
    monkeypatch.setattr(auto_rule, "MOST_DENSE", 1000)
    monkeypatch.setattr(auto_rule, "PRODUCTS_FROM", 1e9)
    assert grid() == 2048
