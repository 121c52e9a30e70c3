"""A share of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import fuzz


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    fuzz.make_inputs(folder)
    return folder


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_mutated_inputs_are_answered(inputs: Path, tmp_path: Path, kind: str) -> None:
    first = list(fuzz.KINDS).index(kind)
    cases = [fuzz.run_case(n, inputs, tmp_path / f"{n}") for n in range(first, 9 * len(fuzz.KINDS), len(fuzz.KINDS))]
    assert [(case.number, case.arguments, case.wrong) for case in cases if case.wrong is not None] == []


def test_inputs_that_are_not_mutated_are_in_order(inputs: Path, tmp_path: Path) -> None:
    """Otherwise every case would end at the first check."""
    commands = [
        ["train", "csv.yaml", "--out", "out"],
        ["train", "jsonl.yaml", "--dry-run"],
        ["evaluate", "result"],
        ["predict", "result", "x.npy"],
        ["data", "list", "--cards", "cards"],
        ["sweep", "sweep.yaml", "--dry-run"],
        ["train", "half.yaml", "--out", "half", "--resume"],
    ]
    assert list((inputs / "half").glob(".*.checkpoint"))
    for number, command in enumerate(commands):
        assert fuzz.plain(inputs, tmp_path / str(number), command).exit_code == 0, command


def test_a_fault_is_found(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, a hang and an escape sequence are failures."""

    def planted(error: BaseException) -> str | None:
        def fail(*_: object) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dpsgd_cli.cli.recipe.load_recipe", fail)
            patch.setitem(fuzz.KINDS, "recipe", lambda rng, folder: ["recipe", "show", "tiny.yaml"])
            return fuzz.run_case(0, inputs, tmp_path / type(error).__name__).wrong

    assert "bug of ours" in str(planted(KeyError("x")))
    assert "takes more than" in str(planted(fuzz.Hang()))
