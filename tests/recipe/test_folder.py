"""A result's recipe is trained again, wherever its relative paths start from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.loading import RECIPE_FOLDER, load_recipe
from dpsgd_cli.training import loop
from dpsgd_cli.training.plans import resolve_auto
from tests.conftest import recipe_writer

Train = Callable[..., Path]

MODEL = "from torch import nn\ndef build(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that names a file of records and one of code, both beside it, and its result in `out`."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "own.py").write_text(MODEL)
    recipe = recipe_writer(folder)(model={"kind": "python", "file": "own.py"}, epochs=1, repeats=1)
    loop.run(resolve_auto(load_recipe(str(recipe))), loop.Options(out=folder / "out"))
    return folder


@pytest.fixture
def result(trained: Path, tmp_path: Path) -> Path:
    """The result, in `out`, of a recipe of the test's own."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (directory,) = (tmp_path / "out").iterdir()
    return directory


def test_the_recipe_of_a_result_trains_again(result: Path, train: Train, tmp_path: Path) -> None:
    other = train(result / "recipe.yaml", "seed=4", out=tmp_path / "out")
    assert other.parent == result.parent and other != result
    assert load_recipe(str(other / "recipe.yaml")).base.resolve() == tmp_path.resolve()
    said: list[str] = []
    assert train(result / "recipe.yaml", out=tmp_path / "out", say=said.append) == result
    assert said == []


def test_a_result_may_be_moved_with_its_data(result: Path, train: Train, tmp_path: Path) -> None:
    elsewhere = Path(shutil.copytree(result, tmp_path / "a" / "b" / "c"))
    with pytest.raises(DataError, match=r"no such file: .*tiny.npz; .* \(of a result's recipe.yaml: "):
        train(elsewhere / "recipe.yaml", "seed=4", out=tmp_path / "more")
    for name in ("tiny.npz", "own.py"):
        shutil.copy(tmp_path / name, elsewhere)
    assert load_recipe(str(elsewhere / "recipe.yaml")).base == elsewhere
    assert train(elsewhere / "recipe.yaml", "seed=4", out=tmp_path / "more").is_dir()


def test_a_recipe_that_names_no_file_records_no_folder(train: Train, tmp_path: Path) -> None:
    recipe = tmp_path / "card.yaml"
    recipe.write_text(
        "name: card\ndata: {name: breast-cancer}\nmodel: {kind: linear}\nepochs: 1\nseed: 0\n"
        "method: {kind: sgd, batch_size: 50, learning_rate: 0.1}\n"
    )
    directory = train(recipe)
    assert RECIPE_FOLDER not in json.loads((directory / "result.json").read_text())["provenance"]
    assert load_recipe(str(directory / "recipe.yaml")).base == directory
