"""Text of other people's files, on its way to a terminal or a spreadsheet: shown, never obeyed."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.common.text_format import shortened, visible
from dpsgd_cli.main import main
from dpsgd_cli.results.files import to_csv

HOSTILE = "\x1b]0;owned\x07\x1b[31m\u202egnp\u2066\x9b2J\x7f\r\x08"
"""Sets the title of a terminal, colours, turns text round, clears the screen, deletes."""


def run(*arguments: object) -> Result:
    found = CliRunner().invoke(main, [str(one) for one in arguments], color=True)
    for text in (found.stdout, found.stderr):
        bad = {char for char in text if unicodedata.category(char) in ("Cc", "Cf", "Cs") and char not in "\n\t"}
        assert not bad, (arguments, bad)
    assert "bug of ours" not in found.stderr
    return found


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table with a hostile column, hostile classes and a hostile name."""
    folder = tmp_path / f"a{HOSTILE}"
    folder.mkdir()
    rows: list[list[object]] = [[n % 7, n % 3, f"{HOSTILE}{n % 2}"] for n in range(60)]
    with (folder / "own.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["x", HOSTILE, "label"], *rows])
    return folder / "own.csv"


def recipe_of(table: Path, **changes: object) -> Path:
    content = {
        "name": "own",
        "data": {
            "path": table.name,
            "target": "label",
            "classes": [f"{HOSTILE}0", f"{HOSTILE}1"],
            "bounds": {"x": [0, 6], HOSTILE: [0, 2]},
            "split": {"test": 20},
        },
        "model": {"kind": "linear"},
        "method": {"kind": "dp-sgd", "batching": "poisson", "batch_size": 10, "learning_rate": 0.5},
        "privacy": {"budget": {"epsilon": 4, "delta": 1e-3}, "accountant": "rdp"},
        "epochs": 1,
    } | changes
    path = table.parent / "own.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def test_every_command_shows_hostile_text(table: Path) -> None:
    recipe, out = recipe_of(table), table.parent / "out"
    for command in (["recipe", "show"], ["recipe", "validate"], ["recipe", "check-model"], ["account"]):
        assert run(*command, recipe).exit_code == 0
    assert run("train", recipe, "--dry-run").exit_code == 0
    trained = run("train", recipe, "--out", out)
    assert trained.exit_code == 0, trained.output
    (result,) = out.glob("own-*")
    predicted = run("predict", result, table, "--probabilities")
    assert predicted.exit_code == 0 and visible(HOSTILE.replace("\r", " ")) in predicted.stdout
    for name in ("evaluate", "account", "report", "compare"):
        assert run(name, result, *(["--out", out] if name == "compare" else [])).exit_code == 0
    (result / "trials.csv").write_text("changed")
    assert run("report", result).exit_code == 2
    assert run("recipe", "new", table, "--target", "label").exit_code == 0
    assert run("recipe", "new", table, "--target", f"lable{HOSTILE}").exit_code != 0


def test_hostile_keys_and_names_in_errors(table: Path, tmp_path: Path) -> None:
    for changes in ({HOSTILE: 1}, {"model": {"kind": HOSTILE}}, {"name": HOSTILE}):
        assert run("recipe", "validate", recipe_of(table, **changes)).exit_code == 2
    assert run("train", recipe_of(table, data={"name": HOSTILE}), "--dry-run").exit_code == 2
    misspelt = yaml.safe_load(recipe_of(table).read_text(encoding="utf-8"))["data"] | {"target": "lable"}
    found = run("train", recipe_of(table, data=misspelt), "--dry-run")
    assert found.exit_code != 0 and "label" in found.stderr
    assert run("train", recipe_of(table), f"{HOSTILE}=1").exit_code == 2
    assert run("train", tmp_path / f"{HOSTILE}.yaml").exit_code == 2
    assert run(HOSTILE).exit_code == 2
    assert run("train", f"--{HOSTILE}").exit_code == 2
    cards = tmp_path / "cards"
    cards.mkdir()
    (cards / "toy.yaml").write_text(yaml.safe_dump({"name": HOSTILE, "description": HOSTILE, HOSTILE: 1}))
    assert run("data", "list", "--cards", cards).exit_code == 2


def test_json_stays_json_of_the_same_content() -> None:
    text = HOSTILE + "\U000e0041"
    for ascii_only in (True, False):
        assert json.loads(visible(json.dumps([text], ensure_ascii=ascii_only))) == [text]


def test_a_name_in_a_list_stays_on_its_line() -> None:
    assert shortened("a\nerror: b\tc") == "a\\nerror: b\\tc"
    assert not re.search(r"[\x00-\x1f]", shortened("".join(map(chr, range(256))), 4000))


def test_no_text_of_a_csv_is_a_formula() -> None:
    cells = ["=cmd()", "+1+1", "-x", "@SUM(A1)", "\tx", "\rx", "-1", "-1e5", "plain", "'=x"]
    text = to_csv([{"=column": cell, "number": -1.5} for cell in cells])
    header, *rows = csv.reader(io.StringIO(text, newline=""))
    assert header == ["'=column", "number"]
    assert [row[0] for row in rows] == ["'=cmd()", "'+1+1", "'-x", "'@SUM(A1)", "'\tx", " x", *cells[6:]]
    assert {row[1] for row in rows} == {"-1.5"}


def test_predictions_hold_no_formula(table: Path, tmp_path: Path) -> None:
    path = tmp_path / "classes.csv"
    path.write_text("x,label\n" + "".join(f"{n % 7},{'=cmd()' if n % 7 > 1 else '-1'}\n" for n in range(60)))
    data = {"path": "classes.csv", "target": "label", "classes": ["=cmd()", "-1"], "bounds": {"x": [0, 6]}}
    recipe = recipe_of(path, data=data | {"split": {"test": 20}})
    assert run("train", recipe, "--out", tmp_path / "out").exit_code == 0
    (result,) = (tmp_path / "out").glob("own-*")
    found = run("predict", result, path).stdout.split()
    assert found[0] == "prediction" and {"'=cmd()"} <= set(found[1:]) <= {"'=cmd()", "-1"}
