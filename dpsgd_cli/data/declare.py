"""What a user's own file takes to be public besides its numbers: labels, and the sentences that say so.

Shared by tables (`own_table.py`) and arrays (`own_arrays.py`). Not here: reading them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpsgd_cli.data import table
from dpsgd_cli.data.dataset import Column
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema.data import Data

if TYPE_CHECKING:
    import pandas as pd


def read_labels(
    data: Data, columns: Sequence[pd.Series], paths: Sequence[Path]
) -> tuple[list[np.ndarray], tuple[Any, ...] | None]:
    """The labels of each part, and the classes that all parts share; None for regression."""
    import pandas as pd

    target = pd.concat([column.astype(object) for column in columns], ignore_index=True)
    classes: tuple[Any, ...] | None = None
    try:
        if data.task == "regression":
            y = table.to_numbers(target, is_target=True).astype(np.float32)
        else:
            y, classes = table.to_labels(target, data.classes)
    except DataError as error:
        raise DataError(f"{' and '.join(path.name for path in paths)}: {error}") from None
    return np.split(y, np.cumsum([len(column) for column in columns])[:-1]), classes


def declarations(data: Data, columns: Sequence[Column], classes: tuple[Any, ...] | None) -> tuple[str, ...]:
    """What the recipe takes to be public, in sentences that also say where it was taken from."""
    said = []
    if classes is not None:
        how = "recipe" if data.classes is not None else "read from the data"
        said.append(f"The class labels are public ({how}): {', '.join(map(str, classes))}.")
    if data.bounds is not None:
        said.append("The bounds of the numeric features are public (recipe).")
    if any(column.values is not None for column in columns):
        how = "recipe" if isinstance(data.categorical, dict) else "read from the data"
        said.append(f"The values of the categorical columns are public ({how}).")
    return tuple(said)


def label_warnings(data: Data, classes: tuple[Any, ...] | None) -> list[str]:
    """A warning when the classes had to be read from the data."""
    if classes is None or data.classes is not None:
        return []
    return [
        "the class labels were read from the data and are declared public; if they are not, list them:"
        f" data.classes: {list(classes)}"
    ]
