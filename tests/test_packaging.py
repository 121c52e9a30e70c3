"""What a wheel holds: every module, every recipe and every card, and that it works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
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
        files = [path for ending in ("yaml", "py") for path in (ROOT / folder).rglob(f"*.{ending}")]
        expected |= {f"dpsgd_cli/shipped/{path.relative_to(ROOT).as_posix()}" for path in files}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected
    assert "dpsgd_cli/shipped/recipes/yu2019/mnist-step.yaml" in held


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
    assert "yu2019/mnist-exponential" in dpsgd("recipe", "list", "--all")
    assert dpsgd("recipe", "show", "quickstart").startswith("name: quickstart\n")
    assert "digits" in dpsgd("data", "list")
    assert list(elsewhere.iterdir()) == []


def test_a_user_without_rights_trains_from_a_read_only_folder(wheel: Path, tmp_path: Path) -> None:
    """Packages that nobody may write to, a home that is not there, no network, and any folder to work in."""
    alone = ["unshare", "--user", "--net"]  # no capability is left, and no network is up
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode != 0:
        pytest.skip("no user namespaces here: `unshare --user --net` does not work")
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    for path in [installed, *installed.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    python = [*alone, sys.executable, "-c"]
    write = f"open({str(installed / 'new')!r}, 'w')"
    assert b"PermissionError" in subprocess.run([*python, write], capture_output=True).stderr
    reach = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    assert b"unreachable" in subprocess.run([*python, reach], capture_output=True).stderr
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "DPSGD_"))}
    environment |= {"PYTHONPATH": str(installed), "HOME": "/nonexistent"}
    command = [*python, "import os; assert os.getuid() != 0; from dpsgd_cli.main import main; main()"]
    train = [*command, "train", "quickstart", "epochs=1", "repeats=1"]
    done = subprocess.run(train, cwd=elsewhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (result,) = (elsewhere / "results").glob("quickstart-*")
    assert (result / "report.html").is_file()
    for path in [installed, *installed.rglob("*")]:
        path.chmod(0o755)


def test_the_sdist_holds_what_its_tests_and_documents_need_and_builds_the_same_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    pytest.importorskip("build.__main__", reason="build is a tool of the extra dev")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).is_file():
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    options = ["--sdist", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    subprocess.run([sys.executable, "-m", "build", *options, str(tmp_path / "source")], check=True, capture_output=True)
    (sdist,) = (tmp_path / "dist").glob("dpsgd-*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    wanted = (
        "dpsgd_cli/",
        "recipes/",
        "datasets/",
        "docs/",
        "examples/",
        "tests/",
        "constraints",
        "Makefile",
        "mkdocs",
    )
    assert {name for name in tracked if name.startswith(wanted) and (ROOT / name).is_file()} - held == set()
    (source,) = (tmp_path / "unpacked").iterdir()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(tmp_path / "again")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True, timeout=120)
    (again,) = (tmp_path / "again").glob("dpsgd-*.whl")
    own = [{name: found.read(name) for name in found.namelist() if ".dist-info/" not in name}
           for found in map(zipfile.ZipFile, (wheel, again))]  # fmt: skip
    assert own[0] == own[1]
