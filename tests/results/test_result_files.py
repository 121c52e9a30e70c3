"""The registry of files in a result: what each states of itself, against results that were trained."""

from __future__ import annotations

import csv
import hashlib
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from dpsgd_cli.errors import DataError
from dpsgd_cli.results import deployment, reading, store
from dpsgd_cli.results.reading import FILES, HASHED, RESULT, sealed
from dpsgd_cli.results.result import NONPRIVATE
from tests.conftest import recipe_writer
from tests.results.test_reading import run

CASES = ("covered", "uncovered")


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Path]:
    """Whether a step of preprocessing read training rows without noise, and a result with every file."""
    folder = tmp_path_factory.mktemp("files")
    path = recipe_writer(folder)(save_model=True, seed=None)
    more = ["data.preprocess=[{scale: {by: min-max}}]"] if request.param == "uncovered" else []
    done = run("train", path, *more, "--out", folder / "out")
    assert done.exit_code == 0, done.stderr
    (directory,) = (folder / "out").glob("tiny-*")
    return request.param == "uncovered", directory


def test_a_result_holds_the_files_of_the_registry_and_no_other(trained: tuple[bool, Path]) -> None:
    _, directory = trained
    names = {path.name for path in directory.iterdir()}
    assert {*HASHED, RESULT} <= names <= {*FILES, RESULT}
    with pytest.raises(ValueError, match=r"gradients\.csv is no file of a result"):
        reading.place(directory, "gradients.csv")


@pytest.mark.parametrize("name", HASHED)
def test_a_file_with_what_was_not_released_is_marked_and_no_other_holds_any(
    trained: tuple[bool, Path], name: str
) -> None:
    uncovered, directory = trained
    document, file = json.loads((directory / RESULT).read_text()), FILES[name]
    private = file.unreleased == "always" or (uncovered and file.unreleased == "of-uncovered-steps")
    assert (name in document[f"{NONPRIVATE}files"]) == private
    assert (name in document["files"]) != private
    content = (directory / name).read_bytes()
    told = document[f"{NONPRIVATE}files" if private else "files"][name]
    assert told["sha256"] == hashlib.sha256(content).hexdigest()
    assert told["lines"] == (content.count(b"\n") if file.lines else None)
    if file.unreleased != "of-uncovered-steps":
        assert (NONPRIVATE.encode() in content) == (file.unreleased == "always")
    if name.endswith(".csv") and file.unreleased == "never":
        assert not any(column.startswith(NONPRIVATE) for column in next(csv.reader(content.decode().splitlines())))


@pytest.mark.parametrize("name", [name for name, file in FILES.items() if file.content is None])
def test_what_is_made_of_a_result_holds_no_marked_number_where_it_may_be_public(
    trained: tuple[bool, Path], name: str
) -> None:
    """Every number of a marked column, as the tables write it, is looked for on the pages.

    Shares of a few records (2/3) are left out: public columns hold them by chance.
    """
    uncovered, directory = trained
    assert FILES[name].unreleased == "never"
    if name == "explained.json" and uncovered:  # it is made of the model, which must not be published
        assert not (directory / name).exists()
        return
    made = {deployment.NAME: lambda: deployment.deployment(store.read_document(directory))}  # by `report --publish`
    page = made.get(name, (directory / name).read_text)()
    rows = list(csv.DictReader((directory / "history.csv").read_text().splitlines()))
    marked = {
        value
        for row in rows
        for column, value in row.items()
        if column.startswith(NONPRIVATE)
        and len(value) > 6
        and float(Fraction(value).limit_denominator(1000)) != float(value)
    }
    assert marked
    assert not [value for value in marked if value in page]


def document_of(directory: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    return json.loads((directory / RESULT).read_text()), {name: (directory / name).read_bytes() for name in HASHED}


def test_a_file_that_the_registry_does_not_list_is_not_written_and_none_of_every_result_may_lack(
    trained: tuple[bool, Path],
) -> None:
    document, files = document_of(trained[1])
    with pytest.raises(ValueError, match=r"not listed in FILES \['gradients.csv'\]"):
        sealed(document, {**files, "gradients.csv": b""})
    for name in reading.WITH_EVERY_RESULT:
        with pytest.raises(ValueError, match=f"missing \\['{name}'\\]"):
            sealed(document, {other: held for other, held in files.items() if other != name})


def test_a_document_that_lists_another_file_is_refused(trained: tuple[bool, Path], tmp_path: Path) -> None:
    document, _ = document_of(trained[1])
    document["files"]["gradients.csv"] = {"sha256": "0" * 64, "lines": 1}
    with pytest.raises(DataError, match=r"lists gradients.csv, which is no file of a result"):
        reading.check_files(trained[1], document)


@pytest.mark.parametrize("left_out", ["uncovered_steps", "budget_covers", "adjacency", "bound"])
def test_a_statement_that_does_not_say_what_it_leaves_out_is_refused(
    trained: tuple[bool, Path], tmp_path: Path, left_out: str
) -> None:
    """A missing list of uncovered steps once read as an empty one."""
    document, files = document_of(trained[1])
    whole = sealed(document, files)
    del whole["privacy"][left_out]
    (tmp_path / RESULT).write_text(json.dumps(sealed(whole)))
    with pytest.raises(DataError, match=r"not all that the statement is about|missing"):
        reading.read(tmp_path / RESULT)
