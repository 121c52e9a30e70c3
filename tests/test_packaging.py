"""What a wheel holds: every module, every recipe and every card, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("dpsgd_cli", "recipes", "datasets")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, without network and without leaving anything in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "pyproject.toml", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    built = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(built)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=120)
    (found,) = built.glob("dpsgd-*.whl")
    return found


def test_the_wheel_holds_every_module_recipe_and_card(wheel: Path) -> None:
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dpsgd_cli").rglob("*.py")}
    for folder in ("recipes", "datasets"):
        expected |= {
            f"dpsgd_cli/shipped/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.yaml")
        }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected
    assert "dpsgd_cli/shipped/recipes/yu2019/mnist-step.yaml" in held


def test_the_wheel_names_its_command_and_its_dependencies(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "dpsgd = dpsgd_cli.main:main" in archive.read(entry).decode()
    (metadata,) = [name for name in archive.namelist() if name.endswith("METADATA")]
    lines = archive.read(metadata).decode().splitlines()
    required = {
        line.split()[1].split(">")[0] for line in lines if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert {"click", "torch", "pydantic"} <= required
    assert "dp-accounting" not in required  # an oracle of the tests, never imported by the package
    assert "Requires-Python: >=3.11" in lines


def test_the_installed_wheel_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def python(*args: str) -> str:
        done = subprocess.run([sys.executable, *args], cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def dpsgd(*args: str) -> str:
        return python("-m", "dpsgd_cli", *args)

    assert python("-c", "import dpsgd_cli; print(dpsgd_cli.__file__)").startswith(str(installed))
    assert "yu2019/mnist-exponential" in dpsgd("recipe", "list")
    assert dpsgd("recipe", "show", "quickstart").startswith("name: quickstart\n")
    assert "digits" in dpsgd("data", "list")
    assert list(elsewhere.iterdir()) == []


def test_everything_that_is_installed_is_pinned() -> None:
    """Each dependency that `make venv` and `make bench` name has an exact version in constraints.txt."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    wanted = [config["options"]["install_requires"], extras["test"], extras["dev"], extras["bench"], extras["parquet"]]
    names = {line.split(">")[0].strip() for block in wanted for line in block.splitlines() if line.strip()}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.lower().split("==") for line in lines if line and not line.startswith("#"))
    assert names - set(pins) == set()
    assert pins["torch"] == "2.13.0"
