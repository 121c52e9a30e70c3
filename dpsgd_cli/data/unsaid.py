"""What a recipe leaves out and has no default of its own for: who decides it, and how, as lines of comments.

Such keys stay out of a resolved recipe: what they come to belongs to the data card or the operating system, and writing
it down would make another recipe of it. Not here: defaults (`schema/`).
"""

from __future__ import annotations

import yaml

from dpsgd_cli.recipe.loading import plain
from dpsgd_cli.recipe.schema import Recipe
from dpsgd_cli.recipe.schema.data import OWN_FILE_STEPS
from dpsgd_cli.recipe.schema.privacy import noise_source
from dpsgd_cli.recipe.tree import CoreDumper


def comments(recipe: Recipe) -> list[str]:
    """A line a key, `# key: value (why)`."""
    said = []
    if recipe.data.preprocess is None:
        said.append(f"data.preprocess: {_flow(_steps(recipe))} ({_whose(recipe)})")
    if recipe.seed is None:
        said.append("seed: none (the operating system's entropy; no run can be repeated)")
    if recipe.privacy is not None and recipe.privacy.noise_source is None:
        source = noise_source(recipe.seed)
        said.append(f"privacy.noise_source: {source} ({'no seed' if recipe.seed is None else 'there is a seed'})")
    return [f"# {line}" for line in said]


def _steps(recipe: Recipe) -> list[object]:
    if recipe.data.name is None:
        return [plain(step) for step in OWN_FILE_STEPS]
    from dpsgd_cli.data import catalog

    return [plain(step) for step in catalog.load_card(recipe.data.name).preprocess]


def _whose(recipe: Recipe) -> str:
    return "a file of your own" if recipe.data.name is None else f"the card of {recipe.data.name}"


def _flow(value: object) -> str:
    text: str = yaml.dump(value, Dumper=CoreDumper, default_flow_style=True, width=10_000)
    return text.strip()
