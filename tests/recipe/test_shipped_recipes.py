"""Every recipe that ships says what it is for and how to run it, and means what its paper says."""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dpsgd_cli.common.package_files import shipped
from dpsgd_cli.recipe.loading import load_recipe, question, shipped_recipes

EVERY = sorted(path for path in shipped("recipes").rglob("*") if path.is_file())
ALL = [path for path in EVERY if path.suffix != ".py"]
FILES = [path for path in ALL if path.parent.name != "sweeps"]  # those are checked in tests/sweep
COMMAND = re.compile(r"^#   (dpsgd train .*)$", re.MULTILINE)


def named(file: Path) -> str:
    return file.relative_to(shipped("recipes")).with_suffix("").as_posix()


@pytest.mark.parametrize("file", FILES, ids=named)
def test_a_recipe_is_valid_and_its_header_asks_a_question_and_gives_its_command(file: Path) -> None:
    recipe = load_recipe(str(file)).recipe
    assert recipe.name in (file.stem, f"{file.parent.name}-{file.stem}")
    assert question(file).endswith("?")
    commands = COMMAND.findall(file.read_text("utf-8"))
    told = [shlex.split(command)[2:] for command in commands]
    found = [load_recipe(source, overrides).recipe for source, *overrides in told]
    assert found[0] == recipe, "the first is the recipe as it stands, others change something"
    assert recipe not in found[1:]
    assert all(shipped_recipes()[source] == file for source, *_ in told)


# Yu et al. 2019, Table II, rho_total = 0.78125: the noise multiplier of epoch t, and how many epochs fit.
TABLE_II: dict[str, tuple[Callable[[int], float], int]] = {
    "uniform": (lambda t: 8, 100),
    "time": (lambda t: 10 / (1 + 0.05 * t), 38),
    "step": (lambda t: 10 * 0.6 ** (t // 10), 31),
    "exponential": (lambda t: 10 * math.exp(-0.01 * t), 71),
    "polynomial": (lambda t: (10 - 2) * (1 - t / 100) ** 3 + 2, 44),
}


@pytest.mark.parametrize("name", TABLE_II)
def test_table_2_epochs_fit_the_budget_as_the_recipe_says(name: str) -> None:
    """`budget_covers: total` where the PCA and all epochs of the paper fit together, `training` only where not."""
    recipe = load_recipe(f"yu2019/mnist-{name}").recipe
    assert recipe.privacy is not None
    assert recipe.data.preprocess is not None
    assert recipe.privacy.schedule.kind == name
    pca = recipe.data.preprocess[0].pca
    assert pca is not None
    assert pca.noise_multiplier == 16
    multiplier, epochs = TABLE_II[name]

    def epochs_within(spent: float) -> int:
        for t in itertools.count():
            spent += 0.5 / multiplier(t) ** 2
            if spent > 0.78125:
                return t
        raise AssertionError

    assert epochs_within(0.0) == epochs
    covers_total = epochs_within(0.5 / pca.noise_multiplier**2) == epochs
    assert recipe.privacy.budget_covers == ("total" if covers_total else "training")
