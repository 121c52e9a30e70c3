"""Which rows are held out for testing: decided by a seed and the number of rows, never by a value.

What is protected is the training part: neighbouring data sets differ in one record of it, after the split.
Not here: folds, or what the split is used for.
"""

from __future__ import annotations

import numpy as np

from dpsgd_cli.data.dataset import Part
from dpsgd_cli.errors import DataError
from dpsgd_cli.recipe.schema import Split, ValidationSet
from dpsgd_cli.wording import count


def count_test(records: int, split: Split) -> int:
    """How many of `records` rows are held out; raises DataError unless both parts get at least one row."""
    if records < 2:
        raise DataError(
            f"split.test: {count(records, 'row')} cannot be split into training and test rows; give at least 2, or the"
            " test rows in a file of their own (data.test_path)"
        )
    held_out = split.test if isinstance(split.test, int) else round(split.test * records)
    if not 1 <= held_out < records:
        raise DataError(
            f"split.test: {split.test} holds out {held_out} of {records} rows; both parts need at least one row,"
            f" so give a fraction or a count from 1 to {records - 1}"
        )
    return held_out


def split_rows(records: int, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers of the training and the test part, each ascending; disjoint, and together all rows."""
    count = count_test(records, split)
    # RandomState's stream is frozen by NumPy; that of the newer Generator may change between releases.
    order = np.random.RandomState(split.seed).permutation(records)
    return np.sort(order[count:]), np.sort(order[:count])


def cut(part: Part, split: Split) -> tuple[Part, Part]:
    """The training and the test part of `part`."""
    train, test = split_rows(len(part), split)
    return Part(part.x[train], part.y[train]), Part(part.x[test], part.y[test])


def pool(train: Part, test: Part | None) -> Part:
    """All rows, training rows first."""
    if test is None:
        return train
    return Part(np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y]))


def validation_split(asked: ValidationSet) -> Split:
    """The cut that takes the validation rows out of the training part."""
    return Split(test=asked.records if asked.records is not None else asked.fraction or 0.0, seed=asked.seed)
