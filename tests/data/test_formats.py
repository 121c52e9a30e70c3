"""How tables are written: read as the recipe says and not otherwise, and found out by `dpsgd recipe new` alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.data import draft, opening
from dpsgd_cli.data.cells import Cells, TableRows, numbers_in
from dpsgd_cli.data.column_settings import TableFormat
from dpsgd_cli.data.settings import Data
from dpsgd_cli.errors import DataError
from dpsgd_cli.main import main

GERMAN = TableFormat(decimal=",", thousands=".", symbols=["€", "%"], missing=["-"])


@pytest.mark.parametrize(
    ("text", "written", "number"),
    [
        ("1.234,50", GERMAN, 1234.5),
        ("-7,5 %", GERMAN, -7.5),
        ("€ 1.234.567", GERMAN, 1234567),
        ("-", GERMAN, None),
        ("12.34", GERMAN, "bad"),
        ("1,234.5", GERMAN, "bad"),
        ("1,2,3", GERMAN, "bad"),
        ("$30,123", TableFormat(thousands=",", symbols=["$"]), 30123),
        ("-$5.25", TableFormat(thousands=",", symbols=["$"]), -5.25),
        ("30,12", TableFormat(thousands=","), "bad"),
        ("0,123", TableFormat(thousands=","), "bad"),
        ("--5", TableFormat(symbols=["$"]), "bad"),
        ("1 234,5", TableFormat(decimal=",", thousands=" "), 1234.5),
        ("1\u00a0234", TableFormat(thousands=" "), 1234),
        ("1\u2019234.5", TableFormat(thousands="'"), 1234.5),
        ("1'234", TableFormat(thousands="\u2019"), 1234),
        ("1'234", TableFormat(thousands=","), "bad"),
        ("\u22125", TableFormat(), -5),
        ("1e3", TableFormat(), 1000),
        ("1,5", TableFormat(), "bad"),
        ("?", TableFormat(), None),
        ("1_000", TableFormat(), "bad"),
        ("\u0663", TableFormat(), "bad"),
        ("<0.2", TableFormat(), "bad"),
        ("<0.2", TableFormat(below="limit"), 0.2),
        ("\u2264 1,4", TableFormat(below="half", decimal=","), 0.7),
        ("<<3", TableFormat(below="limit"), "bad"),
        ("<", TableFormat(below="limit"), "bad"),
        ("22:15", TableFormat(), "bad"),
        ("22:15", TableFormat(parts=True), 22.25),
        ("0:30:36", TableFormat(parts=True), 0.51),
        ("22:75", TableFormat(parts=True), "bad"),
        ("2h 45m", TableFormat(parts=True), 2.75),
        ("5'6\"", TableFormat(parts=True), 5.5),
        ("5'12", TableFormat(parts=True), "bad"),
    ],
)
def test_a_number_is_what_the_format_says_and_nothing_else(text: str, written: TableFormat, number: Any) -> None:
    (found,), (bad,) = numbers_in(Cells.of("x", [text]), written)
    assert ("bad" if bad else None if pd.isna(found) else found) == number


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a,y\n1,x\n", {"separator": ","}),
        ("\ufeffa,y\n1,\u00e9\n".encode(), {"separator": ","}),
        ("a;y\n1;\u00e9\n".encode("latin-1"), {"separator": ";", "encoding": "latin-1"}),
        ("a;y\n1;\u20ac\n".encode("cp1252"), {"separator": ";", "encoding": "cp1252"}),
        ("a\ty\n1\tx\n".encode("utf-16"), {"separator": "\t", "encoding": "utf-16"}),
        (b'a,y\n"1;2;3",x\n"1;2;3",z\n', {"separator": ","}),
        (b"a,y\n 1, x\n", {"separator": ",", "trim": False}),
        (b"a, y\n1, x\n", {"separator": ","}),
        (b"a,y\n1;2,x\n", {"separator": ","}),
        (b"sep=;\na;y\n1,5;x\n", {"separator": ";", "skip": 1}),
    ],
)
def test_encodings_and_separators_that_are_found(tmp_path: Path, content: bytes, found: dict[str, Any]) -> None:
    (tmp_path / "own.csv").write_bytes(content)
    written = draft.format_of(tmp_path / "own.csv", ".csv", "y")
    assert written.model_dump(exclude_defaults=True) == found


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["1.5", "2"], {}),
        (["1,5", "2"], {"decimal": ","}),
        (["1,234", "12,345"], {"thousands": ","}),
        (["1.234,5", "2"], {"decimal": ",", "thousands": "."}),
        (["$1", "-"], {"symbols": ["$"], "missing": ["-"]}),
        (["1 %", "2.5%"], {"symbols": ["%"]}),
        (["red", "-"], {}),
        (["1.2.3", "1.2.4"], {}),
        (["1.234,50 EUR", "-7,00 EUR"], {"decimal": ",", "thousands": ".", "symbols": ["EUR"]}),
        (["1\u2019234.50", "12\u2019345.00"], {"thousands": "'"}),
        (["57,3 kg", "60,1 kg", "71,0 kg", "80,2 kg", "99,9 kg"], {"decimal": ",", "symbols": ["kg"]}),
        (["21.5 °C", "20.0 °C", "19.5 °C", "18.0 °C", "-3.5 °C"], {"symbols": ["°C"]}),
        (["5 apples", "7 pears", "6 plums", "9 nuts", "8 figs"], {}),
        (["10B", "11B", "12B", "13B", "14B"], {"symbols": ["B"]}),
        (["B10", "B11", "B12", "B13", "B14"], {}),
        (["007B", "011B", "012B", "013B", "014B"], {}),
        (["1,000+", "10,000+", "100,000+"], {"thousands": ",", "symbols": ["+"]}),
        (["22:20", "06:05", "0:59"], {"parts": True}),
        ([*(f"{k}.5" for k in range(11)), "<0.2"], {}),
    ],
)
def test_numbers_that_are_found(cells: list[str], found: dict[str, Any]) -> None:
    written = draft.with_numbers(TableRows.of({"a": cells}), TableFormat(separator=","))
    assert written.model_dump(exclude_defaults=True, exclude={"separator"}) == found


def test_units_that_differ_and_days_that_excel_counts_are_told(tmp_path: Path) -> None:
    def drafted(column: str, cells: list[str]) -> Result:
        rows = "".join(f"{cell};{at};{'uv'[at % 2]}\n" for at, cell in enumerate(cells))
        (tmp_path / "t.csv").write_text(f"{column};m;y\n{rows}")
        return command("recipe", "new", tmp_path / "t.csv", "--target", "y")

    kilograms = [f"{50 + at},5 kg" for at in range(12)]
    found = drafted("weight", kilograms)
    assert "symbols 'kg'" in found.output and re.search(r"\nweight +numbers", found.output)
    mixed = drafted("weight", [*kilograms[:9], "150,5 lb", *kilograms[9:]])
    assert re.search("weight: 1 cell is no number, first in data row 10: '150,5 lb'; mend it", mixed.stderr)
    assert (
        "if Excel counted these days from 1900"
        in drafted("sold at day", [str(43000 + 9 * at) for at in range(12)]).output
    )


def test_training_does_not_find_out_what_the_recipe_leaves_out(tmp_path: Path) -> None:
    """One record more or less would otherwise change how all others are read."""
    told: dict[str, Any] = {"path": "own.csv", "target": "y", "classes": ["u", "v"]}
    (tmp_path / "own.csv").write_text("a;y\n1,5;u\n2,5;v\n")
    with pytest.raises(DataError, match="column 'a' holds no number in data row 1 and 1 more"):
        opening.load_raw(Data.model_validate(told), tmp_path)
    read: Any = opening.load_raw(Data.model_validate(told | {"format": {"decimal": ","}}), tmp_path)
    assert read.train.x.tolist() == [[1.5], [2.5]]
    (tmp_path / "own.csv").write_bytes("a,y\n1,u\u00e9\n2,v\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"byte .* is not utf-8; give data\.format\.encoding"):
        opening.load_raw(Data.model_validate(told), tmp_path)


@pytest.mark.parametrize("name", ["own.csv", "own.xlsx"])
def test_lines_above_the_header_are_skipped(tmp_path: Path, name: str) -> None:
    if name.endswith("csv"):
        (tmp_path / name).write_text("Report of 2020\n\na,y\n7,u\n8,v\n")
    else:
        rows = [["Report of 2020", None], [None, None], ["a", "y"], [7, "u"], [8, "v"]]
        pd.DataFrame(rows).to_excel(tmp_path / name, header=False, index=False)
    told = {"path": name, "target": "y", "classes": ["u", "v"], "format": {"skip": 2}}
    read: Any = opening.load_raw(Data.model_validate(told), tmp_path)
    assert (read.train.x.tolist(), read.train.y.tolist()) == ([[7], [8]], [0, 1])


def test_excel_sheets_are_named_and_cells_keep_their_type(tmp_path: Path) -> None:
    with pd.ExcelWriter(tmp_path / "own.xlsx") as book:
        pd.DataFrame({"a": [1, None, 3.5], "y": ["u", "v", "u"]}).to_excel(book, sheet_name="one", index=False)
        pd.DataFrame({"a": [7.0], "y": ["u"]}).to_excel(book, sheet_name="two", index=False)
    told: dict[str, Any] = {"path": "own.xlsx", "target": "y", "classes": ["u", "v"], "missing": {"a": 0}}
    for sheet, rows in ((None, [[1.0], [0.0], [3.5]]), ("two", [[7.0]])):
        read: Any = opening.load_raw(Data.model_validate(told | {"format": {"sheet": sheet}}), tmp_path)
        assert read.train.x.tolist() == rows
    with pytest.raises(DataError, match="has no sheet 'three'"):
        opening.load_raw(Data.model_validate(told | {"format": {"sheet": "three"}}), tmp_path)
    pd.DataFrame([["a", "a", "y"], [1, 2, "u"]]).to_excel(tmp_path / "own.xlsx", header=False, index=False)
    with pytest.raises(DataError, match="two columns are called 'a'"):
        opening.load_raw(Data.model_validate(told), tmp_path)
    (tmp_path / "own.xlsx").write_text("no workbook")
    with pytest.raises(DataError, match="cannot be read as an Excel file"):
        opening.load_raw(Data.model_validate(told), tmp_path)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decimal": ",", "thousands": ","}, "thousands: is ',', which is the decimal mark"),
        ({"header": False}, "separator: is needed with header: false"),
        ({"encoding": "hex"}, "'hex' is no encoding of text"),
    ],
)
def test_formats_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TableFormat.model_validate(given)
