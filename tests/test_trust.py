"""Python files that came with a recipe or a result run only when this user trusts them."""

from __future__ import annotations

import hashlib
import py_compile
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import dpsgd_cli
from dpsgd_cli.common.plugins import load_attribute, trusting
from dpsgd_cli.errors import UsageError
from dpsgd_cli.main import main
from tests.conftest import Train, WriteRecipe

MODEL = """
import pathlib
from torch import nn
(pathlib.Path(__file__).parent / "ran").touch()
def build(input_shape, outputs):
    return nn.Linear(input_shape[0], outputs)
"""
AsSomebodyElse = Callable[[], None]


@pytest.fixture
def own_code_is_trusted() -> None:
    """Takes the place of the fixture that trusts everything."""


@pytest.fixture(autouse=True)
def as_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsSomebodyElse:
    """Begins with a user who trusts nothing, and gives what makes the next one."""
    users = iter(range(100))

    def change() -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache-{next(users)}"))

    change()
    return change


@pytest.fixture
def recipe(tmp_path: Path, write_recipe: WriteRecipe) -> Path:
    (tmp_path / "own.py").write_text(MODEL)
    return write_recipe(model={"kind": "python", "file": "own.py"}, repeats=1)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def refused(folder: Path, *arguments: object, file: str = "own.py") -> None:
    """The command says what it would run, and does not run it; with --trust-code it does, and then without."""
    (folder / "ran").unlink(missing_ok=True)
    found = run(*arguments)
    digest = hashlib.sha256((folder / file).read_bytes()).hexdigest()
    assert found.exit_code == 2, found.output
    assert file in found.stderr and f"SHA-256 {digest}" in found.stderr and "--trust-code" in found.stderr
    assert not (folder / "ran").exists()
    trusted = run(*arguments, "--trust-code")
    assert trusted.exit_code == 0, trusted.output
    assert f"trusted from now on (SHA-256 {digest})" in trusted.stderr
    assert (folder / "ran").exists()
    again = run(*arguments)
    assert again.exit_code == 0 and "trusted" not in again.stderr


def test_a_result_of_somebody_else(
    tmp_path: Path, recipe: Path, train: Train, as_somebody_else: AsSomebodyElse
) -> None:
    result = train(recipe, save_models=True)
    (tmp_path / "new.npz").write_bytes((tmp_path / "tiny.npz").read_bytes())
    assert run("predict", result, tmp_path / "new.npz").exit_code == 0, "who trained with a file trusts it"
    for command in (["predict", result, tmp_path / "new.npz"], ["evaluate", result]):
        as_somebody_else()
        refused(tmp_path, *command)
    as_somebody_else()
    with pytest.raises(UsageError, match="trust_code=True"):
        dpsgd_cli.load(result).evaluate()
    assert dpsgd_cli.load(result, trust_code=True).evaluate()
    assert dpsgd_cli.load(result).evaluate()


def test_a_recipe_of_somebody_else(tmp_path: Path, recipe: Path, as_somebody_else: AsSomebodyElse) -> None:
    refused(tmp_path, "recipe", "check-model", recipe)
    as_somebody_else()
    refused(tmp_path, "train", recipe, "--dry-run")
    as_somebody_else()
    by_layer = "privacy.clipping={kind: per-layer, norm: 1}"  # whose price needs the number of layers
    refused(tmp_path, "account", recipe, by_layer)
    as_somebody_else()
    with pytest.raises(UsageError, match="trust_code=True"):
        dpsgd_cli.account(recipe, overrides=[by_layer])
    assert dpsgd_cli.account(recipe, overrides=[by_layer], trust_code=True)


def test_trust_is_of_a_content(tmp_path: Path, recipe: Path) -> None:
    assert run("train", recipe, "--out", tmp_path / "out").exit_code == 0
    assert run("recipe", "check-model", recipe).exit_code == 0
    (tmp_path / "own.py").write_text(MODEL + "# another\n")
    assert run("recipe", "check-model", recipe).exit_code == 2


def test_nothing_but_the_content_that_was_looked_at_runs(tmp_path: Path) -> None:
    """A compiled file beside a trusted one, made to look fresh, is not taken."""
    path = tmp_path / "own.py"
    path.write_text("value = 'evil'\n")
    compiled = py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    path.write_text("value = 'good'\n")
    with trusting():
        assert load_attribute(path, "value") == "good"
    assert compiled is not None and Path(compiled).exists()


def test_what_is_remembered_is_for_its_owner(tmp_path: Path, recipe: Path, as_somebody_else: AsSomebodyElse) -> None:
    with trusting():
        load_attribute(tmp_path / "own.py", "build")
    (marks,) = tmp_path.glob("cache-*/dpsgd/trusted-code")
    assert marks.stat().st_mode & 0o077 == 0
    assert [mark.name for mark in marks.iterdir()] == [hashlib.sha256(MODEL.encode()).hexdigest()]
    shutil.rmtree(marks)
    with pytest.raises(UsageError):
        load_attribute(tmp_path / "own.py", "build")
