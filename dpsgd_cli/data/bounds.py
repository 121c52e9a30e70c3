"""How long one record's feature vector can be, from public bounds and the steps of preprocessing. Reads no value.

Not here: constants of losses (`core/problems/constants.py`).
"""

from __future__ import annotations

import math
from pathlib import Path

from dpsgd_cli.data import own_file, preparation, preprocess
from dpsgd_cli.data.dataset import Layout
from dpsgd_cli.data.recipe_bounds import card_of
from dpsgd_cli.recipe.schema.data import Data


def feature_norm_bound(data: Data, base: Path) -> float | None:
    """Largest L2 norm of a preprocessed record that the public bounds allow; None where nothing bounds it.

    A numeric column contributes its larger bound, the columns of one category together 1, a constant its value; after
    unit-norm the whole row is at most 1, and a projection makes no row longer.
    """
    layout = card_of(data).layout if data.name is not None else own_file.open_source(data, base).layout
    steps = preparation._steps(data, "add-remove", base)
    layouts = preparation._plan(steps, layout)
    whole: float | None = None
    constants = 0.0
    for step, before in zip(steps, layouts, strict=False):
        if isinstance(step, preprocess.Normalise):
            whole, constants = 1.0, 0.0
        elif isinstance(step, preprocess.AppendConstant):
            constants += step.value**2
        elif isinstance(step, preprocess.Project):
            # whitening stretches some directions
            whole, constants = None if step.whiten else _length(whole, before, constants), 0.0
        elif isinstance(step, preprocess.Rescale):
            whole = None
    return _length(whole, layouts[-1], constants)


def _length(whole: float | None, layout: Layout, constants: float) -> float | None:
    square = whole**2 if whole is not None else _square(layout)
    return None if square is None else math.sqrt(square + constants)


def _square(layout: Layout) -> float | None:
    if layout.columns is None:
        pair = layout.bounds
        return None if pair is None else layout.features * max(abs(pair[0]), abs(pair[1])) ** 2
    numeric = [column for column in layout.columns if not column.indicator]
    if any(column.bounds is None for column in numeric):
        return None
    groups = {column.name.partition("=")[0] for column in layout.columns if column.indicator and "=" in column.name}
    sizes = [max(abs(c.bounds[0]), abs(c.bounds[1])) ** 2 for c in numeric if c.bounds is not None]
    return math.fsum(sizes) + len(groups)
