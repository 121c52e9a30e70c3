"""From a table to predictions at the first try: sixteen tables as spreadsheets export them, with faults."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

from dpsgd_cli.library import load
from dpsgd_cli.main import main
from tests.data.messy_tables import TABLES, Messy, write


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Messy]:
    return write(tmp_path_factory.mktemp("messy"))


def filled(recipe: Path, fill: dict[str, str]) -> None:
    """Write what a person knows into the gaps of a draft."""
    text = recipe.read_text()
    for name, pair in fill.items():
        text, times = re.subn(rf"(\n *{re.escape(name)}: .*?)\[LOW, HIGH\]", rf"\g<1>{pair}", text)
        assert times == 1, name
    assert "LOW" not in text.split("name:", 1)[1]
    recipe.write_text(text)


ROLES: dict[str, Callable[[dict, str], bool]] = {
    "number": lambda recipe, name: name in recipe["data"]["bounds"],
    "category": lambda recipe, name: name in recipe["data"]["categorical"],
    "hash": lambda recipe, name: "hash" in recipe["data"]["columns"][name],
    "text": lambda recipe, name: "text" in recipe["data"]["columns"][name],
    "date": lambda recipe, name: "date" in recipe["data"]["columns"][name],
    "drop": lambda recipe, name: name in recipe["data"]["drop"],
    "unit": lambda recipe, name: recipe["privacy"]["unit"]["column"] == name,
}


@pytest.mark.parametrize("name", TABLES)
def test_from_the_file_to_predictions(tables: dict[str, Messy], name: str, tmp_path: Path) -> None:
    """Every column has a use, predictions are spelled as in the file, and most of them are right."""
    messy = tables[name]
    recipe = messy.path.parent / f"{name}.yaml"
    recipe.unlink(missing_ok=True)
    unit = next((column for column, role in messy.uses.items() if role == "unit"), None)
    answer = ["--one-row-a-person"] if unit is None else ["--unit", unit]
    drafted = command(
        "recipe", "new", messy.path, "--target", messy.target, "--task", messy.task, *answer, "-o", recipe
    )
    assert drafted.exit_code == 0, drafted.stderr
    made = yaml.load(recipe.read_text(), Loader=yaml.BaseLoader)
    for column, role in messy.uses.items():
        assert ROLES[role](made, column), f"{column} as {role}"
        assert re.search(rf"^{re.escape(column)} ", drafted.stdout, re.MULTILINE), f"{column} is not in the table"
    filled(recipe, messy.fill)
    trained = command("train", recipe, "privacy.budget.epsilon=50", "seed=0", "--out", tmp_path / "out")
    assert trained.exit_code == 0, trained.stderr
    (result,) = (tmp_path / "out").iterdir()
    told = command("predict", result, messy.path)
    assert told.exit_code == 0, told.stderr
    rows = [row["prediction"] for row in csv.DictReader(io.StringIO(told.stdout))]
    assert len(rows) == len(messy.spelled)
    if messy.task == "regression":
        prices = np.array([float(one.replace("$", "").replace(",", "")) for one in messy.spelled])
        assert np.corrcoef(prices, np.array(rows, float))[0, 1] > 0.9
        return
    assert set(rows) <= set(messy.spelled)
    right = np.mean([one == other for one, other in zip(rows, messy.spelled, strict=True)])
    shares = [messy.spelled.count(one) / len(messy.spelled) for one in set(messy.spelled)]
    assert right > max(shares), "no better than always the most frequent class"
    found = load(result).predict(messy.path)
    assert [str(one) for one in found] == rows
