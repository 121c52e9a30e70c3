"""`dpsgd data`: what it prints, where, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpsgd_cli.cli.data import command
from dpsgd_cli.data import card_files, cards
from dpsgd_cli.data.cards import Card
from dpsgd_cli.errors import DataError, UsageError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DPSGD_DATA", str(tmp_path))
    return tmp_path


def test_list_shows_every_card_and_whether_it_is_here(data_folder: Path) -> None:
    (data_folder / "mnist").mkdir()
    (data_folder / "mnist" / "t10k-labels-idx1-ubyte.gz").touch()
    (data_folder / "bank").mkdir()
    (data_folder / "bank" / "bank-full.csv").touch()
    result = run("list")
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert set(lines) == {"NAME", *cards.names()}
    assert "bundled" in lines["digits"]
    assert "not fetched" in lines["adult"]
    assert "1 of 4" in lines["mnist"]
    assert " here " in lines["bank"]
    assert lines["mnist"].split()[1:4] == ["70,000", "784", "10"]
    assert str(data_folder) in result.stderr


def test_fetch_of_bundled_data_needs_no_download() -> None:
    result = run("fetch", "digits", "breast-cancer")
    assert result.exit_code == 0
    assert result.stdout.count("comes with scikit-learn, nothing to fetch") == 2


def test_verify_reports_every_file_and_fails_on_the_wrong_ones(data_folder: Path) -> None:
    (data_folder / "adult").mkdir()
    (data_folder / "adult" / "adult.data").write_text("changed")
    result = run("verify", "digits", "adult")
    assert "digits: load_digits: ok" in result.stdout
    assert "adult: adult.data: NOT ok" in result.stdout
    assert isinstance(result.exception, DataError)
    assert "adult.data does not hold what its card says" in str(result.exception)
    assert "adult.test (or .gz) is missing" in str(result.exception)


@pytest.mark.parametrize("action", ["fetch", "verify"])
def test_unknown_names_are_usage_errors_before_anything_is_done(action: str) -> None:
    result = run(action, "digits", "mnits")
    assert isinstance(result.exception, UsageError)
    assert "did you mean 'mnist'" in str(result.exception)
    assert result.stdout == ""


def test_fetch_names_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(card: Card) -> list[Path]:
        return [Path("/data") / card.name / "file"] if card.name == "mnist" else []

    monkeypatch.setattr(card_files, "fetch", pretend)
    result = run("fetch", "mnist", "adult")
    assert result.stdout == "mnist: fetched /data/mnist/file\nadult: is complete, nothing to fetch\n"


def test_verify_of_what_was_never_fetched_says_so_once() -> None:
    result = run("verify", "mnist")
    assert isinstance(result.exception, DataError)
    assert "data set mnist is not in" in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1
