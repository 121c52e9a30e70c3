"""`dpsgd compare`: equal budgets, honest columns, whole files, and a page that stands alone."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.main import main
from dpsgd_cli.results.comparison import compare, read_entries

FAST = ("data.name=digits", "model={kind: linear}", "epochs=2", "repeats=3")
PRIVATE = """\
name: {name}
data: {{name: digits}}
model: {{kind: linear}}
method: {{kind: dp-sgd, batching: {batching}, batch_size: {size}, learning_rate: {rate}}}
privacy: {{adjacency: {adjacency}, budget: {{epsilon: 9, delta: 1e-3}}, delta: 1e-3{extra}}}
epochs: 2
seed: {seed}
repeats: 3
"""
PUBLIC = """\
name: plain
data: {name: digits}
model: {kind: linear}
method: {kind: sgd, batching: poisson, batch_size: 200, learning_rate: 1}
epochs: 2
seed: 4
"""

Recipe = Callable[..., str]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Writes a private recipe and returns its file."""

    def write(
        name: str, batching: str = "poisson", size: str = "200", rate: float = 1, extra: str = "", seed: int = 0
    ) -> str:
        adjacency = "zero-out" if batching == "shuffle" else "add-remove"
        text = PRIVATE.format(
            name=name, batching=batching, size=size, rate=rate, adjacency=adjacency, extra=extra, seed=seed
        )
        file = tmp_path / f"{name}.yaml"
        file.write_text(text)
        return str(file)

    return write


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments, "--out", str(tmp_path / "out")])


def rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_recipe_meets_every_budget_on_its_own_sampler(tmp_path: Path, recipe: Recipe) -> None:
    done = run(tmp_path, recipe("a"), recipe("b", rate=2, seed=7), "--epsilon", "2,0.5", "--delta", "1e-5")
    assert done.exit_code == 0, done.output
    found = rows(tmp_path)
    assert [(row["method"], row["target_epsilon"]) for row in found] == [
        ("a", "0.5"),
        ("a", "2.0"),
        ("b", "0.5"),
        ("b", "2.0"),
    ]
    for row in found:
        assert (
            float(row["target_epsilon"]) * 0.999 <= float(row["epsilon (add-remove)"]) <= float(row["target_epsilon"])
        )
        assert float(row["delta"]) == 1e-5
        result = json.loads((Path(row["directory"]) / "result.json").read_text())
        assert [trial["seed"] for trial in result["trials"]] == [0, 1, 2]
    assert [row["verdict"].split(" (")[0] for row in found[:2]] == ["baseline", "baseline"]
    assert all("(paired)" in row["verdict"] for row in found[2:])


def test_different_adjacencies_stand_in_different_columns_and_are_not_subtracted(
    tmp_path: Path, recipe: Recipe
) -> None:
    done = run(tmp_path, recipe("a"), recipe("s", "shuffle"), "--epsilon", "1")
    assert done.exit_code == 0, done.output
    a, s = rows(tmp_path)
    assert a["epsilon (add-remove)"] and not a["epsilon (zero-out)"]
    assert s["epsilon (zero-out)"] and not s["epsilon (add-remove)"]
    assert "different guarantees" in s["verdict"] and s["difference"] == ""
    assert "are different guarantees and stand in columns of their own" in done.stdout
    assert "epsilon |" not in (tmp_path / "out" / "comparison.md").read_text()


def test_recipes_and_results_and_methods_without_privacy_stand_together(tmp_path: Path, recipe: Recipe) -> None:
    (tmp_path / "plain.yaml").write_text(PUBLIC)
    assert run(tmp_path, recipe("a"), "--epsilon", "1").exit_code == 0
    (directory,) = (tmp_path / "out").glob("a-*")
    done = run(tmp_path, str(tmp_path / "plain.yaml"), str(directory), "--baseline", "plain")
    assert done.exit_code == 0, done.output
    plain, a = rows(tmp_path)
    assert (plain["epsilon (add-remove)"], plain["adjacency"], plain["verdict"]) == ("", "none", "baseline")
    assert float(a["difference"]) < 0


def test_an_unknown_metric_or_baseline_lists_what_there_is(tmp_path: Path, recipe: Recipe) -> None:
    for option in ("--metric", "--baseline"):
        done = run(tmp_path, recipe("a"), option, "xyz")
        assert (done.exit_code, "there are" in done.stderr) == (2, True)


def test_a_sweeps_folder_is_read_with_the_settings_as_names(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("name: s\nrecipes: [quickstart]\ngrid: {method.learning_rate: [1, 2]}\n")
    fast = ["epochs=1", "repeats=2"]
    assert CliRunner().invoke(main, ["sweep", str(sweep), *fast, "--out", str(tmp_path / "cells")]).exit_code == 0
    entries = read_entries(tmp_path / "cells")
    assert [one.settings["method.learning_rate"] for one in entries] == [1, 2]
    alone = [one for cell in entries for one in read_entries(cell.directory)]
    assert [(one.method, one.settings) for one in alone] == [(one.method, one.settings) for one in entries]
    assert [one.settings for one in entries] == [{"method.learning_rate": float(one.method[-2])} for one in entries]
    assert {entry.method for entry in entries} == {
        "quickstart (method.learning_rate=1)", "quickstart (method.learning_rate=2)",
    }  # fmt: skip
    assert run(tmp_path, str(tmp_path / "cells")).exit_code == 0
    assert "(unpaired)" in rows(tmp_path)[1]["verdict"]


class _Outside(HTMLParser):
    """Collects every address and every script of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]


def test_the_page_needs_nothing_else_and_shows_everything(tmp_path: Path, recipe: Recipe) -> None:
    report = tmp_path / "page.html"
    done = run(tmp_path, recipe("a"), recipe("s", "shuffle"), "--epsilon", "1,3", "--plot", "--report", str(report))
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    names = {"metric-by-epsilon", "metric-by-epoch", "noise-by-epoch", "budget-by-epoch"}
    assert {file.stem for file in out.glob("*.png")} == names == {file.stem for file in out.glob("*.svg")}
    for name in names:
        assert (out / f"{name}.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert ElementTree.parse(out / f"{name}.svg").getroot().tag.endswith("svg")
    text = report.read_text()
    outside = _Outside()
    outside.feed(text)
    assert {address.split(",")[0] for address in outside.addresses} == {"data:", "data:image/png;base64"}
    assert outside.tags.count("img") == 4 and outside.tags.count("script") == 0
    assert "@import" not in text and not re.search(r"url\(", text)
    for said in (
        "at most 3.0000",
        "zero-out (shuffle batches; ",
        "add-remove (poisson batches; ",
        "kind: dp-sgd",
        "declared public",
    ):
        assert said in text


def test_a_trial_without_a_metric_is_told_not_averaged(tmp_path: Path, recipe: Recipe) -> None:
    assert run(tmp_path, recipe("a"), recipe("b", rate=2)).exit_code == 0
    entries = [entry for name in ("a", "b") for entry in read_entries(next((tmp_path / "out").glob(f"{name}-*")))]
    entries[1].document["trials"][0]["test_accuracy"] = None
    assert compare(entries, None, None).rows[1]["verdict"] == "not compared: not every trial stayed finite"
