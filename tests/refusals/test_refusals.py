"""Every mistake is one message, with its exit code, and leaves nothing behind. The rows are the YAML files beside this.

A file is a list of groups. `command` stands before the recipe and `args` after it. The recipe is `tiny.yaml` of
`recipe_writer` with the sections `recipe` (null leaves one out); or a name; or, where a group has none, nothing. A row
changes it: sections (`change`), its whole text (`text`, of which `replace: [old, new]` changes one place), arguments
(`args`), files beside it (`files`: text; a list is a .npy file, a section a .npz file, and null removes one). `says` is
part of the message, `exit` the code (2 unless stated).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from dpsgd_cli.main import main
from tests.conftest import WriteRecipe

HERE = Path(__file__).parent


def rows() -> list[Any]:
    """Each row with what its group says of all."""
    found = []
    for path in sorted(HERE.glob("*.yaml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8")):
            common = {key: value for key, value in group.items() if key != "rows"}
            found += [pytest.param(common | row, id=f"{path.stem}-{row['says'][:50]}") for row in group["rows"]]
    return found


def recipe_of(row: dict[str, Any], write_recipe: WriteRecipe, folder: Path) -> list[str]:
    if "text" in row:
        old, new = row.get("replace", ("", ""))
        (folder / "tiny.yaml").write_text(row["text"].replace(old, new, 1))
        return ["tiny.yaml"]
    if isinstance(row.get("recipe"), str):
        return [row["recipe"]]
    if "recipe" not in row:
        return []
    write_recipe(**row["recipe"] | row.get("change", {}))
    return ["tiny.yaml"]


def put(path: Path, content: Any) -> None:
    """Write a file of text or of arrays, or remove it."""
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        np.savez(path, **{name: np.array(values) for name, values in content.items()})  # type: ignore[arg-type]
    elif isinstance(content, list):
        np.save(path, np.array(content))
    else:
        path.write_text(content)


@pytest.mark.parametrize("row", rows())
def test_a_mistake_is_one_message_with_its_exit_code(
    row: dict[str, Any], write_recipe: WriteRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of(row, write_recipe, tmp_path)
    (tmp_path / "models.py").write_text((HERE / "models.txt").read_text())
    for name, content in row.get("files", {}).items():
        put(tmp_path / name, content)
    before = set(tmp_path.rglob("*"))
    result = CliRunner().invoke(main, [*row["command"], *recipe, *map(str, row.get("args", []))])
    assert result.exit_code == row.get("exit", 2), result.output
    assert row["says"] in result.stderr, result.stderr
    assert sum(line.lower().startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output and isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    left = {path for path in set(tmp_path.rglob("*")) - before if "__pycache__" not in path.parts}
    assert left <= {tmp_path / "results"}
