"""Drafts of tables that are read in parts: those of the whole table, whatever comes late, and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import yaml

from dpsgd_cli.data import condensed, recipe_template
from dpsgd_cli.data.recipe_template import Draft, Task, draft
from dpsgd_cli.data.table_files import PLAIN
from dpsgd_cli.errors import DataError
from tests.data.messy_tables import write


def in_parts(monkeypatch: pytest.MonkeyPatch, rows: int, texts: int = 10_000) -> None:
    monkeypatch.setattr(recipe_template, "ROWS_AT_ONCE", rows)
    monkeypatch.setattr(condensed, "MOST_TEXTS", texts)


def of(path: Path) -> Draft:
    return draft(path, "y", None, path.name)


def test_drafts_are_those_of_the_whole_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sixteen messy tables, in parts of a fifth, with few texts kept."""
    tables = write(tmp_path).values()

    def drafts() -> list[Draft]:
        return [draft(one.path, one.target, cast(Task, one.task), "t") for one in tables]

    whole = drafts()
    in_parts(monkeypatch, 50, 20)
    assert drafts() == whole


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_comes_late_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    frame = pd.DataFrame(
        {
            "n": [*np.arange(80) % 7 + 0.5, np.nan],
            "c": ["u", "v"] * 40 + ["late"],
            "same": [1.5] * 80 + [2.5],
            "who": [f"p{i % 15}" for i in range(81)],
            "id": [f"k{i:03d}" for i in range(81)],
            "y": [0, 1] * 40 + [2],
        }
    )
    path = tmp_path / f"t.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    in_parts(monkeypatch, 10, 12)
    data = yaml.load(of(path).recipe, Loader=yaml.BaseLoader)["data"]
    assert data["classes"] == ["0", "1", "2"] and data["missing"] == {"n": {"indicator": "true"}}
    assert data["categorical"]["c"] == ["late", "u", "v"] and data["categorical"]["same"] == ["1.5", "2.5"]
    assert data["drop"] == ["id"] and "who" in data["categorical"]


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"n": "oops"}, "column 'n' holds numbers in several forms: .* data row 75"),
        ({"n": "1,5"}, "column 'n' holds numbers in several forms: .* data row 75"),
        ({"n": "inf"}, "column 'n' has 1 missing or infinite value, first in data row 75"),
        ({"k": "oops"}, "column 'k' holds numbers in several forms: .* data row 75"),
        ({"d": "2020-31-12"}, "column 'd' holds dates in several forms.* data row 75"),
        ({"y": ""}, "label column 'y' has 1 missing label, first in data row 75"),
    ],
)
@pytest.mark.parametrize("texts", [10_000, 15])
def test_a_late_fault_is_named_by_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cells: dict[str, str], said: str, texts: int
) -> None:
    rows: list[dict[str, Any]] = [
        {"n": i % 40 + 0.25, "k": i % 41, "d": f"2020-01-{i % 28 + 1:02d}", "y": "uv"[i % 2]} for i in range(90)
    ]
    rows[74] |= cells
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    # of many texts, those with a digit are not kept: training names such a fault
    in_parts(monkeypatch, 20, 10_000 if set("".join(cells.values())) & set("0123456789") else texts)
    with pytest.raises(DataError, match=said) as refused:
        of(tmp_path / "t.csv")
    assert not any(cell and cell in str(refused.value) for cell in cells.values() if cell != "inf")


def test_marks_of_missing_numbers_that_come_late_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [*(f"{i}.5" for i in range(50)), "-", *(f"{i}.5" for i in range(20))]
    path = tmp_path / "t.csv"
    path.write_text("n;m;y\n" + "".join(f"{cell};{i}.25;{'uv'[i % 2]}\n" for i, cell in enumerate(cells)))
    in_parts(monkeypatch, 10)
    data = yaml.load(of(path).recipe, Loader=yaml.BaseLoader)["data"]
    assert data["format"]["missing"] == ["-"] and set(data["bounds"]) == {"n", "m"} and set(data["missing"]) == {"n"}


def test_what_is_kept_does_not_grow_with_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condensed, "MOST_TEXTS", 100)

    def parts() -> Iterator[pd.DataFrame]:
        random = np.random.default_rng(0)
        for begin in range(0, 8000, 200):
            index = pd.RangeIndex(begin, begin + 200)
            words = pd.Series([f"w{i}" if i % 2 else "x" * (i % 3000) for i in index], index, dtype="category")
            yield pd.DataFrame({"n": random.normal(size=200), "w": words, "i": np.arange(200) + begin}, index)

    columns, rows = condensed.condensed(parts(), PLAIN, "y", lambda _: False)
    assert rows == 8000 and all(len(column.kept) <= 200 + 2 * 100 for column in columns.values())
    assert (columns["i"].cells, columns["i"].different) == (8000, 8000)
    assert columns["w"].kept.index.is_monotonic_increasing and columns["w"].cells == 8000 - 3


def test_different_values_are_counted_exactly_then_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(condensed, "MOST_HASHES", 4096)
    few, many, own = condensed.Different(), condensed.Different(), condensed.Different()
    for part in range(10):
        few.add(np.arange(4000), np.ones(4000, int))
        many.add(np.arange(part * 10_000, part * 10_000 + 20_000), np.ones(20_000, int))
        own.add(np.arange(part * 20_000, part * 20_000 + 20_000), np.ones(20_000, int))
    assert few.of(40_000) == 4000 and own.of(200_000) == 200_000
    # standard error 1 / sqrt(2048) at most
    assert many.of(200_000) == pytest.approx(110_000, rel=0.09)


def test_large_tables_stay_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"n": i % 40 + 0.25, "user": f"u{i % 30}", "y": "uv"[i % 2]} for i in range(60)]
    pd.DataFrame(rows).to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.setattr(recipe_template, "MOST_CELLS", 179)
    assert "on_disk" not in of(tmp_path / "t.csv").recipe and "unit:" in of(tmp_path / "t.csv").recipe
    pd.DataFrame(rows).drop(columns="user").to_csv(tmp_path / "t.csv", index=False)
    assert "on_disk" not in of(tmp_path / "t.csv").recipe
    monkeypatch.setattr(recipe_template, "MOST_CELLS", 119)
    assert yaml.load(of(tmp_path / "t.csv").recipe, Loader=yaml.BaseLoader)["data"]["on_disk"] == "true"
