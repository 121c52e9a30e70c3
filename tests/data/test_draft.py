"""Drafts of recipes: what they hold, what they leave open, and that what was drafted trains."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.data import opening
from dpsgd_cli.data.draft import ONE_ROW, draft
from dpsgd_cli.errors import DataError
from dpsgd_cli.main import main
from dpsgd_cli.recipe.loading import load_recipe

ROWS = [
    {
        "id": row,
        "age": 20 + row * 37 % 41 + 0.25 if row % 9 else None,
        "job": ["nurse", "no", None][row % 3],
        "flag": row % 2,
        "note": f"what {row} said",
        "same": 1,
        "pay": 1234.5 + row * 13 % 60,
        "bought": ["Yes", "No"][row * 37 % 41 > 20],
    }
    for row in range(1, 121)
]
WANTED = {
    "categorical": {"job": ["no", "nurse"], "flag": ["0", "1"]},
    "bounds": {"age": ["LOW", "HIGH"], "pay": ["LOW", "HIGH"]},
    "missing": {"age": {"indicator": True}},
    "columns": {"note": {"text": "128"}},
    "drop": ["id", "same"],
}


def written(folder: Path, kind: str) -> Path:
    path, frame = folder / f"people.{kind}", pd.DataFrame(ROWS)
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep="\t" if kind == "tsv" else ",", index=False)
    return path


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def test_a_draft_tells_spellings_of_one_value_and_rows_that_are_no_records(tmp_path: Path) -> None:
    smokers = ["yes", "Yes ", "no", "maybe"] * 10
    lines = [f"{smoker},{number % 7},{number % 2}" for number, smoker in enumerate(smokers)]
    (tmp_path / "t.csv").write_text("\n".join(["smoker,n,y", *lines]) + "\n")
    told = command("recipe", "new", tmp_path / "t.csv", "--target", "y").stderr
    assert "told apart, though they look alike: 'Yes ', 'yes'\n" in told
    (tmp_path / "t.csv").write_text("\n".join(["smoker,n,y", *lines, "total,40"]) + "\n")
    told = command("recipe", "new", tmp_path / "t.csv", "--target", "y").stderr
    assert "row 42 has 2 cells, not 3" in told and "a total or a note, which is no record" in told


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_draft_is_refused_until_it_is_filled_in_and_then_trains(tmp_path: Path, kind: str) -> None:
    """The same of every kind of file; `no` stays text, and nothing in it is a least or largest value."""
    recipe = tmp_path / "recipes" / "people.yaml"
    recipe.parent.mkdir()
    assert command("recipe", "new", written(tmp_path, kind), "--target", "bought", "-o", recipe).exit_code == 0
    text = recipe.read_text()
    data = yaml.load(text, Loader=yaml.BaseLoader)["data"]
    assert data["path"] == f"../people.{kind}" and (data["task"], data["classes"]) == ("classification", ["No", "Yes"])
    assert {key: data[key] for key in WANTED} == json.loads(json.dumps(WANTED).replace("true", '"true"'))
    assert not re.search(r"20\.25|60\.25|1234|1293", text)
    assert all("read from the file" in line for line in text.splitlines() if re.match(r" *(classes|job|flag):", line))
    refused = command("train", recipe)
    assert refused.exit_code == 2
    assert len(re.findall(r"yaml:\d+: data\.bounds\.(age|pay): still to be filled in; replace", refused.stderr)) == 2
    assert len(refused.stderr.splitlines()) == 2
    recipe.write_text(text.replace("age: [LOW, HIGH]", "age: [18, 90]").replace("pay: [LOW, HIGH]", "pay: [0, 3000]"))
    trained = command("train", recipe, "epochs=2", "--out", tmp_path / "out")
    assert (trained.exit_code, trained.stderr.count("read from the data")) == (0, 0)


@pytest.mark.parametrize(
    ("target", "task", "classes"),
    [("pay", None, None), ("bought", None, ["No", "Yes"]), ("flag", None, [0, 1]), ("flag", "regression", None)],
)
def test_what_the_target_is(tmp_path: Path, target: str, task: Any, classes: list[Any] | None) -> None:
    data = yaml.safe_load(draft(written(tmp_path, "csv"), target, task, "people.csv").recipe)["data"]
    assert data["task"] == ("regression" if classes is None else "classification")
    assert (data.get("classes"), data.get("target_bounds")) == (classes, None if classes else ["LOW", "HIGH"])


def test_what_keeps_a_file_from_being_trained_on_is_said(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("a,b,y\n1,2,u\ninf,3,v\n2,-inf,\n3,inf,u\n")
    told = "\n".join(draft(path, "y", None, "bad.csv").told)
    for said in (
        "y: 1 row without a label, first data row 3",
        *(f"'{a}' has 1 missing or infinite value, first in data row {b}" for a, b in ("a2", "b4")),
    ):
        assert said in told
    with pytest.raises(DataError, match=r"--target names 'Y', which is no column; did you mean 'y'"):
        draft(path, "Y", None, "bad.csv")
    path.write_text("n,y\n1,u\n2,v\n3,u\n")
    with pytest.raises(DataError, match=r"no column to learn from; its others are 'n' \(row numbers\)"):
        draft(path, "y", None, "bad.csv")


@pytest.mark.parametrize(("kind", "bounds"), [(np.float64, ["LOW", "HIGH"]), (np.uint8, [0, 255])])
def test_arrays(tmp_path: Path, kind: Any, bounds: list[Any]) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones((40, 3), kind), label=np.arange(40) % 3)
    data = yaml.safe_load(draft(tmp_path / "a.npz", "label", None, "a.npz").recipe)["data"]
    assert (data["bounds"], data["classes"]) == (bounds, [0, 1, 2])
    with pytest.raises(DataError, match=r"no array 'y' \(known: x, label\)"):
        draft(tmp_path / "a.npz", "y", None, "a.npz")


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("work of an evening")
    refused = command("recipe", "new", written(tmp_path, "csv"), "--target", "pay", "-o", tmp_path / "mine.yaml")
    assert (refused.exit_code, (tmp_path / "mine.yaml").read_text()) == (2, "work of an evening")
    assert "exists; it is not overwritten" in refused.stderr


def test_with_private_bounds_only_names_the_target_and_the_number_of_records_decide(tmp_path: Path) -> None:
    """Two files with the same names and targets, and nothing else in common, give the same recipe."""
    one, other = tmp_path / "one.csv", tmp_path / "other.csv"
    one.write_text("age,job,ill\n1,a,0\n2,b,1\n3,a,1\n")
    other.write_text("age,job,ill\nsecret,9,0\nsecret,,1\nsecret,9,1\n")
    texts = [draft(path, "ill", None, "same.csv", private=["job"]).recipe for path in (one, other)]
    assert texts[0] == texts[1]
    recipe = yaml.safe_load(texts[0])
    assert recipe["data"]["bounds"] == {"age": "private"} and recipe["data"]["categorical"] == {"job": "private"}
    (tmp_path / "r.yaml").write_text(texts[0])
    assert load_recipe(str(tmp_path / "r.yaml")).recipe.data.private_columns == {"age": False, "job": True}
    assert "[LOW, HIGH]" not in texts[0]
    assert "[LOW, HIGH] of the target" in draft(one, "age", "regression", "same.csv", private=["job"]).recipe


def test_with_private_bounds_a_wrong_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("age,job,ill\n1,a,0\n2,b,1\n")
    with pytest.raises(DataError, match="--categorical names 'jop', which is no column; did you mean 'job'"):
        draft(path, "ill", None, "one.csv", private=["jop"])
    with pytest.raises(DataError, match="--categorical names 'ill'"):
        draft(path, "ill", None, "one.csv", private=["ill"])


def test_the_command_says_what_it_used_of_a_file_with_private_bounds(tmp_path: Path) -> None:
    path, out = tmp_path / "one.csv", tmp_path / "one.yaml"
    path.write_text("age,job,ill\n1,a,0\n2,b,1\n")
    asked = ["recipe", "new", str(path), "--target", "ill"]
    done = CliRunner().invoke(main, [*asked, "--private-bounds", "--categorical", "job", "-o", str(out)])
    assert "from the names of columns, the number of records and the target alone" in done.output
    assert yaml.safe_load(out.read_text())["data"]["categorical"] == {"job": "private"}
    refused = CliRunner().invoke(main, [*asked, "--categorical", "job"])
    assert refused.exit_code == 2 and "goes with --private-bounds" in refused.output


def exported(name: str = "", n: int = 300) -> dict[str, Any]:
    """The columns of a table as it is exported, all drawn at random; forms are those of real exports."""
    rng = np.random.default_rng(11)
    person = rng.integers(0, n // 3, n)
    label = np.where(rng.random(n) < 0.4, "ja", "nein")
    tables: dict[str, dict[str, Any]] = {
        "persons": {
            "MRN": 700_000 + person,
            "emp_no": 1000 + person,
            "account": [f"A{p:05d}" for p in person],
            "nhs_number": 4_000_000_000 + 7 * person,
            "msisdn": [f"+44 7{p:09d}" for p in person],
            "Versichertennr": [f"K{p:09d}" for p in person],
            "cust_no": 50_000 + 3 * person,
            "ref": 1000 + person,
            "Akte": 50_000 + 3 * person,
        },
        "measured": {
            "kwh": rng.integers(100, 999, n),
            "price": rng.choice(np.arange(1099, 9999, 100), n),
            "rent": rng.integers(300, 700, n) * 10,
            "house": rng.integers(100, 180, n) * 1000,
            "birth weight": rng.normal(3400, 400, n).round(-1).astype(int),
            "grams": rng.permutation(np.repeat(rng.normal(3400, 400, n // 2).round().astype(int), 2)),
            "born": rng.integers(1930, 2005, n),
            "height": rng.normal(170, 9, n).round(1),
        },
    }
    few = {"age": 20 + person % 60, "ward": rng.choice(["A", "B", "C"], n), "y": label}
    return tables.get(name, {}) | few


def test_whose_rows_these_are_is_asked_of_every_column_that_may_say_so(tmp_path: Path) -> None:
    """Whatever it is called; no number of the answer is in the recipe, and nothing trains before it is given."""
    columns = exported("persons")
    frame = pd.DataFrame(columns)
    frame.to_csv(tmp_path / "ids.csv", index=False)
    made = command("recipe", "new", tmp_path / "ids.csv", "--target", "y", "-o", tmp_path / "open.yaml")
    for name in {*columns} - {"age", "ward", "y"}:
        times = frame[name].value_counts()
        assert f"rows per value of {name}: {times.mean():.2f}, at most {times.max()}\n" in made.output
    assert "rows per value of age" not in made.output and "--one-row-a-person" in made.output
    text = (tmp_path / "open.yaml").read_text()
    asked = yaml.safe_load(text)["privacy"]["unit"]
    assert asked[0] == "WHOSE" and {*asked[1:]} == {*columns} - {"age", "ward", "y"}
    assert f"{frame['MRN'].value_counts().mean():.2f}" not in text and "at most 1e-5" in text
    refused = command("train", tmp_path / "open.yaml", "data.bounds.age=[0, 120]")
    assert refused.exit_code == 2 and not (tmp_path / "results").exists()
    assert re.search(
        r"privacy\.unit: is an open question: whose rows .*\{column: '\w+', most_rows: 10\}.* null", refused.stderr
    )
    for answer, unit in (("null", None), ("{column: MRN, most_rows: 10}", "MRN")):
        loaded = load_recipe(str(tmp_path / "open.yaml"), ["data.bounds.age=[0, 120]", f"privacy.unit={answer}"])
        told = loaded.recipe.privacy and loaded.recipe.privacy.unit
        assert (told and told.column) == unit


def test_the_answer_of_whose_rows_these_are_is_an_option(tmp_path: Path) -> None:
    pd.DataFrame(exported("persons")).to_csv(tmp_path / "ids.csv", index=False)

    def drafted(*options: str) -> dict[str, Any]:
        made = command("recipe", "new", tmp_path / "ids.csv", "--target", "y", *options)
        assert made.exit_code == 0, made.output
        return yaml.load(made.stdout, Loader=yaml.BaseLoader)

    of_mrn, of_rows = drafted("--unit", "MRN"), drafted("--one-row-a-person")
    assert of_mrn["privacy"]["unit"] == {"column": "MRN", "most_rows": "10"}
    assert "MRN" not in {**of_mrn["data"]["bounds"], **of_mrn["data"]["columns"]}
    assert of_rows["privacy"]["unit"] == "null" and "MRN" in of_rows["data"]["columns"]
    assert command("recipe", "new", tmp_path / "ids.csv", "--target", "y", "--unit", "MRM").exit_code == 2
    named = draft(tmp_path / "ids.csv", "y", None, "ids.csv", private=["ward"])
    assert yaml.safe_load(named.recipe)["privacy"]["unit"] == [
        "WHOSE",
        "emp_no",
        "account",
        "cust_no",
        "MRN",
    ]  # by names alone


def test_one_odd_cell_hides_no_column_that_tells_persons_apart(tmp_path: Path) -> None:
    frame = pd.DataFrame(exported("persons")).astype(object)
    for name, odd in {
        "MRN": "unknown",
        "emp_no": 0,
        "account": "test",
        "cust_no": "<7",
        "msisdn": "",
        "ref": 0,
    }.items():
        frame.loc[5, name] = odd
    frame["few"] = [f"P{k % 30:04d}" for k in range(len(frame))]
    frame.to_csv(tmp_path / "ids.csv", index=False)
    asked = yaml.safe_load(draft(tmp_path / "ids.csv", "y", None, "ids.csv").recipe)["privacy"]["unit"]
    assert {*asked} == {"WHOSE", *frame.columns} - {"age", "ward", "y"}


def test_numbers_that_are_measured_are_not_asked_about(tmp_path: Path) -> None:
    pd.DataFrame(exported("measured")).to_csv(tmp_path / "m.csv", index=False)
    assert yaml.safe_load(draft(tmp_path / "m.csv", "y", None, "m.csv").recipe)["privacy"].get("unit") is None


def csv_of(columns: dict[str, Any], after: str = "", before: str = "") -> str:
    rows = "".join(",".join(map(str, row)) + "\n" for row in zip(*columns.values(), strict=True))
    return f"{before}{','.join(columns)}\n{rows}{after}"


N = 40
SOLD = [("no", "yes")[k % 3 == 0] for k in range(N)]
NUMBERS = [f"{1 + k * 7 % 23}.{k % 10}" for k in range(N)]
EXPORTS: dict[str, tuple[str, str, list[str], dict[str, Any]]] = {
    "a detection limit": (
        csv_of({"creatinine": [*NUMBERS[:7], "<0.2", *NUMBERS[8:]], "y": SOLD}),
        "first in data row 8: '<0.2'; data.format.below: limit reads '<0.2' as 0.2, data.format.missing: ['<0.2']",
        ["data.bounds.creatinine=[0, 30]", "data.format.below=half"],
        {"rows": 40, "x": {7: 0.1, 8: float(NUMBERS[8])}},
    ),
    "a word among numbers": (
        csv_of({"rooms": [*NUMBERS[:3], "unknown", *NUMBERS[4:]], "y": SOLD}),
        "missing 'unknown'",
        ["data.bounds.rooms=[0, 30]"],
        {"rows": 40, "x": {3: 15.0, 4: float(NUMBERS[4])}},
    ),
    "a word that no list has": (
        csv_of({"size": [*NUMBERS[:3], "Varies", "Varies", *NUMBERS[5:]], "y": SOLD}),
        "size: 2 cells are no number, first in data row 4: 'Varies'; data.format.missing: ['Varies']",
        ["data.bounds.size=[0, 30]", "data.format.missing=[Varies]"],
        {"rows": 40, "x": {3: 15.0}},
    ),
    "a row of sums": (
        csv_of({"kwh": NUMBERS, "y": SOLD}, after="Summe,\n"),
        "y: 1 row without a label, first data row 41; data.rows: labelled",
        ["data.bounds.kwh=[0, 30]", "data.rows=labelled"],
        {"rows": 40, "x": {39: float(NUMBERS[39])}},
    ),
    "a blank label": (
        csv_of({"a": NUMBERS, "y": [*SOLD[:9], " ", *SOLD[10:]]}),
        "y: 1 row without a label, first data row 10; data.rows: labelled",
        ["data.bounds.a=[0, 30]", "data.rows=labelled"],
        {"rows": 39, "x": {9: float(NUMBERS[10])}, "classes": ("no", "yes")},
    ),
    "gaps of blanks": (
        csv_of({"a": [*NUMBERS[:5], " ", *NUMBERS[6:]], "y": SOLD}),
        "a       numbers, with gaps",
        ["data.bounds.a=[0, 30]"],
        {"rows": 40, "x": {5: 15.0}},
    ),
    "a class called None": (
        csv_of({"hours": NUMBERS, "y": [("None", "Insomnia", "Apnea")[k % 3] for k in range(N)]}),
        "'None' is taken for a class",
        ["data.bounds.hours=[0, 30]"],
        {"rows": 40, "classes": ("Apnea", "Insomnia", "None")},
    ),
    "magnitudes": (csv_of({"a": [f"{k * 7 % 41}M" for k in range(N)], "y": SOLD}), "('0M' is read as 0)",
                   ["data.bounds.a=[0, 99]"], {"x": {1: 7.0}}),
    "pounds": (csv_of({"a": [f"{130 + k * 7 % 41}lbs" for k in range(N)], "y": SOLD}), "('130lbs' is read as 130)",
               ["data.bounds.a=[0, 999]"], {"x": {1: 137.0}}),
    "durations": (csv_of({"a": [f"{1 + k % 9}h {k}m" for k in range(N)], "y": SOLD}), "('1h 0m' is read as 1)",
                  ["data.bounds.a=[0, 24]"], {"x": {30: 4.5}}),
    "times of a day": (csv_of({"a": [f"{k % 24:02d}:{k:02d}" for k in range(N)], "y": SOLD}), "is read as 0)",
                       ["data.bounds.a=[0, 24]"], {"x": {30: 6.5}}),
    "more than": (csv_of({"a": [f'"{10 ** (k % 3)},000+"' for k in range(N)], "y": SOLD}), "('1,000+' is read as 1000)",
                  ["data.bounds.a=[0, 999999]"], {"x": {2: 100_000.0}}),
    "feet and inches": (csv_of({"a": [f"{5 + k % 2}'{k % 12}" for k in range(N)], "y": SOLD}), "is read as 5)",
                        ["data.bounds.a=[3, 8]"], {"x": {6: 5.5}}),
    "names of rows": (
        '"a","y"\n' + "".join(f'"{k}",{k * 7 % 23},{SOLD[k]}\n' for k in range(N)),
        "row names  row numbers",
        ["data.bounds.a=[0, 30]"],
        {"x": {1: 7.0}},
    ),
    "a separator at the end": (
        "a,y\n" + "".join(f"{k * 7 % 23},{SOLD[k]},\n" for k in range(N)),
        "after the last separator  empty throughout",
        ["data.bounds.a=[0, 30]"],
        {"x": {1: 7.0}},
    ),
    "decomposed names and cells": (
        csv_of({"Gro\u0308\u00dfe": NUMBERS, "Ort": ["K\u00f6ln", "Ko\u0308ln"] * (N // 2), "y": SOLD}),
        "Gr\u00f6\u00dfe  ",
        ["data.bounds={Gro\u0308\u00dfe: [0, 30]}", "data.drop=[Ort]"],
        {"x": {1: float(NUMBERS[1])}},
    ),
}  # fmt: skip
"""A file, what is said of it, what a person then adds to the recipe, and what training reads."""


@pytest.mark.parametrize("case", EXPORTS)
def test_an_odd_cell_does_not_stop_a_draft_and_what_it_offers_trains(tmp_path: Path, case: str) -> None:
    content, said, added, wanted = EXPORTS[case]
    (tmp_path / "t.csv").write_text(content)
    drafted = draft(tmp_path / "t.csv", "y", None, "t.csv", unit=ONE_ROW)
    assert said in "\n".join(drafted.told)
    (tmp_path / "t.yaml").write_text(drafted.recipe)
    data = load_recipe(str(tmp_path / "t.yaml"), added).recipe.data
    read: Any = opening.load_raw(data, tmp_path)
    assert len(read.train.x) == wanted.get("rows", N) and read.classes == wanted.get("classes", ("no", "yes"))
    assert {row: read.train.x[row, 0] for row in wanted.get("x", {})} == pytest.approx(wanted.get("x", {}))


def test_a_column_of_several_forms_is_left_out_and_said(tmp_path: Path) -> None:
    days = [f"{1 + k % 28:02d}.05.2021" for k in range(N)]
    columns = {"a": NUMBERS, "b": NUMBERS, "c": [f'"{k},5"' for k in range(N)], "d": [*days[1:], "2020-01-31"]}
    columns["y"] = SOLD
    (tmp_path / "t.csv").write_text(csv_of(columns))
    drafted = draft(tmp_path / "t.csv", "y", None, "t.csv", unit=ONE_ROW)
    assert yaml.safe_load(drafted.recipe)["data"]["drop"] == ["c", "d"]
    told = "\n".join(drafted.told)
    assert "numbers in another form (decimal ',', thousands None)" in told
    assert "d: 1 cell is no date of the form %d.%m.%Y, first in data row 40: '2020-01-31'; mend it" in told
    assert "2020" not in drafted.recipe
