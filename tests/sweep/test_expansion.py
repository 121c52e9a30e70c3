"""Cells are the product of the blocks, each valid, each with noise of its own."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dpsgd_cli.errors import RecipeError, UsageError
from dpsgd_cli.methods.dp_sgd.settings import DpSgdMethod
from dpsgd_cli.recipe.loading import shipped_recipes
from dpsgd_cli.sweep.expansion import Cell, expand, parse_shard, shard_of
from dpsgd_cli.sweep.settings import LoadedSweep, load_sweep

HEAD = "name: x\nrecipes: [quickstart]\n"


def loaded(tmp_path: Path, text: str, *overrides: str) -> LoadedSweep:
    file = tmp_path / "sweep.yaml"
    file.write_text(text)
    return load_sweep(str(file), overrides)


def cells(tmp_path: Path, text: str, *overrides: str) -> list[Cell]:
    return expand(loaded(tmp_path, HEAD + text, *overrides))


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        cells(tmp_path, text, *overrides)
    return [problem.removeprefix(f"{tmp_path}/") for problem in caught.value.problems]


def test_blocks_multiply(tmp_path: Path) -> None:
    text = """\
grid: {method.learning_rate: [1, 2], privacy.clipping.norm: [0.5, 1, 2]}
zip: {epochs: [3, 4], method.batch_size: [100, 200]}
list: [{method.weight_decay: 0.1}, {privacy.budget.epsilon: 1}]
random: {samples: 3, keys: {privacy.budget.delta: {log-uniform: [1e-6, 1e-5]}}}
"""
    found = cells(tmp_path, text)
    assert len(found) == 2 * 3 * 2 * 2 * 3
    assert len({cell.directory for cell in found}) == len(found)
    met = {
        (method.learning_rate, cell.loaded.recipe.epochs, method.batch_size)
        for cell in found
        if isinstance(method := cell.loaded.recipe.method, DpSgdMethod)
    }
    assert met == {(rate, *pair) for rate, pair in itertools.product((1, 2), ((3, 100), (4, 200)))}
    for cell in found:
        assert cell.loaded.recipe.privacy is not None
        assert 1e-6 <= cell.settings["privacy.budget.delta"] <= 1e-5


def test_distinct_cells_have_distinct_seeds_and_keep_them(tmp_path: Path) -> None:
    few = {cell.settings["epochs"]: cell for cell in cells(tmp_path, "grid: {epochs: [3, 4]}\n")}
    more = {cell.settings["epochs"]: cell for cell in cells(tmp_path, "grid: {epochs: [9, 4, 3]}\n")}
    assert few[3].directory == more[3].directory
    seeds = sorted(cell.loaded.recipe.seed or 0 for cell in more.values())
    assert min(b - a for a, b in itertools.pairwise(seeds)) >= 2**20


def test_recipes_are_an_axis_and_doubles_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "\n".join(["name: own", *Path("recipes/quickstart.yaml").read_text().splitlines()[6:]])
    )
    found = expand(loaded(tmp_path, "name: x\nrecipes: [quickstart, own.yaml]\ngrid: {epochs: [3, 3, 4]}\n"))
    assert [(cell.settings["recipe"], cell.settings["epochs"]) for cell in found] == [
        ("quickstart", 3), ("quickstart", 4), ("own.yaml", 3), ("own.yaml", 4),
    ]  # fmt: skip


def test_random_samples_are_a_function_of_the_seed(tmp_path: Path) -> None:
    text = """\
random:
  samples: 40
  seed: {}
  keys:
    method.learning_rate: {{uniform: [1, 2]}}
    epochs: {{integers: [1, 3]}}
    method.optimizer.momentum: {{choice: [0, 0.5]}}
"""
    first, again, other = (cells(tmp_path, text.format(seed)) for seed in (1, 1, 2))
    assert [c.directory for c in first] == [c.directory for c in again] != [c.directory for c in other]
    assert {c.settings["epochs"] for c in first} == {1, 2, 3}
    assert {c.settings["method.optimizer.momentum"] for c in first} == {0, 0.5}
    assert all(1 <= c.settings["method.learning_rate"] <= 2 for c in first)


def test_every_problem_of_every_cell_is_told_with_its_line(tmp_path: Path) -> None:
    text = """\
grid:
  method.batch_size:
    - 0
    - 100
  method.lerning_rate: [1, 2]
zip: {epochs: [some, 2]}
"""
    assert problems(tmp_path, text) == [
        "sweep.yaml:5: method.batch_size: must be a whole number at least 1 or auto, got 0 (in 4 cells)",
        "sweep.yaml:7: method.lerning_rate: unknown key; did you mean method.learning_rate? (in 8 cells)",
        "sweep.yaml:8: epochs: must be a whole number at least 1 and at most 1e+06, until-budget or auto, got 'some'"
        " (in 4 cells)",
    ]


def test_overrides_reach_every_cell_or_the_sweep(tmp_path: Path) -> None:
    found = cells(
        tmp_path, "grid: {epochs: [3, 4]}\n", "grid.epochs=[5]", "grid.method.batch_size=[10, 20]", "repeats=2"
    )
    assert [(c.loaded.recipe.epochs, c.loaded.recipe.method.batch, c.trials) for c in found] == [
        (5, 10, 2),
        (5, 20, 2),
    ]
    assert problems(tmp_path, "grid: {epochs: [3]}\n", "repeats=0") == [
        "override repeats=0: repeats: must be a whole number at least 1 and at most 100000, got 0"
    ]


def test_shards_are_a_partition(tmp_path: Path) -> None:
    found = cells(tmp_path, "grid: {epochs: [1, 2, 3, 4, 5, 6, 7]}\n")
    shards = [shard_of(found, (i, 3)) for i in (1, 2, 3)]
    assert sorted(cell.number for shard in shards for cell in shard) == list(range(7))
    assert [len(shard) for shard in shards] == [3, 2, 2]


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/2"])
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write I/N with 1 <= I <= N"):
        parse_shard(text)


@pytest.mark.parametrize("name", shipped_recipes(sweeps=True))
def test_a_shipped_sweep_is_valid_and_its_header_asks_a_question_and_gives_its_command(name: str) -> None:
    text = shipped_recipes(sweeps=True)[name].read_text("utf-8")
    assert text.splitlines()[0].endswith(("?", "checks."))
    assert f"#   dpsgd sweep {name}" in text
    assert expand(load_sweep(name))
