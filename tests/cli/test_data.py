"""`dpsgd data`: what it prints, where, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from matplotlib import image

from dpsgd_cli.cli.data import command
from dpsgd_cli.data import card_files, cards, synthetic
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


def test_fetch_names_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(card: Card, manner: card_files.Manner) -> list[Path]:
        return [Path("/data") / card.name / "file"] if card.name == "mnist" else []

    monkeypatch.setattr(card_files, "fetch", pretend)
    result = run("fetch", "mnist", "adult")
    assert result.stdout == "mnist: fetched /data/mnist/file\nadult: is complete, nothing to fetch\n"


def test_verify_reports_every_file_and_fails_on_the_wrong_ones(data_folder: Path) -> None:
    (data_folder / "adult").mkdir()
    (data_folder / "adult" / "adult.data").write_text("changed")
    result = run("verify", "digits", "adult")
    assert "digits: load_digits: ok" in result.stdout
    assert "adult: adult.data: NOT ok" in result.stdout
    assert isinstance(result.exception, DataError)
    assert "adult.data does not hold what its card says" in str(result.exception)
    assert "adult.test (or .gz) is missing" in str(result.exception)


def test_verify_of_what_was_never_fetched_says_so_once() -> None:
    result = run("verify", "mnist")
    assert isinstance(result.exception, DataError)
    assert "data set mnist is not in" in str(result.exception)
    assert len(str(result.exception).splitlines()) == 1


@pytest.mark.parametrize("action", ["fetch", "verify"])
def test_unknown_names_are_usage_errors_before_anything_is_done(action: str) -> None:
    result = run(action, "digits", "mnits")
    assert isinstance(result.exception, UsageError)
    assert "did you mean 'mnist'" in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("action", ["list", "fetch", "verify"])
def test_every_action_has_help_with_an_example(action: str) -> None:
    result = run(action, "--help")
    assert result.exit_code == 0
    assert f"dpsgd data {action}" in result.stdout


def test_synthetic_images_are_written_to_be_looked_at(tmp_path: Path) -> None:
    result = run("synthetic", "strokes", str(tmp_path / "drawn"), "--count", "12", "--side", "10")
    assert result.exit_code == 0
    images = np.load(tmp_path / "drawn" / "strokes.npy")
    assert (images == synthetic.draw("strokes", 12, (1, 10, 10), 0)).all()
    picture = image.imread(tmp_path / "drawn" / "strokes.png")
    assert picture.shape[:2] == (60, 300)
    assert abs(picture[1, 31, 0] - images[1, 0, 0, 0] / 255) < 1e-6


def test_strokes_of_several_hands_are_written_too(tmp_path: Path) -> None:
    assert run("synthetic", "strokes", str(tmp_path), "--count", "2", "--side", "8", "--hands", "3").exit_code == 0
    expected = synthetic.draw_variants(2, 3, (1, 8, 8), 0).reshape(6, 1, 8, 8)
    assert (np.load(tmp_path / "strokes.npy") == expected).all()
    result = run("synthetic", "dead-leaves", str(tmp_path), "--hands", "3")
    assert result.exit_code == 2
    assert "variants are drawn of strokes, not of dead-leaves" in result.stderr


def test_synthetic_images_go_only_where_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file"):
        synthetic.write("strokes", np.zeros((1, 1, 8, 8), np.uint8), tmp_path / "file")
