"""The wheel and the sdist in environments that hold nothing else (a long test; the first run downloads).

The environments are read-only, the user has no rights and no home, and no network is up. Every command of a first
evening must work from an empty folder, and write nothing but there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "wheels"
ALONE = ("unshare", "--user", "--net")
"""Without capabilities and with no network but a loopback that is down."""
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")

pytestmark = pytest.mark.long


def run(*command: str | Path, cwd: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command; return both its streams. Asserts that it succeeds."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist. All that they need lies in build/wheels."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", folder)
    (wheel,) = folder.glob("*.whl")
    WHEELS.mkdir(parents=True, exist_ok=True)
    options = ("--constraint", ROOT / "constraints.txt", "--dest", WHEELS)
    run(sys.executable, *PIP, "download", *options, "--find-links", WHEELS, wheel, "setuptools>=77")
    for old in WHEELS.glob("dpsgd-*"):
        old.unlink()
    return folder


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_a_user_without_rights_spends_a_first_evening(kind: str, built: Path, tmp_path: Path) -> None:
    (package,) = built.glob(kind)
    clean, here = tmp_path / "clean", tmp_path / "here"
    here.mkdir()
    run(sys.executable, "-m", "venv", clean)
    python = clean / "bin" / "python"
    # what an sdist is built with comes from the same folder: pip hands these options on
    options = ("--no-index", "--find-links", WHEELS, "--constraint", ROOT / "constraints.txt")
    run(python, *PIP, "install", *options, package, cwd=here)
    held = {path for path in clean.rglob("*") if not path.is_symlink()}
    for path in held:
        path.chmod(path.stat().st_mode & 0o555)

    own = ("XDG_", "DPSGD_", "PYTHON")
    nobody = {name: value for name, value in os.environ.items() if not name.startswith(own)} | {"HOME": "/nonexistent"}

    def dpsgd(*arguments: str) -> str:
        command = "import os; assert os.getuid() != 0; from dpsgd_cli.main import main; main(prog_name='dpsgd')"
        return run(*ALONE, python, "-c", command, *arguments, cwd=here, environment=nobody)

    try:
        assert "dpsgd train quickstart" in dpsgd() and "predict" in run(clean / "bin" / "dpsgd", "--help", cwd=here)
        assert "epsilon" in dpsgd("train", "quickstart", "epochs=2", "repeats=1")
        rows = [f"{age},{'abc'[age % 3]},{'yes' if age > 50 else 'no'}" for age in range(20, 80)] * 10
        (here / "own.csv").write_text("\n".join(["age,place,ill", *rows]), encoding="utf-8")
        dpsgd("recipe", "new", "own.csv", "--target", "ill", "-o", "own.yaml")
        text = (here / "own.yaml").read_text(encoding="utf-8")
        assert "age: [LOW, HIGH]" in text
        (here / "own.yaml").write_text(text.replace("age: [LOW, HIGH]", "age: [0, 120]"), encoding="utf-8")
        dpsgd("train", "own.yaml", "--out", "mine")
        (result,) = (path.name for path in (here / "mine").glob("own-*"))
        dpsgd("predict", f"mine/{result}", "own.csv", "--out", "predictions.csv")
        assert len((here / "predictions.csv").read_text(encoding="utf-8").splitlines()) == 601
        assert "epsilon" in dpsgd("account", f"mine/{result}")
        dpsgd("report", f"mine/{result}")
        dpsgd("explain", f"mine/{result}", "--out", "explained")
        assert (here / "mine" / result / "report.html").is_file()
        names = {path.name.partition("-")[0] for path in here.iterdir()}
        assert names == {"results", "own.csv", "own.yaml", "mine", "predictions.csv", "explained"}
        assert {path for path in clean.rglob("*") if not path.is_symlink()} == held
    finally:
        for path in held:
            path.chmod(path.stat().st_mode | 0o200)
