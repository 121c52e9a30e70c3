"""`dpsgd audit` as a user types it: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpsgd_cli.main import main
from tests.audit.planted import FULL, little_noise

SMALL = [*FULL, "epochs=2", "repeats=1"]


def test_an_audit_is_written_beside_the_result_and_shown_on_its_page(tmp_path: Path) -> None:
    run = CliRunner()
    assert run.invoke(main, ["train", "quickstart", *SMALL, "--out", str(tmp_path)]).exit_code == 0
    result = next(tmp_path.glob("quickstart-*"))
    done = run.invoke(main, ["audit", str(result), "--quick", "--trials", "4"])
    assert done.exit_code == 0, done.output
    folder = tmp_path / "audits" / result.name
    found = json.loads((folder / "audit.json").read_text())
    assert {path.name for path in folder.iterdir()} == {"audit.json", "audit.md"}
    assert not found["refuted"] and {row["tier"] for row in found["findings"]} == set("ABCD")
    assert found["claim"]["epsilon"] == pytest.approx(6, rel=1e-4) and found["training"]["trials"] == 4
    assert found["lower_bounds"]["A"] <= found["lower_bounds"]["B"] < 6
    assert "Audited: not refuted" in (result / "report.md").read_text()


def test_a_refuted_claim_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    little_noise(monkeypatch, tmp_path)
    asked = ["audit", "quickstart", *SMALL, "--quick", "--tier", "c", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 1 and "REFUTED" in done.stdout and done.stderr.splitlines()[-1].startswith("error: ")
    assert list((tmp_path / "out").glob("quickstart-*/audit.json"))


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (["quickstart", "--tier", "E"], 2, "E is not a tier; choose from A,B,C,D"),
        (["quickstrat"], 2, "did you mean quickstart?"),
        (["yu2019/cancer-non-private"], 2, "trains without privacy, so it claims nothing"),
    ],
)
def test_what_cannot_be_audited_is_refused(asked: list[str], code: int, said: str) -> None:
    done = CliRunner().invoke(main, ["audit", *asked])
    assert done.exit_code == code and said in done.stderr
