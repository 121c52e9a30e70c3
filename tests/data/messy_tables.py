"""Sixteen tables as spreadsheets and databases export them, each with faults of its own: `write(folder)`.

Run `python -m tests.data.messy_tables FOLDER` for files to try by hand.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROWS = 240
Row = Sequence[Any]


@dataclass(frozen=True)
class Messy:
    """A table: its file, the column to learn, what a person fills in, and the target as the file spells it.

    `uses` are the roles that the draft should give to columns.
    """

    path: Path
    target: str
    fill: dict[str, str]
    spelled: list[str]
    uses: dict[str, str] = field(default_factory=dict)
    task: str = "classification"


def _days(random: np.random.Generator, form: str, count: int = ROWS) -> list[str]:
    first = np.datetime64("2019-01-01T00:00", "m")
    minutes = random.integers(0, 3 * 365 * 24 * 60, count)
    return [(first + one).astype(object).strftime(form) for one in minutes]


def _text(rows: Sequence[Row], separator: str = ",", **how: Any) -> str:
    stream = io.StringIO()
    csv.writer(stream, delimiter=separator, lineterminator="\r\n", **how).writerows(rows)
    return stream.getvalue()


def churn(folder: Path, random: np.random.Generator) -> Messy:
    """Nine columns, of which six are categories, dates and names of customers."""
    age, fee = random.integers(18, 90, ROWS), random.uniform(5, 90, ROWS).round(2)
    plan, city = random.choice(["basic", "plus", "pro"], ROWS), random.integers(0, 90, ROWS)
    label = ["Churned " if a + f > 100 else "Stayed" for a, f in zip(age, fee, strict=True)]
    columns = [
        [f"C-{one:05d}" for one in random.permutation(ROWS)],
        age,
        fee,
        plan,
        [f"City {one}" for one in city],
        _days(random, "%Y-%m-%d"),
        _days(random, "%Y-%m-%d %H:%M:%S"),
        random.choice(["web", "shop", ""], ROWS),
        label,
    ]
    names = ["customer_id", "age", "fee", "plan", "city", "joined", "last call", "channel", "churn"]
    path = folder / "churn.csv"
    path.write_text(_text([names, *zip(*columns, strict=True)]), encoding="utf-8-sig")
    fill = {"age": "[18, 100]", "fee": "[0, 100]", "joined": "[2019-01-01, 2021-12-31]"}
    uses = {"customer_id": "drop", "plan": "category", "city": "hash", "joined": "date", "last call": "date"}
    return Messy(path, "churn", fill | {"last call": fill["joined"]}, label, uses)


def german(folder: Path, random: np.random.Generator) -> Messy:
    """Windows-1252, semicolons, decimal commas, dots between thousands, and days before months."""
    pay = random.uniform(1000, 9000, ROWS)
    shown = [f"{one:,.2f}".translate(str.maketrans(",.", ".,")) for one in pay]
    share = [f"{one:.3f}".replace(".", ",") for one in random.uniform(0, 1, ROWS)]
    where = random.choice(["Köln", "München", "Zürich \u2013 West"], ROWS)
    label = ["Übernahme" if one > 5000 else "Nein" for one in pay]
    rows = zip(shown, share, where, _days(random, "%d.%m.%Y"), label, strict=True)
    path = folder / "german.csv"
    path.write_bytes(_text([["Gehalt", "Anteil", "Ort", "Eintritt", "Ergebnis"], *rows], ";").encode("cp1252"))
    fill = {"Gehalt": "[0, 10000]", "Anteil": "[0, 1]", "Eintritt": "[2019-01-01, 2021-12-31]"}
    return Messy(path, "Ergebnis", fill, label, {"Gehalt": "number", "Eintritt": "date", "Ort": "category"})


def excel(folder: Path, random: np.random.Generator) -> Messy:
    """An Excel file whose cells are numbers, dates, truth values and text, with empty ones between."""
    import pandas as pd

    height = [None if one % 17 == 0 else float(one) / 2 for one in random.integers(280, 400, ROWS)]
    when = [np.datetime64("2019-01-01") + one for one in random.integers(0, 1000, ROWS)]
    label = ["tall" if one is not None and one > 170 else "small" for one in height]
    frame = pd.DataFrame({"height": height, "seen": when, "smoker": random.integers(0, 2, ROWS) > 0, "class": label})
    path = folder / "clinic.xlsx"
    with pd.ExcelWriter(path) as book:
        frame.to_excel(book, sheet_name="Visits", index=False)
        pd.DataFrame({"note": ["see the first sheet"]}).to_excel(book, sheet_name="Notes", index=False)
    fill = {"height": "[130, 220]", "seen": "[2019-01-01, 2022-12-31]"}
    return Messy(path, "class", fill, label, {"height": "number", "seen": "date", "smoker": "category"})


def tabs(folder: Path, random: np.random.Generator) -> Messy:
    """Tabs, in a file that is called .csv, and dashes where a value is missing."""
    weight = [("-" if one % 11 == 0 else str(one / 10)) for one in random.integers(400, 1200, ROWS)]
    label = ["1.0" if one != "-" and float(one) > 80 else "0.0" for one in weight]
    rows = zip(weight, random.integers(0, 9, ROWS), label, strict=True)
    path = folder / "tabs.csv"
    path.write_text(_text([["weight", "visits", "heavy"], *rows], "\t"))
    return Messy(path, "heavy", {"weight": "[30, 200]", "visits": "[0, 10]"}, label, {"weight": "number"})


def percent(folder: Path, random: np.random.Generator) -> Messy:
    """Percent signs, in Latin-1."""
    share = random.uniform(0, 100, ROWS).round(1)
    label = ["été" if one > 50 else "hiver" for one in share]
    rows = zip([f"{one} %" for one in share], random.integers(0, 50, ROWS), label, strict=True)
    path = folder / "percent.csv"
    path.write_bytes(_text([["humidité", "age", "saison"], *rows], ",").encode("latin-1"))
    return Messy(path, "saison", {"humidité": "[0, 100]", "age": "[0, 99]"}, label, {"humidité": "number"})


def currency(folder: Path, random: np.random.Generator) -> Messy:
    """Dollars with commas between thousands, as inputs and as the target of a regression; packed with gzip."""
    area = random.integers(300, 3000, ROWS)
    price = [f"${200 * one:,}" for one in area]
    rows = zip([f"{one:,}" for one in area], random.choice(["yes", "no"], ROWS), price, strict=True)
    path = folder / "houses.csv.gz"
    path.write_bytes(gzip.compress(_text([["sq ft", "garage", "price"], *rows]).encode()))
    fill = {"sq ft": "[100, 5000]", "target_bounds": "[0, 1000000]"}
    return Messy(path, "price", fill, price, {"sq ft": "number", "garage": "category"}, "regression")


def codes(folder: Path, random: np.random.Generator) -> Messy:
    """Codes with leading zeros, many of them and few, and as labels; packed with zstd."""
    import pyarrow

    post, kind = random.integers(0, 300, ROWS), random.integers(0, 4, ROWS)
    label = [f"{one:02d}" for one in kind % 3]
    rows = zip([f"{one:05d}" for one in post], [f"{one:03d}" for one in kind], label, strict=True)
    path = folder / "codes.csv.zst"
    with pyarrow.output_stream(str(path), compression="zstd") as stream:
        stream.write(_text([["zip", "kind", "group"], *rows]).encode())
    return Messy(path, "group", {}, label, {"zip": "hash", "kind": "category"})


def texts(folder: Path, random: np.random.Generator) -> Messy:
    """Free text beside a number: quotes, commas and line breaks inside of it."""
    words = np.array(
        ["good", "bad", "room", "staff", "food, cold", 'the "sea"', "late\nnight", "clean", "price", "view"]
    )
    notes = [" ".join(random.choice(words, 6)) for _ in range(ROWS)]
    label = ["Yes" if note.count("good") + note.count("clean") > 1 else "No" for note in notes]
    path = folder / "reviews.csv"
    path.write_text(_text([["stars", "review", "again"], *zip(random.integers(1, 6, ROWS), notes, label, strict=True)]))
    return Messy(path, "again", {"stars": "[1, 5]"}, label, {"review": "text", "stars": "number"})


def visits(folder: Path, random: np.random.Generator) -> Messy:
    """Several rows of each patient, and a number of the visit that is in no other row."""
    who, stay = random.integers(0, 60, ROWS), random.integers(0, 30, ROWS)
    label = ["home" if one < 15 else "transfer" for one in stay]
    rows = zip(
        [f"V{one:06d}" for one in random.permutation(ROWS)], [f"P{one:04d}" for one in who], stay, label, strict=True
    )
    path = folder / "visits.csv"
    path.write_text(_text([["visit id", "patient_id", "days", "left to"], *rows]))
    return Messy(
        path, "left to", {"days": "[0, 60]"}, label, {"visit id": "drop", "patient_id": "unit", "days": "number"}
    )


def truths(folder: Path, random: np.random.Generator) -> Messy:
    """True and False as labels and as inputs."""
    x = random.normal(size=ROWS).round(3)
    label = [str(bool(one > 0)) for one in x]
    rows = zip(x, [str(bool(one)) for one in random.integers(0, 2, ROWS)], label, strict=True)
    path = folder / "truths.csv"
    path.write_text(_text([["x", "member", "fraud"], *rows]))
    return Messy(path, "fraud", {"x": "[-4, 4]"}, label, {"x": "number", "member": "category"})


def questions(folder: Path, random: np.random.Generator) -> Messy:
    """Question marks, NA and nothing where a value is missing, and blanks before each cell."""
    age = [
        ("?" if one % 13 == 0 else "NA" if one % 17 == 0 else "" if one % 19 == 0 else one)
        for one in random.integers(17, 90, ROWS)
    ]
    work = random.choice(["Private", "State", "?"], ROWS)
    label = [">50K" if isinstance(one, int | np.integer) and one > 45 else "<=50K" for one in age]
    lines = ["age, work, income", *(f"{a}, {w}, {y}" for a, w, y in zip(age, work, label, strict=True))]
    path = folder / "census.csv"
    path.write_text("\n".join(lines) + "\n")
    return Messy(path, "income", {"age": "[17, 90]"}, label, {"age": "number", "work": "category"})


def survey(folder: Path, random: np.random.Generator) -> Messy:
    """A title above the header, names of two lines, words of agreement, and empty columns without a name."""
    words = np.array(["Strongly disagree", "Disagree", "Neutral", "Agree", "Strongly agree", ""])
    staff, back = random.integers(0, 6, ROWS), random.integers(0, 5, ROWS)
    label = ["Yes" if one % 5 + other > 4 else "No" for one, other in zip(staff, back, strict=True)]
    rows = zip(words[staff], words[back], random.integers(18, 80, ROWS), label, [""] * ROWS, [""] * ROWS, strict=True)
    path = folder / "survey.csv"
    head = [["Customers, 2024", *[""] * 5], ["The staff\nwas friendly", "I will\nreturn", "Age", "Recommend?", "", ""]]
    path.write_text(_text([*head, *rows]), encoding="utf-8-sig")
    uses = {"The staff was friendly": "category", "I will return": "category", "Age": "number", "column 6": "drop"}
    return Messy(path, "Recommend?", {"Age": "[18, 99]"}, label, uses)


def log(folder: Path, random: np.random.Generator) -> Messy:
    """Times with their zones, in two spellings, and addresses of clients."""
    times = [one + ("Z" if number % 3 else "+01:00") for number, one in enumerate(_days(random, "%Y-%m-%dT%H:%M:%S"))]
    client = [f"10.0.{random.integers(0, 40)}.{random.integers(0, 3)}" for _ in range(ROWS)]
    took = random.exponential(200, ROWS).round(1)
    label = ["slow" if one > 150 else "fast" for one in took]
    path = folder / "log.csv"
    path.write_text(_text([["time", "address", "took ms", "speed"], *zip(times, client, took, label, strict=True)]))
    fill = {"time": "[2019-01-01, 2021-12-31]", "took ms": "[0, 2000]"}
    return Messy(path, "speed", fill, label, {"time": "date", "address": "hash", "took ms": "number"})


def bank(folder: Path, random: np.random.Generator) -> Messy:
    """Amounts below zero with their sign behind them, and years of two digits."""
    amount = random.normal(0, 3000, ROWS)
    shown = [f"{abs(one):,.2f}".translate(str.maketrans(",.", ".,")) + "-" * int(one < 0) for one in amount]
    label = ["Soll" if one < 0 else "Haben" for one in amount]
    rows = zip(_days(random, "%d.%m.%y"), shown, random.choice(["Gebühr", "Lohn"], ROWS), label, strict=True)
    path = folder / "bank.csv"
    path.write_bytes(_text([["Buchungstag", "Betrag", "Vorgang", "S/H"], *rows], ";").encode("cp1252"))
    fill = {"Buchungstag": "[2019-01-01, 2021-12-31]", "Betrag": "[-10000, 10000]"}
    return Messy(path, "S/H", fill, label, {"Buchungstag": "date", "Betrag": "number", "Vorgang": "category"})


def figures(folder: Path, random: np.random.Generator) -> Messy:
    """An Excel file with a cover sheet, a merged title above the header, and losses in brackets."""
    import openpyxl

    book = openpyxl.Workbook()
    book.active.title = "Cover"
    sheet = book.create_sheet("Data")
    sheet["A1"] = "Figures of the year"
    sheet.merge_cells("A1:C1")
    result = random.integers(-5000, 5000, ROWS)
    label = ["up" if one > 0 else "down" for one in result]
    shown = [f"({-one:,})" if one < 0 else f"{one:,}" for one in result.tolist()]
    for row in [[], ["Region", "Result", "Trend"], *zip(random.choice(["N", "S"], ROWS), shown, label, strict=True)]:
        sheet.append(list(map(str, row)))
    path = folder / "figures.xlsx"
    book.save(path)
    return Messy(path, "Trend", {"Result": "[-5000, 5000]"}, label, {"Region": "category", "Result": "number"})


def genes(folder: Path, random: np.random.Generator) -> Messy:
    """Far more columns than a small table should have, two of them constant, and labels 0 and 1."""
    values = random.normal(8, 1, (ROWS, 40)).round(2)
    values[:, 7], values[:, 0] = 3.5, random.choice([5, 8, 11], ROWS)
    label = [str(int(one > 8)) for one in values[:, 0]]
    path = folder / "genes.tsv"
    rows = ([*one, other] for one, other in zip(values, label, strict=True))
    path.write_text(_text([[*(f"G{number}" for number in range(40)), "tumour"], *rows], "\t"))
    fill = {f"G{number}": "[0, 16]" for number in range(40) if number != 7}
    return Messy(path, "tumour", fill, label, {"G0": "number", "G7": "drop"})


TABLES: dict[str, Callable[[Path, np.random.Generator], Messy]] = {
    one.__name__: one
    for one in (
        churn,
        german,
        excel,
        tabs,
        percent,
        currency,
        codes,
        texts,
        visits,
        truths,
        questions,
        survey,
        log,
        bank,
        figures,
        genes,
    )
}


def write(folder: Path) -> dict[str, Messy]:
    """Write all tables into `folder`."""
    return {name: make(folder, np.random.default_rng(number)) for number, (name, make) in enumerate(TABLES.items())}


if __name__ == "__main__":
    for made in write(Path(sys.argv[1])).values():
        print(made.path, "--target", made.target)
