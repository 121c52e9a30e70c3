"""Public fields are functions of what was released: the records that they are made of lead nowhere else."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from dpsgd_cli.data import Dataset
from dpsgd_cli.engine.tensors import Table
from dpsgd_cli.main import main
from dpsgd_cli.methods.base import Method
from dpsgd_cli.methods.context import Context
from dpsgd_cli.results import store
from dpsgd_cli.results.result import Released, Unreleased, mark_nonprivate, public
from dpsgd_cli.training import assemble
from tests.conftest import Train, WriteRecipe


def one_more_feature(folder: Path, feature: float) -> dict[str, Any]:
    """A file of 40 records whose last has this feature, and the `data` section that reads it as it is."""
    rng = np.random.default_rng(0)
    x = rng.random((40, 3))
    y = x.sum(axis=1)
    x[-1] = feature
    np.savez(folder / "own.npz", x=x, y=y, x_test=x[:8], y_test=y[:8])
    return {"path": "own.npz", "preprocess": [], "task": "regression", "target_bounds": [0, 3]}


def outcome(folder: Path, write_recipe: WriteRecipe, feature: float) -> tuple[dict[str, Any], str, str]:
    """`result.json`, stdout and stderr of the whole command."""
    recipe = write_recipe(data=one_more_feature(folder, feature), method={"kind": "dp-gd", "learning_rate": 0.1})
    done = CliRunner().invoke(main, ["train", str(recipe), "--out", str(folder / f"out-{feature:g}")])
    assert done.exit_code == 0, done.stderr
    (directory,) = (folder / f"out-{feature:g}").glob("tiny-*")
    return store.read_document(directory), done.stdout, done.stderr


def test_public_warnings_do_not_look_at_training_losses(tmp_path: Path, write_recipe: WriteRecipe) -> None:
    """Features of 1e30 give an error whose square float32 does not hold; its gradient counts as zero."""
    ours, stdout, stderr = outcome(tmp_path, write_recipe, 1.0)
    theirs, other_stdout, other_stderr = outcome(tmp_path, write_recipe, 1e30)
    assert theirs["metrics"]["nonprivate_train_loss"]["mean"] is None
    assert ours["warnings"] == theirs["warnings"]
    assert any("losses on training rows are not finite" in text for text in theirs["nonprivate_warnings"])
    assert names(public(ours)) == names(public(theirs))
    assert ours["privacy"] == theirs["privacy"]
    assert "nonprivate" not in stdout + other_stdout
    kept = [line for line in other_stderr.splitlines() if not line.startswith("nonprivate warning: ")]
    assert kept == stderr.splitlines()


def names(value: Any) -> Any:
    """The shape of a document: keys, and lengths of lists."""
    if isinstance(value, dict):
        return {key: names(inner) for key, inner in value.items()}
    return [names(inner) for inner in value] if isinstance(value, list) else None


def reached(value: Any, seen: dict[int, Any]) -> None:
    """Everything that attributes, keys and items of `value` lead to; classes and functions are not followed."""
    if id(value) in seen or isinstance(value, type | str | bytes | int | float | Path) or callable(value):
        return
    seen[id(value)] = value
    inner = [*value.items()] if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else []
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    for one in [*inner, *vars(value).values(), *slots] if hasattr(value, "__dict__") else [*inner, *slots]:
        reached(one, seen)


def test_a_released_record_leads_to_no_training_row(
    train: Train, write_recipe: WriteRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Released, Unreleased]] = []
    whole = assemble.result

    def result(released: Released, unreleased: Unreleased) -> Any:
        given.append((released, unreleased))
        return whole(released, unreleased)

    monkeypatch.setattr(assemble, "result", result)
    train(write_recipe())
    ((released, _),) = given
    found: dict[int, Any] = {}
    reached(released, found)
    assert any(value is released.ledgers[0] for value in found.values())
    hidden = (torch.Tensor, np.ndarray, Table, Dataset, Context, Method, Unreleased)
    assert [type(value) for value in found.values() if isinstance(value, hidden)] == []


def test_what_makes_public_fields_is_given_nothing_else() -> None:
    makers = (assemble._privacy, assemble._warnings, assemble._trials, assemble._spendings)
    for maker in makers:
        said = " ".join(str(one.annotation) for one in inspect.signature(maker).parameters.values())
        assert "Unreleased" not in said and "Any" not in said and "Row" not in said, maker


def test_what_is_marked_is_not_public() -> None:
    document = {
        "metrics": {"test": 1, **mark_nonprivate({"train": 2})},
        "rows": [{"a": 1} | mark_nonprivate({"b": 2})],
        **mark_nonprivate({"c": 3}),
    }
    assert public(document) == {"metrics": {"test": 1}, "rows": [{"a": 1}]}
